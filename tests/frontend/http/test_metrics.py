from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from tandem.frontend.http.metrics import ITL_BUCKETS_S, MAX_BATCH, FrontendMetrics, RequestClock


def value(registry: CollectorRegistry, name: str) -> float:
    return registry.get_sample_value(name) or 0.0


@given(st.lists(st.floats(0, 5), max_size=80))
def test_many_values_at_once_count_as_one_by_one(values: list[float]) -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    FrontendMetrics(registry).itl_s.observe_all(values)
    plain = Histogram("tandem_router_itl_seconds", "", buckets=ITL_BUCKETS_S, registry=other)
    for one in values:
        plain.observe(one)
    for bound in (*ITL_BUCKETS_S, "+Inf"):
        key = "tandem_router_itl_seconds_bucket", {"le": str(bound)}
        assert registry.get_sample_value(*key) == other.get_sample_value(*key)
    total = value(other, "tandem_router_itl_seconds_sum")
    assert value(registry, "tandem_router_itl_seconds_sum") == pytest.approx(total)


def test_deltas_are_recorded_in_batches_and_the_rest_at_the_end() -> None:
    registry, now = CollectorRegistry(), 10.0

    def clock() -> float:
        return now

    one = RequestClock(FrontendMetrics(registry), arrived_s=9.0, now=clock)
    one.start()
    assert value(registry, "tandem_router_running_requests") == 1
    one.record(0)
    one.note_prompt(100, 48)
    for _ in range(MAX_BATCH):
        now += 0.25
        one.record(2)
    assert value(registry, "tandem_router_ttft_seconds_sum") == 1.25
    assert value(registry, "tandem_router_generation_tokens_total") == 0
    now += 0.25
    one.record(1)
    one.note_prompt(100, 96)  # the request was moved: its prompt was counted
    assert value(registry, "tandem_router_generation_tokens_total") == 2 * MAX_BATCH + 1
    assert value(registry, "tandem_router_itl_seconds_count") == MAX_BATCH
    one.record(3)
    one.stop()
    one.flush()  # again
    assert value(registry, "tandem_router_generation_tokens_total") == 2 * MAX_BATCH + 4
    assert value(registry, "tandem_router_itl_seconds_count") == MAX_BATCH + 1
    assert value(registry, "tandem_router_itl_seconds_sum") == 0.25 * MAX_BATCH
    assert value(registry, "tandem_router_prompt_tokens_total") == 100
    assert value(registry, "tandem_router_cached_prompt_tokens_total") == 48
    assert value(registry, "tandem_router_ttft_seconds_count") == 1
    assert value(registry, "tandem_router_running_requests") == 0
