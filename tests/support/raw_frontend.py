"""A frontend process that says whatever a test wants said to the deciding process, in whatever order."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self

from tandem.frontend.processes import wire
from tandem.frontend.processes.message_link import framed


class RawFrontend:
    """Speaks the protocol by hand. To be entered as a context; its id must be expected before it joins."""

    def __init__(self, path: str, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.is_closed = False  # the deciding process has closed the connection
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._data = b""

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
        try:
            while data := self._socket.recv(1 << 16):
                self._data += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # closed before it had read everything
            self.is_closed = True
        taken = []
        while len(self._data) >= 4 and len(self._data) >= (end := 4 + int.from_bytes(self._data[:4], "little")):
            taken.append(self._data[4:end])
            self._data = self._data[end:]
        return taken
