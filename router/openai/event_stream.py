"""An answer as a stream of server-sent events."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import ServingError
from tandem.router.http.disconnect import cancel_on_disconnect
from tandem.router.http.errors import ClientDisconnected, internal_error_body, serving_error_body
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.response_writer import ResponseWriter
from tandem.router.openai.choice_text import ChoiceDelta
from tandem.router.openai.formats import Usage
from tandem.router.openai.planned_answer import PlannedAnswer
from tandem.router.streams import Stream

__all__ = ["EventStream"]

logger = logging.getLogger(__name__)

EXPLANATION_FIELD = "tandem_explain"
DONE_EVENT = b"data: [DONE]\n\n"


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
            logger.info("Stream %s failed: %s", self._answer.answer_id, exc)
            last = self._error_event(serving_error_body(exc))
        except ClientDisconnected:
            raise
        except Exception:  # a bug: the client is told, as the stream has begun
            logger.exception("Stream %s failed", self._answer.answer_id)
            last = self._error_event(internal_error_body())
        await writer.end(last)

    async def _send_deltas(self, writer: ResponseWriter) -> bytes:
        """Send the deltas; return the last events, which are still to be sent."""
        events = _Events(self._answer)

        def write(deltas: list[ChoiceDelta]) -> bool:
            data = b"".join([events.of(delta) for delta in deltas])
            return not data or writer.write(data)

        write(self._first)
        has_ended = False
        while not has_ended:
            await writer.drain()
            has_ended = await self._deltas.read_into(write)
        return events.ending()

    def _error_event(self, body: dict[str, Any]) -> bytes:
        self._metrics.stream_errors.inc()
        return _event(body)


class _Events:
    """Makes the server-sent events of one answer."""

    def __init__(self, answer: PlannedAnswer) -> None:
        self._answer = answer
        self._usage = Usage(answer.num_prompt_tokens)
        self._opened: set[int] = set()
        self._num_finished = 0
        self._decision: dict[str, Any] | None = None
        self._envelope = {
            "id": answer.answer_id,
            "object": answer.format.chunk_object,
            "created": int(time.time()),
            "model": answer.model,
        }
        self._opening = b"data: " + orjson.dumps(self._envelope)[:-1] + b',"choices":['  # starts every event
        self._closing = b'],"usage":null}\n\n' if answer.has_usage else b"]}\n\n"

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta, maybe none. A choice's opening is sent with its first delta."""
        self._usage.add(delta)
        self._num_finished += delta.finish_reason is not None
        self._decision = self._decision or delta.decision
        events = b""
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            opening = self._answer.format.opening(delta.index)
            if opening is not None:
                events = self._chunk(opening)
        if delta.is_empty:
            return events
        for piece in self._answer.format.pieces(delta):
            events += self._chunk(piece)
        return events

    def ending(self) -> bytes:
        """The last events of a complete answer."""
        if not self._answer.has_usage:
            return DONE_EVENT
        return _event({**self._envelope, "choices": [], "usage": self._usage.to_json()}) + DONE_EVENT

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        is_explained = self._decision and choice["finish_reason"] and self._num_finished == len(self._answer.choices)
        if not is_explained and not self._answer.has_running_usage:
            return self._opening + orjson.dumps(choice) + self._closing
        chunk = {**self._envelope, "choices": [choice]}
        if self._answer.has_usage:
            chunk["usage"] = self._usage.to_json() if self._answer.has_running_usage else None
        if is_explained:
            chunk[EXPLANATION_FIELD] = self._decision  # in the last chunk with choices; OpenAI's clients keep extras
        return _event(chunk)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
