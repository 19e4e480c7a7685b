from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.block_pool import BlockPool
from tandem.engine.receive_queue import Reservation
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Phase, ScheduledChunk, Sequence, SequenceStatus
from tandem.engine.token_array import token_array
from tandem.protocol.messages import Preemption, WorkerPriority
from tandem.protocol.sampling import SamplingParams
from tests.support.answers import Endless, Expects

SIZE = 4


def make_scheduler(
    num_blocks: int = 32, *, max_num_seqs: int = 8, max_num_batched_tokens: int = 16, expects: int | None = 1
) -> Scheduler:
    """Expects each answer to end soon, so that every sequence with room now is admitted. With None it learns."""
    return Scheduler(
        BlockPool(num_blocks),
        block_size=SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        lengths=None if expects is None else Expects(expects),
    )


def make_sequence(
    num_tokens: int,
    *,
    name: str = "a",
    family: int | None = None,
    max_tokens: int = 100,
    phase: Phase = Phase.WHOLE,
    order: float = 0.0,
    max_step_tokens: int = 0,
) -> Sequence:
    """A prompt of `num_tokens`; sequences of one family have the same tokens, others share none."""
    first = 1000 * (sum(name.encode()) if family is None else family)
    tokens = token_array(range(first, first + num_tokens))
    priority = WorkerPriority(order=order, max_step_tokens=max_step_tokens)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, tokens, num_tokens, sampling, root=b"root", phase=phase, priority=priority)


def try_receive(scheduler: Scheduler, num_prompt_tokens: int, **options: object) -> Sequence | None:
    """A sequence whose prompt KV arrived from elsewhere, with its first token; None when the pool has no room."""
    sequence = make_sequence(num_prompt_tokens, **options)  # type: ignore[arg-type]
    blocks = scheduler.pool.try_allocate(math.ceil(num_prompt_tokens / SIZE))
    if blocks is None:
        return None
    sequence.blocks += blocks
    sequence.num_computed_tokens = num_prompt_tokens
    sequence.token_ids.append(7)
    scheduler.blocks.publish_computed(sequence)
    return sequence


def make_received(scheduler: Scheduler, num_prompt_tokens: int, **options: object) -> Sequence:
    sequence = try_receive(scheduler, num_prompt_tokens, **options)
    assert sequence is not None, "no room"
    return sequence


