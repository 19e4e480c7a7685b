"""Answers one generation request: all at once or as a stream of server-sent events.

Every way out (the end, an error, a client that leaves, a server that stops) closes the generators below.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import ServingError
from tandem.router.backend import Backend
from tandem.router.http.disconnect import cancel_on_disconnect
from tandem.router.http.errors import ClientDisconnected, internal_error_body, serving_error_body
from tandem.router.http.metrics import EdgeMetrics, RequestClock
from tandem.router.http.request_options import EXPLAIN_HEADER
from tandem.router.http.response_writer import ResponseWriter
from tandem.router.openai.formats import AnswerFormat, FinishedChoice, Usage
from tandem.router.openai.generation import ChoiceDelta, ChoicePlan, run_choices
from tandem.router.streams import Stream
from tandem.router.text.tokenizer import Tokenizer

__all__ = ["EventStream", "PlannedAnswer", "answer_request", "new_answer_id"]

logger = logging.getLogger(__name__)

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter: no buffering in nginx
EXPLANATION_FIELD = "tandem_explain"
LONG_ENTRIES = 256  # tokens whose log probabilities are made JSON of in 20 ms
DONE_EVENT = b"data: [DONE]\n\n"


def new_answer_id(prefix: str) -> str:
    """A fresh id; the sequences of the request derive theirs from it."""
    return prefix + secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """What to generate for a request and how to present it."""

    answer_id: str
    model: str
    arrived_s: float
    format: AnswerFormat
    choices: list[ChoicePlan]
    num_prompt_tokens: int
    is_stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False


async def answer_request(
    request: Request, answer: PlannedAnswer, backend: Backend, tokenizer: Tokenizer, metrics: EdgeMetrics
) -> Response:
    """Generate and respond. Raises a `ServingError` for what goes wrong before the first token of a stream."""
    metrics.prompt_tokens.inc(answer.num_prompt_tokens)
    deltas = run_choices(backend, answer.choices, tokenizer, lambda: RequestClock(metrics, answer.arrived_s))
    headers = {"x-request-id": answer.answer_id}
    try:
        if answer.is_stream:
            async with cancel_on_disconnect(request.receive):
                first = await deltas.take()
            headers |= STREAM_HEADERS | _explanation(first[0].decision)
            return EventStream(answer, first, deltas, metrics, headers)
        async with cancel_on_disconnect(request.receive):
            body, decision = await _collect(answer, deltas)
        headers |= _explanation(decision)
    except BaseException as exc:
        if isinstance(exc, ClientDisconnected):
            metrics.client_disconnects.inc()
        await deltas.aclose()
        raise
    metrics.duration_s.observe(time.perf_counter() - answer.arrived_s)
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


class EventStream(Response):
    """Response that sends an answer's events as its deltas come; owns the deltas and closes them."""

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
            outlet = ResponseWriter(scope, send)
            try:
                async with cancel_on_disconnect(receive):
                    await self._send(outlet)
            except ClientDisconnected:
                self._metrics.client_disconnects.inc()
            finally:
                outlet.close()
                self._metrics.duration_s.observe(time.perf_counter() - self._answer.arrived_s)

    async def _send(self, outlet: ResponseWriter) -> None:
        await outlet.start(self.raw_headers)
        try:
            last = await self._send_deltas(outlet)
        except ServingError as exc:
            # One dead worker fails many: not a warning each.
            logger.info("Stream %s failed: %s", self._answer.answer_id, exc)
            last = self._error_event(serving_error_body(exc))
        except ClientDisconnected:
            raise
        except Exception:
            logger.exception("Stream %s failed", self._answer.answer_id)
            last = self._error_event(internal_error_body())
        await outlet.end(last)

    async def _send_deltas(self, outlet: ResponseWriter) -> bytes:
        """Send the deltas; return the last events, which are still to be sent."""
        chunks = _Chunks(self._answer)

        def show(deltas: list[ChoiceDelta]) -> bool:
            events = b"".join([chunks.of(delta) for delta in deltas])
            return not events or outlet.show(events)

        show(self._first)
        has_ended = False
        while not has_ended:
            await outlet.drained()
            has_ended = await self._deltas.read_into(show)
        return chunks.ending()

    def _error_event(self, body: dict[str, Any]) -> bytes:
        self._metrics.stream_errors.inc()
        return _event(body)


def _explanation(decision: dict[str, Any] | None) -> dict[str, str]:
    """The response header that tells the decision."""
    return {EXPLAIN_HEADER: json.dumps(decision, separators=(",", ":"))} if decision else {}  # in ASCII


async def _collect(answer: PlannedAnswer, deltas: Stream[ChoiceDelta]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The body of the whole answer, and the decision if it was asked for."""
    decision: dict[str, Any] | None = None
    choices = [FinishedChoice(plan.index) for plan in answer.choices]
    usage = Usage(answer.num_prompt_tokens)

    def add(deltas: list[ChoiceDelta]) -> bool:
        nonlocal decision
        for delta in deltas:
            choices[delta.index].add(delta)
            usage.add(delta)
            decision = decision or delta.decision
        return True

    async with aclosing(deltas):
        await deltas.read_into(add)

    def shown() -> list[dict[str, Any]]:
        return [answer.format.whole(choice) for choice in choices]

    is_long = sum(len(choice.entries) for choice in choices) > LONG_ENTRIES
    body = {
        "id": answer.answer_id,
        "object": answer.format.plain_object,
        "created": int(time.time()),
        "model": answer.model,
        "choices": await asyncio.to_thread(shown) if is_long else shown(),
        "usage": usage.to_json(),
    }
    return body, decision


class _Chunks:
    """Makes the events of one stream."""

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
        self._opening = b"data: " + orjson.dumps(self._envelope)[:-1] + b',"choices":['  # of every chunk
        self._closing = b'],"usage":null}\n\n' if answer.has_usage else b"]}\n\n"

    def of(self, delta: ChoiceDelta) -> bytes:
        """Events for one delta, in one piece: a choice's opening goes out with its first delta. Maybe empty."""
        self._usage.add(delta)
        self._num_finished += delta.finish_reason is not None
        self._decision = self._decision or delta.decision
        events = b""
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            opening = self._answer.format.opening(delta.index)
            if opening is not None:
                events = self._chunk(opening)
        return events if delta.is_empty else events + self._chunk(self._answer.format.piece(delta))

    def ending(self) -> bytes:
        """The last events of a complete answer."""
        if not self._answer.has_usage:
            return DONE_EVENT
        return _event({**self._envelope, "choices": [], "usage": self._usage.to_json()}) + DONE_EVENT

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        is_explained = self._decision and self._num_finished == len(self._answer.choices)
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
