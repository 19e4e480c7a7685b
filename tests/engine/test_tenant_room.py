"""Seats and blocks of one worker between tenants, in virtual time: real DecodeRole and Scheduler, no model."""

from __future__ import annotations

import itertools
import random

import pytest

from tandem.engine.block_table import BlockTable
from tandem.engine.pool_forecast import BlockDemand
from tandem.engine.sequence import Sequence
from tandem.engine.tenant_room import TenantShares
from tandem.engine.token_array import token_array
from tandem.protocol.messages import WorkerPriority
from tandem.protocol.sampling import SamplingParams
from tests.support.answers import Expects
from tests.support.pressure_world import STEP_S, PressureWorld, Request

A, B, C = WorkerPriority(tenant="a"), WorkerPriority(tenant="b"), WorkerPriority(tenant="c")
NUM_SEATS = 16
KINDS = ["handed over", "computed here"]


class World(PressureWorld):
    """Requests of several tenants, each with a prompt of its own."""

    def __init__(self, *, num_blocks: int = 4000, max_num_seqs: int = NUM_SEATS) -> None:
        super().__init__(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self._first_tokens = itertools.count(10_000, 10_000)
        self.tenants: dict[str, list[Request]] = {}

    def ask(self, priority: WorkerPriority, num_outputs: int, *, num_prompt: int = 20, kind: str = KINDS[0]) -> Request:
        first = next(self._first_tokens)
        prompt = list(range(first, first + num_prompt))
        begin = self.hand_over if kind == KINDS[0] else self.compute_here
        request = begin(f"{priority.tenant}-{first}", prompt, num_outputs, priority=priority)
        self.tenants.setdefault(priority.tenant, []).append(request)
        return request

    def num_seats(self, priority: WorkerPriority) -> int:
        """Sequences of a tenant that run or are received."""
        holding = (*self.scheduler.running, *self.scheduler.receiving)
        return sum(sequence.priority.tenant == priority.tenant for sequence in holding)

    def expected(self) -> list[BlockDemand]:
        """What each sequence holds and is expected to need until its end."""
        return [self.scheduler.admission.held(sequence) for sequence in self.scheduler.running]

    def end(self) -> None:
        """Until all is served and nothing is held."""
        self.drain()
        self.check(idle=True)

    def wait_for(self, *requests: Request, limit: int) -> int:
        """Steps until these have ended."""
        for num_steps in range(limit):
            if all(request.ended_s is not None for request in requests):
                return num_steps
            self.step()
            self.check()
        raise AssertionError(f"{[r.request_id for r in requests if r.ended_s is None]} did not end in {limit} steps")


def fill(world: World, priority: WorkerPriority, num: int, num_outputs: int, kind: str, num_prompt: int = 20) -> None:
    for _ in range(num):
        world.ask(priority, num_outputs, kind=kind, num_prompt=num_prompt)
    world.run(10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_answer_does_not_wait_for_another_tenants_long_ones(kind: str) -> None:
    world = World()
    fill(world, A, 4 * NUM_SEATS, 2000, kind)
    assert world.num_seats(A) == NUM_SEATS
    assert world.wait_for(world.ask(B, 4, kind=kind), limit=12) <= 12
    # What gave way comes back at once, and goes on before requests of its tenant that came later.
    world.run(2)
    assert world.num_seats(A) == NUM_SEATS
    assert all(sequence.num_output_tokens > 1 for sequence in world.scheduler.running)


@pytest.mark.parametrize("kind", KINDS)
def test_tenants_with_much_to_do_have_seats_by_weight(kind: str) -> None:
    world = World()
    fill(world, A, 2 * NUM_SEATS, 400, kind)
    heavy = WorkerPriority(tenant="b", weight=3.0)
    fill(world, heavy, 2 * NUM_SEATS, 400, kind)
    assert (world.num_seats(A), world.num_seats(heavy)) == (NUM_SEATS // 4, NUM_SEATS * 3 // 4)
    world.end()


@pytest.mark.parametrize("kind", KINDS)
def test_tenants_do_not_push_each_other_out_in_turn(kind: str) -> None:
    world = World()
    for priority in (A, B, C):
        fill(world, priority, 2 * NUM_SEATS, 300, kind)
    num_preemptions = world.scheduler.num_preemptions
    assert num_preemptions <= NUM_SEATS, "each seat changes hands at most once"
    world.run(200)
    assert world.scheduler.num_preemptions == num_preemptions
    assert sorted(world.num_seats(priority) for priority in (A, B, C)) == [5, 5, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_change_hands_where_seats_are_left(kind: str) -> None:
    world = World(num_blocks=100, max_num_seqs=64)
    fill(world, A, 12, 1000, kind, num_prompt=100)
    long = world.ask(B, 4, num_prompt=400, kind=kind)  # a quarter of the pool
    assert world.wait_for(long, limit=12) <= 12
    world.end()


def test_what_does_not_fit_anyhow_pushes_nobody_out() -> None:
    world = World(num_blocks=100)
    fill(world, A, 4, 500, KINDS[0], num_prompt=100)
    fill(world, B, 4, 500, KINDS[0], num_prompt=100)
    num_preemptions = world.scheduler.num_preemptions
    request = world.ask(C, 4, num_prompt=1590, kind=KINDS[1])  # all of the pool
    world.run(50)
    # It may have what the others hold above what it holds, which is nothing: all of them give way but it gets in.
    assert world.scheduler.num_preemptions - num_preemptions in (0, 8)
    world.drain()
    assert request.ended_s is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_steady_tenant_beside_a_hoard_is_as_fast_as_alone(kind: str) -> None:
    """Its requests come one after the other; the hoard pays for what is computed again, and for no more."""

    def firsts(*, has_hoard: bool) -> tuple[list[float], int]:
        world = World()
        if has_hoard:
            fill(world, A, 8 * NUM_SEATS, 2000, kind)
        waits = []
        for _ in range(50):
            request = world.ask(B, 8, kind=kind)
            world.wait_for(request, limit=40)
            assert request.ended_s is not None
            waits.append(request.ended_s - request.came)
        tokens = sum(request.num_tokens for request in world.tenants.get("a", []))
        return waits, tokens * NUM_SEATS // max(world.num_steps * NUM_SEATS, 1)

    alone, _ = firsts(has_hoard=False)
    beside, rate = firsts(has_hoard=True)
    assert max(beside) <= max(alone) + 3 * STEP_S
    assert rate >= NUM_SEATS - 3, f"the hoard got {rate} tokens a step of {NUM_SEATS - 1}"


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_whatever_comes_everything_ends_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)
    world = World(num_blocks=rng.choice([60, 150, 1000]), max_num_seqs=rng.choice([3, 16]))
    tenants = [WorkerPriority(tenant=name, weight=rng.choice([0.5, 1.0, 4.0])) for name in "abcd"]
    for _ in range(400):
        if rng.random() < 0.3:
            kind, num_prompt = rng.choice(KINDS), rng.choice([5, 60, 300])
            world.ask(rng.choice(tenants), rng.choice([1, 5, 80, 300]), kind=kind, num_prompt=num_prompt)
        if rng.random() < 0.05 and world.requests:
            request_id = rng.choice(list(world.requests))
            if world.requests[request_id].ended_s is None:
                world.cancel(request_id)
        world.step()
        world.check()
    world.end()
    assert not world.failed
    assert all(request.ended_s is not None for request in world.requests.values())


def sequence(priority: WorkerPriority, name: str, num_blocks: int = 0) -> Sequence:
    ids, sampling = token_array([1]), SamplingParams(max_tokens=4)
    return Sequence(name, ids, 1, sampling, root=b"", priority=priority, blocks=BlockTable(range(num_blocks)))


def shares_of(**num_held: int) -> TenantShares:
    shares = TenantShares(num_seats=10, num_blocks=100)
    for name, num in num_held.items():
        held = [sequence(WorkerPriority(tenant=name), f"{name}{idx}", 5) for idx in range(num)]
        for idx, one in enumerate(held):
            one.arrival = idx + 1
            shares.take(one, 5)
        shares.add_victims(held)
    return shares


@pytest.mark.parametrize(
    ("held", "num_victims"),
    [({"a": 8}, 7), ({"a": 8, "b": 1}, 6), ({"a": 5, "b": 5}, 0), ({"a": 5, "b": 4}, 0), ({"a": 6, "b": 4}, 1)],
)
def test_a_tenant_gives_way_while_it_still_holds_more(held: dict[str, int], num_victims: int) -> None:
    victims = list(shares_of(**held).victims_for(sequence(B, "new")))
    assert [victim.request_id for victim in victims] == [f"a{held['a'] - 1 - idx}" for idx in range(num_victims)]


def test_the_poorest_tenant_takes_its_turn_first_and_equals_in_order() -> None:
    shares = shares_of(a=3, b=1)
    line = [sequence(A, "a-1"), sequence(C, "c-1"), sequence(B, "b-1"), sequence(C, "c-2"), sequence(C, "c-3")]
    names = []
    for one in shares.in_turn(line):
        names.append(one.request_id)
        shares.take(one, 1)
    assert names == ["c-1", "b-1", "c-2", "c-3", "a-1"]


def test_a_growing_stream_takes_its_blocks_from_the_tenant_that_holds_most() -> None:
    world = World(num_blocks=40)
    fill(world, A, 6, 200, KINDS[1], num_prompt=60)
    small = world.ask(B, 100, kind=KINDS[1])
    world.wait_for(small, limit=120)
    assert small.longest_gap_s <= 2 * STEP_S, "it was never preempted, though it came last"
    world.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_only_as_many_give_way_as_the_room_of_the_next_steps_takes(kind: str) -> None:
    """The pool is not enough for what the others are expected to need until their end, as their answers got longer."""
    world = World(num_blocks=200, max_num_seqs=64)
    world.scheduler.admission.lengths = Expects(30)
    fill(world, A, 20, 1000, kind)
    world.run(40)
    assert world.num_seats(A) == 20
    world.scheduler.admission.lengths = Expects(900)
    assert sum(admission.num_steps for admission in world.expected()) > 200 * 16
    assert world.wait_for(world.ask(B, 4, kind=kind), limit=12) <= 12
    assert world.scheduler.num_preemptions <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_choices_that_share_a_prompt_give_way_for_two_at_once(kind: str) -> None:
    """Once the first of them has given way, the blocks of the prompt are the other's alone."""
    world = World(max_num_seqs=3)
    begin = world.hand_over if kind == KINDS[0] else world.compute_here
    for idx, first in enumerate((0, 1000, 1000)):
        begin(f"a-{idx}", list(range(first, first + 100)), 1000, priority=A)
        world.run(3)
    assert world.num_seats(A) == 3
    requests = [world.ask(priority, 4, kind=kind) for priority in (B, C)]
    assert world.wait_for(*requests, limit=12) <= 12
    world.end()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_choice_that_gives_way_frees_the_prompt_too(kind: str) -> None:
    world = World(num_blocks=110, max_num_seqs=64)
    world.scheduler.admission.lengths = Expects(60)
    begin = world.hand_over if kind == KINDS[0] else world.compute_here
    for idx in range(4):
        first = idx // 2 * 1000
        begin(f"a-{idx}", list(range(first, first + 700)), 1000, priority=A)
        world.run(4)
    assert world.num_seats(A) == 4
    assert world.wait_for(world.ask(B, 4, num_prompt=480, kind=kind), limit=12) <= 12
    world.end()


def test_turns_of_many_tenants_take_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one request in line, and all of them get their turn."""

    def num_looks(num_tenants: int) -> int:
        looks = 0
        look = TenantShares.share

        def counted(shares: TenantShares, one: Sequence) -> float:
            nonlocal looks
            looks += 1
            return look(shares, one)

        monkeypatch.setattr(TenantShares, "share", counted)
        shares = shares_of(a=8)
        line = [sequence(WorkerPriority(tenant=f"t{idx}"), f"t{idx}") for idx in range(num_tenants)]
        for one in shares.in_turn(line):
            shares.take(one, 1)
        monkeypatch.undo()
        return looks

    assert num_looks(1000) <= 12 * num_looks(100)


def test_turns_follow_what_others_give_up_meanwhile() -> None:
    shares = shares_of(a=8, b=3)
    line = [sequence(C, "c-1"), sequence(B, "b-1"), sequence(A, "a-1"), sequence(C, "c-2")]
    names = []
    for one in shares.in_turn(line):
        names.append(one.request_id)
        if one.request_id == "c-1":
            for _ in zip(range(6), shares.victims_for(one), strict=False):
                pass  # of the tenant that holds most, which then holds less than B
        shares.take(one, 1)
    assert names == ["c-1", "c-2", "a-1", "b-1"]


@pytest.mark.parametrize("num_seats", [3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_waits_for_others_to_end_lets_smaller_ones_pass(kind: str, num_seats: int) -> None:
    """A third tenant passes it, and still takes room back."""
    world = World(num_blocks=400, max_num_seqs=num_seats)
    world.scheduler.admission.lengths = Expects(100)
    for _ in range(2):
        fill(world, A, 1, 3000, kind, num_prompt=2500)
    large = world.ask(B, 4, num_prompt=4700, kind=kind)
    world.run(2)
    assert world.wait_for(world.ask(C, 4, num_prompt=1440, kind=kind), limit=12) <= 12
    world.drain()
    assert large.ended_s is not None
