"""Cleans up after a server, however it ends: ends the processes that it started and removes its folder.

A server that is killed cannot clean up. So a small second process, the guard, waits for its end: the guard reads from
a pipe that ends with the server. It runs in a session of its own, so that a signal to the terminal's job spares it, and
is nobody's child, because Ray ends the children of an actor that it ends.

After its parents have died, nobody can tell whose child a process was. So all processes of a server inherit a random
mark in their environment, behind those of the servers that started it. Ray's processes overwrite parts of their
environment with their title, but they have files of Ray's folder open for writing. A pidfd names the process that was
examined, even if another gets its number later.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tandem.protocol.process import has_ended
from tandem.protocol.python_module import module_command, module_environment

RAY_FOLDER = "ray"  # within a run's folder: a process that writes into its files is one of Ray's
_MARK = "TANDEM_RUN"
_DONE = b"done"  # to the guard
_GRACE_S = 5.0  # for the server's processes to end by themselves
_KILL_TIMEOUT_S = 5.0
_GUARD_TIMEOUT_S = 10.0


@contextlib.contextmanager
def private_run(*, grace_s: float | None = None) -> Iterator[Path]:
    """A folder for temporary files of this process and of those that it starts within the block.

    At the end of the block these processes are ended, by force after `grace_s` (5 s), and the folder is removed. If
    this process is killed, the guard does that at once. Raises `ConfigError` if the folder cannot be made.
    """
    # Here: the guard needs neither, and the first brings asyncio.
    from tandem.runtime.signals import ignore_keyboard_interrupt
    from tandem.runtime.temporary_folder import make_temporary_folder

    folder = make_temporary_folder()
    mark = secrets.token_hex(16)
    guard = _start_guard(mark, folder)
    before = {name: os.environ.get(name) for name in (_MARK, "TMPDIR")}
    os.environ |= {_MARK: ":".join(filter(None, (before[_MARK], mark))), "TMPDIR": folder}
    tempfile.tempdir = None  # Python looks it up again
    try:
        yield Path(folder)
    finally:
        with ignore_keyboard_interrupt():  # a second Ctrl-C here would leave processes and files behind
            os.environ |= {name: value for name, value in before.items() if value is not None}
            for name in (name for name, value in before.items() if value is None):
                del os.environ[name]
            tempfile.tempdir = None
            clean_up(mark, folder, grace_s=_GRACE_S if grace_s is None else grace_s)
            assert guard.stdin is not None, "its input is a pipe"
            with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
                guard.stdin.write(_DONE)
                guard.stdin.close()
            assert guard.stdout is not None, "its output is a pipe"
            select.select([guard.stdout], [], [], _GUARD_TIMEOUT_S)  # it ends with the guard
            guard.stdout.close()


def clean_up(mark: str, folder: str, *, grace_s: float) -> int:
    """End all processes of this run, by SIGKILL after `grace_s`, and remove the folder. Returns how many it killed."""
    killed: set[int] = set()
    grace_until = time.monotonic() + grace_s
    deadline = grace_until + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        processes = dict(_processes_of(mark, folder))
        try:
            if not processes:
                break
            if time.monotonic() >= grace_until:
                for pid, descriptor in processes.items():
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            has_ended(next(iter(processes.values())), max(grace_until - time.monotonic(), 0.5))
        finally:
            for descriptor in processes.values():
                os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    return len(killed)


def _processes_of(mark: str, folder: str) -> Iterator[tuple[int, int]]:
    """Pid and pidfd of each process of this run except this one; the caller closes the pidfds."""
    prefix = f"{os.path.realpath(folder)}/{RAY_FOLDER}/"
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if pid == os.getpid():
            continue
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended, or is a thread
            continue
        try:
            is_ours = mark in _marks_of(pid) or _writes_below(prefix, pid)
        except OSError:  # it has ended, or is another user's
            is_ours = False
        if is_ours:
            yield pid, descriptor
        else:
            os.close(descriptor)


def _marks_of(pid: int) -> list[str]:
    """The marks in the environment of a process. Raises OSError if it has ended, or is another user's."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(f"{_MARK}=".encode()):
            return entry.decode(errors="replace").partition("=")[2].split(":")
    return []


def _writes_below(prefix: str, pid: int) -> bool:
    """Whether the process has such a file open for writing. A process that reads a log is not Ray's."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(prefix):
                flags = Path(f"/proc/{pid}/fdinfo/{number}").read_text().partition("flags:")[2].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def _start_guard(mark: str, folder: str) -> subprocess.Popen[bytes]:
    guard = subprocess.Popen(
        module_command(__name__),
        # Without the mark of an outer server that started this one: the guard must not end with that server.
        env={name: value for name, value in module_environment().items() if name != _MARK},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    guard.wait()  # the process that goes on is its child, which is nobody's then
    assert guard.stdin is not None, "its input is a pipe"
    guard.stdin.write(json.dumps([os.getpid(), mark, folder]).encode() + b"\n")
    guard.stdin.flush()
    return guard


def _guard() -> None:
    """Wait for the end of the server, then clean up after it unless it did so itself."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server
    server, mark, folder = json.loads(sys.stdin.buffer.readline())
    if sys.stdin.buffer.read() == _DONE:
        return
    num_killed = clean_up(mark, folder, grace_s=0.0)
    if num_killed:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"tandem: process {server} was killed; ended the {num_killed} that it left", file=sys.stderr)


if __name__ == "__main__":
    _guard()
