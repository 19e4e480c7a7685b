"""Keeps a stream's connection alive while there is nothing to send: proxies cut one that is silent for 50 to 60 s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from tandem.frontend.http.errors import ClientDisconnected, is_messages_path
from tandem.frontend.http.response_writer import ResponseWriter

HEAD_AFTER_S = 2.0  # an error that comes earlier still has a status of its own
PING_INTERVAL_S = 10.0

_COMMENT = b": ping\n\n"  # clients drop comments
_MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'  # what Anthropic's API sends


class Heartbeat:
    """While its block runs, a stream that has nothing to send sends its head after `HEAD_AFTER_S`, and then pings.

    One timer per stream. A token does not touch it: the timer looks whether anything was written since it last ran, so
    a stream that falls silent after its first token gets its next ping after one to two intervals.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        headers: list[tuple[bytes, bytes]],
        path: str,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
    ) -> None:
        """`headers` are those of a head that goes out before the first event is known. `path` is the request's."""
        self._writer = writer
        self._headers = headers
        self._ping = _MESSAGES_PING if is_messages_path(path) else _COMMENT
        self._call_later = call_later or asyncio.get_running_loop().call_later

    def __enter__(self) -> Self:
        self._timer = self._call_later(HEAD_AFTER_S, self._beat)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        writer = self._writer
        with suppress(ClientDisconnected):  # the request's own task notices it
            if not writer.has_started:
                writer.start_soon(self._headers)
            if writer.is_silent:
                writer.ping(self._ping)
        writer.is_silent = True  # until something is written
        self._timer = self._call_later(PING_INTERVAL_S, self._beat)
