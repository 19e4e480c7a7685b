"""Counts what a GPU would be asked to do, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from typing_extensions import override

from tests.support.recorded_graph import HostGraph


class _Counter(TorchDispatchMode):
    """Counts operations that write a result: all but views and those that only make a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@contextmanager
def _counting_graphs(names: list[str]) -> Iterator[None]:
    """Let a replay count once, whatever was recorded."""
    replay = HostGraph.replay

    def counted(graph: HostGraph) -> None:
        names.append("graph")
        with torch.utils._python_dispatch._disable_current_modes():
            replay(graph)

    with mock.patch.object(HostGraph, "replay", counted):
        yield


@contextmanager
def _counting_kernels(names: list[str]) -> Iterator[None]:
    """Let a launch of a Triton kernel count once, whatever the interpreter does for it."""
    launch = InterpretedFunction.__getitem__

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            names.append(kernel.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(kernel, grid)(*arguments, **options)

        return run

    with mock.patch.object(InterpretedFunction, "__getitem__", counted):
        yield


def launches(function: Callable[[], object]) -> list[str]:
    """Names of the operations, kernels and graphs that a call launches."""
    counter = _Counter()
    with torch.inference_mode(), counter, _counting_kernels(counter.names), _counting_graphs(counter.names):
        function()
    return counter.names
