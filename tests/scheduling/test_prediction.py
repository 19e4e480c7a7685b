"""Predicted attainment where the lengths of prompts, and so the room that their KV takes, vary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from tandem.scheduling.autoscaling.prediction import (
    Backlog,
    Capacity,
    Pools,
    Prediction,
    Sizing,
    _at_most,
    _beyond,
    predict,
)
from tandem.scheduling.autoscaling.traffic import Traffic
from tandem.scheduling.cost_model import StepCosts
from tandem.scheduling.workers.demand import DemandMeter

GPU = Capacity(StepCosts(19e-3, 0.14e-3, 0.0, 30e-6, 48e-9), step_tokens=8192, kv_tokens=320_000, num_seats=128)
EVEN, UNEVEN = (12_000,), (2_000,) * 11 + (122_000,)  # of the same mean


def traffic_of(lengths: Sequence[int], rate: float = 3.6) -> Traffic:
    rng, meter, traffic = random.Random(4), DemandMeter(), Traffic()
    for tick in range(600):
        for _ in range(math.floor((tick + 1) * rate) - math.floor(tick * rate)):
            meter.note(rng.choice(lengths), 1_000, 60.0, 0.1)
        traffic = traffic.updated(meter.total, float(tick))
    return traffic


def predicted(lengths: Sequence[int], num_decode: int) -> Prediction:
    sizing = Sizing(
        traffic=traffic_of(lengths),
        capacity=GPU,
        backlog=Backlog(0.0, 33, 12_000.0),
        output_tokens=340.0,
        horizon_s=360.0,
        start_s=60.0,
    )
    return predict(sizing, Pools(60, num_decode), 600.0)


def test_prompts_of_uneven_lengths_need_more_room_than_their_mean() -> None:
    assert traffic_of(EVEN).length_variation == pytest.approx(0.0, abs=1e-9)
    assert traffic_of(UNEVEN).length_variation == pytest.approx(7.6, rel=0.2)
    assert predicted(EVEN, 2).attainment > 0.999
    assert predicted(UNEVEN, 2).attainment < predicted(EVEN, 2).attainment - 0.01
    assert predicted(UNEVEN, 2).decode_wait_s > predicted(EVEN, 2).decode_wait_s
    assert predicted(UNEVEN, 3).attainment > 0.999


@pytest.mark.parametrize(("limit", "mean", "variance"), [(10, 8, 4), (10, 12, 9), (53, 25, 200), (5, 4.9, 0.01)])
def test_share_and_mean_beyond_a_limit(limit: float, mean: float, variance: float) -> None:
    rng = random.Random(7)
    draws = [rng.gauss(mean, math.sqrt(variance)) for _ in range(20_000)]
    share, excess = _beyond(limit, mean, variance)
    assert share == pytest.approx(sum(draw > limit for draw in draws) / len(draws), abs=0.015)
    assert excess == pytest.approx(sum(max(draw - limit, 0) for draw in draws) / len(draws), rel=0.1, abs=0.01)


def test_without_variance_a_limit_is_exceeded_or_not() -> None:
    assert _beyond(10.0, 8.0, 0.0) == (0.0, 0.0)
    assert _beyond(10.0, 12.0, 0.0) == (1.0, 2.0)
    assert _beyond(10.0, 1.0, 1e-12) == (0.0, 0.0)


@pytest.mark.parametrize("mean", [1e-200, 1e-300, 1e-320])
def test_next_to_nothing_is_nothing(mean: float) -> None:
    """As the last answer's trace in the model is after minutes without traffic."""
    assert _beyond(10.0, mean, mean) == (0.0, 0.0)
    assert _at_most(2.0, mean, 1.0) == pytest.approx(1.0)


def magnitude(rng: random.Random, low: float, high: float) -> float:
    return 0.0 if rng.random() < 0.1 else 10 ** rng.uniform(low, high)


@pytest.mark.parametrize("seed", range(60))
def test_every_figure_is_a_number_for_any_traffic_costs_and_pools(seed: int) -> None:
    rng, meter, traffic, now = random.Random(seed), DemandMeter(), Traffic(), 0.0
    for _ in range(20):
        now += rng.choice([0.1, 2.0, 60.0, 3600.0])
        for _ in range(rng.choice([0, 0, 1, 3, 50])):
            slos = magnitude(rng, -3, 3), magnitude(rng, -3, 1) or None
            meter.note(rng.randint(1, 10 ** rng.randint(1, 6)), 0, *slos)
        for _ in range(rng.choice([0, 1, 5])):
            meter.note_answer(rng.randint(0, 10 ** rng.randint(0, 5)))
        traffic = traffic.updated(meter.total, now)
    for _ in range(10):
        costs = StepCosts(*(magnitude(rng, -12, 2) for _ in range(5)))
        num_seats = rng.choice([0, 1, 64, 10**5])
        sizing = Sizing(
            traffic=traffic,
            capacity=Capacity(costs, rng.randint(1, 10**5), rng.randint(1, 10**8), num_seats),
            backlog=Backlog(magnitude(rng, 0, 9), magnitude(rng, -320, 5), magnitude(rng, 0, 6)),
            output_tokens=magnitude(rng, -3, 6),
            horizon_s=rng.uniform(1, 4000),
            start_s=magnitude(rng, -1, 4),
            demand_factor=rng.choice([0.0, 1.0, 1.25]),
        )
        pools, lost_s = Pools(rng.randint(0, 100), rng.randint(0, 100)), magnitude(rng, -3, 5)
        later_s, extra_s = magnitude(rng, -1, 3), magnitude(rng, -3, 5)
        found = predict(sizing, pools, now, later=Pools(3, 3), later_s=later_s, extra_s=extra_s, lost_s=lost_s)
        assert 0 <= found.attainment <= 1 + 1e-9
        assert all(map(math.isfinite, (found.score, found.least, found.itl_s, found.load, found.last_wait_s)))
        assert found.prefill_wait_s >= 0
        assert found.decode_wait_s >= 0
