"""Finds forwards that read values of tensors on the host: on a GPU each such read waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Untagged ones, as they look in inference mode; the last one is the beginning of `tolist` and `numpy`.
_NAMES = {"aten::is_nonzero", "aten::_local_scalar_dense", "aten::item", "aten::resolve_neg"}


def host_read(operation: Any, arguments: tuple[Any, ...]) -> str:
    """The name of an operation whose result, or its shape, must be known on the host; "" for others."""
    if operation is torch.ops.aten.index.Tensor:  # only masks select a number of elements that depends on their values
        is_read = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    else:
        is_read = operation.name().partition(".")[0] in _NAMES or not _TAGS.isdisjoint(operation.tags)
    return operation.name() if is_read else ""


class HostReads(TorchDispatchMode):
    """Lists the reads inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, _: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        if name := host_read(operation, arguments):
            self.found.append(name)
        return operation(*arguments, **(options or {}))
