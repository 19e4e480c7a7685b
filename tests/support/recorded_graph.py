"""Graphs on a CPU that behave as CUDA graphs do: a replay repeats recorded work at recorded addresses.

Every operation of torch and every call of our C++ kernels is recorded with the tensors and pointers it was given. A
replay repeats them in place, and runs none of the Python code that launched them. Before it, all temporaries are
garbage. Work that reads a value on the host is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from tandem.engine.cpu import matmul
from tandem.engine.cpu.library import load_kernels
from tandem.engine.graphs.recorder import DeviceGraph, GraphRecorder, NotRecordable
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sequence import ScheduledChunk
from tests.support.host_reads import host_read

GARBAGE = 12345.0


class HostGraph(TorchDispatchMode):
    """Recorded work; `with` it, operations are recorded while they run."""

    current: HostGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._calls: list[Callable[[], object]] = []
        self._made: dict[int, Tensor] = {}  # by address of its storage
        self._read: dict[int, Tensor] = {}  # likewise, tensors that were there before

    def __enter__(self) -> HostGraph:
        HostGraph.current = self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        HostGraph.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, _: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        options = options or {}
        if name := host_read(operation, arguments):
            raise NotRecordable(f"{name} reads a value on the host")
        result = operation(*arguments, **options)
        read = {_address(tensor): tensor for tensor in _tensors((arguments, options))}
        self._read |= {address: tensor for address, tensor in read.items() if address not in self._made}
        copied = [(place, tensor) for place, tensor in enumerate(_tensors(result)) if _address(tensor) not in read]
        self._made |= {_address(tensor): tensor for _, tensor in copied}

        def repeat() -> None:
            again = _tensors(operation(*arguments, **options))
            for place, tensor in copied:
                tensor.copy_(again[place])

        self._calls.append(repeat)
        return result

    def note(self, call: Callable[[], object]) -> None:
        """Record a call that is not a torch operation."""
        self._calls.append(call)

    def foreign(self, allowed: Iterable[Tensor]) -> list[Tensor]:
        """What the work reads that is neither made by it nor allowed."""
        known = {_address(tensor) for tensor in allowed}
        return [tensor for address, tensor in self._read.items() if address not in known]

    def replay(self) -> None:
        """Repeat the work."""
        self.num_replays += 1
        for tensor in self._made.values():
            tensor.fill_(GARBAGE)
        for call in self._calls:
            call()


class LateOperations(TorchDispatchMode):
    """Inside `with`, operations on these buffers, and on what they give, run at `flush`. Until then it is garbage.

    The host goes on at once, as with a GPU: what it writes without torch is there before operations that it launched.
    """

    def __init__(self, buffers: Iterable[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._late = {_address(tensor): tensor for tensor in buffers}
        self._launched: list[Callable[[], object]] = []
        replay = HostGraph.replay
        monkeypatch.setattr(HostGraph, "replay", lambda graph: self._launched.append(lambda: replay(graph)))
        patch_triton(monkeypatch, self._launched.append)

    def __torch_dispatch__(self, operation: Any, _: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        call = partial(operation, *arguments, **(options or {}))
        given = {_address(tensor) for tensor in _tensors((arguments, options))}
        if given.isdisjoint(self._late):
            return call()
        if operation._schema.is_mutable:
            self._launched.append(call)
            return arguments[0]
        result = call()
        if _address(result) not in given:  # otherwise it is a view
            result.fill_(GARBAGE)
            self._late[_address(result)] = result
            self._launched.append(lambda: result.copy_(call()))
        return result

    @torch.inference_mode()
    def flush(self) -> None:
        """Do all that was launched."""
        for call in self._launched:
            call()


def launched_ahead(
    runner: ModelRunner,
    steps: Iterable[list[ScheduledChunk]],
    buffers: Iterable[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> list[Tensor | None]:
    """The logits of steps that are all launched before the device begins with the first; read at the end."""
    late = LateOperations(buffers, monkeypatch)
    with late:
        logits = [runner.run(step) for step in steps]
    late.flush()
    return logits


class HostGraphRecorder(GraphRecorder):
    """Records on a CPU."""

    def __init__(self) -> None:
        self.graphs: list[HostGraph] = []

    @override
    def record(self, function: Callable[[], object]) -> list[DeviceGraph]:
        function()
        first = len(self.graphs)
        with ExitStack() as self._recording:
            self._begin()
            function()
        return [*self.graphs[first:]]

    @override
    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        if HostGraph.current is None:
            return None
        self._recording.close()
        self._begin()
        return list(tensors)  # graphs keep all that they made

    def _begin(self) -> None:
        self.graphs.append(self._recording.enter_context(HostGraph()))

    @override
    def trim(self) -> int:
        return 0

    @override
    def graph_bytes(self, num_graphs: int) -> int:
        return num_graphs


def patch_triton(monkeypatch: pytest.MonkeyPatch, take: Callable[[Callable[[], object]], object]) -> None:
    """Hand launches of Triton's kernels to a function; the interpreter's own operations are nobody's business."""
    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    launch = interpreted.__getitem__

    def handed(kernel: Any, grid: Any) -> Callable[..., object]:
        def run(*arguments: Any, **options: Any) -> object:
            with _disable_current_modes():
                return launch(kernel, grid)(*arguments, **options)

        return lambda *arguments, **options: take(partial(run, *arguments, **options))

    monkeypatch.setattr(interpreted, "__getitem__", handed)


def note_and_run(call: Callable[[], object]) -> object:
    """Record a call, if work is recorded, and make it."""
    if HostGraph.current is not None:
        HostGraph.current.note(call)
    return call()


def patch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines that are built from now on tell the graph which C++ kernels they call."""
    for module in ("tandem.engine.cpu.ops", "tandem.engine.native_layers", "tandem.engine.attention.cpu"):
        monkeypatch.setattr(f"{module}.load_kernels", _RecordingLibrary)
    matmul._kernels()  # declares the types of its functions
    monkeypatch.setattr(matmul, "_kernels", _RecordingLibrary)


class _RecordingLibrary:
    def __getattr__(self, name: str) -> _RecordingKernel:
        return _RecordingKernel(getattr(load_kernels(), name))


class _RecordingKernel:
    def __init__(self, kernel: Any) -> None:
        object.__setattr__(self, "_kernel", kernel)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kernel, name, value)

    def __call__(self, *arguments: Any) -> Any:
        return note_and_run(partial(self._kernel, *arguments))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
