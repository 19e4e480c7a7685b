"""Prometheus metrics of engines, collected at each scrape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.protocol.messages import WorkerState
from tandem.router.engines.breaker import BreakerState
from tandem.router.engines.engine_fleet import EngineFleet


class EngineCollector:
    """State, circuit breaker and failures of every engine, and the number of retries."""

    def __init__(self, fleet: EngineFleet, num_retries: Callable[[], int]) -> None:
        self._fleet = fleet
        self._num_retries = num_retries

    def collect(self) -> Iterator[Metric]:
        """All metrics with their current values."""
        now = self._fleet.clock()
        engines = self._fleet.engines
        ready = GaugeMetricFamily(
            "tandem_engine_ready", "1 while the engine answers its health check and may get requests", labels=["engine"]
        )
        circuit = GaugeMetricFamily(
            "tandem_engine_circuit_open",
            "1 while the engine's circuit breaker is open: it gets no requests",
            labels=["engine"],
        )
        running = GaugeMetricFamily(
            "tandem_engine_running_requests", "Requests of this router that run on the engine", labels=["engine"]
        )
        requests = CounterMetricFamily(
            "tandem_engine_requests",
            "Attempts to have a request answered that were sent to the engine",
            labels=["engine"],
        )
        failures = CounterMetricFamily("tandem_engine_failures", "Attempts that the engine failed", labels=["engine"])
        openings = CounterMetricFamily(
            "tandem_engine_circuit_openings", "Times that the engine's circuit breaker opened", labels=["engine"]
        )
        stalls = CounterMetricFamily(
            "tandem_engine_stalls", "Times that the engine answered but computed nothing", labels=["engine"]
        )
        expiry = GaugeMetricFamily(
            "tandem_engine_client_certificate_expiry_timestamp_seconds",
            "When the certificate that the engine is shown expires, as Unix time",
            labels=["engine"],
        )
        damaged = GaugeMetricFamily(
            "tandem_engine_tls_files_damaged",
            "1 while the files for TLS with the engine cannot be used: older certificates are in use",
            labels=["engine"],
        )
        for engine in engines:
            name = [engine.name]
            ready.add_metric(name, engine.state is WorkerState.READY)
            circuit.add_metric(name, engine.breaker.state(now) is BreakerState.OPEN)
            running.add_metric(name, len(engine.running))
            requests.add_metric(name, engine.num_requests)
            failures.add_metric(name, engine.num_failures)
            openings.add_metric(name, engine.breaker.num_opened)
            stalls.add_metric(name, engine.num_stalls)
            if engine.tls is not None:
                damaged.add_metric(name, bool(engine.tls.damage))
                if math.isfinite(engine.tls.loaded.expires_at_s):
                    expiry.add_metric(name, engine.tls.loaded.expires_at_s)
        yield from (ready, circuit, running, requests, failures, openings, stalls, expiry, damaged)
        yield CounterMetricFamily(
            "tandem_engine_retries", "Attempts after a failed one, before the first byte", value=self._num_retries()
        )
