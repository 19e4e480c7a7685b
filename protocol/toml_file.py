"""Reads TOML files of users, and checks their values by types that describe themselves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from tandem.protocol.errors import ConfigError
from tandem.protocol.user_file import read_text


def read_toml(flag: str, path: str | Path) -> dict[str, Any]:
    """The content of a file that this flag names. Raises `ConfigError` for one that is missing or no TOML."""
    text = read_text(flag, path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # also for a number or a nesting that Python does not parse
        raise ConfigError(f"{flag}={str(path)!r} is not valid TOML: {exc}") from exc


def checked_as(kind: Any, value: Any, shown: str) -> Any:
    """The value as this type, which is annotated with a `msgspec.Meta` that describes it.

    Raises `ConfigError`: `shown`, which names the value, must be what the description says.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        description = next(note.description for note in kind.__metadata__ if isinstance(note, msgspec.Meta))
        raise ConfigError(f"{shown} must be {description}") from exc
