"""Writes a response from callbacks and tasks: directly to the connection if the server can, otherwise by ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any

from starlette.types import Message, Scope, Send

from tandem.frontend.http.errors import ClientDisconnected

DIRECT_WRITE = "tandem.direct_write"  # extension of ASGI; its "write" is a `(bytes) -> bool`, see HttpProtocol


class ResponseWriter:
    """Writes one response. Its owner closes it.

    Raises `ClientDisconnected` when the connection breaks, so that no other `OSError` is mistaken for that.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        extension = (scope.get("extensions") or {}).get(DIRECT_WRITE, {})
        self._write: Callable[[bytes], bool] = extension.get("write", _cannot_write)
        self._send = send
        self._sending: EagerAwaitable | None = None  # waits for a slow client
        self.has_started = False  # the head of the response is on its way
        self.is_silent = True  # nothing was written since `Heartbeat` set this

    async def send(self, message: Message) -> None:
        """As ASGI's `send`."""
        try:
            await self._send(message)
        except OSError as exc:
            raise ClientDisconnected from exc

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a stream."""
        self.has_started = True
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    def start_soon(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a stream from a callback: await `drain` before anything else is written."""
        self._sending = EagerAwaitable(self.start(headers))

    def ping(self, events: bytes) -> None:
        """Send a part from a callback, or drop it if the client is slow."""
        if self.is_blocked or self._write(events):
            return
        # Before anything is written, ASGI's `send` waits for the client: what is closed there has sent nothing.
        EagerAwaitable(self.send({"type": "http.response.body", "body": events, "more_body": True})).close()

    def write(self, events: bytes) -> bool:
        """Send a part of a stream. Returns False if the client is slow: await `drain` before the next part.

        A message of ASGI costs two coroutines and a dict, nearly as much as everything else done with a token.
        """
        self.is_silent = False
        if self._write(events):
            return True
        self._sending = EagerAwaitable(self.send({"type": "http.response.body", "body": events, "more_body": True}))
        return self._sending.is_done

    @property
    def is_blocked(self) -> bool:
        """Whether `drain` would wait for the client."""
        return self._sending is not None and not self._sending.is_done

    async def drain(self) -> None:
        """Return when the client has room for more."""
        if self._sending is not None:
            await self._sending

    async def end(self, events: bytes) -> None:
        """Send the last part of a stream, after the part that waits."""
        await self.drain()
        await self.send({"type": "http.response.body", "body": events, "more_body": False})

    def close(self) -> None:
        """Give up a part that waits for the client."""
        if self._sending is not None:
            self._sending.close()


def _cannot_write(_: bytes) -> bool:
    return False


class EagerAwaitable:
    """Runs up to its first wait at construction, with or without a task, like the eager tasks of Python 3.12.

    Awaiting it does the rest. The owner awaits or closes it, unless it is done.
    """

    def __init__(self, work: Awaitable[None]) -> None:
        """Raises what `work` raises before its first wait."""
        self.is_done = False
        self._steps = work.__await__()
        self._advance(self._steps.send, None)

    def __await__(self) -> Generator[Any, Any, None]:
        """Do the rest in the awaiting task."""
        while not self.is_done:
            try:
                result = yield self._pending
            except BaseException as exc:  # thrown into the work, as `yield from` does: a cancellation, say
                self._advance(self._steps.throw, exc)
            else:
                self._advance(self._steps.send, result)

    def close(self) -> None:
        """End it where it waits."""
        self.is_done = True
        self._steps.close()

    def _advance(self, step: Callable[[Any], Any], value: Any) -> None:
        self.is_done = True  # unless it waits again
        with suppress(StopIteration):
            self._pending = step(value)
            self.is_done = False
