"""The device of the tests' engines: a CPU, or in `make test-gpu` a GPU. Marks say which tests cannot hold there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

_NAME = os.environ.get("TANDEM_TEST_DEVICE", "cpu")
_FAKE = "fake-gpu"  # `fake_gpu.py`: shows without a GPU which tests need a mark
IS_GPU = _NAME != "cpu"
DEVICE: Any = "cpu" if _NAME == _FAKE else _NAME
_CPU_ONLY = {"exact_bits": "needs equal bits", "cpu_engine": "needs an engine on a CPU"}


def prepare_device() -> None:
    """Raise UsageError if there is no such device, before any test runs."""
    if _NAME == _FAKE:
        from tests.support.fake_gpu import install  # here: torch takes seconds

        install(pytest.MonkeyPatch())
    elif IS_GPU:
        import torch

        if _NAME != "cuda" or not torch.cuda.is_available():
            raise pytest.UsageError(
                f"TANDEM_TEST_DEVICE={_NAME!r}: torch {torch.__version__} sees no such GPU here. `make test` is for "
                f"CPUs; TANDEM_TEST_DEVICE={_FAKE} rounds and is late as a GPU"
            )


def skip_what_needs_a_cpu(item: pytest.Item) -> None:
    """Skip a marked test on a GPU, with the mark's reason."""
    reasons = list(_reasons(item))  # on a CPU too, where a mark without a reason would be overlooked
    if reasons and IS_GPU:
        pytest.skip("; ".join(reasons))


def _reasons(item: pytest.Item) -> Iterator[str]:
    for name, need in _CPU_ONLY.items():
        for mark in item.iter_markers(name):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str):
                raise pytest.UsageError(f'{item.nodeid}: {name} takes a reason: @pytest.mark.{name}("...")')
            yield f"{need}: {mark.args[0]}"
