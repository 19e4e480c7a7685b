"""Prometheus metrics of admission: requests that wait, and those admitted, refused or dropped, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tandem.scheduling.admission.stats import WAIT_BUCKETS_S, TenantStats
from tandem.scheduling.admission.work import Work
from tandem.scheduling.placement.shadow import Shadow

_BOUNDS = [*map(str, WAIT_BUCKETS_S), "+Inf"]


class AdmissionSource(Protocol):
    """An `Admission`, or the sum of several."""

    @property
    def shadow(self) -> Shadow:
        """What other strategies of routing would have cost."""

    @property
    def stats(self) -> Mapping[str, TenantStats]:
        """The outcomes of requests, by the tenants' labels."""

    def queued(self) -> Mapping[str, Work]:
        """Work of the waiting requests, by the tenants' labels."""


class AdmissionCollector:
    """Reads the queue of a router when scraped. Tenants that the tenants file does not name share one label."""

    def __init__(self, admission: AdmissionSource) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        yield from self._queue()
        yield from self._shadow()
        by_reason = ["tenant", "reason"]
        admitted = CounterMetricFamily(
            "tandem_router_admitted", "Requests that were admitted and sent to workers or engines", labels=["tenant"]
        )
        waits = HistogramMetricFamily(
            "tandem_router_queue_wait_seconds",
            "Time admitted requests waited in the queue",
            labels=["tenant"],
        )
        rejected = CounterMetricFamily(
            "tandem_router_rejected", "Requests that were refused at once, by reason", labels=by_reason
        )
        dropped = CounterMetricFamily(
            "tandem_router_dropped", "Requests that waited in the router and then failed, by reason", labels=by_reason
        )
        for tenant, stats in self._admission.stats.items():
            admitted.add_metric([tenant], stats.num_admitted)
            counts = [float(count) for count in accumulate(stats.waits)]
            waits.add_metric([tenant], list(zip(_BOUNDS, counts, strict=True)), stats.wait_s)
            for reason, count in stats.rejected.items():
                rejected.add_metric([tenant, reason], count)
            for reason, count in stats.dropped.items():
                dropped.add_metric([tenant, reason], count)
        yield from (admitted, waits, rejected, dropped)

    def _shadow(self) -> Iterator[Metric]:
        lost = GaugeMetricFamily(
            "tandem_router_shadow_lost_seconds",
            "Predicted seconds that a request would have lost by this routing strategy, as a moving mean",
            labels=["strategy"],
        )
        decisions = CounterMetricFamily(
            "tandem_router_shadow_decisions",
            "Decisions that were compared with this routing strategy",
            labels=["strategy"],
        )
        for strategy, mean_s in self._admission.shadow.mean_lost_s.items():
            lost.add_metric([strategy], mean_s)
            decisions.add_metric([strategy], self._admission.shadow.num_decisions[strategy])
        yield from (lost, decisions)

    def _queue(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "tandem_router_queue_requests", "Requests that wait in the router", labels=["tenant"]
        )
        tokens = GaugeMetricFamily(
            "tandem_router_queue_tokens",
            "Prompt tokens to compute for the requests that wait in the router",
            labels=["tenant"],
        )
        seconds = GaugeMetricFamily(
            "tandem_router_queue_worker_seconds",
            "Predicted seconds of workers that the requests which wait in the router will take",
            labels=["tenant"],
        )
        for tenant, work in self._admission.queued().items():
            requests.add_metric([tenant], work.num_requests)
            tokens.add_metric([tenant], work.new_tokens)
            seconds.add_metric([tenant], work.worker_s)
        yield from (requests, tokens, seconds)
