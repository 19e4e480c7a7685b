"""Sends spans to a collector over OTLP/HTTP, as OpenTelemetry's environment variables say. It imports OpenTelemetry.

A slow or lost collector costs only spans: they wait in a bounded queue, a thread sends them, and those that do not fit
are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter

from tandem.protocol.errors import ConfigError
from tandem.runtime.tracing.tracing import Tracing

_CLOSE_S = 2.0  # for the last spans to be sent
_LOG_INTERVAL_S = 60.0  # between two lines about batches that could not be sent
_QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"


class SpanExport:
    """The pipeline of one process, from its spans to the collector. Its owner calls `close`."""

    def __init__(self, process: str, *, exporter: SpanExporter | None = None) -> None:
        """`process` is part of the metrics' names. Raises `ConfigError` for variables that cannot be used."""
        self._counts = _SpanCounts(process)
        self._exporter = _CountingExporter(exporter or _otlp_exporter(), self._counts)
        self._provider = TracerProvider(resource=_resource(process), shutdown_on_exit=False)
        self._provider.add_span_processor(_BoundedBatches(self._exporter, self._counts))
        self.tracing = Tracing(self._provider.get_tracer("tandem"))

    def register(self, registry: CollectorRegistry) -> None:
        """Show its counters in a registry."""
        registry.register(self._counts.exported)
        registry.register(self._counts.dropped)

    async def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Send what is left, in bounded time."""
        # A daemon: one that hangs in a send must not keep the process from ending.
        ending = threading.Thread(target=self._provider.shutdown, name="end of tracing", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, timeout_s)
        if ending.is_alive():
            self._exporter.shutdown()  # gives up the retry under way


class _SpanCounts:
    def __init__(self, process: str) -> None:
        self.exported = Counter(
            f"tandem_{process}_exported_spans", "Spans of traces that the collector has taken", registry=None
        )
        self.dropped = Counter(
            f"tandem_{process}_dropped_spans",
            "Spans that were lost: the queue to the collector was full, or the collector did not take them",
            ["reason"],
            registry=None,
        )
        for reason in ("queue_full", "export_failed"):
            self.dropped.labels(reason)
        self.lock = threading.Lock()  # spans end in the event loop, and are sent by a thread
        self.num_pending = 0


class _BoundedBatches(SpanProcessor):
    """OpenTelemetry's batches with a bound of ours: its own bound drops without counting, and logs each time."""

    def __init__(self, exporter: SpanExporter, counts: _SpanCounts) -> None:
        self._counts = counts
        self._max_pending = _queue_size()
        try:
            self._batches = BatchSpanProcessor(exporter, max_queue_size=self._max_pending)
        except ValueError as exc:
            raise ConfigError(f"the variables OTEL_BSP_*: {exc}") from exc

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        counts = self._counts
        with counts.lock:
            is_full = counts.num_pending >= self._max_pending
            counts.num_pending += not is_full
        if is_full:
            counts.dropped.labels("queue_full").inc()
        else:
            self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what is queued, and end."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, counts: _SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        counts = self._counts
        with counts.lock:
            counts.num_pending -= len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                counts.exported.inc(len(spans))
            else:
                counts.dropped.labels("export_failed").inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()


class _OncePer(logging.Filter):
    """Lets one line pass per interval: failures are counted, and a line for each batch would fill the log."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + self._interval_s
        return True


def _resource(process: str) -> Resource:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, with defaults for the rest."""
    defaults = Resource({"service.name": "tandem", "service.instance.id": f"{process}-{os.getpid()}"})
    return Resource.create().merge(defaults).merge(OTELResourceDetector().detect())


def _otlp_exporter() -> OTLPSpanExporter:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise ConfigError(f"{name}={protocol!r} is not supported; set it to http/protobuf, on port 4318 by default")
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_OncePer(_LOG_INTERVAL_S))
    try:
        return OTLPSpanExporter()
    except ValueError as exc:
        raise ConfigError(f"the variables OTEL_EXPORTER_OTLP_*: {exc}") from exc


def _queue_size() -> int:
    text = os.environ.get(_QUEUE_SIZE) or "2048"
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise ConfigError(f"{_QUEUE_SIZE}={text!r} is not a number from 1 to {1 << 20}")
    return int(text)
