"""A decode worker whose pool is asked for more than it holds: nothing that fits fails, streams go on, it stays busy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tandem.engine.block_table import BlockTable
from tandem.protocol.digest import block_digests
from tandem.protocol.errors import PeerLost, TransferTimeout
from tandem.protocol.messages import PeerAddress, WorkerEpoch
from tests.support.answers import Expects
from tests.support.pressure_world import BLOCK_SIZE, STEP_S, PressureWorld, Request

NUM_BLOCKS = 1000
PROMPTS, OUTPUTS = (400, 800, 1600), (50, 100, 400, 1600)
# Blocks times steps of the mean request, over the pool: that many requests a step keep it full.
_MEAN_PROMPT, _MEAN_OUTPUT = sum(PROMPTS) / 3, sum(OUTPUTS) / 4
_FOOTPRINT = (_MEAN_PROMPT * _MEAN_OUTPUT + sum(n * n for n in OUTPUTS) / 8) / BLOCK_SIZE
FULL = NUM_BLOCKS / _FOOTPRINT
MAX_GAP_S = 3.0

Send = Callable[[PressureWorld, str, random.Random], Request]


def handed_over(world: PressureWorld, name: str, rng: random.Random) -> Request:
    num_outputs = rng.choice(OUTPUTS)
    return world.hand_over(name, prompt(rng, rng.choice(PROMPTS)), num_outputs)


def handed_over_without_a_bound(world: PressureWorld, name: str, rng: random.Random) -> Request:
    num_outputs = rng.randint(50, 1000)
    return world.hand_over(name, prompt(rng, rng.choice(PROMPTS)), num_outputs, max_tokens=8000)


def computed_here(world: PressureWorld, name: str, rng: random.Random) -> Request:
    return world.compute_here(name, prompt(rng, rng.choice(PROMPTS)), rng.choice(OUTPUTS))


def half_and_half(world: PressureWorld, name: str, rng: random.Random) -> Request:
    return (computed_here if rng.random() < 0.5 else handed_over)(world, name, rng)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(num_tokens)]


def arrivals(load: float, rng: random.Random, full: float = FULL) -> Iterator[int]:
    """Number of requests that come in each step; the worker can serve `full` of them in a step."""
    due = rng.expovariate(load * full)
    for step in range(1 << 30):
        count = 0
        while due <= step:
            due += rng.expovariate(load * full)
            count += 1
        yield count


def offer(
    world: PressureWorld, send: Send, load: float, seconds: float, rng: random.Random, full: float = FULL
) -> float:
    """Offer this share of the load that the worker can serve; output tokens per second over the last two thirds."""
    num_steps = round(seconds / STEP_S)
    coming, num_before = arrivals(load, rng, full), 0
    for step in range(num_steps):
        if step == num_steps // 3:
            num_before = world.output_tokens
        for _ in range(next(coming)):
            send(world, f"r{len(world.requests)}", rng)
        world.step()
    return (world.output_tokens - num_before) / (num_steps - num_steps // 3) / STEP_S


def check_drained(world: PressureWorld) -> None:
    world.drain()
    assert world.failed == []
    world.check(idle=True)


def serve_rising_load(
    send: Send,
    loads: Sequence[float],
    seconds: float,
    check: Callable[[PressureWorld], None],
    *,
    full: float = FULL,
    seed: int = 1,
    **fields: Any,
) -> dict[float, float]:
    """Offer each load to a world of its own and check it; output tokens per second by load, which must not fall."""
    speeds = {}
    for load in loads:
        world = PressureWorld(**fields)
        speeds[load] = offer(world, send, load, seconds, random.Random(seed), full)
        print(
            f"seed {seed} load {load}: {speeds[load]:.0f} tok/s, {world.num_ended} of {len(world.requests)} answered, "
            f"{world.scheduler.num_preemptions} preemptions, {world.num_without_a_seat} without a seat, "
            f"longest gap {world.longest_gap_s:.1f} s"
        )
        world.check()
        assert world.failed == []
        check(world)
    best = 0.0
    for load, speed in speeds.items():
        assert speed > 0.9 * best, f"{speeds} falls at load {load}"
        best = max(best, speed)
    return speeds


SENDS = [handed_over, handed_over_without_a_bound, computed_here, half_and_half]
slowly = pytest.mark.slow


@pytest.mark.parametrize(
    ("send", "loads"),
    [
        (handed_over_without_a_bound, (0.9, 2.0)),
        (half_and_half, (0.9, 2.0)),
        *(pytest.param(send, (0.6, 0.9, 1.2, 2.0), marks=slowly) for send in SENDS),
    ],
)
def test_nothing_fails_or_slows_as_load_rises(send: Send, loads: Sequence[float]) -> None:
    def check(world: PressureWorld) -> None:
        assert world.longest_gap_s < MAX_GAP_S
        assert world.scheduler.num_preemptions <= 3

    serve_rising_load(send, loads, 60.0, check, num_blocks=NUM_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("send", SENDS)
def test_long_runs_of_load(send: Send, seed: int) -> None:
    def check(world: PressureWorld) -> None:
        gaps = sorted(request.longest_gap_s for request in world.requests.values())
        assert gaps[int(0.99 * len(gaps))] < MAX_GAP_S

    serve_rising_load(send, (0.6, 0.9, 1.2, 2.0), 250.0, check, seed=seed, num_blocks=NUM_BLOCKS)


def test_one_large_prompt_neither_fails_nor_empties_the_pool_of_others() -> None:
    rng = random.Random(3)
    world = PressureWorld(num_blocks=NUM_BLOCKS)
    offer(world, handed_over, 0.9, 30.0, rng)
    num_before = world.num_ended
    large = world.hand_over("large", prompt(rng, 14_000), 50)
    coming = arrivals(0.9, rng)
    used, num_began = [], 0
    while large.first_s is None:
        for _ in range(next(coming)):
            handed_over(world, f"r{len(world.requests)}", rng)
        num_began += sum(len(grant.block_ids) < 800 for _, grant in world.grants)
        world.step()
        used.append(world.pool.num_used)
        assert world.now < 120.0, "the large prompt is passed for ever"
    waited_s = large.first_s - large.came
    print(f"the large prompt waited {waited_s:.1f} s; {world.num_ended - num_before} others ended, {num_began} began")
    assert num_began >= 5, "nobody may pass, however short"
    assert world.num_ended - num_before >= 10
    check_drained(world)


def test_a_blocked_head_is_passed_by_a_bounded_amount_of_others() -> None:
    """Answers are far longer than they are expected to be, so all that pass make the head wait longer."""
    rng = random.Random(4)
    world = PressureWorld(num_blocks=100)
    world.scheduler.admission.lengths = Expects(1)
    world.hand_over("first", prompt(rng, 10 * BLOCK_SIZE), 200)
    world.step()
    large = world.hand_over("large", prompt(rng, 95 * BLOCK_SIZE), 10)
    num_steps = 0
    while large.first_s is None:
        if len(world.scheduler.awaiting_room) < 10:
            world.hand_over(f"small-{num_steps}", prompt(rng, BLOCK_SIZE), 100)
        world.step()
        num_steps += 1
        assert num_steps < 1500, "the head is passed for ever"
    begun = [request for name, request in world.requests.items() if name.startswith("small") and request.first_s]
    assert 10 < len(begun) <= 110, "about a pool's worth of blocks goes to those that pass"
    for name in [name for name, request in world.requests.items() if request.first_s is None]:
        world.cancel(name)
    check_drained(world)


# 98 blocks fit, but not the first token.
@pytest.mark.parametrize(
    ("num_large", "num_large_blocks", "is_received"), [(1, 99, False), (12, 98, False), (1, 98, True), (12, 99, True)]
)
def test_a_prompt_beside_lost_blocks_holds_nobody_up(num_large: int, num_large_blocks: int, is_received: bool) -> None:
    """A sender that is alive never confirms a lease: its blocks stay in quarantine, and no end of others frees them."""
    rng = random.Random(10)
    world = PressureWorld(num_blocks=100, handoff_timeout_s=4.0, lease_ttl_s=3.0)
    send = world.hand_over if is_received else world.compute_here
    world.is_silent = lambda worker_id: worker_id == "lost"
    world.hand_over("lost", prompt(rng, 2 * BLOCK_SIZE), 5, sender=PeerAddress("lost", 1, "", ""))
    world.step()
    world.cancel("lost")
    large = [send(f"large-{idx}", prompt(rng, num_large_blocks * BLOCK_SIZE), 5) for idx in range(num_large)]
    for step in range(2000):
        if step % 40 == 0:
            send(f"small-{step}", prompt(rng, 6 * BLOCK_SIZE), 20)
        world.step()
        assert world.failed == []
    assert world.role.num_quarantined_blocks == 2
    assert all(request.ended_s is None for request in large)
    assert world.num_unended <= num_large + 3, "the worker is stuck"
    world.role.peer_lost(WorkerEpoch("lost", 1))
    check_drained(world)


def test_whole_prompts_of_one_block_more_than_they_have_pass_a_preempted_head() -> None:
    """Received sequences that lack at most a block wait for nobody."""
    rng = random.Random(6)
    world = PressureWorld(num_blocks=40)
    world.scheduler.admission.lengths = Expects(1)
    for name in ("old", "young"):
        world.hand_over(name, prompt(rng, 18 * BLOCK_SIZE), 200)
    while not world.scheduler.num_preemptions:
        world.step()
    preempted = world.sequences["young"]
    assert not preempted.blocks
    small = world.make_sequence("small", prompt(rng, BLOCK_SIZE), preempted.sampling)
    small.blocks = BlockTable(world.pool.try_allocate(1) or [])
    small.num_computed_tokens = BLOCK_SIZE
    small.token_ids.append(7)
    world.requests["small"] = Request("small", [], 5, 5, world.now)
    world.add(small)
    world.step()
    assert small in world.scheduler.running
    assert preempted in world.scheduler.waiting
    check_drained(world)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slowly) for seed in (1, 2, 3))])
def test_cancels_dead_senders_forks_pins_and_loans_under_load(seed: int) -> None:
    """Everything that holds blocks at once, and nothing is lost: what is not cancelled and has a live sender ends."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = PressureWorld(num_blocks=300, max_num_seqs=24, lease_ttl_s=3.0, handoff_timeout_s=6.0)
    dead: set[str] = set()
    world.is_silent = lambda worker_id: worker_id in dead
    doomed: set[str] = set()
    shared = prompt(rng, 20 * BLOCK_SIZE)
    world.pool.pin(block_digests(b"root", shared, BLOCK_SIZE))
    loans: list[tuple[float, list[int]]] = []
    coming = arrivals(0.4, rng)
    for step in range(3000):
        for _ in range(next(coming)):
            name, num_outputs = f"r{step}-{rng.random():.6f}", rng.choice((10, 40, 160))
            tokens = prompt(rng, rng.choice((15, 16, 17, 200, 800)))
            kind = rng.random()
            if kind < 0.2:  # n > 1: forks of one prompt
                for fork in range(4):
                    world.hand_over(f"{name}-{fork}", shared + tokens[:20], num_outputs)
            elif kind < 0.4:
                world.compute_here(name, shared + tokens, num_outputs, max_tokens=1000)
            elif kind < 0.5 and len(dead) < 20:
                sender = PeerAddress(f"p{step}", 1, "", "")
                dead.add(sender.worker_id)
                world.hand_over(name, tokens, num_outputs, sender=sender)
                doomed.add(name)
            else:
                world.hand_over(name, tokens, num_outputs)
        if step % 40 == 0 and (spare := world.scheduler.admission.num_spare_blocks):
            loans.append((world.now + rng.random() * 5, world.pool.try_allocate(rng.randint(1, spare)) or []))
        for loan in [loan for loan in loans if loan[0] <= world.now]:
            loans.remove(loan)
            world.pool.release(loan[1])
        live = [name for name, request in world.requests.items() if request.ended_s is None and name not in doomed]
        if live and step % 50 == 0:
            world.cancel(rng.choice(live))
        if step % 500 == 499:  # known dead at last: their quarantined blocks are free
            for worker_id in dead:
                world.role.peer_lost(WorkerEpoch(worker_id, 1))
        world.step()
        world.scheduler.pool.check_integrity()
    for _, blocks in loans:
        world.pool.release(blocks)
    for worker_id in dead:
        world.role.peer_lost(WorkerEpoch(worker_id, 1))
    assert {failed[0] for failed in world.failed} == doomed
    assert {failed[2] for failed in world.failed} <= {PeerLost.code, TransferTimeout.code}
    for name in doomed:
        world.handoffs.pop(name, None)
        del world.requests[name]
    world.failed.clear()
    check_drained(world)


