"""Rates and percentiles of a recent window."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.dashboard.traffic import Change, Totals, TrafficWindow, totals_of
from tandem.frontend.http.metrics import FrontendMetrics


def totals(**counts: float) -> Totals:
    return Totals(counts)


def histogram(values: Iterable[float], bounds: tuple[float, ...] = (0.1, 0.2, 0.4)) -> Totals:
    values = list(values)
    counts = [(bound, float(sum(value <= bound for value in values))) for bound in (*bounds, float("inf"))]
    return Totals({}, {"ttft_s": counts})


def test_rates_are_of_the_time_that_was_asked_for() -> None:
    window = TrafficWindow(span_s=60)
    assert window.latest(60) is None
    for now, tokens in [(0.0, 0), (30.0, 300), (50.0, 900), (60.0, 1200)]:
        window.add(now, totals(tokens=tokens))
    for span_s, rate in [(60, 20.0), (30, 30.0), (10, 30.0), (1, 30.0)]:
        change = window.latest(span_s)
        assert change is not None
        assert change.per_s("tokens") == rate, span_s


def test_a_window_keeps_only_what_it_needs() -> None:
    window = TrafficWindow(span_s=60)
    for now in range(500):
        window.add(float(now), totals(tokens=now))
    assert len(window) == 61


def test_nothing_is_known_across_a_long_gap() -> None:
    window = TrafficWindow(span_s=60)
    window.add(0.0, totals(tokens=5))
    window.add(1000.0, totals(tokens=9000))
    assert window.latest(60) is None


def test_a_counter_that_fell_counts_as_nothing() -> None:
    change = Change(10.0, totals(tokens=100), totals(tokens=3))
    assert (change.total("tokens"), change.per_s("unknown"), change.ratio("tokens", "unknown")) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("values", "median"),
    [([0.05] * 4, 0.05), ([0.15] * 4, 0.15), ([0.15] * 3 + [0.3], 0.1 + 0.1 * 2 / 3), ([9.0] * 4, 0.4), ([], None)],
)
def test_a_percentile_is_linear_within_its_bucket(values: list[float], median: float | None) -> None:
    before = histogram([0.3] * 100)
    after = histogram([0.3] * 100 + values)
    [found] = Change(10.0, before, after).quantiles("ttft_s", [0.5])
    assert found == (None if median is None else pytest.approx(median))
    assert Change(10.0, before, after).quantiles("unknown", [0.5, 0.9]) == [None, None]


def test_no_percentile_is_far_above_the_slowest_first_token() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    for ttft_s in (13.0, 14.0, 14.5):
        metrics.ttft_s.observe(ttft_s)
    found = Change(60.0, Totals(), totals_of(metrics.traffic())).quantiles("ttft_s", [0.5, 0.99])
    assert all(value is not None and 12 < value <= 15 for value in found)


def test_the_metrics_of_requests_become_totals() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    for status in ("200", "200", "400", "429", "500", "503"):
        metrics.requests.labels("/v1/completions", status).inc()
    metrics.stream_errors.inc()
    metrics.generation_tokens.inc(7)
    metrics.ttft_s.observe(0.3)
    metrics.itl_s.observe_all([0.011, 0.012])
    found = totals_of(metrics.traffic())
    wanted = {"status_2xx": 2, "status_4xx": 1, "refused": 2, "failed": 2, "output_tokens": 7, "finished": 0}
    assert wanted.items() <= found.counts.items()
    assert found.buckets["ttft_s"][-1] == (float("inf"), 1)
    assert [count for bound, count in found.buckets["itl_s"] if bound == 0.015] == [2]
