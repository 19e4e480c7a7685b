"""An answer as a stream of server-sent events."""

from __future__ import annotations

import json
import logging
import time
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected, internal_error_body, serving_error_body
from tandem.frontend.http.heartbeat import Heartbeat
from tandem.frontend.http.metrics import EdgeMetrics
from tandem.frontend.http.request_options import EXPLAIN_HEADER, note_unserved
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import PlannedAnswer
from tandem.protocol.errors import ServingError
from tandem.router.streams import Stream

__all__ = ["EventStream", "explanation"]

logger = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter: no buffering in nginx


class EventStream(Response):
    """Response that sends an answer's events as its deltas arrive. It owns the deltas and closes them.

    Raises what fails before the head of the response is sent, so that it gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: PlannedAnswer, deltas: Stream[ChoiceDelta], metrics: EdgeMetrics) -> None:
        self._answer = answer
        self._events = answer.format.events(answer)
        self._deltas = deltas
        self._metrics = metrics
        self._has_token = False
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI app."""
        async with aclosing(self._deltas):
            writer = ResponseWriter(scope, send)
            try:
                async with cancel_on_disconnect(receive):
                    await self._send(writer, scope)
            except ClientDisconnected:
                self._metrics.client_disconnects.inc()
                if not writer.has_started:
                    raise
            finally:
                writer.close()
                if writer.has_started:
                    self._metrics.duration_s.observe(time.perf_counter() - self._answer.arrived_s)

    async def _send(self, writer: ResponseWriter, scope: Scope) -> None:
        try:
            with Heartbeat(writer, self.raw_headers, scope["path"]):
                last = await self._send_deltas(writer)
        except Exception as exc:  # whatever it is: if the stream has begun, the client gets an error event
            if not writer.has_started or isinstance(exc, ClientDisconnected):
                raise
            if not self._has_token:
                note_unserved(scope, exc)
            last = self._error_event(self._failed(exc))
        await writer.end(last)

    async def _send_deltas(self, writer: ResponseWriter) -> bytes:
        """Send the deltas; return the last events, which are still to be sent."""
        events = self._events

        def write(deltas: list[ChoiceDelta]) -> bool:
            data = b"".join([events.of(delta) for delta in deltas])
            return not data or writer.write(data)

        first = await self._deltas.take()
        self._has_token = True
        if not writer.has_started:
            await writer.start(self.raw_headers + explanation(first[0].decision))
        await writer.drain()
        write(first)
        has_ended = False
        while not has_ended:
            await writer.drain()
            has_ended = await self._deltas.read_into(write)
        return await events.ending()

    def _failed(self, exc: Exception) -> dict[str, Any]:
        """The error's body, after a line in the log."""
        if isinstance(exc, ServingError):
            # No warning: one dead worker fails many streams.
            logger.info("the stream of request %s failed: %s", self._answer.request_id, exc.log_text)
            return serving_error_body(exc)
        logger.error("the stream of request %s failed", self._answer.request_id, exc_info=exc)  # a bug
        return internal_error_body()

    def _error_event(self, body: dict[str, Any]) -> bytes:
        self._metrics.stream_errors.inc()
        return self._events.error(body)


def explanation(decision: dict[str, Any] | None) -> list[tuple[bytes, bytes]]:
    """The response header that carries the decision, if there is one. It is in ASCII."""
    return [(EXPLAIN_HEADER.encode(), json.dumps(decision, separators=(",", ":")).encode())] if decision else []
