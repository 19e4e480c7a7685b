"""Work of a GPU on a stream of its own, because on the current one it would run behind the launched steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside_steps(device: torch.device) -> Iterator[None]:
    """Launch work beside the steps, and wait for its end. Nothing that was launched may still use its blocks."""
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
