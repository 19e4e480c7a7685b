"""Process ids that are never reused, and descriptors that signal the end of a process."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process among all that ever ran on any machine: the kernel may give its number to another one later."""

    machine: Annotated[str, Meta(max_length=512)]  # boot id and PID namespace in which `pid` is valid
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Annotated[int, Meta(ge=0, lt=1 << 62)]  # clock ticks after the boot

    @property
    def is_here(self) -> bool:
        """Whether `pid` is valid in this process's namespace."""
        return self.machine == _machine()

    def open(self) -> int | None:
        """A pidfd of the process, or None if it is gone. It becomes readable when the last thread has ended.

        The caller closes it. Raises `ValueError` for a process of another machine.
        """
        if not self.is_here:
            raise ValueError(f"process {self.pid} is on another machine: {self.machine}")
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if _started_at(self.pid) == self.started:  # read after opening, so both belong to the same process
            return descriptor
        os.close(descriptor)
        return None


def has_ended(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended; waits for that up to `timeout_s`."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def own_process() -> ProcessId:
    """This process."""
    ours = process_of(os.getpid())
    assert ours is not None, "this process is alive"
    return ours


def process_of(pid: int) -> ProcessId | None:
    """The process that has this number now, if there is one."""
    started = _started_at(pid)
    return None if started is None else ProcessId(_machine(), pid, started)


def _started_at(pid: int) -> int | None:
    """When the process started; None if it is gone. Its name may contain anything, up to the last parenthesis."""
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
