"""Prometheus metrics of pins: live pins, refused pins, and the blocks that each worker keeps."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.router.workers.pins import PinService
from tandem.scheduling.workers.registry import Registry

__all__ = ["PinCollector"]


class PinCollector:
    """Reads the pins of a router, and its workers' reports about them, when scraped."""

    def __init__(self, service: PinService, registry: Registry) -> None:
        self._service = service
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        pins = self._service.summary()
        yield GaugeMetricFamily("tandem_router_pins", "Pins that have not ended", value=pins.num_pins)
        yield GaugeMetricFamily(
            "tandem_router_pinned_blocks", "Blocks that pins cover, cached or not", value=pins.num_blocks
        )
        yield GaugeMetricFamily("tandem_router_max_pinned_blocks", "Blocks that pins may cover", value=pins.max_blocks)
        refused = CounterMetricFamily("tandem_router_refused_pins", "Pins refused, by quota", labels=["reason"])
        for reason, count in pins.num_refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield from self._worker_metrics()

    def _worker_metrics(self) -> Iterator[Metric]:
        kept = GaugeMetricFamily(
            "tandem_pinned_blocks", "Blocks that the worker keeps for pins, by place", labels=["worker", "place"]
        )
        prefetched = CounterMetricFamily(
            "tandem_prefetched_blocks", "Blocks brought up for pins, by where to", labels=["worker", "place"]
        )
        for worker in self._registry:
            if worker.pins is None:
                continue
            for place, count in worker.pins.num_blocks.items():
                kept.add_metric([worker.worker_id, place], count)
            for place, count in worker.pins.num_prefetched.items():
                prefetched.add_metric([worker.worker_id, place], count)
        yield kept
        yield prefetched
