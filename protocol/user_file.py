"""Reads the files that a user names in a flag, a key or an environment variable."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.protocol.errors import ConfigError

_MAX_CHARS = 16 << 20  # a device such as /dev/zero has no end, and would fill the memory


def expanded(name: str, path: str) -> str:
    """The path with ~ replaced by a home folder, as a shell does. Raises `ConfigError` for the ~ of an unknown user."""
    result = os.path.expanduser(path)
    if result.startswith("~"):
        raise ConfigError(f"{name}={path!r} names the home folder of an unknown user; write the whole path")
    return result


def read_text(name: str, path: str | Path) -> str:
    """The text of a file or a pipe. Raises `ConfigError`, which shows nothing of the content."""
    shown = f"{name}={str(path)!r}"
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors on Windows begin a file with such a mark
            text = file.read(_MAX_CHARS + 1)
    except OSError as exc:
        raise ConfigError(f"{shown} cannot be read: {exc.strerror}; give a file that this user can read") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{shown} is not UTF-8 text (see byte {exc.start}); save it as UTF-8") from exc
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{shown} has more than {_MAX_CHARS} characters; give a smaller file")
    return text
