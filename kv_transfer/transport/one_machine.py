"""NIXL links between processes of one user on one machine, without any port of UCX.

UCX's TCP port accepts data from every process of the machine and writes it to any address that the data names. Without
that port, and without the System V segments that UCX opens to the user's whole group, UCX copies from process to
process with CMA (`process_vm_writev`), which the kernel allows only between processes of the same user. Such a copy
needs nothing from the receiver and is over when the call returns.

UCX could also carry notifications in shared memory. But all senders share one ring at the receiver, and a sender that
is killed while it writes to the ring stops it for all. So notifications go through Unix sockets in a private folder.
UCX does not notice there that a peer has died either; the kernel reports it through a pidfd.
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

UCX_TLS = "^tcp,sysv"

_MAX_QUEUED = 10_000  # notifications, at each end
_MAX_NOTIFICATION = 64 << 20  # bytes
_MAX_PER_POLL = 10_000


def can_copy_between_processes() -> bool:
    """Whether the kernel has CMA and permits it; some sandboxes do not, and an administrator can forbid it."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope > 1:  # at 1 UCX permits its peers to copy; above 1 only an administrator may
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    here, there = (_IoVec(ctypes.addressof(buffer), 1) for buffer in (source, target))
    write = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
    return write is not None and write(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 1


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class MailboxAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a process receives notifications, and which process it is."""

    endpoint: Annotated[str, Meta(min_length=1, max_length=256)]
    process: ProcessId


class Mailbox:
    """Receives the notifications for one agent. Only the thread that polls uses it."""

    def __init__(self, endpoint: str, agent_name: str) -> None:
        """`endpoint` is `ipc://` and the path of a new file in a folder that only this user may enter."""
        self._agent_name = agent_name
        self._context = zmq.Context()
        self.socket = self._context.socket(SocketType.PULL)  # readable when there are messages to take
        self.socket.setsockopt(SocketOption.MAXMSGSIZE, _MAX_NOTIFICATION)
        self.socket.setsockopt(SocketOption.RCVHWM, _MAX_QUEUED)
        self.socket.bind(endpoint)
        self.address = MailboxAddress(endpoint, own_process())

    def open(self, theirs: MailboxAddress) -> MailboxSender:
        """Connect to a peer's mailbox.

        Raises `TransferError` if it is not in our folder and on this machine, `PeerLost` if its process has ended.
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
        """The messages that arrived, oldest first, by the name of the sending agent."""
        arrived: dict[str, list[bytes]] = {}
        for _ in range(_MAX_PER_POLL):
            if not int(self.socket.get(SocketOption.EVENTS)) & PollEvent.POLLIN:
                break
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 2:
                arrived.setdefault(frames[0].decode(errors="replace"), []).append(frames[1])
        return arrived

    def close(self) -> None:
        """Call this after all senders were closed."""
        self._context.destroy(linger=0)


class MailboxSender:
    """Sends to one peer's mailbox and knows whether that peer's process lives."""

    def __init__(self, agent_name: bytes, socket: Any, descriptor: int) -> None:
        self._agent_name = agent_name
        self._socket = socket
        self._descriptor = descriptor

    def send(self, message: bytes) -> bool:
        """False if there is no room because the peer has read nothing for long: then try again later.

        Raises `TransferError` for a message larger than the peer accepts.
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
        """Call this once. Messages that the peer has not read are dropped."""
        self._socket.close(linger=0)
        os.close(self._descriptor)


def _folder_of(endpoint: str) -> str:
    return endpoint.rpartition("/")[0]
