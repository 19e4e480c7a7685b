"""A frontend process that says whatever a test wants said to the deciding process, in whatever order."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self

from tandem.frontend.processes import wire
from tandem.protocol.frames import Frames, framed


class RawFrontend:
    """Speaks the protocol by hand. To be entered as a context; its id must be expected before it joins."""

    def __init__(self, path: str, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.is_closed = False  # the deciding process has closed the connection
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._frames = Frames()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def join(self) -> None:
        self.send(wire.Join(self.frontend_id))

    def send(self, message: Any) -> None:
        self.send_bytes(wire.encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(framed(data))

    def take(self) -> list[bytes]:
        """The messages that have come since the last time."""
        taken: list[bytes] = []
        try:
            while data := self._socket.recv(1 << 16):
                taken += self._frames.add(data)
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # closed before it had read everything
            self.is_closed = True
        return taken
