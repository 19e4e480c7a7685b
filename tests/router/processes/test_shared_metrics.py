"""Metrics of several processes as one text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.router.http.metrics import EdgeMetrics
from tandem.router.processes.shared_metrics import MAX_RETIRED, SharedMetrics


class Told:
    """What all processes are told alike."""

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("tandem_engine_ready", "1 = answers", labels=["engine"])
        gauge.add_metric(["a"], True)
        yield gauge


class Process:
    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.edge = EdgeMetrics(registry)
        registry.register(Told())
        self.metrics = SharedMetrics(registry)

    def count(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self.edge.requests.labels("/v1/completions", "200").inc()
            self.edge.ttft_s.observe(0.3)
        self.edge.running_requests.set(num_requests)


def values(text: bytes) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    return {sample.name + "".join(sample.labels.get(key, "") for key in ("le", "engine")): sample.value
            for sample in samples}  # fmt: skip


def test_counts_are_added_up_and_what_all_are_told_is_not() -> None:
    one, two = Process(), Process()
    one.count(2)
    two.count(3)
    one.metrics.note("two", 1, two.metrics.own(), {("two", 1)})
    shown = values(one.metrics.exposition({("two", 1)}))
    assert shown["tandem_router_requests_total"] == 5
    assert shown["tandem_router_ttft_seconds_count"] == 5
    assert shown["tandem_router_ttft_seconds_bucket0.2"] == 0
    assert shown["tandem_router_ttft_seconds_bucket0.4"] == 5
    assert shown["tandem_router_running_requests"] == 5
    assert shown["tandem_engine_readya"] == 1
    assert shown["tandem_router_processes"] == 2


def test_each_process_counts_once_with_its_latest_word() -> None:
    one, two = Process(), Process()
    for _ in range(3):
        two.count(1)
        one.metrics.note("two", 1, two.metrics.own(), {("two", 1)})
    assert values(one.metrics.exposition({("two", 1)}))["tandem_router_requests_total"] == 3


def test_the_total_keeps_what_a_dead_process_counted_but_not_what_it_ran() -> None:
    one, two, successor = Process(), Process(), Process()
    two.count(3)
    one.metrics.note("two", 1, two.metrics.own(), {("two", 1)})
    one.metrics.note("two", 2, successor.metrics.own(), {("two", 2)})
    shown = values(one.metrics.exposition({("two", 2)}))
    assert (shown["tandem_router_requests_total"], shown["tandem_router_running_requests"]) == (3, 0)
    successor.metrics.note_retired(one.metrics.retired({("two", 2)}))
    successor.metrics.note("one", 1, one.metrics.own(), {("one", 1)})
    shown = values(successor.metrics.exposition({("one", 1)}))
    assert shown["tandem_router_requests_total"] == 3


def test_the_living_and_who_was_heard_last_are_kept_however_many_have_ended() -> None:
    one, silent, talking, ended = Process(), Process(), Process(), Process()
    silent.count(1)
    talking.count(2)
    ended.count(4)
    living = {("silent", 1), ("talking", 1)}
    one.metrics.note("silent", 1, silent.metrics.own(), living)
    for epoch in range(MAX_RETIRED + 10):
        one.metrics.note("talking", 1, talking.metrics.own(), living)
        one.metrics.note("ended", epoch, ended.metrics.own(), living)
    shown = values(one.metrics.exposition(living))
    assert shown["tandem_router_requests_total"] == 1 + 2 + 4 * MAX_RETIRED
    one.metrics.note("silent", 1, silent.metrics.own(), living)  # its last word: then it ends, and is the newest
    one.metrics.note("ended", MAX_RETIRED + 10, ended.metrics.own(), {("talking", 1)})
    shown = values(one.metrics.exposition({("talking", 1)}))
    assert shown["tandem_router_requests_total"] == 1 + 2 + 4 * (MAX_RETIRED - 1)


def test_alone_it_is_the_registrys_text() -> None:
    one = Process()
    one.count(2)
    shown = values(one.metrics.exposition(set()))
    assert (shown["tandem_router_requests_total"], shown["tandem_router_processes"]) == (2, 1)
