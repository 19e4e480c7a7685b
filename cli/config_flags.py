"""The bridge between flags and config: a flag has its field's name and its field's default, written once, there."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

__all__ = ["default_of", "from_flags"]

Config = TypeVar("Config")


def default_of(config: type[Any], name: str) -> Any:
    """Default of this config field. Raises `KeyError` for a field that does not exist or has none."""
    default = {field.name: field.default for field in fields(config)}[name]
    if default is MISSING:
        raise KeyError(f"{config.__name__}.{name} has no default")
    return default


def from_flags(config: type[Config], flags: dict[str, Any], **given: Any) -> Config:
    """A config whose fields come from `given`, then from the flags of the same name, then from its defaults."""
    taken = {}
    for field in fields(config):  # type: ignore[arg-type]  # a dataclass, which TypeVar cannot say
        if field.name in flags:
            value = flags[field.name]
            taken[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**(taken | given))
