"""Whole messages over a TCP connection without blocking, for the two ends of an `nccl` link.

A peer's death ends the connection: at once if its process died, within seconds if its host did.
"""

from __future__ import annotations

import errno
import socket

from tandem.protocol.errors import PeerLost
from tandem.protocol.frames import Frames, FrameTooLong, framed

_MAX_MESSAGE_BYTES = 64 << 20  # no transport sends more
_READ_BYTES = 1 << 18
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),  # ms
)


class MessageStream:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for level, name, value in _KEEPALIVE:
            connection.setsockopt(level, name, value)
        self._socket = connection
        self._unsent = bytearray()
        self._frames = Frames(_MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        """For a selector: when it is readable, call `receive`."""
        return self._socket.fileno()

    def put(self, message: bytes) -> None:
        """Queue a message. `flush` sends it."""
        self._unsent += framed(message)

    def flush(self) -> None:
        """Send queued messages as far as the connection accepts them. Raises `PeerLost` when it is broken."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as exc:
                raise PeerLost(f"connection broke: {exc}") from exc
            del self._unsent[:sent]

    def receive(self) -> list[bytes]:
        """Messages that arrived, oldest first. Raises `PeerLost` once the connection has ended, in later calls too."""
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise PeerLost(f"connection broke: {exc}") from exc
        if not chunk:
            raise PeerLost("connection closed by the peer")
        try:
            return self._frames.add(chunk)
        except FrameTooLong as exc:
            raise PeerLost(f"{exc}: not a peer of ours") from exc

    def close(self) -> None:
        """End the connection; unsent messages are dropped."""
        self._socket.close()


def listen(host: str) -> socket.socket:
    """A listening socket on a free port, at this address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    listener.setblocking(False)
    return listener


def connect(host: str, port: int) -> MessageStream:
    """Start to connect. Later calls show whether it worked; messages put before then are kept."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    stream = MessageStream(connection)
    code = connection.connect_ex((host, port))
    if code not in (0, errno.EINPROGRESS):
        stream.close()
        raise PeerLost(f"{host}:{port} cannot be reached: {errno.errorcode.get(code, code)}")
    return stream
