"""Answers one generation request: as a whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.answer_shapes import Error
from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected, internal_error_body, serving_error_body
from tandem.frontend.http.heartbeat import Heartbeat
from tandem.frontend.http.metrics import FrontendMetrics, RequestClock
from tandem.frontend.http.request_options import EXPLAIN_HEADER, key_use_of, note_unserved, span_of
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.openai.cache_hints import follow_hints
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.choices import run_choices
from tandem.frontend.openai.planned_answer import FinishedChoice, PlannedAnswer
from tandem.frontend.openai.traced_answer import TracedAnswer
from tandem.protocol.errors import ServingError
from tandem.router.backend import Backend
from tandem.router.streams import Stream
from tandem.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_ENTRIES = 256  # log probabilities of this many tokens take 20 ms to turn into JSON
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter: no buffering in nginx


async def answer_request(
    request: Request, answer: PlannedAnswer, backend: Backend, tokenizer: Tokenizer, metrics: FrontendMetrics
) -> Response:
    """Generate and respond. A stream generates when it is sent. Raises a `ServingError`."""
    use = key_use_of(request)
    if use is not None:
        max_tokens = sum(choice.request.sampling.max_tokens for choice in answer.choices)
        await use.charge(answer.num_prompt_tokens, len(answer.choices), max_tokens)
    prompts = [choice.request for choice in answer.choices if choice.is_first_sibling]
    headers = await follow_hints(request, answer.hints, prompts, backend.cache)
    deltas = run_choices(backend, answer.choices, tokenizer, lambda: RequestClock(metrics, answer.arrived_s, use))
    span = span_of(request.scope)
    if span is not None and span.is_sampled:
        deltas = TracedAnswer(deltas, answer, span)
    if answer.is_stream:
        return _EventStream(answer, deltas, metrics, headers)
    try:
        async with cancel_on_disconnect(request.receive):
            body, decision = await _collect(answer, deltas)
    except ClientDisconnected:
        metrics.client_disconnects.inc()
        raise
    metrics.duration_s.observe(time.perf_counter() - answer.arrived_s)
    response = Response(msgspec.json.encode(body), media_type="application/json")
    response.raw_headers += headers + _explanation(decision)
    return response


async def _collect(answer: PlannedAnswer, deltas: Stream[ChoiceDelta]) -> tuple[msgspec.Struct, dict[str, Any] | None]:
    """The body of the whole answer, and the decision if it was requested."""
    decision: dict[str, Any] | None = None
    choices = [FinishedChoice(plan.index) for plan in answer.choices]
    usage = answer.new_usage()

    def add(deltas: list[ChoiceDelta]) -> bool:
        nonlocal decision
        for delta in deltas:
            choices[delta.index].add(delta)
            usage.add(delta)
            decision = decision or delta.decision
        return True

    async with aclosing(deltas):
        await deltas.read_into(add)

    def body() -> msgspec.Struct:
        return answer.format.body(answer, choices, usage)

    is_long = sum(len(choice.entries) for choice in choices) > LONG_ENTRIES
    return await asyncio.to_thread(body) if is_long else body(), decision


class _EventStream(Response):
    """Response that sends an answer's events as its deltas arrive. It owns the deltas and closes them.

    Raises what fails before the head of the response is sent, so that it gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: PlannedAnswer,
        deltas: Stream[ChoiceDelta],
        metrics: FrontendMetrics,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        self._answer = answer
        self._events = answer.format.events(answer)
        self._deltas = deltas
        self._metrics = metrics
        self._has_token = False
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self.raw_headers += headers

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
            if (span := span_of(scope)) is not None:
                span.fail(exc)
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
            await writer.start(self.raw_headers + _explanation(first[0].decision))
        await writer.drain()
        write(first)
        has_ended = False
        while not has_ended:
            await writer.drain()
            has_ended = await self._deltas.read_into(write)
        return await events.ending()

    def _failed(self, exc: Exception) -> Error:
        """The error's body, after a line in the log."""
        if isinstance(exc, ServingError):
            # No warning: one dead worker fails many streams.
            logger.info("the stream of request %s failed: %s", self._answer.request_id, exc.log_text)
            return serving_error_body(exc)
        logger.error("the stream of request %s failed", self._answer.request_id, exc_info=exc)  # a bug
        return internal_error_body()

    def _error_event(self, body: Error) -> bytes:
        self._metrics.stream_errors.inc()
        return self._events.error(body)


def _explanation(decision: dict[str, Any] | None) -> list[tuple[bytes, bytes]]:
    """The response header that carries the decision, if there is one. It is in ASCII."""
    return [(EXPLAIN_HEADER.encode(), json.dumps(decision, separators=(",", ":")).encode())] if decision else []
