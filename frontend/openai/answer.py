"""Answers one generation request: as a whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected
from tandem.frontend.http.metrics import EdgeMetrics, RequestClock
from tandem.frontend.http.request_options import key_use_of, span_of
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.choices import run_choices
from tandem.frontend.openai.event_stream import EventStream, explanation
from tandem.frontend.openai.planned_answer import FinishedChoice, PlannedAnswer
from tandem.frontend.openai.traced_answer import TracedAnswer
from tandem.router.backend import Backend
from tandem.router.streams import Stream
from tandem.text.tokenizer import Tokenizer

__all__ = ["answer_request"]

LONG_ENTRIES = 256  # log probabilities of this many tokens take 20 ms to turn into JSON


async def answer_request(
    request: Request, answer: PlannedAnswer, backend: Backend, tokenizer: Tokenizer, metrics: EdgeMetrics
) -> Response:
    """Generate and respond. A stream generates when it is sent. Raises a `ServingError`."""
    use = key_use_of(request)
    if use is not None:
        max_tokens = sum(choice.request.sampling.max_tokens for choice in answer.choices)
        await use.charge(answer.num_prompt_tokens, len(answer.choices), max_tokens)
    metrics.prompt_tokens.inc(answer.num_prompt_tokens)
    deltas = run_choices(backend, answer.choices, tokenizer, lambda: RequestClock(metrics, answer.arrived_s, use))
    span = span_of(request.scope)
    if span is not None and span.is_sampled:
        deltas = TracedAnswer(deltas, answer, span)
    if answer.is_stream:
        return EventStream(answer, deltas, metrics)
    try:
        async with cancel_on_disconnect(request.receive):
            body, decision = await _collect(answer, deltas)
    except ClientDisconnected:
        metrics.client_disconnects.inc()
        raise
    metrics.duration_s.observe(time.perf_counter() - answer.arrived_s)
    response = Response(orjson.dumps(body), media_type="application/json")
    response.raw_headers += explanation(decision)
    return response


async def _collect(answer: PlannedAnswer, deltas: Stream[ChoiceDelta]) -> tuple[dict[str, Any], dict[str, Any] | None]:
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

    def body() -> dict[str, Any]:
        return answer.format.body(answer, choices, usage)

    is_long = sum(len(choice.entries) for choice in choices) > LONG_ENTRIES
    return await asyncio.to_thread(body) if is_long else body(), decision
