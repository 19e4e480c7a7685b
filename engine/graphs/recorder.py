"""Records the work of a device once, to launch it again as a whole: the only module that knows CUDA graphs.

A replay repeats the recorded work at the recorded addresses, with the recorded shapes and figures of the host. No
Python runs in it. So what changes from one replay to the next must be in tensors that stay where they were.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from typing_extensions import override

__all__ = ["CudaGraphRecorder", "DeviceGraph", "GraphRecorder", "NotRecordable", "make_recorder"]

# What CUDA keeps for one graph of some hundred kernels, beside its tensors: an allowance, which was never measured.
_GRAPH_BYTES = 8 << 20


class NotRecordable(Exception):
    """The work cannot be recorded; the message says why."""


class DeviceGraph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch the work once more, behind everything launched before."""


class GraphRecorder(abc.ABC):
    """Records graphs that share their memory: a replay overwrites the temporaries of all others."""

    @abc.abstractmethod
    def record(self, function: Callable[[], object]) -> DeviceGraph:
        """Run `function`, to warm up, and record the work that it launches.

        Results must be copied into tensors that were made outside of it. Raises NotRecordable, for example if the
        function reads results on the host.
        """

    @abc.abstractmethod
    def trim(self) -> int:
        """Give back memory that holds no tensors. Returns the bytes that stay taken."""

    @abc.abstractmethod
    def graph_bytes(self) -> int:
        """Memory that a graph takes beyond its tensors."""


class CudaGraphRecorder(GraphRecorder):
    """Captures CUDA graphs on a stream of its own, with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def record(self, function: Callable[[], object]) -> DeviceGraph:
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                function()  # compiles and loads kernels, and makes workspaces: a capture must not
                with _refusing_syncs():  # an error of the capture itself would say less, and leave it open
                    function()
                torch.cuda.synchronize(self._device)
                # Calls of other threads do not concern this capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        except RuntimeError as exc:
            raise NotRecordable(str(exc)) from exc
        caller.wait_stream(self._stream)
        return graph

    @override
    def trim(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    @override
    def graph_bytes(self) -> int:
        return _GRAPH_BYTES


def make_recorder(device: torch.device) -> GraphRecorder | None:
    """The recorder of a device; None for CPUs, where launching costs next to nothing."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None


@contextmanager
def _refusing_syncs() -> Iterator[None]:
    """Raise RuntimeError where torch waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
