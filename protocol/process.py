"""A process named so that no other is ever taken for it, and a descriptor that tells its end."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["ProcessId", "has_ended", "own_process", "process_of"]


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process among all that ever ran on a machine; its number alone may be given to another one later."""

    machine: Annotated[str, Meta(max_length=512)]  # boot and namespace in which `pid` counts
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Annotated[int, Meta(ge=0, lt=1 << 62)]  # clock ticks after the boot

    @property
    def is_here(self) -> bool:
        """Whether its number means the same process to us."""
        return self.machine == _machine()

    def open(self) -> int | None:
        """A pidfd of it, which becomes readable when its last thread has ended. None if it is gone.

        The caller closes it. Raises `ValueError` for a process of another machine, where its number means nothing.
        """
        if not self.is_here:
            raise ValueError(f"process {self.pid} is on another machine: {self.machine}")
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if _started_at(self.pid) == self.started:  # looked up after it was opened: both are of one process
            return descriptor
        os.close(descriptor)
        return None


def has_ended(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended, waiting for that up to `timeout_s`."""
    poll = select.poll()  # not `select.select`, which takes no descriptor beyond 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def own_process() -> ProcessId:
    """This process."""
    ours = process_of(os.getpid())
    assert ours is not None, "this process is alive"
    return ours


def process_of(pid: int) -> ProcessId | None:
    """The process of this machine that has this number now."""
    started = _started_at(pid)
    return None if started is None else ProcessId(_machine(), pid, started)


def _started_at(pid: int) -> int | None:
    """When it started; None if it is gone. Its name, which may hold anything, stands before the last parenthesis."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # some sandboxes show neither
        return socket.gethostname()