def plan(chunks: list[ScheduledChunk]) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step of an engine whose model always samples token 7."""
    chunks = scheduler.schedule()
    assert sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for chunk in chunks:
        sequence = chunk.sequence
        assert chunk.num_tokens > 0
        assert chunk.start == sequence.num_computed_tokens
        assert len(sequence.blocks) * SIZE >= chunk.start + chunk.num_tokens, "no slot for a scheduled token"
        scheduler.blocks.advance(chunk)
        scheduler.blocks.publish_computed(chunk.sequence)
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.num_uncomputed_tokens == 0:
            assert chunk.samples
            sequence.token_ids.append(7)
            if sequence.phase is Phase.PREFILL_ONLY or sequence.num_output_tokens >= sequence.sampling.max_tokens:
                scheduler.remove(sequence, keep_blocks=sequence.phase is Phase.PREFILL_ONLY)
        else:
            assert not chunk.samples
    scheduler.pool.check_integrity()
    return plan(chunks)


def drain(scheduler: Scheduler, limit: int = 1000) -> None:
    """Step until nothing is queued and no block is held; fail when a step does nothing."""
    for _ in range(limit):
        if not (scheduler.running or scheduler.waiting):
            scheduler.pool.check_integrity(idle=True)
            return
        assert step(scheduler), f"stuck: {len(scheduler.waiting)} waiting, {scheduler.pool.num_available} blocks free"
    raise AssertionError(f"not drained after {limit} steps")


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, [(0, 1)]), (15, [(0, 15)]), (16, [(0, 16)]), (17, [(0, 16), (16, 1)]), (33, [(0, 16), (16, 16), (32, 1)])],
)
def test_a_prompt_is_cut_by_the_token_budget(num_tokens: int, expected: list[tuple[int, int]]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(num_tokens, max_tokens=1))
    steps = []
    while scheduler.waiting or scheduler.running:
        steps += [(start, count) for _, start, count in step(scheduler)]
    assert steps == expected
    scheduler.pool.check_integrity(idle=True)


def test_decoding_goes_first_and_prompts_share_the_rest_in_order() -> None:
    scheduler = make_scheduler()
    for name, count in (("a", 3), ("b", 20), ("c", 9)):
        scheduler.add(make_sequence(count, name=name))
    assert step(scheduler) == [("a", 0, 3), ("b", 0, 13)]
    assert step(scheduler) == [("a", 3, 1), ("b", 13, 7), ("c", 0, 8)]
    assert step(scheduler) == [("a", 4, 1), ("b", 20, 1), ("c", 8, 1)]
    assert step(scheduler) == [("a", 5, 1), ("b", 21, 1), ("c", 9, 1)]


def test_a_prompt_that_is_begun_is_overtaken_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(40, name="a", max_tokens=1, order=2.0))
    assert step(scheduler) == [("a", 0, 16)]
    scheduler.add(make_sequence(20, name="b", max_tokens=2, order=3.0))
    scheduler.add(make_sequence(20, name="c", max_tokens=2, order=1.0))
    assert step(scheduler) == [("c", 0, 16)]
    assert step(scheduler) == [("c", 16, 4), ("a", 16, 12)]
    assert step(scheduler) == [("c", 20, 1), ("a", 28, 12), ("b", 0, 3)]
    drain(scheduler)


def test_a_request_without_room_does_not_stop_those_it_would_overtake() -> None:
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add(make_sequence(36, name="a", max_tokens=1, order=2.0))
    step(scheduler)
    scheduler.add(make_sequence(36, name="b", max_tokens=1, order=1.0))
    assert step(scheduler) == [("a", 16, 16)], "there is no room for b"
    assert step(scheduler) == [("a", 32, 4)]
    assert step(scheduler) == [("b", 0, 16)]


def test_sequences_with_a_first_token_go_before_those_without() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence(4, name="a", max_tokens=1))
    step(scheduler)
    scheduler.add(make_sequence(4, name="b", order=-1.0))
    scheduler.add(make_received(scheduler, 4, name="received"))
    assert step(scheduler) == [("received", 4, 1)]


def test_a_prompt_joins_no_longer_step_than_it_may() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(20, name="a", max_tokens=1, order=1.0))
    scheduler.add(make_sequence(20, name="b", max_tokens=2, order=2.0, max_step_tokens=6))
    assert step(scheduler) == [("a", 0, 16)]
    assert step(scheduler) == [("a", 16, 4), ("b", 0, 2)], "its step would be over later"
    assert step(scheduler) == [("b", 2, 6)]
    drain(scheduler)


def test_streams_that_are_computed_again_go_on_one_after_the_other() -> None:
    """In short steps: the first one need not wait for all, and those beside them get their tokens meanwhile."""
    scheduler = make_scheduler()
    scheduler.add(make_sequence(2, name="beside"))
    assert step(scheduler) == [("beside", 0, 2)]
    for name in "ab":
        resumed = make_sequence(8, name=name, max_step_tokens=6)
        resumed.token_ids.extend([7, 7])
        scheduler.add(resumed)
    assert step(scheduler) == [("beside", 2, 1), ("a", 0, 6)]
    assert step(scheduler) == [("beside", 3, 1), ("a", 6, 4), ("b", 0, 2)]
    assert step(scheduler) == [("beside", 4, 1), ("a", 10, 1), ("b", 2, 6)]


def test_new_prompts_do_not_lengthen_steps_of_resumed_streams() -> None:
    scheduler = make_scheduler()
    resumed = make_sequence(10, name="resumed", max_step_tokens=6)
    resumed.token_ids.extend([7, 7])
    scheduler.add(resumed)
    scheduler.add(make_sequence(30, name="new", max_tokens=1))
    assert step(scheduler) == [("resumed", 0, 6)]
    assert step(scheduler) == [("resumed", 6, 6)]
    assert step(scheduler) == [("resumed", 12, 1), ("new", 0, 15)]


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_prefix_hit_leaves_the_last_token_to_compute(num_tokens: int, num_hit: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(12, family=1, max_tokens=1))
    drain(scheduler)
    again = make_sequence(num_tokens, name="b", family=1, max_tokens=1)
    scheduler.add(again)
    assert step(scheduler) == [("b", num_hit, num_tokens - num_hit)]
    assert again.num_cached_tokens == num_hit
    scheduler.pool.check_integrity(idle=True)


def test_a_prompt_waits_while_another_computes_its_prefix() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(30, name="a", family=1))
    scheduler.add(make_sequence(30, name="b", family=1))
    assert step(scheduler) == [("a", 0, 16)]
    assert step(scheduler) == [("a", 16, 14)]
    assert step(scheduler) == [("a", 30, 1), ("b", 28, 2)]


def test_a_prompt_that_an_earlier_one_waits_for_is_computed_at_its_turn() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(44, name="bulk", family=1, max_tokens=1, order=20.0, max_step_tokens=8))
    assert step(scheduler) == [("bulk", 0, 8)]
    scheduler.add(make_sequence(33, name="urgent", family=1, max_tokens=1, order=5.0))
    scheduler.add(make_sequence(12, name="other", max_tokens=1, order=6.0))
    scheduler.add(make_sequence(8, name="late", max_tokens=1, order=10.0))
    assert step(scheduler) == [("bulk", 8, 16)], "neither short steps nor those behind the urgent one hold it up"
    assert step(scheduler) == [("bulk", 24, 16)]
    assert step(scheduler) == [("urgent", 32, 1), ("other", 0, 12), ("late", 0, 3)]
    assert step(scheduler) == [("late", 3, 5), ("bulk", 40, 3)], "its own turn and steps again"
    drain(scheduler)


def test_a_sequence_that_waits_for_a_prefix_is_passed_while_its_seat_is_kept() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    scheduler.add(make_sequence(20, name="a", family=1, max_tokens=1))
    assert step(scheduler) == [("a", 0, 16)]
    scheduler.add(make_sequence(24, name="b", family=1, max_tokens=20))
    scheduler.add(make_sequence(4, name="c", max_tokens=20))
    scheduler.add(make_sequence(4, name="d", max_tokens=20))
    assert step(scheduler) == [("a", 16, 4), ("c", 0, 4)]
    assert step(scheduler) == [("c", 4, 1), ("b", 20, 4), ("d", 0, 4)]


def test_a_sequence_that_waits_for_a_prefix_is_passed_while_its_blocks_are_kept() -> None:
    scheduler = make_scheduler(num_blocks=16)
    scheduler.add(make_sequence(20, name="a", family=1, max_tokens=1))
    assert step(scheduler) == [("a", 0, 16)]
    scheduler.add(make_sequence(48, name="b", family=1, max_tokens=1))  # 12 blocks, of which it shares 5
    scheduler.add(make_sequence(20, name="c", max_tokens=20))
    assert step(scheduler) == [("a", 16, 4)], "c would take one block too many"
    assert step(scheduler) == [("b", 20, 16)]
    drain(scheduler)


def test_a_crowd_that_waits_for_a_prefix_is_passed_only_so_far() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=64)
    scheduler.add(make_sequence(20, name="a", family=1, max_tokens=1))
    step(scheduler)
    for number in range(9):
        scheduler.add(make_sequence(24, name=f"crowd-{number}", family=1, max_tokens=1))
    scheduler.add(make_sequence(4, name="other", max_tokens=1))
    assert step(scheduler) == [("a", 16, 4)], "eight are passed, not nine"
    drain(scheduler)


def test_a_prompt_does_not_wait_for_a_block_it_could_not_use() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_sequence(24, name="a", family=1))
    assert step(scheduler) == [("a", 0, 16)]
    # The last token of b must be computed, so the block that a computes next does not help it.
    scheduler.add(make_sequence(20, name="b", family=1))
    assert step(scheduler) == [("a", 16, 8), ("b", 16, 4)]


def test_pool_exactly_full_serves_and_one_block_short_waits() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(8, name="a", max_tokens=1))
    scheduler.add(make_sequence(8, name="b", max_tokens=1))
    assert step(scheduler) == [("a", 0, 8), ("b", 0, 8)]
    scheduler.add(make_sequence(8, name="c", max_tokens=1))
    scheduler.add(make_sequence(16, name="d", max_tokens=1))
    assert step(scheduler) == [("c", 0, 8)]
    assert step(scheduler) == [("d", 0, 16)]
    scheduler.pool.check_integrity(idle=True)


def test_the_sequence_admitted_last_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=32)
    scheduler.add(make_sequence(4, name="a"))
    scheduler.add(make_sequence(4, name="b"))
    step(scheduler)
    assert step(scheduler) == [("a", 4, 1), ("b", 4, 1)]  # two blocks each: full
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_sequence(4, name="c"))
    assert step(scheduler) == [("a", 8, 1)]  # took b's
    assert [sequence.request_id for sequence in scheduler.waiting] == ["b", "c"]
    assert scheduler.num_preemptions == 1
    told = Preemption(request_id="b", reason="no free block", num_blocks=2, num_tokens=8)
    assert (list(scheduler.latest_preemptions), scheduler.preemptions_by_reason) == ([told], {told.reason: 1})
    b = scheduler.waiting[0]
    assert (b.blocks, b.num_computed_tokens, b.num_output_tokens) == ([], 0, 5)


@pytest.mark.parametrize("names", [["decoding", "bulk"], ["bulk", "decoding"]])
def test_the_prompt_whose_turn_comes_last_is_preempted(names: list[str]) -> None:
    scheduler = make_scheduler(num_blocks=24, max_num_batched_tokens=8)
    early = {
        "decoding": make_sequence(3, name="decoding", max_tokens=20),
        "bulk": make_sequence(40, name="bulk", max_tokens=20, order=20.0),
    }
    for name in names:
        scheduler.add(early[name])
        step(scheduler)
    urgent = make_sequence(40, name="urgent", max_tokens=20, order=5.0)
    scheduler.add(urgent)
    step(scheduler)
    assert scheduler.running == [*(early[name] for name in names), urgent]
    leased = scheduler.pool.try_allocate(scheduler.pool.num_available)
    assert leased is not None
    for _ in range(2 * SIZE):
        assert step(scheduler)[0][0] == "decoding"
        if scheduler.num_preemptions:
            break
    assert list(scheduler.waiting) == [early["bulk"]]
    assert scheduler.running == [early["decoding"], urgent]
    scheduler.pool.release(leased)
    drain(scheduler)


def test_a_preempted_sequence_keeps_its_first_hit_count() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(4, name="a", max_tokens=6))
    b = make_sequence(4, name="b", max_tokens=6)
    scheduler.add(b)
    drain(scheduler)
    assert scheduler.num_preemptions >= 1
    assert b.num_cached_tokens == 0
    scheduler.pool.check_integrity(idle=True)


def test_a_prompt_being_handed_over_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    scheduler.add(make_sequence(3, name="a", max_tokens=20))
    step(scheduler)
    scheduler.add(make_sequence(16, name="handed", phase=Phase.PREFILL_ONLY))
    step(scheduler)
    handed = scheduler.running[1]
    assert len(handed.blocks) == 4
    blocks = list(handed.blocks)
    while not handed.num_output_tokens:
        assert step(scheduler)
        assert handed.blocks == blocks
    while scheduler.running:  # a outgrows what is left and has to preempt itself
        step(scheduler)
    assert scheduler.schedule() == []  # the rest is held by the handoff and will come back
    assert handed.blocks == blocks
    scheduler.blocks.release(handed)
    drain(scheduler)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_prompt_that_lacks_blocks_holds_others_up_for_so_long_only(phase: Phase) -> None:
    """A prompt to hand over lacks room as long as those before it wait for room at their receivers."""
    scheduler = make_scheduler(num_blocks=10)
    handed = [make_sequence(12, name=name, phase=Phase.PREFILL_ONLY) for name in ("x", "y")]
    for sequence in handed:
        scheduler.add(sequence)
        step(scheduler)
    large = make_sequence(32, name="large", phase=phase, max_tokens=2)
    scheduler.add(large)
    small = [make_sequence(8, name=f"s{number}", phase=Phase.PREFILL_ONLY) for number in range(20)]
    for sequence in small:
        scheduler.add(sequence)

    def hand_over() -> int:
        """Compute all that has room; receivers take it at once. Returns how many of the small prompts are done."""
        while step(scheduler):
            for sequence in (large, *small):
                if sequence.status is SequenceStatus.FINISHED:
                    scheduler.blocks.release(sequence)
        return sum(sequence.num_output_tokens > 0 for sequence in small)

    assert hand_over() == 5, "a pool's worth of blocks passes it"
    scheduler.blocks.release(handed[0])
    assert hand_over() == 5, "what comes free is kept for it"
    assert not large.num_output_tokens
    scheduler.blocks.release(handed[1])
    assert hand_over() == 20
    assert large.num_output_tokens
    scheduler.pool.check_integrity(idle=True)


def test_a_prompt_to_hand_over_that_cannot_fit_holds_nobody_up() -> None:
    """Blocks are in quarantine for long, so nothing tells when there will be room for it."""
    scheduler = make_scheduler(num_blocks=10)
    lost = scheduler.pool.try_allocate(3)
    assert lost is not None
    scheduler.admission.lost_blocks["leases"] = 3
    large = make_sequence(32, name="large", phase=Phase.PREFILL_ONLY)
    scheduler.add(large)
    for number in range(20):
        scheduler.add(make_sequence(8, name=f"s{number}", max_tokens=1))
    while step(scheduler):
        pass
    assert [sequence.request_id for sequence in scheduler.waiting] == ["large"]
    scheduler.admission.lost_blocks["leases"] = 0
    scheduler.pool.release(lost)
    while step(scheduler):
        pass
    assert large.num_output_tokens
    scheduler.blocks.release(large)
    scheduler.pool.check_integrity(idle=True)


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
def test_a_received_sequence_computes_its_newest_token_only(num_prompt_tokens: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_received(scheduler, num_prompt_tokens, max_tokens=3))
    assert step(scheduler) == [("a", num_prompt_tokens, 1)]
    assert step(scheduler) == [("a", num_prompt_tokens + 1, 1)]
    scheduler.pool.check_integrity(idle=True)
    assert len(scheduler.pool.cached_digests()) == (num_prompt_tokens + 2) // SIZE


def test_blocks_are_reclaimed_from_the_tail_and_stay_findable() -> None:
    scheduler = make_scheduler(num_blocks=7)
    sizes = {"a": 8, "b": 8, "c": 12}
    for name, num_tokens in sizes.items():
        scheduler.add(make_received(scheduler, num_tokens, name=name, max_tokens=2))
    assert step(scheduler) == [("a", 8, 1), ("b", 8, 1)]
    assert [bool(sequence.blocks) for sequence in scheduler.waiting] == [False]
    assert step(scheduler) == [("c", 4, 9)]  # two of c's three blocks were evicted: its leaves
    scheduler.pool.check_integrity(idle=True)


arrivals = st.tuples(
    st.sampled_from(["prompt", "prefill_only", "received", "abort", "release"]),
    st.integers(1, 20),  # prompt tokens, or which sequence to abort
    st.integers(1, 12),  # max tokens
    st.integers(0, 3),  # family: prompts that share a prefix
    st.integers(0, 3),  # steps afterwards
    st.sampled_from([(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 5)]),  # order and longest step
)


@given(
    st.lists(arrivals, min_size=1, max_size=25), st.integers(8, 12), st.sampled_from([(1, 1), (2, 4), (4, 5), (8, 16)])
)
def test_every_mix_of_arrivals_drains(
    events: list[tuple[str, int, int, int, int, tuple[float, int]]], num_blocks: int, limits: tuple[int, int]
) -> None:
    scheduler = make_scheduler(num_blocks, max_num_seqs=limits[0], max_num_batched_tokens=limits[1])
    handed: list[Sequence] = []

    def add(sequence: Sequence) -> None:
        if sequence.phase is Phase.PREFILL_ONLY:
            handed.append(sequence)
        scheduler.add(sequence)

    for i, (kind, number, max_tokens, family, num_steps, priority) in enumerate(events):
        name, options = f"s{i}", {"order": priority[0], "max_step_tokens": priority[1]}
        queued = [*scheduler.waiting, *scheduler.running]
        if kind == "prompt":
            add(make_sequence(number, name=name, family=family, max_tokens=max_tokens, **options))
        elif kind == "prefill_only":
            add(make_sequence(number, name=name, family=family, phase=Phase.PREFILL_ONLY, **options))
        elif kind == "received":
            sequence = try_receive(scheduler, number, name=name, family=family, max_tokens=max_tokens + 1)
            if sequence is not None:
                add(sequence)
        elif kind == "abort" and queued:
            scheduler.remove(queued[number % len(queued)])
        elif kind == "release":  # handoffs that are over give their blocks back
            release_finished(scheduler, handed)
        for _ in range(num_steps):
            step(scheduler)
    for _ in range(2000):
        if not (scheduler.waiting or scheduler.running):
            break
        if not step(scheduler):  # only handoffs may hold everybody up
            assert release_finished(scheduler, handed), "stuck with nothing held outside"
    assert not scheduler.waiting
    assert not scheduler.running
    release_finished(scheduler, handed)
    scheduler.pool.check_integrity(idle=True)


def ask(scheduler: Scheduler, *names: str, num_tokens: int = 4, max_tokens: int = 100) -> None:
    """Let prompts that a peer computed ask for room here."""
    for name in names:
        scheduler.request_room(make_sequence(num_tokens, name=name, max_tokens=max_tokens))


def receive(scheduler: Scheduler, reservation: Reservation) -> Sequence:
    """Let the KV of a reservation arrive."""
    sequence = reservation.sequence
    sequence.blocks += reservation.block_ids
    sequence.num_computed_tokens = sequence.num_prompt_tokens
    sequence.token_ids.append(7)
    scheduler.add(sequence)
    return sequence


def reserved(scheduler: Scheduler) -> list[str]:
    return [reservation.sequence.request_id for reservation in scheduler.reserve()]


def test_a_seat_is_promised_with_the_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    scheduler.add(make_sequence(4, name="here"))
    step(scheduler)
    ask(scheduler, "a", "b", "c")
    assert scheduler.admission.num_free_seats == 2
    assert reserved(scheduler) == ["a", "b"]
    assert scheduler.admission.num_free_seats == 0
    assert reserved(scheduler) == []
    assert scheduler.num_waiting_for_room == 1
    scheduler.stop_receiving(next(iter(scheduler.receiving)))
    assert reserved(scheduler) == ["c"]


def test_an_answer_that_goes_on_here_gets_room_like_any_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    moved = make_sequence(4, name="moved")
    moved.token_ids.append(7)  # its first token was sampled elsewhere
    scheduler.request_room(moved)
    ask(scheduler, "a", "b")
    assert reserved(scheduler) == ["moved", "a"]


def test_a_prompt_to_compute_here_takes_no_seat_that_was_promised() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    ask(scheduler, "a", "b")
    first, second = scheduler.reserve()
    scheduler.add(make_sequence(4, name="here"))
    assert step(scheduler) == []
    receive(scheduler, first)
    scheduler.stop_receiving(second.sequence)
    scheduler.pool.release(second.block_ids)
    assert step(scheduler) == [("a", 4, 1), ("here", 0, 4)]


def test_a_preempted_sequence_keeps_its_seat_before_what_is_coming() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    for name in ("old", "young"):
        scheduler.add(make_sequence(7, name=name, max_tokens=9))
    while not scheduler.num_preemptions:
        step(scheduler)
    ask(scheduler, "asks")
    assert scheduler.admission.num_free_seats == 0
    assert reserved(scheduler) == []
    assert [sequence.request_id for sequence in scheduler.waiting] == ["young"]
    drain(scheduler)
    assert reserved(scheduler) == ["asks"]


@pytest.mark.parametrize(("lead", "expected"), [(0, []), (2, []), (3, ["a", "b"]), (49, ["a", "b", "c"])])
def test_a_seat_is_promised_that_will_be_free_when_the_kv_is_here(lead: int, expected: list[str]) -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for name, max_tokens in (("soon", 4), ("too", 4), ("later", 50)):
        scheduler.add(make_sequence(4, name=name, max_tokens=max_tokens))
    step(scheduler)
    scheduler.receive_queue.leads.extend([lead, lead, 1000])
    ask(scheduler, "a", "b", "c", "d")
    assert reserved(scheduler) == expected


def test_how_long_a_lease_takes_is_counted_in_steps_that_decode() -> None:
    scheduler = make_scheduler()
    ask(scheduler, "a")
    scheduler.add(make_sequence(40, name="long"))
    (lease,) = scheduler.reserve()
    for _ in range(3):  # the prompt's
        step(scheduler)
    for _ in range(5):
        step(scheduler)
    receive(scheduler, lease)
    assert list(scheduler.receive_queue.leads) == [5]


def test_a_received_sequence_waits_for_a_seat_if_others_run_longer() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence(4, name="runs", max_tokens=5))
    step(scheduler)
    scheduler.receive_queue.leads.append(8)
    ask(scheduler, "a", "b")
    (lease,) = scheduler.reserve()
    receive(scheduler, lease)
    assert reserved(scheduler) == []
    assert step(scheduler) == [("runs", 4, 1)]
    drain(scheduler)
    assert lease.sequence.num_output_tokens == 100


leases = st.tuples(
    st.sampled_from(["ask", "arrive", "stop", "prompt", "abort"]),
    st.integers(0, 30),  # prompt tokens, or which one
    st.integers(1, 12),  # max tokens
    st.integers(0, 3),  # steps afterwards
)


@given(st.lists(leases, max_size=60), st.integers(8, 24), st.integers(1, 5), st.booleans())
def test_no_block_and_no_seat_is_promised_twice(
    events: list[tuple[str, int, int, int]], num_blocks: int, max_num_seqs: int, looks_ahead: bool
) -> None:
    """Except seats of sequences that are expected to end before the KV arrives."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs)
    if not looks_ahead:
        scheduler.admission.lengths = Endless(1)
    pool, open_leases = scheduler.pool, list[Reservation]()

    def grant() -> None:
        least = min(scheduler.admission.num_free_seats, -scheduler.receive_queue.num_ending())
        open_leases.extend(scheduler.reserve())
        assert scheduler.admission.num_free_seats >= least
        assert looks_ahead or scheduler.admission.num_free_seats >= 0

    for i, (kind, number, max_tokens, num_steps) in enumerate(events):
        name = f"s{i}"
        if kind == "ask":
            ask(scheduler, name, num_tokens=number + 1, max_tokens=max_tokens + 1)
        elif kind == "prompt":
            scheduler.add(make_sequence(number + 1, name=name, max_tokens=max_tokens))
        elif kind == "arrive" and open_leases:
            receive(scheduler, open_leases.pop(number % len(open_leases)))
        elif kind == "stop" and open_leases:
            lease = open_leases.pop(number % len(open_leases))
            scheduler.stop_receiving(lease.sequence)
            scheduler.blocks.release(lease.sequence)
            pool.release(lease.block_ids)
        elif kind == "abort" and (queued := [*scheduler.running, *scheduler.waiting]):
            scheduler.remove(queued[number % len(queued)])
        grant()
        for _ in range(num_steps):
            step(scheduler)
            grant()
        pool.check_integrity()
        lent = [block for lease in open_leases for block in lease.block_ids]
        held = {block for s in (*scheduler.running, *scheduler.waiting) for block in s.blocks}
        assert len(lent) == len(set(lent))
        assert not held & set(lent), "a block that is lent is somebody's"
        assert len(scheduler.running) <= max_num_seqs
    while open_leases or scheduler.awaiting_room or scheduler.running or scheduler.waiting:
        for sequence in [s for s in scheduler.awaiting_room if scheduler.admission.is_hopeless(s)]:
            scheduler.stop_receiving(sequence)
        for sequence in [s for s in scheduler.waiting if scheduler.admission.is_hopeless(s)]:
            scheduler.remove(sequence)
        grant()
        while open_leases:
            receive(scheduler, open_leases.pop())
        step(scheduler)
    pool.check_integrity(idle=True)


