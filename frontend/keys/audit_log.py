"""The audit log: one line of JSON for each thing that an operator did. It never has a key, a token or a prompt.

A thread of its own writes the lines, so a slow disk delays no request. A full disk is logged once, and the server goes
on. Each line is one write at the end of the file, so any number of processes may share one file, and a program that
rotates it may move it away at any time.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # lines
MAX_CHARS = 200  # per value
MAX_LINE_BYTES = 4096  # file systems append this much in one piece
CLOSE_TIMEOUT_S = 2.0


def audit_line(
    action: str,
    *,
    key_id: str = "",
    target: str = "",
    result: str = "ok",
    client: str = "",
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """One line. `key_id` of the API key by which it was done; "" = none. `client` is the address it came from."""
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "action": action,
        "key_id": key_id,
        "target": _shown(target),
        "result": _shown(result),
        "client": _shown(client),
    }
    line = msgspec.json.encode(entry | dict(details or {})) + b"\n"
    return line if len(line) <= MAX_LINE_BYTES else msgspec.json.encode(entry) + b"\n"


def _shown(text: str) -> str:
    """The text as JSON can carry it, cut if it is long."""
    return text[:MAX_CHARS].encode(errors="replace").decode()


def append_line(path: str, line: bytes) -> None:
    """Write a line at the end of the file; makes the file if there is none. Raises `OSError`."""
    file_descriptor = _open(path)
    try:
        if (written := os.write(file_descriptor, line)) != len(line):
            raise OSError(None, f"only {written} of {len(line)} bytes were written")
    finally:
        os.close(file_descriptor)


def check_audit_log(path: str) -> None:
    """Raise `ConfigError` if nothing can be appended to this file. Makes it if there is none."""
    if not path:
        return
    try:
        os.close(_open(path))
    except OSError as exc:
        raise ConfigError(
            f"audit_log={path!r} cannot be written: {exc.strerror}; give a file that this user can append to"
        ) from exc


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


class AuditLog:
    """The audit log of one process; without a path nothing is written. Its owner calls `close` at the end."""

    def __init__(self, path: str, on_lost: Callable[[], object] = lambda: None) -> None:
        """`on_lost` is called, in any thread, for each line that could not be written."""
        self._path = path
        self._on_lost = on_lost
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._has_failed = False  # whether the latest write failed, which was logged
        self._is_torn = False  # whether the line before is incomplete

    def note(self, action: str, **fields: Any) -> None:
        """Write a line soon; does not wait. `fields` are those of `audit_line`."""
        if not self._path:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_lines, name="audit log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(audit_line(action, **fields))
        except queue.Full:
            self._lost(f"{MAX_WAITING} lines wait for the disk")

    def close(self) -> None:
        """Write the waiting lines, as far as the disk accepts them within two seconds."""
        if self._thread is not None:
            try:
                self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                append_line(self._path, b"\n" * self._is_torn + line)
            except OSError as exc:
                self._is_torn = True
                self._lost(exc.strerror or str(exc))
            else:
                self._is_torn = False
                if self._has_failed:
                    self._has_failed = False
                    logger.warning("the audit log %s can be written again", self._path)

    def _lost(self, reason: str) -> None:
        self._on_lost()
        if not self._has_failed:
            self._has_failed = True
            logger.error("THE AUDIT LOG %s CANNOT BE WRITTEN: %s; lines are lost until it can", self._path, reason)
