"""The trace of one handed-over request of a real server, as a collector receives it."""

from __future__ import annotations

from collections import Counter

import httpx

from tests.support.collector import CollectedSpan, Collector
from tests.support.server import HTTP, Server
from tests.support.tracing import CLIENT_SPAN, CLIENT_TRACE, TRACEPARENT
from tests.support.waiting import until

PATH = "/v1/completions"
PARENTS = {
    f"POST {PATH}": "",
    "prepare": f"POST {PATH}",
    "generate": f"POST {PATH}",
    "admission": "generate",
    "placement": "admission",
    "prefill": "generate",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "lease_wait": "generate",
    "kv_transfer": "generate",
    "decode": "generate",
    "decode.queue": "decode",
}


def tracing_to(collector: Collector) -> dict[str, str]:
    """The environment of a server that traces to this collector."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_SERVICE_NAME": "our-tandem",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def ask(server: Server, key: str = "", **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": "tell me " * 20, "max_tokens": 8, "temperature": 0} | fields
    headers = {"traceparent": TRACEPARENT, "x-request-id": "e2e"} | authorization(key)
    return HTTP.post(f"{server.url}{PATH}", json=body, headers=headers)


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def check_trace(server: Server, collector: Collector, key: str) -> None:
    """The first traced request of a server of two processes makes one tree of spans, and they are counted."""
    response = ask(server, key, stream=True)
    assert response.status_code == 200
    assert response.headers["traceresponse"].startswith(f"00-{CLIENT_TRACE}-")
    collector.wait_for(1, f"POST {PATH}")
    spans = collector.wait_for(1, "generate")
    assert_connected(spans)
    assert {span.service for span in spans} == {"our-tandem"}
    assert len({span.instance for span in spans}) == 2, "the deciding process exports its own spans"
    by_name = {span.name: span for span in spans}
    assert by_name[f"POST {PATH}"].attributes["tandem.request_id"] == "e2e"
    assert by_name["generate"].attributes["gen_ai.usage.output_tokens"] == 8
    assert by_name["kv_transfer"].attributes["tandem.bytes"] > 0
    assert by_name["decode"].attributes["tandem.output_tokens"] == 7
    exported = "tandem_router_exported_spans_total 2.0"

    def metrics() -> str:
        return HTTP.get(f"{server.url}/metrics", headers=authorization(key)).text

    until(lambda: exported in metrics(), 10.0, metrics)  # the exporter counts spans once it has the collector's answer
    assert 'tandem_router_dropped_spans_total{reason="queue_full"} 0.0' in metrics()


def assert_connected(spans: list[CollectedSpan]) -> None:
    """One tree: each span is within the one that it should be in, in time too."""
    by_id = {span.span_id: span for span in spans}
    assert Counter(span.name for span in spans) == Counter(PARENTS.keys())
    for span in spans:
        assert span.trace_id == CLIENT_TRACE
        if not PARENTS[span.name]:
            assert span.parent_id == CLIENT_SPAN
            continue
        parent = by_id[span.parent_id]
        assert parent.name == PARENTS[span.name]
        slack_ns = 5_000_000  # spans of different processes compare their clocks with the wall clock each for itself
        assert parent.start_ns - slack_ns <= span.start_ns <= span.end_ns <= parent.end_ns + slack_ns, span.name
