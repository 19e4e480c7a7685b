"""Records the work of a device once, to launch it again as a whole: the only module that knows CUDA graphs.

A replay repeats the recorded work at the recorded addresses, with the recorded shapes and figures of the host. No
Python runs in it. So what changes from one replay to the next must be in tensors that stay where they were.
"""

from __future__ import annotations

import abc
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tandem.protocol.errors import ConfigError

# What CUDA keeps for a graph of some hundred kernels, beside its tensors: an allowance. An H100 took 2.3 to 4.7 MB.
_GRAPH_BYTES = 8 << 20
_PIECE_BYTES = 256 << 10  # and for each further graph over which the kernels are divided: it was never measured


class NotRecordable(Exception):
    """The work cannot be recorded; the message says why."""


class DeviceGraph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch the work once more, after everything launched before."""


class GraphRecorder(abc.ABC):
    """Records graphs that share their memory: a replay overwrites the temporaries of all others."""

    @abc.abstractmethod
    def record(self, function: Callable[[], object]) -> list[DeviceGraph]:
        """Run `function` some times, to warm up, and then record the work that it launches.

        The result is one graph, and one more for each `cut` that the function makes. A tensor that the function makes
        keeps its place if it is kept, or copied into one that was made outside. Raises NotRecordable, for example if
        the function reads results on the host; ConfigError if recording failed and the process cannot go on.
        """

    @abc.abstractmethod
    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Called by a recorded function: end its graph, and begin the next one. Returns None while it warms up.

        Between the replays of the two, other work may be launched on these tensors. Returns tensors over the same
        memory that do not keep it: the recorded work behind the cut may use it for others.
        """

    @abc.abstractmethod
    def trim(self) -> int:
        """Give back memory that holds no tensors. Returns the bytes that stay taken."""

    @abc.abstractmethod
    def graph_bytes(self, num_graphs: int) -> int:
        """Memory that a recording of this many graphs takes beyond its tensors."""


class CudaGraphRecorder(GraphRecorder):
    """Captures CUDA graphs with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: list[torch.cuda.CUDAGraph] = []  # the last one is being captured; empty while none is

    @override
    def record(self, function: Callable[[], object]) -> list[DeviceGraph]:
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
            torch.cuda.empty_cache()  # a capture cannot do so if memory runs out
            graphs = self._capture(function)
        caller.wait_stream(stream)
        return graphs

    @override
    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        if not self._captured:
            return None
        self._captured[-1].capture_end()
        borrowed = [_borrow(tensor) for tensor in tensors]
        self._begin()
        return borrowed

    @override
    def trim(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    @override
    def graph_bytes(self, num_graphs: int) -> int:
        return _GRAPH_BYTES + (num_graphs - 1) * _PIECE_BYTES

    def _capture(self, function: Callable[[], object]) -> list[DeviceGraph]:
        """NOTE: torch does not recover from a failed capture, because its allocator goes on as if it were within it."""
        try:
            with _without_gc():
                self._begin()
                function()
                self._captured[-1].capture_end()
            return [*self._captured]
        except RuntimeError as exc:
            raise ConfigError(f"a CUDA graph could not be captured: {exc}; start with --cuda-graphs off") from exc
        finally:
            self._captured = []

    def _begin(self) -> None:
        self._captured.append(torch.cuda.CUDAGraph())
        self._captured[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may use the GPU


def make_recorder(device: torch.device) -> GraphRecorder | None:
    """The recorder of a device; None for CPUs, where launching costs next to nothing."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None


class _Memory:
    """Memory of a tensor as other libraries show theirs to torch, which does not keep it then."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"<i{size}",  # the interface has no bfloat16
            "version": 2,
        }


def _borrow(tensor: Tensor) -> Tensor:
    """A tensor over the same memory, which that does not keep."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


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
