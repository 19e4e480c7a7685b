"""Records the work of a device once, to launch it again as a whole: the only module that knows CUDA graphs.

A replay repeats the recorded work at the recorded addresses, with the recorded shapes and figures of the host. No
Python runs in it. So what changes from one replay to the next must be in tensors that stay where they were.
"""

from __future__ import annotations

import abc
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from typing_extensions import override

from tandem.protocol.errors import ConfigError

# What CUDA keeps for one graph of some hundred kernels, beside its tensors: an allowance, which was never measured.
_GRAPH_BYTES = 8 << 20


class NotRecordable(Exception):
    """The work cannot be recorded; the message says why."""


class DeviceGraph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch the work once more, after everything launched before."""


class GraphRecorder(abc.ABC):
    """Records graphs that share their memory: a replay overwrites the temporaries of all others."""

    @abc.abstractmethod
    def record(self, function: Callable[[], object]) -> DeviceGraph:
        """Run `function`, to warm up, and record the work that it launches.

        Results must be copied into tensors that were made outside of it. Raises NotRecordable, for example if the
        function reads results on the host; ConfigError if recording failed and the process cannot go on.
        """

    @abc.abstractmethod
    def trim(self) -> int:
        """Give back memory that holds no tensors. Returns the bytes that stay taken."""

    @abc.abstractmethod
    def graph_bytes(self) -> int:
        """Memory that a graph takes beyond its tensors."""


class CudaGraphRecorder(GraphRecorder):
    """Captures CUDA graphs with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def record(self, function: Callable[[], object]) -> DeviceGraph:
        caller, stream = torch.cuda.current_stream(self._device), _capture_stream(self._device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            try:
                function()  # compiles and loads kernels, and makes workspaces: a capture must not
                with _refusing_syncs():
                    function()
            except RuntimeError as exc:
                raise NotRecordable(str(exc)) from exc
            torch.cuda.synchronize(self._device)
            graph = self._capture(function)
        caller.wait_stream(stream)
        return graph

    @override
    def trim(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    @override
    def graph_bytes(self) -> int:
        return _GRAPH_BYTES

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """NOTE: torch does not recover from a failed capture, because its allocator goes on as if it were within it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with _without_gc():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may use the GPU
                function()
                graph.capture_end()
        except RuntimeError as exc:
            raise ConfigError(f"a CUDA graph could not be captured: {exc}; start with --cuda-graphs off") from exc
        return graph


def make_recorder(device: torch.device) -> GraphRecorder | None:
    """The recorder of a device; None for CPUs, where launching costs next to nothing."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None


@lru_cache(maxsize=16)
def _capture_stream(device: torch.device) -> Any:
    """One for all recorders: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turn off garbage collection: it could destroy something, such as another graph, within a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _refusing_syncs() -> Iterator[None]:
    """Raise RuntimeError where torch waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype: lines in the user's terminal
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
