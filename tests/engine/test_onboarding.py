"""Prompts whose KV is loaded from elsewhere while the engine computes the blocks before it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Onboarding, Sequence
from tests.engine.test_scheduler import SIZE, drain, make_scheduler, make_sequence, step
from tests.support.scheduler_listener import FakeListener


def onboarding(scheduler: Scheduler, *, end: int, hold_at: int | None) -> FakeListener:
    """Let admitted sequences expect their tokens up to `end` from elsewhere."""

    def begin(sequence: Sequence) -> None:
        sequence.onboarding = Onboarding(start=end, end=end, hold_at=hold_at)

    listener = FakeListener(begin)
    scheduler.listen(listener)
    return listener


def waiting_for_40(hold_at: int | None) -> tuple[Scheduler, Sequence]:
    """A sequence of 42 tokens, the first 40 of which it expects from elsewhere."""
    scheduler = make_scheduler()
    onboarding(scheduler, end=40, hold_at=hold_at)
    sequence = make_sequence(42)
    scheduler.add(sequence)
    return scheduler, sequence


def test_a_sequence_is_held_for_a_fast_load_and_computes_only_its_tail() -> None:
    scheduler, sequence = waiting_for_40(hold_at=0)
    assert step(scheduler) == []
    assert scheduler.blocks.onboard(sequence, 20, 40, "host")
    assert step(scheduler) == []
    assert scheduler.blocks.onboard(sequence, 0, 20, "disk")
    assert sequence.num_computed_tokens == 40
    assert sequence.num_cached_tokens == 40
    assert sequence.num_loaded_tokens == {"host": 20, "disk": 20}
    assert step(scheduler) == [("a", 40, 2)]


def test_others_compute_while_one_is_held() -> None:
    scheduler = make_scheduler()
    loads = onboarding(scheduler, end=20, hold_at=0)
    scheduler.add(make_sequence(22))
    assert step(scheduler) == []
    loads.when_admitted = lambda sequence: None
    scheduler.add(make_sequence(10, name="b"))
    assert step(scheduler) == [("b", 0, 10)]


def test_computing_and_loading_meet() -> None:
    scheduler, sequence = waiting_for_40(hold_at=12)
    assert step(scheduler) == [("a", 0, 12)]
    assert scheduler.blocks.onboard(sequence, 24, 40, "host")
    assert step(scheduler) == [], "it computes no more than planned while the load is in time"
    assert scheduler.blocks.onboard(sequence, 12, 24, "host")
    assert step(scheduler) == [("a", 40, 2)]
    assert sequence.num_cached_tokens == 28
    assert sequence.onboarding is None


def test_a_late_load_is_overtaken_and_what_came_is_used() -> None:
    scheduler, sequence = waiting_for_40(hold_at=0)
    step(scheduler)
    assert scheduler.blocks.onboard(sequence, 32, 40, "host")
    scheduler.blocks.end_onboarding(sequence)
    assert step(scheduler) == [("a", 0, 16)]
    assert not scheduler.blocks.onboard(sequence, 8, 32, "host"), "these tokens are computed already"
    assert step(scheduler) == [("a", 16, 16)]
    assert step(scheduler) == [("a", 40, 2)]
    assert (sequence.num_cached_tokens, sequence.num_loaded_tokens) == (8, {"host": 8})


def test_of_a_piece_that_computing_runs_into_only_the_rest_counts() -> None:
    scheduler, sequence = waiting_for_40(hold_at=None)
    assert step(scheduler) == [("a", 0, 16)]
    assert scheduler.blocks.onboard(sequence, 32, 40, "host")
    assert scheduler.blocks.onboard(sequence, 20, 32, "peer")
    assert step(scheduler) == [("a", 16, 4)]
    assert (sequence.num_cached_tokens, sequence.num_loaded_tokens) == (20, {"host": 8, "peer": 12})


def test_loaded_blocks_are_published_in_their_order_and_found_by_the_next() -> None:
    scheduler = make_scheduler()
    published: list[tuple[int, int]] = []
    loads = onboarding(scheduler, end=40, hold_at=0)
    scheduler.listen(FakeListener(when_published=lambda sequence, first, end: published.append((first, end))))
    sequence = make_sequence(42, max_tokens=1)
    scheduler.add(sequence)
    step(scheduler)
    scheduler.blocks.onboard(sequence, 8, 40, "host")
    assert published == []
    scheduler.blocks.onboard(sequence, 0, 8, "host")
    assert published == [(0, 40 // SIZE)]
    drain(scheduler)
    loads.when_admitted = lambda sequence: None
    again = make_sequence(42, name="b", family=sum(b"a"))
    scheduler.add(again)
    step(scheduler)
    assert (again.num_cached_tokens, again.num_loaded_tokens) == (40, {}), "they are in the pool now"


@pytest.mark.parametrize("end_by", [Scheduler.remove, Scheduler.preempt])
def test_an_onboarding_ends_with_its_hold_on_blocks(
    end_by: Callable[[Scheduler, Sequence], object],
) -> None:
    scheduler, sequence = waiting_for_40(hold_at=0)
    step(scheduler)
    end_by(scheduler, sequence)
    assert sequence.onboarding is None
    assert not scheduler.blocks.onboard(sequence, 20, 40, "host")
    scheduler.pool.check_integrity(idle=True)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_when_every_token_is_computed_or_loaded_once(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    scheduler = make_scheduler(64)
    end = SIZE * rng.randint(1, 15)
    onboarding(scheduler, end=end, hold_at=rng.choice([None, SIZE * rng.randint(0, end // SIZE)]))
    sequence = make_sequence(62, max_tokens=3)
    scheduler.add(sequence)
    covered: list[tuple[int, int]] = []
    for _ in range(100):
        covered += [(start, start + count) for _, start, count in step(scheduler)]
        current = sequence.onboarding
        if current is not None and rng.random() < 0.6:
            piece = SIZE * rng.randint(1, 4)
            start, stop = max(current.start - piece, 0), current.start
            if scheduler.blocks.onboard(sequence, start, stop, "host"):
                covered.append((start, stop))
        elif current is not None and rng.random() < 0.3:
            scheduler.blocks.end_onboarding(sequence)
        if sequence.num_output_tokens == 3:
            break
    else:
        raise AssertionError("it did not finish")
    tokens = sorted(token for start, stop in covered for token in range(start, stop))
    assert tokens == list(range(64))
    scheduler.pool.check_integrity(idle=True)
