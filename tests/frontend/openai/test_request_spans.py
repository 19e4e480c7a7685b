"""The span of an HTTP request: whose trace it is in, and what it says."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from tandem.protocol.errors import WorkerError
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.fake_backend import FakeBackend, RawClient, make_app
from tests.support.tracing import CLIENT_SPAN, CLIENT_TRACE, TRACEPARENT, KeptSpans
from tests.support.waiting import eventually

CHAT = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 3}
PATH = "/v1/chat/completions"


def client_of(backend: FakeBackend, kept: KeptSpans, **config: Any) -> httpx.AsyncClient:
    app = make_app(backend, tracing=kept.tracing, **config)
    return app_client(app)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_in_its_clients_trace(tokenizer: Tokenizer, is_stream: bool) -> None:
    kept, backend = KeptSpans(), FakeBackend(tokenizer)
    async with client_of(backend, kept) as client:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=a1", "x-request-id": "mine"}
        response = await client.post(PATH, json=CHAT | {"stream": is_stream}, headers=headers)
    assert kept.tree() == [(f"POST {PATH}", ("prepare",))]
    span = kept.named(f"POST {PATH}")
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (CLIENT_TRACE, CLIENT_SPAN)
    assert span.context.trace_state.to_header() == "vendor=a1"
    assert response.headers["traceresponse"] == f"00-{CLIENT_TRACE}-{span.context.span_id:016x}-01"
    assert [request.traceparent for request in backend.requests] == [response.headers["traceresponse"]]
    attributes = kept.attributes(f"POST {PATH}")
    expected = {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "tandem.request_id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "org/toy",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "tandem.is_complete": True,
    }
    assert {name: attributes[name] for name in expected} == expected
    assert 0 < attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert not any("secret" in str(span.to_json()) for span in kept.all), "a trace has no prompts"


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "")],
        [("traceparent", "x")],
        [("traceparent", TRACEPARENT.upper())],
        [("traceparent", TRACEPARENT + "-01")],
        [("traceparent", "ff" + TRACEPARENT[2:])],
        [("traceparent", f"00-{'0' * 32}-{CLIENT_SPAN}-01")],
        [("traceparent", f"00-{CLIENT_TRACE}-{'0' * 16}-01")],
        [("traceparent", f"00-{CLIENT_TRACE[:-1]}g-{CLIENT_SPAN}-01")],
        [("traceparent", f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-zz")],
        [("traceparent", f"00-{'é' * 32}-{CLIENT_SPAN}-01")],
        [("traceparent", TRACEPARENT * 100)],
        [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
        [("tracestate", "vendor=a1")],
    ],
)
async def test_a_hostile_traceparent_is_ignored(tokenizer: Tokenizer, headers: list[tuple[str, str]]) -> None:
    kept = KeptSpans()
    async with client_of(FakeBackend(tokenizer), kept) as client:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        response = await client.get("/v1/models", headers=raw)
    assert response.status_code == 200
    span = kept.named("GET /v1/models")
    assert span.parent is None
    assert CLIENT_TRACE not in response.headers["traceresponse"]


@pytest.mark.parametrize(
    "tracestate",
    ["", "=", "a", "a=b=c", "a=" + "x" * 600, "A=1", "\x00=1", "a=é", ",".join(f"k{i}=1" for i in range(40))],
)
async def test_a_hostile_tracestate_is_dropped(tokenizer: Tokenizer, tracestate: str) -> None:
    kept = KeptSpans()
    async with client_of(FakeBackend(tokenizer), kept) as client:
        headers = [(b"traceparent", TRACEPARENT.encode()), (b"tracestate", tracestate.encode("latin-1"))]
        await client.get("/v1/models", headers=headers)
    span = kept.named("GET /v1/models")
    assert span.parent is not None, "the traceparent is valid"
    assert span.context is not None
    assert span.context.trace_state.to_header() == ""


async def test_an_unsampled_request_costs_no_spans(tokenizer: Tokenizer) -> None:
    for sampler in (ALWAYS_OFF, TraceIdRatioBased(0.0)):
        kept, backend = KeptSpans(sampler), FakeBackend(tokenizer)
        async with client_of(backend, kept) as client:
            response = await client.post(PATH, json=CHAT)
        assert int(response.headers["traceresponse"][-2:], 16) & 1 == 0, "the flag that says that it is sampled"
        assert ([request.traceparent for request in backend.requests], kept.all) == ([""], [])


async def test_a_client_that_samples_nothing_is_not_traced(tokenizer: Tokenizer) -> None:
    kept = KeptSpans(ParentBased(TraceIdRatioBased(1.0)))
    async with client_of(FakeBackend(tokenizer), kept) as client:
        await client.post(PATH, json=CHAT, headers={"traceparent": TRACEPARENT[:-2] + "00"})
    assert kept.all == []


@pytest.mark.parametrize(
    ("method", "path", "name", "status", "error"),
    [
        ("POST", PATH, f"POST {PATH}", 400, "RequestError"),
        ("GET", "/none", "GET unmatched", 404, None),
        ("GET", "/v1/models/none", "GET /v1/models/{model_id:path}", 404, "model_not_found"),
        ("BREW", "/v1/models", "HTTP /v1/models", 405, None),
    ],
)
async def test_refused_requests_are_traced(
    tokenizer: Tokenizer, method: str, path: str, name: str, status: int, error: str | None
) -> None:
    kept = KeptSpans()
    async with client_of(FakeBackend(tokenizer), kept) as client:
        headers = {"content-type": "application/json"}
        assert (await client.request(method, path, content=b"{", headers=headers)).status_code == status
    attributes = kept.attributes(name)
    assert (attributes["http.response.status_code"], attributes.get("error.type")) == (status, error)
    assert attributes["http.request.method"] == (method if method != "BREW" else "_OTHER")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("error", "kind"), [(WorkerError("gone"), "worker_failed"), (ValueError("x"), "ValueError")])
async def test_a_failed_answer_is_an_error(tokenizer: Tokenizer, is_stream: bool, error: Exception, kind: str) -> None:
    kept, backend = KeptSpans(), FakeBackend(tokenizer)
    backend.script = lambda request: [*backend.reply_steps(request)[:1], error]
    async with client_of(backend, kept) as client:
        response = await client.post(PATH, json=CHAT | {"stream": is_stream})
    assert (response.status_code == 200) == is_stream
    span = kept.named(f"POST {PATH}")
    assert span.status.status_code is StatusCode.ERROR
    attributes = kept.attributes(f"POST {PATH}")
    assert attributes["error.type"] == (WorkerError.code if isinstance(error, WorkerError) else kind)
    assert attributes["tandem.is_complete"] is False
    assert attributes["gen_ai.usage.output_tokens"] == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_ends_the_span(tokenizer: Tokenizer, is_stream: bool) -> None:
    kept, backend = KeptSpans(), FakeBackend(tokenizer)
    backend.script = lambda request: [*backend.reply_steps(request)[:1], asyncio.Event()]
    client = RawClient(make_app(backend, tracing=kept.tracing), PATH, CHAT | {"stream": is_stream})
    await eventually(lambda: backend.num_steps == 2)
    client.leave()
    await asyncio.wait_for(client.task, 5)
    attributes = kept.attributes(f"POST {PATH}")
    assert attributes["tandem.is_complete"] is False
    assert attributes["http.response.status_code"] == (200 if is_stream else 499)


async def test_probes_are_not_traced(tokenizer: Tokenizer) -> None:
    kept = KeptSpans()
    async with client_of(FakeBackend(tokenizer), kept) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert "traceresponse" not in (await client.get(path)).headers
    assert kept.all == []


SECRET = "a-secret-of-the-prompt"
HELLO = [{"role": "user", "content": SECRET}]
QUOTED: list[dict[str, Any]] = [
    {"messages": SECRET},
    {"messages": [{"role": SECRET, "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]},
    {"messages": HELLO, "model": SECRET},
    {"messages": HELLO, "tool_choice": SECRET},
    {"messages": HELLO, "logit_bias": {SECRET: 1}},
    {"messages": HELLO, "tools": [{"type": "function", "function": {"name": f"{SECRET} !"}}]},
    {"messages": HELLO, "structured_outputs": {"regex": f"({SECRET}"}},
    {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": SECRET}}}},
]


@pytest.mark.parametrize("body", QUOTED)
async def test_no_part_of_a_refused_request_is_in_its_trace_or_in_the_log(
    tokenizer: Tokenizer, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="tandem")
    kept = KeptSpans()
    async with client_of(FakeBackend(tokenizer), kept) as client:
        response = await client.post(PATH, json=body)
        assert 400 <= response.status_code < 500
    assert "error.type" in kept.attributes(f"POST {PATH}")
    assert SECRET not in "".join(span.to_json() for span in kept.all)
    assert SECRET not in caplog.text


async def test_no_part_of_a_bugs_message_is_in_a_trace(tokenizer: Tokenizer) -> None:
    kept, backend = KeptSpans(), FakeBackend(tokenizer)
    backend.script = lambda request: [ValueError(SECRET)]
    async with client_of(backend, kept) as client:
        await client.post(PATH, json=CHAT)
    assert kept.attributes(f"POST {PATH}")["error.type"] == "ValueError"
    assert SECRET not in "".join(span.to_json() for span in kept.all)
