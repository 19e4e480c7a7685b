"""What NIXL's links need between processes of one user on one machine, so that UCX opens no port there.

UCX's TCP port takes what any process of the machine sends it, and writes it to whatever address that names. Without it,
and without the System V segments that UCX opens to the user's whole group, UCX copies from process to process with CMA
(`process_vm_writev`), which the kernel allows to processes of the same user alone. Such a copy needs nothing of the
receiver and is over when the call returns.

UCX could carry notifications in shared memory, too, but all senders share one ring at the receiver, and a sender that
is killed while it puts one in stops that ring for everybody. So they go through Unix sockets in a private folder. Nor
does UCX notice there that a peer has died; the kernel tells it, by a pidfd.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta
from zmq.constants import PollEvent, SocketOption, SocketType
from zmq.error import Again

from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.process import ProcessId, has_ended, own_process

__all__ = ["UCX_TLS", "Mailbox", "MailboxAddress", "MailboxSender", "can_copy_between_processes"]

UCX_TLS = "^tcp,sysv"

_MAX_QUEUED = 10_000  # notifications, at either end
_MAX_NOTIFICATION = 64 << 20  # bytes
_MAX_PER_POLL = 10_000


def can_copy_between_processes() -> bool:
    """Whether the kernel has CMA and lets us use it; some sandboxes do not, and an administrator can forbid it."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope > 1:  # at 1 UCX allows its peers to copy; above only an administrator may
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    here, there = (_IoVec(ctypes.addressof(buffer), 1) for buffer in (source, target))
    write = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
    return write is not None and write(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 1


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class MailboxAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a process takes notifications, and which process that is."""

    endpoint: Annotated[str, Meta(min_length=1, max_length=256)]
    process: ProcessId


class Mailbox:
    """Where the notifications for one agent arrive. Belongs to the thread that polls."""

    def __init__(self, endpoint: str, agent_name: str) -> None:
        """`endpoint` is `ipc://` and a file that is to be, in a folder that only this user may enter."""
        self._agent_name = agent_name
        self._context = zmq.Context()
        self._socket = self._context.socket(SocketType.PULL)
        self._socket.setsockopt(SocketOption.MAXMSGSIZE, _MAX_NOTIFICATION)
        self._socket.setsockopt(SocketOption.RCVHWM, _MAX_QUEUED)
        self._socket.bind(endpoint)
        self.address = MailboxAddress(endpoint, own_process())

    def open(self, theirs: MailboxAddress) -> MailboxSender:
        """The way to a peer's mailbox.

        Raises `TransferError` if it is not one of our folder and machine, `PeerLost` if its process has ended.
        """
        if _folder_of(theirs.endpoint) != _folder_of(self.address.endpoint) or not theirs.process.is_here:
            raise TransferError(f"{theirs.endpoint} of process {theirs.process.pid} is not of this machine and pool")
        descriptor = theirs.process.open()
        if descriptor is None:
            raise PeerLost(f"process {theirs.process.pid} is gone")
        socket = self._context.socket(SocketType.PUSH)
        socket.setsockopt(SocketOption.SNDHWM, _MAX_QUEUED)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.connect(theirs.endpoint)
        return MailboxSender(self._agent_name.encode(), socket, descriptor)

    def take(self) -> dict[str, list[bytes]]:
        """What arrived, oldest first, by the name of the agent that sent it."""
        arrived: dict[str, list[bytes]] = {}
        for _ in range(_MAX_PER_POLL):
            if not int(self._socket.get(SocketOption.EVENTS)) & PollEvent.POLLIN:
                break
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 2:
                arrived.setdefault(frames[0].decode(errors="replace"), []).append(frames[1])
        return arrived

    def close(self) -> None:
        """After all ways were closed."""
        self._context.destroy(linger=0)


class MailboxSender:
    """To one peer's mailbox, and what knows whether that peer's process lives."""

    def __init__(self, agent_name: bytes, socket: Any, descriptor: int) -> None:
        self._agent_name = agent_name
        self._socket = socket
        self._descriptor = descriptor

    def send(self, message: bytes) -> bool:
        """False if the peer has taken nothing for so long that there is no room: then try again later.

        Raises `TransferError` for more than the peer takes.
        """
        if len(message) > _MAX_NOTIFICATION:
            raise TransferError(f"a notification of {len(message)} bytes is too large; {_MAX_NOTIFICATION} are allowed")
        try:
            self._socket.send_multipart([self._agent_name, message], zmq.NOBLOCK)
        except Again:
            return False
        return True

    @property
    def is_dead(self) -> bool:
        """Whether the peer's process has ended."""
        return has_ended(self._descriptor)

    def close(self) -> None:
        """Once. What was not taken yet is dropped."""
        self._socket.close(linger=0)
        os.close(self._descriptor)


def _folder_of(endpoint: str) -> str:
    return endpoint.rpartition("/")[0]
