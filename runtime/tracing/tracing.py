"""Spans of OpenTelemetry: live ones of requests and attempts, and finished ones made from `SpanNode`s.

This module imports OpenTelemetry, so it is imported only where tracing is on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.runtime.tracing.client_context import client_trace_headers
from tandem.runtime.tracing.span_node import Attributes, SpanNode, error_message, error_type

_MAX_TEXT = 500  # characters of a client's text in an attribute
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin_request(self, scope: Mapping[str, Any], request_id: str) -> LiveSpan:
        """The span of an HTTP request. It is in the client's trace if the request's headers name a valid one."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes: Attributes = {
            "http.request.method": method,
            "url.path": scope["path"][:_MAX_TEXT],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "tandem.request_id": request_id,
        }
        if scope.get("client"):
            attributes["client.address"] = scope["client"][0]
        agents = [value for name, value in headers if name == b"user-agent"]
        if agents:
            attributes["user_agent.original"] = agents[0].decode("latin-1")[:_MAX_TEXT]
        context = _W3C.extract(client_trace_headers(headers), Context())
        return LiveSpan(self._tracer, self._tracer.start_span(method, context, SpanKind.SERVER, attributes))

    def record(self, traceparent: str, node: SpanNode) -> None:
        """Export a finished span and those within it, under a span of another of our processes, or of this one."""
        _, trace_id, span_id, flags = traceparent.split("-")
        parent = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
        _record(self._tracer, set_span_in_context(NonRecordingSpan(parent), Context()), node)


class LiveSpan:
    """A span that has begun. Its owner ends it on every path."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self.is_sampled = span.is_recording()

    @property
    def traceparent(self) -> str:
        """Its identity for other processes, in W3C's format."""
        return self.headers["traceparent"]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request within this span: `traceparent`, and `tracestate` if there is one."""
        headers: dict[str, str] = {}
        _W3C.inject(headers, self._context)
        return headers

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Something happened now."""
        self._span.add_event(name)

    def fail(self, error: BaseException) -> None:
        """It ends with this error."""
        _set_error(self._span, error_type(error), error_message(error))

    def child(self, name: str, attributes: Attributes) -> LiveSpan:
        """Begin a span within this one, of a request to another server."""
        return LiveSpan(self._tracer, self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes))

    def record(self, node: SpanNode) -> None:
        """Add a finished span within this one."""
        if self.is_sampled:
            _record(self._tracer, self._context, node)

    def answered(self, route: str, status: int) -> None:
        """End the span of an HTTP request. A status of 500 and above is an error of the server."""
        method = getattr(self._span, "attributes", {}).get("http.request.method", "")
        self._span.update_name(f"{'HTTP' if method == '_OTHER' else method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def end(self) -> None:
        """End it now."""
        self._span.end()


def _record(tracer: Tracer, context: Context, node: SpanNode) -> None:
    # The two clocks are compared now: a step of the wall clock during a long request must not stretch its spans.
    _record_at(tracer, context, node, time.time_ns() - time.monotonic_ns())


def _record_at(tracer: Tracer, context: Context, node: SpanNode, to_unix_ns: int) -> None:
    def unix_ns(at_s: float) -> int:
        return int(at_s * 1e9) + to_unix_ns

    span = tracer.start_span(node.name, context, attributes=node.attributes, start_time=unix_ns(node.start_s))
    if not span.is_recording():
        return
    inner = set_span_in_context(span, context)
    for child in node.children:
        _record_at(tracer, inner, child, to_unix_ns)
    for name, at_s in node.events:
        span.add_event(name, timestamp=unix_ns(at_s))
    if node.error:
        _set_error(span, node.error, node.message)
    span.end(unix_ns(node.end_s))


def _set_error(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message[:_MAX_TEXT]))
