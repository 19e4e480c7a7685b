from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tandem.loadtest.traces import TRACE_BLOCK_SIZE
from tandem.simulator.arrivals import chats
from tandem.simulator.machine import MACHINES
from tandem.simulator.measures import Slo
from tandem.simulator.shapes import ATTAINMENT, MAX_WORKERS, Shape, ShapeSearch

REQUESTS = chats(80, random.Random(1))
SEARCH = ShapeSearch(
    requests=[replace(one, arrival_s=one.arrival_s - REQUESTS[0].arrival_s) for one in REQUESTS],
    machine=MACHINES["h200-8b"],
    slo=Slo(1.0, 0.03),
)


@pytest.mark.parametrize("shape", [Shape(0, 2), Shape(1, 1)])
def test_a_capacity_is_within_the_slo_and_little_more_is_not(shape: Shape) -> None:
    capacity = SEARCH.capacity(shape)
    assert capacity.attainment >= ATTAINMENT
    assert SEARCH.serve(shape, capacity.rate).attainment == capacity.attainment
    assert SEARCH.serve(shape, capacity.rate * 2 ** (1 / 16)).attainment < ATTAINMENT


def test_an_slo_that_nothing_meets_has_no_capacity() -> None:
    runs: list[None] = []
    search = replace(SEARCH, slo=Slo(1e-3, 0.03), on_run=lambda: runs.append(None))
    assert search.capacity(Shape(0, 2)).rate == 0
    assert len(runs) == 1, "one run at the slowest pace tells"


def test_the_fewest_workers_are_found_from_any_guess() -> None:
    rate = 80.0
    enough = [n for n in range(1, 13) if SEARCH.serve(Shape(0, n), rate).is_good]
    for guess in (1, 5, 12):
        served = SEARCH.least_workers(Shape(0, 1), rate, guess)
        assert served is not None
        assert served.shape == Shape(0, enough[0]) != Shape(0, 1)
    assert SEARCH.least_workers(Shape(0, 1), rate, MAX_WORKERS + 1) is None


def test_splits_are_around_the_share_of_prefill() -> None:
    assert SEARCH.shapes(4) == [Shape(0, 4), Shape(1, 3), Shape(2, 2), Shape(3, 1)]
    many = SEARCH.shapes(40)
    assert len(many) == 6
    assert {shape.num_workers for shape in many} == {40}
    assert [str(shape) for shape in SEARCH.shapes(2)] == ["2 colocated", "1P1D"]


def test_requests_that_no_pool_holds_are_missed() -> None:
    search = replace(SEARCH, machine=replace(SEARCH.machine, pool_tokens=TRACE_BLOCK_SIZE))
    served = search.serve(Shape(0, 1), 1.0)
    assert (served.attainment, served.summary) == (0.0, None)


def test_made_up_conversations_grow_and_share_their_start() -> None:
    assert chats(80, random.Random(1)) == REQUESTS
    arrivals = [one.arrival_s for one in REQUESTS]
    assert arrivals == sorted(arrivals)
    for one in REQUESTS:
        assert one.block_ids[:2] == (0, 1)
        assert len(one.block_ids) == -(-one.num_prompt_tokens // TRACE_BLOCK_SIZE)
    seen = {one.block_ids for one in REQUESTS}
    assert any(one[:-1] in {other[: len(one) - 1] for other in seen - {one}} for one in seen if len(one) > 3)