def release_finished(scheduler: Scheduler, handed: list[Sequence]) -> int:
    """Release the blocks of finished handoffs; returns their number."""
    finished = [sequence for sequence in handed if sequence.status is SequenceStatus.FINISHED]
    count = sum(len(sequence.blocks) for sequence in finished)
    for sequence in finished:
        scheduler.blocks.release(sequence)
        handed.remove(sequence)
    return count


def test_the_victim_of_a_step_computes_nothing_in_it() -> None:
    scheduler = make_scheduler(num_blocks=4)
    young = make_received(scheduler, 5, name="young", max_tokens=9)  # a block's room for two more tokens
    old = make_received(scheduler, 7, name="old", max_tokens=9)  # its next token but one needs a third block
    young.arrival, old.arrival = 2, 1  # the older one was preempted, and came back behind the younger one
    scheduler.add(young)
    step(scheduler)
    scheduler.add(old)
    step(scheduler)
    assert [sequence.request_id for sequence in scheduler.running] == ["young", "old"]
    assert step(scheduler) == [("old", 8, 1)]
    assert young.blocks == []
    drain(scheduler)


def test_what_was_computed_before_a_preemption_is_not_published_after_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence(24))
    [chunk] = scheduler.schedule()
    computed = scheduler.blocks.advance(chunk)
    assert computed is not None
    former = list(sequence.blocks)
    scheduler.preempt(sequence)
    other = scheduler.pool.try_allocate(2)
    assert scheduler.schedule(), "it is computed again"
    assert sequence.blocks != former
    scheduler.blocks.publish(computed)
    assert scheduler.pool.cached_digests() == []
    assert sequence.num_published_blocks == 0
    scheduler.blocks.release(sequence)
    scheduler.pool.release(other or [])
    scheduler.pool.check_integrity(idle=True)


def test_a_prefix_that_is_launched_but_not_published_is_waited_for() -> None:
    scheduler = make_scheduler()
    scheduler.add(first := make_sequence(24, name="first", family=1))
    scheduler.add(make_sequence(24, name="second", family=1))
    [chunk] = scheduler.schedule()
    computed = scheduler.blocks.advance(chunk)
    assert computed is not None
    assert plan(scheduler.schedule()) == [("first", 16, 8)], "the second needs what is not published"
    scheduler.blocks.publish(computed)
    assert first.num_published_blocks == 16 // SIZE
