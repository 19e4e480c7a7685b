"""Where the events of a stream go out: past ASGI where the server offers a way, else by its `send`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Scope, Send

from tandem.router.http.errors import ClientDisconnected
from tandem.router.http.started import Started

__all__ = ["DIRECT_WRITE", "ResponseWriter"]

DIRECT_WRITE = "tandem.direct_write"  # extension of ASGI; its "write" is a `(bytes) -> bool`, see HttpProtocol


class ResponseWriter:
    """Sends a response from wherever its parts come up, a callback or a task. Whoever makes one closes it.

    Where the connection breaks it raises `ClientDisconnected`: no other `OSError` is to be taken for that.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        extension = (scope.get("extensions") or {}).get(DIRECT_WRITE, {})
        self._write: Callable[[bytes], bool] = extension.get("write", _cannot_write)
        self._send = send
        self._sending: Started | None = None  # what waits for the client

    async def send(self, message: Message) -> None:
        """As ASGI's `send`."""
        try:
            await self._send(message)
        except OSError as exc:
            raise ClientDisconnected from exc

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin a stream."""
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    def show(self, events: bytes) -> bool:
        """Send a part of a stream. Returns False where the client is slow: await `drained` before the next.

        A message of ASGI costs two coroutines and a dict, nearly as much as all else that is done with a token.
        """
        if self._write(events):
            return True
        self._sending = Started(self.send({"type": "http.response.body", "body": events, "more_body": True}))
        return self._sending.is_done

    async def drained(self) -> None:
        """Return when the client has room for more."""
        if self._sending is not None:
            await self._sending

    async def end(self, events: bytes) -> None:
        """Send the last part of a stream, behind what waits."""
        await self.drained()
        await self.send({"type": "http.response.body", "body": events, "more_body": False})

    def close(self) -> None:
        """End a sending that waits for the client."""
        if self._sending is not None:
            self._sending.close()


def _cannot_write(_: bytes) -> bool:
    return False
