"""Frees the parts of a multimodal model that text does not use: its towers for images and sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def dropping_idle_parts(module: nn.Module) -> Iterator[None]:
    """Free the memory of the parts beside the language model that no forward inside this block has called."""
    ran: set[nn.Module] = set()
    parts = _beside_decoder(module)
    hooks = [getattr(parent, name).register_forward_hook(lambda part, *_: ran.add(part)) for parent, name in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for parent, name in parts:
        if getattr(parent, name) not in ran:
            for parameter in getattr(parent, name).parameters():
                parameter.data = parameter.data.new_empty(0)  # some models read its device and dtype


def _beside_decoder(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(parent, name) of each module that is a sibling of the language model, or of a module which contains it."""
    model: Any = module
    if model.config.get_text_config(decoder=True) is model.config:
        return []  # a model of text alone
    decoder = model.get_decoder()
    (path,) = [name.split(".") for name, part in module.named_modules() if part is decoder]
    parents = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    return [
        (parent, name)
        for parent, inner in zip(parents, path, strict=True)
        for name, _ in parent.named_children()
        if name != inner
    ]
