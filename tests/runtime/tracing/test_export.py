from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.runtime.tracing.export import SpanExport
from tandem.runtime.tracing.setup import begin_tracing, close_tracing, tracing_of
from tandem.runtime.tracing.span_node import SpanNode
from tandem.text.tokenizer import Tokenizer
from tests.support.collector import collecting
from tests.support.engines_harness import dead_url
from tests.support.fake_backend import FakeBackend, make_client
from tests.support.tracing import CLIENT_SPAN, CLIENT_TRACE, TRACEPARENT
from tests.support.waiting import eventually


def record(export: SpanExport, count: int) -> None:
    """End `count` spans."""
    now = time.monotonic()
    for _ in range(count):
        export.tracing.record(TRACEPARENT, SpanNode("generate", now, now))


def counts(export: SpanExport) -> dict[str, float]:
    registry = CollectorRegistry()
    export.register(registry)
    lost = {
        reason: registry.get_sample_value("tandem_router_dropped_spans_total", {"reason": reason})
        for reason in ("queue_full", "export_failed")
    }
    exported = registry.get_sample_value("tandem_router_exported_spans_total")
    return {"exported": exported or 0.0} | {name: value or 0.0 for name, value in lost.items()}


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_spans_arrive_as_the_variables_say(monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,service.instance.id=seven")
        export = begin_tracing("router", is_on=True)
        assert export is not None
        record(export, 3)
        await export.close()
        spans = collector.wait_for(3, "generate")
    assert {(span.service, span.instance) for span in spans} == {("ours", "seven")}
    assert {(span.trace_id, span.parent_id) for span in spans} == {(CLIENT_TRACE, CLIENT_SPAN)}
    assert counts(export) == {"exported": 3, "queue_full": 0, "export_failed": 0}


async def test_the_service_has_a_name_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        export = SpanExport("decider")
        record(export, 1)
        await export.close()
        (span,) = collector.wait_for(1, "generate")
    assert span.service == "tandem"
    assert span.instance.startswith("decider-")


@pytest.mark.parametrize("how", ["gone", "hangs", "refuses"])
async def test_a_bad_collector_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", dead_url() if how == "gone" else collector.url)
        collector.status = 400
        if how == "hangs":
            collector.is_open.clear()
        export = SpanExport("router")
        record(export, 5000)
        async with asyncio.timeout(30):  # a request under way may take 10 s, and so may each retry
            await export.close(0.5)
        lost = counts(export)
        assert lost["exported"] == 0
        assert lost["queue_full"] > 0
        if how == "refuses":
            assert lost["export_failed"] >= 32
        assert lost["queue_full"] + lost["export_failed"] <= 5000
        assert lost["queue_full"] >= 5000 - lost["export_failed"] - 64 - 32, "what waits is bounded"


async def test_the_event_loop_turns_while_the_last_spans_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        collector.is_open.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        export = SpanExport("router")
        record(export, 1)
        closing = asyncio.create_task(export.close(20.0))
        await eventually(lambda: collector.num_requests)
        assert not closing.done()
        collector.is_open.set()
        await closing
        assert len(collector.named("generate")) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_"):
        begin_tracing("router", is_on=True)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: Any = None
    monkeypatch.setitem(__import__("sys").modules, "tandem.runtime.tracing.export", blocked)
    with pytest.raises(ConfigError, match=r"tandem-serve\[otel\]"):
        begin_tracing("router", is_on=True)


async def test_tracing_is_off_by_default_and_can_be_off(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    assert not RouterConfig().tracing
    assert begin_tracing("router", is_on=RouterConfig().tracing) is tracing_of(None) is None
    monkeypatch.setattr("tandem.runtime.tracing.tracing.Tracing.begin_request", lambda *_: pytest.fail("a span began"))
    backend = FakeBackend(tokenizer)
    async with make_client(backend) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": TRACEPARENT})
    assert "traceresponse" not in response.headers
    assert [request.traceparent for request in backend.requests] == [""]
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert begin_tracing("router", is_on=True) is None
    await close_tracing(None)
