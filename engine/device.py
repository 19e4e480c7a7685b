"""The order of work launched on a device: the only module that knows that a GPU runs behind its caller.

NOTE: work of one stream sees everything launched before it, so the engine itself waits for nothing. Transports and
peers access blocks outside that order. So blocks are published, offered, granted and lent only behind a mark that was
recorded after the last work that may touch them.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tandem.protocol.fault_boundary import outcome_of

T = TypeVar("T")
Mark = Any  # a point in the order of a stream's work; only that stream can read it


class DeviceStream(abc.ABC):
    """Work that was launched on a device and may still run. It completes in the order in which it was launched."""

    @abc.abstractmethod
    def record(self) -> Mark:
        """A mark after all work launched so far."""

    @abc.abstractmethod
    def is_done(self, mark: Mark) -> bool:
        """Whether all work before the mark is complete and its results are in memory. Does not wait."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Return once all work before the mark is complete."""

    @abc.abstractmethod
    def seconds_between(self, first: Mark, last: Mark) -> float:
        """Seconds from one mark to a later one, as the device reached them. Both are done."""


class HostStream(DeviceStream):
    """A CPU, on which every call is done when it returns. A mark is the time at which it was recorded."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    @override
    def record(self) -> Mark:
        return self._clock()

    @override
    def is_done(self, mark: Mark) -> bool:
        return True

    @override
    def wait(self, mark: Mark) -> None:
        pass

    @override
    def seconds_between(self, first: Mark, last: Mark) -> float:
        return float(last - first)


class CudaStream(DeviceStream):
    """The current stream of a GPU. A mark is an event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def record(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def is_done(self, mark: Mark) -> bool:
        return bool(mark.query())

    @override
    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    @override
    def seconds_between(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last)) / 1e3


def make_stream(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> DeviceStream:
    """The stream of a device. `clock` tells the time on a CPU; a GPU has its own."""
    return CudaStream(device) if device.type == "cuda" else HostStream(clock)


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A host array on the device. `torch.tensor(values, device=...)` would wait there for all earlier work."""
    return to_pinned(array, device).to(device, non_blocking=True)


def to_pinned(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A host array as a tensor that the device can copy without waiting; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory; it may be read once a mark recorded after this call is done."""
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor


def outcome_on_device(function: Callable[..., T], *arguments: object) -> T | Exception:
    """The result of a call, or its exception. Raises errors of the device: it is lost for every row."""
    outcome = outcome_of(function, *arguments)
    if isinstance(outcome, torch.AcceleratorError):
        raise outcome
    return outcome
