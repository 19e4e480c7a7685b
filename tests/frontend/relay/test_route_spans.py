"""`tandem route`: attempts as spans, retries, and what engines learn about the trace."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.engines_harness import COMPLETIONS, PAIRED, completion, pair, routing, routing_by_decider, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.tracing import CLIENT_TRACE, TRACEPARENT, KeptSpans

HEADERS = {"traceparent": TRACEPARENT, "tracestate": "vendor=a1"}
REQUEST, MODEL = f"POST {COMPLETIONS}", "toy"


def attempts(kept: KeptSpans) -> list[ReadableSpan]:
    found = [span for span in kept.all if span.kind is SpanKind.CLIENT]
    return sorted(found, key=lambda span: span.start_time or 0)


def name_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{CLIENT_TRACE}-{span.context.span_id:016x}-01"


async def test_an_engine_is_told_of_the_attempt(fake_a: FakeServer) -> None:
    kept = KeptSpans()
    async with routing(spec_of(fake_a, "a"), tracing=kept.tracing) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=True), headers=HEADERS)
        assert response.status_code == 200
    (attempt,) = attempts(kept)
    assert kept.tree() == [(REQUEST, ("admission", ("placement",)), (attempt.name, ("decode",)))]
    assert attempt.name.startswith("text_completion ")
    assert fake_a.request_headers[0]["traceparent"] == name_of(attempt)
    assert fake_a.request_headers[0]["tracestate"] == "vendor=a1"
    attributes = dict(attempt.attributes or {})
    expected = {
        "tandem.engine": "a",
        "http.request.resend_count": 0,
        "http.response.status_code": 200,
        "gen_ai.usage.output_tokens": 4,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert [event.name for event in attempt.events] == ["first_token"]
    assert kept.attributes("placement")["tandem.placement.decode_worker"] == "a"
    assert kept.attributes(REQUEST)["gen_ai.usage.output_tokens"] == 4


async def test_both_engines_of_a_pair_are_told_of_one_attempt(fake_a: FakeServer, fake_b: FakeServer) -> None:
    kept = KeptSpans()
    async with routing(*pair(fake_a, fake_b), config=PAIRED, tracing=kept.tracing) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=True), headers=HEADERS)
        assert response.status_code == 200
    (attempt,) = attempts(kept)
    assert (attempt.attributes or {})["tandem.engine.prefill"] == "p"
    assert kept.tree() == [(REQUEST, ("admission", ("placement",)), (attempt.name, ("prefill",), ("decode",)))]
    for fake in (fake_a, fake_b):
        assert fake.request_headers[-1]["traceparent"] == name_of(attempt)


async def test_a_decider_adds_its_spans_to_the_trace_of_a_frontend_process(fake_a: FakeServer, tmp_path: Path) -> None:
    kept = KeptSpans()
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), tracing=kept.tracing) as decider:
        frontend = await decider.frontend("frontend")
        response = await frontend.client.post(COMPLETIONS, json=completion(), headers=HEADERS)
        assert response.status_code == 200
    (attempt,) = attempts(kept)
    assert kept.tree() == [(REQUEST, ("admission", ("placement",)), (attempt.name,))]


async def test_without_tracing_engines_get_the_clients_own_context(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        assert (await router.client.post(COMPLETIONS, json=completion(), headers=HEADERS)).status_code == 200
    for fake in (fake_a, fake_b):
        assert {name: fake.request_headers[0].get(name) for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    "headers",
    [
        *({"tracestate": "vendor=a1"}, {"traceparent": ""}, {"traceparent": TRACEPARENT + "-more"}),
        *({"traceparent": "cc" + TRACEPARENT[2:] + "-" + "x" * 10_000}, [("traceparent", TRACEPARENT)] * 2),
    ],
    ids=["state alone", "empty", "more", "too long", "twice"],
)
async def test_an_invalid_context_is_dropped(fake_a: FakeServer, headers: Any) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        assert (await router.client.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200
    assert not fake_a.request_headers[0].keys() & HEADERS.keys()


async def test_a_tracestate_that_is_too_long_is_left_out(fake_a: FakeServer) -> None:
    headers = {"traceparent": "cc" + TRACEPARENT[2:] + "-later", "tracestate": "a=" + "b" * 511}
    async with routing(spec_of(fake_a, "a")) as router:
        assert (await router.client.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200
    assert fake_a.request_headers[0]["traceparent"] == headers["traceparent"]
    assert "tracestate" not in fake_a.request_headers[0]


@pytest.mark.parametrize("by_decider", [False, True])
async def test_a_retry_is_a_second_attempt_with_a_placement(
    fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path, by_decider: bool
) -> None:
    kept, specs = KeptSpans(), (spec_of(fake_a, "a"), spec_of(fake_b, "b"))
    for fake in (fake_a, fake_b):
        fake.status = 429
    async with AsyncExitStack() as stack:
        if by_decider:
            decider = await stack.enter_async_context(routing_by_decider(tmp_path, *specs, tracing=kept.tracing))
            client = (await decider.frontend("frontend")).client
        else:
            client = (await stack.enter_async_context(routing(*specs, tracing=kept.tracing))).client
        assert (await client.post(COMPLETIONS, json=completion(), headers=HEADERS)).status_code == 429
    first, second = attempts(kept)
    told = [dict(span.attributes or {}) for span in (first, second)]
    assert [one["http.request.resend_count"] for one in told] == [0, 1]
    assert {one["tandem.engine"] for one in told} == {"a", "b"}
    assert {span.status.status_code for span in (first, second)} == {StatusCode.ERROR}
    assert kept.attributes(REQUEST)["http.response.status_code"] == 429
    assert "error.type" in kept.attributes(REQUEST)
    shown = [("admission", ("placement",)), (first.name,), ("placement",), (second.name,), ("placement",)]
    assert kept.tree()[0][: len(shown) + 1] == (REQUEST, *shown)
    placed = sorted((span for span in kept.all if span.name == "placement"), key=lambda span: span.start_time or 0)
    workers = [(span.attributes or {}).get("tandem.placement.decode_worker") for span in placed]
    assert workers == [*(one["tandem.engine"] for one in told), None]
    assert placed[-1].status.status_code is StatusCode.ERROR