SEAT_LOADS = (0.6, 0.9, 1.2, 1.5, 2.0)


def short_answers(world: PressureWorld, name: str, rng: random.Random) -> Request:
    return world.hand_over(name, prompt(rng, 100), rng.randint(20, 80))


@pytest.mark.parametrize(
    ("send", "mean_output", "transfer_steps", "loads"),
    [
        (handed_over_without_a_bound, 525, 16, (0.9, 2.0)),
        (short_answers, 50, 16, (0.9, 2.0)),
        *(pytest.param(send, _MEAN_OUTPUT, 1, SEAT_LOADS, marks=slowly) for send in (handed_over, half_and_half)),
        pytest.param(handed_over_without_a_bound, 525, 16, SEAT_LOADS, marks=slowly),
        pytest.param(short_answers, 50, 16, SEAT_LOADS, marks=slowly),
    ],
)
def test_where_seats_are_short_streams_go_on_and_none_is_empty(
    send: Send, mean_output: float, transfer_steps: int, loads: Sequence[float]
) -> None:
    """A sequence without a seat waits before its first token, and leases are in transit while others end."""
    num_seats = 32

    def check(world: PressureWorld) -> None:
        assert world.longest_gap_s < MAX_GAP_S
        assert world.num_without_a_seat <= num_seats // 4

    speeds = serve_rising_load(
        send,
        loads,
        50.0,
        check,
        full=num_seats / mean_output,
        num_blocks=20_000,
        max_num_seqs=num_seats,
        transfer_steps=transfer_steps,
    )
    assert speeds[2.0] > 0.97 * num_seats / STEP_S


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_seats_that_are_all_taken_hold_nobody_up_for_ever(max_num_seqs: int) -> None:
    """Answers are longer than they are expected to be, so some are preempted while all seats are taken."""
    rng = random.Random(8)
    world = PressureWorld(num_blocks=200, max_num_seqs=max_num_seqs)
    world.scheduler.admission.lengths = Expects(1)
    requests = [world.hand_over(f"r{idx}", prompt(rng, rng.choice((100, 700, 1500))), 100) for idx in range(20)]
    check_drained(world)
    assert [request.num_tokens for request in requests] == [99] * 20, "the first one comes from the prefill worker"
    began = [request.first_s for request in requests]
    assert began == sorted(began, key=lambda first_s: first_s or 0.0), "nobody is passed"
    assert world.now < 20 / max_num_seqs * 110 * STEP_S, "a seat stood empty"
