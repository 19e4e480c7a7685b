from __future__ import annotations

import math
import random
from collections.abc import Iterable

import numpy as np
import pytest

from tandem.scheduling.autoscaling.burstiness import Burstiness
from tandem.scheduling.autoscaling.prediction import _at_most
from tandem.scheduling.autoscaling.waits import Queue


def measured(counts: Iterable[float], tick_s: float = 2.0) -> Burstiness:
    bursts = Burstiness()
    for count in counts:
        bursts = bursts.updated(count, tick_s)
    return bursts


def poisson(mean: float, num: int, seed: int = 1) -> list[float]:
    return np.random.default_rng(seed).poisson(mean, num).astype(float).tolist()


@pytest.mark.parametrize("mean", [0.3, 5.0])
def test_independent_arrivals_have_a_dispersion_of_one_at_every_scale(mean: float) -> None:
    found = dict(measured(poisson(mean, 2000)).by_scale())
    assert set(found) == {2.0, 4.0, 8.0, 16.0, 32.0, 64.0}
    assert all(0.5 < dispersion < 1.7 for dispersion in found.values()), found


def test_bursts_show_at_the_scale_that_they_have() -> None:
    bursts = measured(100.0 if tick % 60 < 4 else 0.0 for tick in range(600))  # 8 s of two minutes
    assert bursts.dispersion(2.0) < bursts.dispersion(16.0)
    assert bursts.dispersion(16.0) > 100


def test_a_steady_rise_is_not_a_burst_and_a_change_of_level_barely_is() -> None:
    assert max(dict(measured(0.1 * tick for tick in range(600)).by_scale()).values()) <= 1.0
    calm = poisson(20.0, 300)
    changed = measured([*calm, *(3 * count for count in calm)])
    assert changed.dispersion(64.0) < 20


def test_a_client_that_waits_for_answers_arrives_more_evenly_than_chance() -> None:
    rng, arrivals, now = random.Random(3), [0] * 300, 0.0
    while now < 600.0:
        arrivals[int(now / 2.0)] += 1
        now += rng.uniform(2.2, 3.2)
    assert measured(map(float, arrivals)).dispersion(4.0) < 0.6


def test_bursts_make_prompts_late_and_more_workers_help() -> None:
    bursty = measured(100.0 if tick % 60 < 4 else 0.0 for tick in range(600))

    def late(num_workers: int, bursts: Burstiness, longest_s: float = 60.0) -> float:
        return float(Queue(3.3, 0.3, 1.0, num_workers, bursts, longest_s).late(np.array([4.0]))[0])

    assert late(4, Burstiness()) < 0.01
    assert late(4, bursty) > 0.3
    shares = [late(num, bursty) for num in (2, 4, 8, 16, 32, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.02
    assert late(4, bursty, longest_s=1.0) == late(4, Burstiness()), "longer bursts are followed"


@pytest.mark.parametrize(("most", "mean"), [(1, 0.4), (4, 0.4), (3, 2.0), (20, 15.0)])
def test_the_number_of_other_answers_is_a_poisson_variable(most: int, mean: float) -> None:
    exact = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(most + 1))
    assert _at_most(most, mean, 1.0) == pytest.approx(exact, abs=0.01)
    assert _at_most(most, mean, 0.2) > exact, "more even arrivals"
    assert _at_most(most, 0.0, 1.0) == 1.0


@pytest.mark.parametrize("busy", [0.1, 0.32, 0.9])
def test_a_client_that_waits_for_its_answer_has_no_other_one_beside_it(busy: float) -> None:
    assert _at_most(0, busy, 1 - busy) == 1.0
    for dispersion in (0.1, 0.3, 0.6, 0.9):  # also where less is known of it
        assert _at_most(1, busy, dispersion) > 0.65


@pytest.mark.parametrize(("num_clients", "busy"), [(2, 0.5), (4, 0.5), (8, 0.25), (8, 0.8), (20, 0.9)])
def test_clients_that_wait_for_their_answers_meet_those_of_the_others(num_clients: int, busy: float) -> None:
    others = num_clients - 1
    for most in range(others):
        exact = sum(math.comb(others, k) * busy**k * (1 - busy) ** (others - k) for k in range(most + 1))
        assert _at_most(most, num_clients * busy, 1 - busy) == pytest.approx(exact, abs=0.08)


@pytest.mark.parametrize(("mean", "dispersion"), [(0.3, 2.0), (5.0, 2.0), (5.0, 6.0), (30.0, 3.0), (30.0, 10.0)])
def test_most_answers_of_a_burst_see_the_burst(mean: float, dispersion: float) -> None:
    """The number that runs is negative binomial; what one of them sees has one more failure."""
    success, failures = 1 - 1 / dispersion, mean / (dispersion - 1) + 1
    share, exact = (1 - success) ** failures, 0.0
    for most in range(60):
        exact += share
        share *= success * (failures + most) / (most + 1)
        assert _at_most(most, mean, dispersion) == pytest.approx(exact, abs=0.06)
