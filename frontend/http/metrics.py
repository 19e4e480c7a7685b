"""Prometheus metrics of the HTTP edge. Deltas are recorded in batches."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from tandem.frontend.keys.limiter import KeyUse

MAX_BATCH = 32  # deltas of one sequence that are recorded together

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 9.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0, 60.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class FrontendMetrics:
    """The metrics of one app, registered in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, histogram = (partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
        self.requests = counter(
            "tandem_router_requests",
            "HTTP requests that were answered, by route and status; 499 = the client left",
            ["endpoint", "status"],
        )
        self.running_requests = gauge(
            "tandem_router_running_requests",
            "Sequences being generated for clients, or waiting for that",
            multiprocess_mode="livesum",
        )
        self.prompt_tokens = counter(
            "tandem_router_prompt_tokens", "Prompt tokens of answers, counted with the first token"
        )
        self.cached_tokens = counter("tandem_router_cached_prompt_tokens", "Prompt tokens that were not computed again")
        self.generation_tokens = counter("tandem_router_generation_tokens", "Tokens generated for clients")
        self.ttft_s = histogram(
            "tandem_router_ttft_seconds", "From the request's arrival to its first token", buckets=TTFT_BUCKETS_S
        )
        self.itl_s = _Histogram(
            "tandem_router_itl_seconds",
            "Gap between two deltas of a sequence (one token each, unless a step gives several)",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.duration_s = histogram(
            "tandem_router_request_duration_seconds",
            "From a generation request's arrival to its last byte",
            buckets=DURATION_BUCKETS_S,
        )
        self.finished = counter(
            "tandem_router_finished",
            "Sequences that were generated to their end for clients, by finish reason",
            ["reason"],
        )
        self.client_disconnects = counter(
            "tandem_router_client_disconnects", "Clients that left before their answer was complete"
        )
        self.refused_keys = counter(
            "tandem_router_refused_keys", "Requests refused because of their API key", ["key_id", "reason"]
        )
        self.lost_audit_lines = counter(
            "tandem_router_lost_audit_lines", "Lines of the audit log that could not be written"
        )
        self.stream_errors = counter("tandem_router_stream_errors", "Streams that ended in an error event")

    def traffic(self) -> Iterable[Metric]:
        """The metrics of requests and tokens, as they are now."""
        counters = (self.requests, self.prompt_tokens, self.cached_tokens, self.generation_tokens, self.stream_errors)
        sources = (*counters, self.running_requests, self.ttft_s, self.itl_s, self.duration_s)
        return chain.from_iterable(source.collect() for source in sources)


class _Histogram(Histogram):  # type: ignore[misc]  # no stubs
    """Takes many values at once, at little more than the cost of one."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of these values."""
        bounds = self._upper_bounds
        for bucket, count in Tally(bisect_left(bounds, value) for value in values).items():
            self._buckets[bucket].inc(count)
        self._sum.inc(sum(values))


class RequestClock:
    """Times the deltas of one sequence, and records them in batches."""

    def __init__(
        self,
        metrics: FrontendMetrics,
        arrived_s: float,
        use: KeyUse | None = None,
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`use` counts the tokens against the limits of an API key."""
        self._metrics = metrics
        self._use = use
        self._last_s = arrived_s
        self._now = now
        self._is_first = True
        self._num_pending_tokens = 0
        self._pending_gaps_s: list[float] = []

    def start(self) -> None:
        """Count the sequence as running."""
        self._metrics.running_requests.inc()

    def stop(self) -> None:
        """Count it as no longer running, and record what is pending."""
        self._metrics.running_requests.dec()
        self.flush()

    def note_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt, once a first delta tells how much of it was cached. Later ones, of a moved request, do not.

        Both counts come at the same moment: their ratio is also true of a short time with long prompts.
        """
        if self._is_first:
            self._metrics.prompt_tokens.inc(num_tokens)
            self._metrics.cached_tokens.inc(num_cached_tokens)

    def record(self, num_tokens: int) -> None:
        """Note a delta that arrived just now."""
        if num_tokens == 0:
            return
        now_s = self._now()
        gap_s, self._last_s = now_s - self._last_s, now_s
        self._num_pending_tokens += num_tokens
        if self._is_first:
            self._is_first = False
            self._metrics.ttft_s.observe(gap_s)
            return
        self._pending_gaps_s.append(gap_s)
        if len(self._pending_gaps_s) == MAX_BATCH:
            self.flush()

    def finish(self, reason: str) -> None:
        """Count the sequence as generated to its end."""
        self._metrics.finished.labels(reason).inc()

    def flush(self) -> None:
        """Record what is pending."""
        if self._num_pending_tokens:
            self._metrics.generation_tokens.inc(self._num_pending_tokens)
            if self._use is not None:
                self._use.num_output_tokens += self._num_pending_tokens
            self._num_pending_tokens = 0
        if self._pending_gaps_s:
            self._metrics.itl_s.observe_all(self._pending_gaps_s)
            self._pending_gaps_s.clear()
