"""What tests may not forget of a GPU, on a CPU: bits that depend on the batch, and results that come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tandem.engine import engine, loader, native_layers
from tandem.engine.cpu import packed_linear
from tandem.engine.cpu.matmul import PackedWeight
from tandem.engine.device import DeviceStream, Mark


class _LateStream(DeviceStream):
    """Work is not done when it is first asked for. A mark is its number."""

    def __init__(self, _: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._recorded_at: list[float] = []
        self._last_done = -1

    @override
    def record(self) -> Mark:
        self._recorded_at.append(self._clock())
        return len(self._recorded_at) - 1

    @override
    def is_done(self, mark: Mark) -> bool:
        was_done = self._last_done >= mark
        self.wait(mark)
        return was_done

    @override
    def wait(self, mark: Mark) -> None:
        self._last_done = max(self._last_done, mark)

    @override
    def seconds_between(self, first: Mark, last: Mark) -> float:
        return self._recorded_at[last] - self._recorded_at[first]


class _RoundingWeight(PackedWeight):
    """A weight whose product is summed in another order for another number of rows, as by libraries of GPUs."""

    def __init__(self, weight: Tensor, **options: Any) -> None:
        super().__init__(weight, **options)
        self._weight = weight.detach().clone()

    @override
    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        depth = x.shape[-1]
        cut = depth * (x[..., 0].numel() % 7 + 1) // 8
        parts = (slice(cut), slice(cut, depth))
        first, second = (nn.functional.linear(x[..., part], self._weight[:, part]) for part in parts)
        return first + second if bias is None else first + second + bias


def install(patch: pytest.MonkeyPatch) -> None:
    """Let every engine of this process be of this kind. What tests make of our kernels for CPUs stays."""
    use_kernels, lock = loader._use_kernels, threading.Lock()  # several engines may load at once

    def use_rounding_kernels(*arguments: Any) -> str:
        with lock, pytest.MonkeyPatch.context() as while_loading:
            while_loading.setattr(packed_linear, "PackedWeight", _RoundingWeight)
            while_loading.setattr(native_layers, "use_native_layers", lambda _: None)
            return use_kernels(*arguments)

    patch.setattr(loader, "_use_kernels", use_rounding_kernels)
    patch.setattr(loader, "inexact_parts", lambda _: ["products"])
    patch.setattr(engine, "make_stream", _LateStream)
