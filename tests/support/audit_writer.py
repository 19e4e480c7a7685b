"""A process that writes audit lines. It is a module of its own because a new process imports it."""

from __future__ import annotations

from tandem.frontend.keys.audit_log import append_line, audit_line


def append_many(path: str, name: str, count: int) -> None:
    for number in range(count):
        append_line(path, audit_line(name, target="x" * 150 + str(number)))
