from __future__ import annotations

import pytest

from tandem.protocol.load_prior import LoadPrior
from tandem.scheduling.load_cost import LoadCost


def test_a_load_moves_the_cost_half_way_on_a_logarithmic_scale() -> None:
    cost = LoadCost(LoadPrior(latency_s=0.01, bytes_per_s=1e6), block_bytes=1000)
    assert cost.block_s == pytest.approx(1e-3)
    cost.observe(num_blocks=10, seconds=1.0)  # 0.1 s a block, 100 times as much
    assert cost.block_s == pytest.approx(1e-2)
    assert cost.latency_s == 0.01  # only `observe_latency` changes it
    cost.observe_latency(0.04)
    assert cost.latency_s == pytest.approx(0.02)


def test_a_load_that_was_given_up_at_least_doubles_the_cost() -> None:
    cost = LoadCost(LoadPrior(latency_s=0.01, bytes_per_s=1e6), block_bytes=1000)
    cost.observe_at_least(num_blocks=10, seconds=0.001)
    assert cost.block_s == pytest.approx(2e-3)
    cost.observe_at_least(num_blocks=10, seconds=1.0)
    assert cost.block_s == pytest.approx(0.1)


def test_a_load_of_no_measurable_time_costs_something() -> None:
    cost = LoadCost(LoadPrior(latency_s=0.01, bytes_per_s=1e6), block_bytes=1000)
    for _ in range(100):
        cost.observe(num_blocks=1, seconds=0.0)
    assert cost.block_s == pytest.approx(1e-7)
