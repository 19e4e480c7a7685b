"""An edge process that says whatever a test wants said to a hub, in whatever order."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import zmq
from zmq.constants import SocketType

from tandem.router.processes import wire


class RawEdge:
    """Speaks the hub's protocol by hand. To be entered as a context; the hub must expect its id."""

    def __init__(self, endpoint: str, edge_id: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.identity = edge_id.encode()
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def send(self, message: Any) -> None:
        self.send_bytes(wire.encode(message))

    def take(self) -> list[bytes]:
        """The messages that have come since the last time."""
        taken = []
        while self._socket.poll(0):
            taken.append(self._socket.recv())
        return taken

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)
