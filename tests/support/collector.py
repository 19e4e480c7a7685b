"""A trace collector: receives OTLP over HTTP and keeps the decoded spans."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class CollectedSpan(NamedTuple):
    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" = a root
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """Answers every request with `status`, or not at all while `is_open` is cleared."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_requests = 0
        self.num_held = 0  # that came while `is_open` was cleared
        self.spans: list[CollectedSpan] = []
        self._changed = threading.Condition()

    def wait_for(self, count: int, name: str, timeout_s: float = 30.0) -> list[CollectedSpan]:
        """Wait until `count` spans have this name. Returns all spans. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.named(name)) >= count, timeout_s):
                raise TimeoutError(f"{len(self.named(name))} spans {name!r} in {[span.name for span in self.spans]}")
            return list(self.spans)

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource_spans in request.resource_spans:
                resource = {item.key: _value(item.value) for item in resource_spans.resource.attributes}
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        attributes = {item.key: _value(item.value) for item in span.attributes}
                        ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                        times = span.start_time_unix_nano, span.end_time_unix_nano
                        self.spans.append(
                            CollectedSpan(
                                resource.get("service.name", ""),
                                resource.get("service.instance.id", ""),
                                span.name,
                                *ids,
                                *times,
                                attributes,
                                span.status.code == 2,
                            )
                        )
            self._changed.notify_all()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.num_requests += 1
            collector.num_held += not collector.is_open.is_set()
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.is_open.wait(60)
            if collector.status == 200:
                collector.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            with contextlib.suppress(OSError):  # the client may have gone
                self.send_response(collector.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.is_open.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
