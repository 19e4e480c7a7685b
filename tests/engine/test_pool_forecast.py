from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.pool_forecast import BlockDemand, PoolForecast

SIZE = 4


def room(num_blocks: int, *holders: tuple[int, int], held_by_others: int = 0) -> PoolForecast:
    """`holders` are (steps, blocks)."""
    demands = [BlockDemand(*holder) for holder in holders]
    return PoolForecast(num_blocks, held_by_others + sum(blocks for _, blocks in holders), demands, block_size=SIZE)


def uses(num_blocks: int, holders: list[BlockDemand], num_used: int) -> list[int]:
    """Blocks used in each step from now on, counted one by one: each holder takes one more every `SIZE` steps."""
    others = num_used - sum(demand.num_blocks for demand in holders)
    last = max((demand.num_steps for demand in holders), default=0)
    return [
        others + sum(demand.num_blocks + math.ceil(step / SIZE) for demand in holders if demand.num_steps >= step)
        for step in range(last + 1)
    ]


def test_admitted_sequences_count_for_those_behind_them() -> None:
    pool = room(10, (4, 1))
    assert pool.try_take(BlockDemand(4, 3))
    assert pool.num_spare == 4
    assert pool.try_take(BlockDemand(4, 3))
    assert not pool.try_take(BlockDemand(4, 1))
    assert pool.has_head
    assert pool.num_spare == 0


def test_what_does_not_grow_takes_its_blocks_only() -> None:
    pool = room(10, (4, 1))
    assert pool.try_take(BlockDemand(0, 8), grows=False)
    assert not pool.try_take(BlockDemand(0, 1), grows=False)


def test_the_head_is_passed_only_by_those_that_do_not_delay_it() -> None:
    # The head begins after 20 steps, when the holder has ended.
    for steps, blocks, may in ((20, 1, True), (21, 1, False), (4, 2, True), (4, 28, False)):
        pool = room(30, (20, 2))
        assert not pool.try_take(BlockDemand(4, 28))
        assert pool.try_take(BlockDemand(steps, blocks)) is may, (steps, blocks)
        assert not pool.try_take(BlockDemand(4, 1), may_pass=False)
    pool = room(10, (20, 2))
    assert not pool.try_take(BlockDemand(20, 6))
    assert pool.try_take(BlockDemand(100, 1)) is False, "it would grow into what the head needs"


def test_a_head_without_a_start_in_sight_is_delayed_by_nobody() -> None:
    pool = room(10, held_by_others=5)
    assert not pool.try_take(BlockDemand(4, 8))
    assert pool.try_take(BlockDemand(4, 2))


def test_room_for_some_steps_is_less_than_room_for_all() -> None:
    assert not room(10, (40, 2)).try_take(BlockDemand(40, 4))
    assert room(10, (40, 2)).try_take(BlockDemand(40, 4), num_sure_steps=8)
    assert not room(10, (40, 2)).try_take(BlockDemand(40, 4), num_sure_steps=9)


demands = st.tuples(st.integers(1, 40), st.integers(1, 6)).map(lambda demand: BlockDemand(*demand))


@given(st.lists(demands, max_size=6), demands, st.integers(0, 5), st.integers(1, 60))
def test_the_forecast_is_that_of_counting_step_by_step(
    holders: list[BlockDemand], demand: BlockDemand, held_by_others: int, num_blocks: int
) -> None:
    num_used = held_by_others + sum(holder.num_blocks for holder in holders)
    pool = PoolForecast(num_blocks, num_used, holders, block_size=SIZE)
    peak = max(uses(num_blocks, [*holders, demand], num_used + demand.num_blocks))
    fits = peak <= num_blocks if holders else num_used + demand.num_blocks <= num_blocks
    assert pool.peak_of(sorted([*holders, demand]), num_used + demand.num_blocks) == peak
    assert pool.try_take(demand) is fits
    start = pool.start_of(demand, sorted(holders), num_used)
    later = uses(num_blocks, holders, num_used)
    fitting = [at for at in range(len(later)) if all(used + demand.num_blocks <= num_blocks for used in later[at:])]
    left = held_by_others + demand.num_blocks <= num_blocks
    # `later[step]` is before the ends of that step: it is free from the step before the first that fits on.
    expected = max(fitting[0] - 1, 0) if fitting else (len(later) - 1 if left else math.inf)
    assert start == (expected if left else math.inf)
