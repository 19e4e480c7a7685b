"""An answer as a stream of server-sent events."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import ServingError
from tandem.router.http.disconnect import cancel_on_disconnect
from tandem.router.http.errors import ClientDisconnected, internal_error_body, serving_error_body
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.response_writer import ResponseWriter
from tandem.router.openai.choice_text import ChoiceDelta
from tandem.router.openai.planned_answer import PlannedAnswer
from tandem.router.streams import Stream

__all__ = ["EventStream"]

logger = logging.getLogger(__name__)


class EventStream(Response):
    """Response that sends an answer's events as its deltas arrive. It owns the deltas and closes them."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: PlannedAnswer,
        first: list[ChoiceDelta],
        deltas: Stream[ChoiceDelta],
        metrics: EdgeMetrics,
        headers: dict[str, str],
    ) -> None:
        self._answer = answer
        self._events = answer.format.events(answer)
        self._first = first
        self._deltas = deltas
        self._metrics = metrics
        self.status_code = 200
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI app."""
        async with aclosing(self._deltas):
            writer = ResponseWriter(scope, send)
            try:
                async with cancel_on_disconnect(receive):
                    await self._send(writer)
            except ClientDisconnected:
                self._metrics.client_disconnects.inc()
            finally:
                writer.close()
                self._metrics.duration_s.observe(time.perf_counter() - self._answer.arrived_s)

    async def _send(self, writer: ResponseWriter) -> None:
        await writer.start(self.raw_headers)
        try:
            last = await self._send_deltas(writer)
        except ServingError as exc:
            # No warning: one dead worker fails many streams.
            logger.info("the stream of request %s failed: %s", self._answer.request_id, exc.log_text)
            last = self._error_event(serving_error_body(exc))
        except ClientDisconnected:
            raise
        except Exception:  # a bug: the stream has begun, so the client gets an error event
            logger.exception("the stream of request %s failed", self._answer.request_id)
            last = self._error_event(internal_error_body())
        await writer.end(last)

    async def _send_deltas(self, writer: ResponseWriter) -> bytes:
        """Send the deltas; return the last events, which are still to be sent."""
        events = self._events

        def write(deltas: list[ChoiceDelta]) -> bool:
            data = b"".join([events.of(delta) for delta in deltas])
            return not data or writer.write(data)

        write(self._first)
        has_ended = False
        while not has_ended:
            await writer.drain()
            has_ended = await self._deltas.read_into(write)
        return await events.ending()

    def _error_event(self, body: dict[str, Any]) -> bytes:
        self._metrics.stream_errors.inc()
        return self._events.error(body)
