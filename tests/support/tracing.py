"""Spans kept in memory, and shown as a tree."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from tandem.runtime.tracing.tracing import Tracing

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


class KeptSpans:
    """Tracing whose spans stay here."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider.get_tracer("test"))

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    def attributes(self, name: str) -> dict[str, Any]:
        return dict(self.named(name).attributes or {})

    def tree(self) -> list[Any]:
        """Names, each with those of the spans within it, in order of their starts. Spans lie within their parents."""
        spans = sorted(self.all, key=lambda span: span.start_time or 0)
        known = {span.context.span_id: span for span in spans if span.context}

        def children(parent: int | None) -> list[Any]:
            found = []
            for span in spans:
                over = span.parent.span_id if span.parent and span.parent.span_id in known else None
                if over == parent and span.context:
                    if over is not None:
                        assert_within(span, known[over])
                    found.append((span.name, *children(span.context.span_id)))
            return found

        return children(None)


def assert_within(span: ReadableSpan, parent: ReadableSpan) -> None:
    assert span.start_time is not None
    assert span.end_time is not None
    assert parent.start_time is not None
    assert parent.end_time is not None
    assert span.context is not None
    assert parent.context is not None
    assert span.context.trace_id == parent.context.trace_id
    slack_ns = 1_000_000  # the wall clock and the monotonic one are compared for each span
    assert parent.start_time - slack_ns <= span.start_time <= span.end_time <= parent.end_time + slack_ns, span.name
