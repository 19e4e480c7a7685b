"""Detects changes of a file by a signature that differs after each change, even of a file behind links."""

from __future__ import annotations

import os

Signature = tuple[int, ...]  # differs after each change of a file


def signature_of(path: str) -> Signature | None:
    """The present signature of the file; None if it cannot be read."""
    try:
        return signature_of_status(os.stat(path))
    except OSError:
        return None


def signature_of_status(status: os.stat_result) -> Signature:
    """The signature of an open file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_at_once(path: str, flags: int) -> int:
    """An opener for `open` that does not wait for somebody to write to a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
