"""The autoscaler's decisions. Classes of tests: what it does, how others failed, and what must always hold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role, StepStats, WorkerLoad, WorkerState
from tandem.scheduling.autoscaling.autoscaler import decide
from tandem.scheduling.autoscaling.in_flight import AutoscalerState
from tandem.scheduling.autoscaling.moves import Move, Reason, ScalingDecision
from tandem.scheduling.autoscaling.observation import Fleet, Observation, WorkerView, observe, server_of
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.scheduling.autoscaling.prediction import Backlog, Capacity
from tandem.scheduling.autoscaling.traffic import DAY_S, Traffic
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel, StepCosts
from tandem.scheduling.workers.demand import DemandMeter
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card

P, D = Role.PREFILL, Role.DECODE
FLIPS = AutoscalerPolicy(cooldown_s=0.0)
ALL = AutoscalerPolicy(acts=frozenset({"flip", "add", "remove"}), max_workers=16, remove_after_s=20.0, start_s=30.0)
CAPACITY = Capacity(costs=CPU_PRIOR, step_tokens=512, kv_tokens=65_536, num_seats=64)
TICK_S = 2.0


class World:
    """Workers whose load the test states, and whose moves are carried out at once."""

    def __init__(self, num_prefill: int, num_decode: int, policy: AutoscalerPolicy = FLIPS) -> None:
        roles = [P] * num_prefill + [D] * num_decode
        self.views = {f"w{i}": WorkerView(worker_id=f"w{i}", role=role) for i, role in enumerate(roles)}
        self.policy, self.state, self.meter = policy, AutoscalerState(), DemandMeter()
        self.now, self.capacity, self.backlog, self.outputs = 1000.0, CAPACITY, Backlog(), 100.0
        self.moves: list[Move] = []
        self.can_place = True
        self.fleet = Fleet()
        self.tick_s = TICK_S

    def num(self, role: Role) -> int:
        return sum(view.role == role for view in self.views.values())

    @property
    def observation(self) -> Observation:
        return Observation(
            workers=tuple(self.views.values()),
            demand=self.meter.total,
            capacity=self.capacity,
            backlog=self.backlog,
            expected_output_tokens=self.outputs,
            fleet=self.fleet,
        )

    def tick(self, rate: float = 0.0, prompt: int = 1000, num_ticks: int = 1) -> ScalingDecision:
        """Let time pass while `rate` requests arrive per second."""
        for _ in range(num_ticks):
            begin, self.now = self.now, self.now + self.tick_s
            for _ in range(int(rate * self.now) - int(rate * begin)):
                self.meter.note(prompt, 0, None, None)
            decision, self.state = decide(self.observation, self.now, self.state, self.policy)
            check(decision)
            if decision.move is not None:
                self.moves.append(decision.move)
                self._carry_out(decision.move)
        return decision

    def until(self, rate: float, is_done: Callable[[], bool], num_ticks: int = 200, prompt: int = 1000) -> None:
        for _ in range(num_ticks):
            if is_done():
                return
            self.tick(rate, prompt)
        raise AssertionError(f"not in {num_ticks} ticks: {self.moves}")

    def _carry_out(self, move: Move) -> None:
        for name in [name for name in self.views if server_of(name) in move.worker_ids]:
            if move.kind == "flip":
                self.views[name] = replace(self.views[name], role=move.role)
            else:
                del self.views[name]
        for _ in range(move.num_added if self.can_place else 0):
            name = f"n{len(self.moves)}-{len(self.views)}"
            self.views[name] = WorkerView(worker_id=name, role=move.role)


def check(decision: ScalingDecision) -> None:
    """Every figure is a number, and every hold says why."""
    assert decision.reason
    assert isinstance(decision.code, Reason)
    for prediction in (decision.now, decision.after):
        if prediction is not None:
            figures = (prediction.attainment, prediction.score, prediction.least)
            assert all(0 <= figure <= 1 + 1e-9 for figure in figures), figures
            others = (prediction.prefill_wait_s, prediction.decode_wait_s, prediction.itl_s, prediction.load)
            assert all(math.isfinite(figure) and figure >= 0 for figure in others), others


class TestMoves:
    def test_prompts_that_one_worker_cannot_compute_take_decode_workers(self) -> None:
        world = World(1, 3)
        world.tick(1.7, num_ticks=20)
        assert world.num(P) > 1
        assert {move.role for move in world.moves} == {P}

    def test_answers_that_are_slow_take_prefill_workers(self) -> None:
        world = World(3, 1)
        world.outputs, world.backlog = 400.0, Backlog(0.0, 60, 300.0)
        world.tick(2.0, 100, 20)
        assert world.num(D) > 1
        assert {move.role for move in world.moves} == {D}

    def test_two_observations_must_agree(self) -> None:
        world = World(1, 3)
        world.backlog = Backlog(20_000)
        world.tick(0.5)
        codes = [world.tick(0.5).code for _ in range(2)]
        assert codes == [Reason.AGREEING, Reason.FLIP]
        assert world.moves

    def test_the_worker_with_least_to_lose_is_flipped(self) -> None:
        world = World(1, 3)
        for name, num in (("w1", 5), ("w2", 2), ("w3", 9)):
            world.views[name] = replace(world.views[name], num_running=num)
        world.backlog = Backlog(20_000)
        world.until(1.0, lambda: bool(world.moves))
        assert world.moves[0].worker_ids[0] == "w2"

    def test_one_move_is_in_flight_at_a_time(self) -> None:
        world = World(1, 5)
        world.backlog = Backlog(50_000)
        world._carry_out = lambda move: None  # type: ignore[method-assign]  # the move stays under way
        world.until(1.5, lambda: bool(world.moves))
        assert world.tick(1.5).code is Reason.IN_FLIGHT
        assert len(world.moves) == 1

    def test_a_worker_that_dies_while_moving_does_not_block_the_next_move(self) -> None:
        world = World(1, 5)
        world.backlog = Backlog(50_000)
        world._carry_out = lambda move: [world.views.pop(name) for name in move.worker_ids]  # type: ignore
        world.until(1.5, lambda: bool(world.moves))
        assert world.tick(1.5).code is not Reason.IN_FLIGHT

    def test_an_empty_pool_gets_a_worker(self) -> None:
        world = World(3, 0)
        decision = world.tick(0.1, num_ticks=2)
        assert decision.reason.startswith("flip w0 to decode: 0.0% in time on 3 prefill + 0 decode workers")
        assert "00000" not in decision.reason, "an answer that never comes takes no time"
        assert world.num(D) == 1

    def test_flips_come_before_new_workers(self) -> None:
        world = World(1, 7, ALL)
        world.until(1.5, lambda: bool(world.moves))
        assert world.moves[0].kind == "flip"

    def test_more_traffic_than_all_can_serve_adds_workers_less_removes_them(self) -> None:
        world = World(2, 2, ALL)
        world.tick(5.0, num_ticks=200)
        most = len(world.views)
        assert most > 6
        world.tick(0.2, num_ticks=400)
        assert len(world.views) < most / 2
        assert {move.kind for move in world.moves} >= {"add", "remove"}

    def test_without_leave_to_add_it_advises(self) -> None:
        world = World(2, 2)
        decision = world.tick(5.0, num_ticks=30)
        assert decision.advice is not None
        assert decision.advice.kind == "add"
        assert "advice" in decision.as_dict()
        assert decision.code is Reason.ADVISED
        assert decision.reason.startswith(f"a move that it may not make would help: {decision.advice} would bring ")
        assert "give --max-workers, or run tandem add" in decision.reason
        assert {move.kind for move in world.moves} <= {"flip"}

    def test_a_policy_that_would_swing_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"headroom=1"):
            AutoscalerPolicy(headroom=1.0)
        with pytest.raises(ConfigError, match=r"min_workers=3"):
            AutoscalerPolicy(min_workers=3, max_workers=2)


class TestServers:
    """A server with several data-parallel ranks is several workers, and moves as one."""

    @pytest.mark.parametrize("policy", [ALL, FLIPS], ids=["acts", "advises"])
    @pytest.mark.parametrize("role", [P, D])
    def test_the_last_server_of_a_pool_is_never_named(self, policy: AutoscalerPolicy, role: Role) -> None:
        world, other = World(0, 0, policy), D if role is P else P
        world.views = {
            name: WorkerView(worker_id=name, role=own)
            for name, own in (("only.dp0", role), ("only.dp1", role), ("a.dp0", other), ("a.dp1", other), ("b", other))
        }
        for rate, queued in ((0.0, 0), (3.0, 100_000), (0.0, 0)):
            world.backlog = Backlog(queued, 500 if queued else 0, 500.0 if queued else 0.0)
            for _ in range(50):
                named = world.tick(rate)
                for move in (named.move, named.advice):
                    moved = move.worker_ids if move else ()
                    assert not {name.partition(".")[0] for name in moved} & {"only"}, move

    def test_all_ranks_go_at_once_and_count_as_one(self) -> None:
        world = World(0, 0, replace(ALL, min_workers=3))
        names = [f"{name}.dp{rank}" for name in "abcd" for rank in range(2)]
        world.views = {name: WorkerView(worker_id=name, role=P if name < "c" else D) for name in names}
        world.tick(0.0, num_ticks=300)
        assert [move.num_workers for move in world.moves] == [1]
        assert len(world.views) == 6

    @pytest.mark.parametrize(
        ("worker_id", "server"),
        [("decode-0", "decode-0"), ("decode-0.dp12", "decode-0"), ("a.dpx", "a.dpx"), (".dp1", ".dp1")],
    )
    def test_names_of_ranks(self, worker_id: str, server: str) -> None:
        assert server_of(worker_id) == server


class TestBounds:
    def test_a_worker_that_is_drained_by_hand_no_longer_counts_for_the_minimum(self) -> None:
        world = World(2, 2, replace(ALL, min_workers=3))
        world.views["w3"] = replace(world.views["w3"], is_ready=False)
        world.tick(0.0, num_ticks=100)
        assert world.moves == []

    def test_workers_that_come_count_for_the_most(self) -> None:
        world = World(2, 2, replace(ALL, max_workers=6))
        world.fleet = Fleet(coming=frozenset({"x", "y"}))
        codes = {world.tick(9.0).code for _ in range(100)}
        assert not [move for move in world.moves if move.kind == "add"]
        assert Reason.AT_MAX in codes

    def test_workers_whose_machines_stay_reserved_leave_last(self) -> None:
        world = World(1, 3, ALL)
        world.fleet = Fleet(spared=frozenset({"w0", "w1", "w2"}))
        world.until(0.0, lambda: bool(world.moves))
        assert world.moves[0].worker_ids == ("w3",)


class TestWithdrawal:
    def adding(self) -> World:
        """Four workers, and one or more that Ray has no room for."""
        world = World(2, 2, ALL)
        world.can_place = False
        world.until(5.0, lambda: any(move.kind == "add" for move in world.moves))
        world.fleet = Fleet(coming=frozenset({"new"}), num_unplaced=1)
        return world

    def until_over(self, world: World, rate: float) -> ScalingDecision:
        for _ in range(300):
            if (decision := world.tick(rate)).code is not Reason.IN_FLIGHT:
                return decision
        raise AssertionError("it is in flight for ever")

    def test_one_without_room_is_withdrawn_at_its_deadline_with_the_reason(self) -> None:
        world = self.adding()
        began_s = world.now
        decision = self.until_over(world, 5.0)
        assert decision.code is Reason.WITHDRAWN
        assert decision.withdrawn == world.moves[-1]
        assert "Ray has found no room by its deadline; no other add for 300 s" in decision.reason
        assert world.now - began_s == pytest.approx(ALL.move_deadline_s, abs=2 * TICK_S)

    def test_a_setback_ends_it_at_once_with_its_reason(self) -> None:
        world = self.adding()
        world.fleet = Fleet(setback="decode-1 was not added: no such model")
        decision = world.tick(5.0)
        assert (decision.code, decision.withdrawn) == (Reason.WITHDRAWN, world.moves[-1])
        assert "decode-1 was not added: no such model; no other add for 300 s" in decision.reason

    def test_each_withdrawal_in_a_row_makes_the_pause_longer(self) -> None:
        world = self.adding()
        world.tick_s = 5 * TICK_S  # pauses are long
        pauses = []
        for _ in range(3):
            world.fleet = Fleet(setback="no room")
            assert world.tick(5.0).code is Reason.WITHDRAWN
            pauses.append(world.state.pause("add").until_s - world.now)
            world.fleet = Fleet()
            num = len(world.moves)
            world.until(5.0, lambda num=num: "add" in {move.kind for move in world.moves[num:]}, 1000)  # type: ignore
        assert pauses == [300.0, 600.0, 1200.0]
        world.views |= {f"late{idx}": WorkerView(worker_id=f"late{idx}", role=P) for idx in range(20)}
        world.tick(5.0)
        assert world.state.pauses == {}

    def test_one_that_has_no_room_is_given_up_when_no_longer_needed(self) -> None:
        world = self.adding()
        decision = self.until_over(world, 0.0)
        assert (decision.code, decision.withdrawn) == (Reason.UNWANTED, world.moves[-1])
        assert world.state.pause("add").num_withdrawn == 0, "nothing went wrong"
        assert world.state.moving is None

    def test_one_that_loads_its_model_is_waited_for(self) -> None:
        world = self.adding()
        world.fleet = Fleet(coming=frozenset({"new"}))
        assert {world.tick(0.0).code for _ in range(100)} == {Reason.IN_FLIGHT}

    def test_a_model_that_loads_slowly_has_longer(self) -> None:
        policy = replace(ALL, start_s=400.0)
        assert [policy.deadline_s(kind) for kind in ("flip", "remove", "add")] == [60.0, 300.0, 1200.0]

    def test_a_removal_that_is_refused_is_over_at_once(self) -> None:
        world = World(3, 3, ALL)
        world._carry_out = lambda move: None  # type: ignore[method-assign]
        world.until(0.0, lambda: bool(world.moves))
        world.fleet = Fleet(setback="w3 is already leaving.")
        assert "w3 is already leaving" in world.tick(0.0).reason
        world.fleet = Fleet()
        assert world.tick(0.0, num_ticks=100).code is Reason.BACKOFF


class TestFailuresOfOthers:
    def test_a_burst_that_waits_is_seen_before_the_rate_is(self) -> None:
        """Waiting in the queue counts too: the service time alone looks good."""
        world = World(2, 4, ALL)
        world.tick(0.1, num_ticks=30)
        assert not [move for move in world.moves if move.role == P and move.kind != "remove"]
        world.backlog = Backlog(prompt_tokens=30_000)
        world.tick(0.2, num_ticks=3)
        assert world.moves[-1].kind in {"flip", "add"}
        assert world.moves[-1].role == P

    def test_first_steps_of_new_workers_do_not_poison_the_costs(self) -> None:
        costs = CostModel()

        def step(worker: str, factor: float, num: int) -> None:
            for idx in range(num):
                seqs, kv = 1 + idx % 8, 200 * (1 + idx % 8)
                duration_s = CPU_PRIOR.step_s(float(seqs), float(kv)) * factor
                stats = StepStats(duration_s=duration_s, num_decode_seqs=seqs, num_decode_kv_tokens=kv)
                costs.learn(worker, "cpu-1", stats)

        step("old", 1.0, 200)
        before = costs.steps("cpu-1").costs.step_s(4.0, 800.0)
        step("new", 20.0, 30)
        assert costs.steps("cpu-1").costs.step_s(4.0, 800.0) == before
        step("new", 1.0, 50)
        assert costs.steps("cpu-1").costs.step_s(4.0, 800.0) == pytest.approx(before, rel=0.05)
        step("third", 2.0, 300)  # no warm-up: it stays slow
        assert costs.steps("cpu-1").costs.step_s(4.0, 800.0) > 1.5 * before

    def test_no_traffic_is_a_rate_of_zero_and_makes_pools_small(self) -> None:
        world = World(7, 3, ALL)
        world.tick(3.0, num_ticks=100)
        decision = world.tick(0.0, num_ticks=400)
        assert decision.code is Reason.ON_TARGET
        assert len(world.views) == ALL.min_workers

    def test_very_little_load_adds_nothing_and_makes_pools_small(self) -> None:
        """A slow machine: the time an idle worker takes for a prompt and a step is not a reason for a second one."""
        policy = replace(ALL, max_workers=3)
        slow = replace(CAPACITY, costs=StepCosts(38e-3, 2.5e-3, 700e-9, 5e-3, 2e-6))
        for pools in ((2, 1), (1, 2), (1, 1)):
            world = World(*pools, policy)
            world.capacity, world.outputs = slow, 48.0
            decision = world.tick(0.36, 8, num_ticks=120)
            assert len(world.views) == 2, decision.reason
            assert {move.kind for move in world.moves} <= {"remove", "flip"}

    def test_a_cache_that_would_be_lost_does_not_keep_an_idle_worker(self) -> None:
        """What it saved is computed again with the requests that come, and not all at once."""
        world = World(2, 1, replace(ALL, max_workers=3))
        world.capacity, world.outputs = replace(CAPACITY, costs=StepCosts(50e-3, 1.9e-3, 100e-9, 2e-3, 2e-6)), 48.0
        for tick in range(120):
            if tick % 4 == 0:
                world.meter.note(600, 592, None, None)
            world.tick()
        assert len(world.views) == 2

    def test_growth_is_undone_when_one_client_is_left(self) -> None:
        """Twelve clients, then one: bursts of the past and long means must not keep the added workers."""
        world = World(1, 1, replace(ALL, max_workers=4))
        world.capacity, world.outputs = replace(CAPACITY, costs=StepCosts(38e-3, 2.5e-3, 700e-9, 5e-3, 2e-6)), 48.0
        world.backlog = Backlog(1000, 12, 624.0)
        world.tick(2.0, 120, num_ticks=90)
        assert len(world.views) > 2
        world.backlog = Backlog(0, 1, 624.0)
        world.until(0.36, lambda: len(world.views) == 2, num_ticks=120, prompt=8)

    def test_an_overloaded_pool_gives_no_worker_away_for_faster_answers(self) -> None:
        """With all prompts late, their share in time is 0 either way; the queue would grow seven times as fast."""
        world = World(2, 2)
        world.capacity = replace(CAPACITY, costs=StepCosts(40e-3, 2e-3, 1e-6, 8e-3, 20e-6))
        for _ in range(16):
            world.meter.note(1000, 0, None, None)
        world.backlog = Backlog(12_000, 2, 1000.0)
        world.tick(0.8, 1000, 8)
        assert not [move for move in world.moves if move.role == D], world.moves

    def test_a_flood_that_no_single_move_could_serve_adds_workers_step_by_step(self) -> None:
        """Twice as many workers would still have nothing in time: no gain, and yet the way."""
        world = World(1, 1, replace(ALL, max_workers=40))
        world.until(60.0, lambda: len(world.views) >= 20, num_ticks=300, prompt=2000)

    @pytest.mark.parametrize("policy", [FLIPS, replace(ALL, max_workers=8)])
    def test_a_flood_beyond_all_workers_flips_those_that_have_little_to_do(self, policy: AutoscalerPolicy) -> None:
        """No flip brings an answer in time, and no worker can be added: still three times as much is served."""
        world = World(2, 6, policy)
        world.backlog = Backlog(1_000_000, 5, 300.0)
        world.until(12.0, lambda: world.num(P) >= 6, num_ticks=60, prompt=2000)
        world.tick(12.0, 2000, 60)
        assert world.num(P) >= 6, "none goes back"

    @pytest.mark.parametrize(("every", "leaves"), [(12, True), (3, False)])
    def test_a_slow_moment_now_and_then_does_not_keep_a_spare_worker(self, every: int, leaves: bool) -> None:
        world = World(2, 2, replace(ALL, remove_after_s=60.0, acts=frozenset({"remove"})))
        for number in range(int(300 / TICK_S)):
            world.backlog = Backlog(50_000 if number % every == 0 else 0)
            world.tick(0.2)
        assert bool(world.moves) == leaves

    @pytest.mark.parametrize("is_spare_after", [True, False])
    def test_a_pause_of_the_router_says_nothing_of_spare_workers(self, is_spare_after: bool) -> None:
        policy = replace(ALL, remove_after_s=60.0, acts=frozenset({"remove"}))
        world = World(2, 2, policy)
        world.tick(0.2, num_ticks=25)
        before_s = world.state.spare_s
        assert 24 < before_s < 54
        world.now += 3600.0
        world.backlog = Backlog(0 if is_spare_after else 50_000)
        world.tick(0.0)
        assert abs(world.state.spare_s - before_s) <= policy.contrary_weight * 3 * policy.interval_s
        assert not world.moves
        world.backlog = Backlog(0)
        world.tick(0.0, num_ticks=60)
        assert world.moves, "it is removed once it was seen to be spare for that long"

    def test_a_worker_that_cannot_be_placed_is_given_up_and_blocks_nothing(self) -> None:
        world = World(2, 2, ALL)
        world.can_place = False
        world.until(5.0, lambda: any(move.kind == "add" for move in world.moves))
        codes = set()
        for _ in range(int(ALL.move_deadline_s / TICK_S) + 2):
            codes.add(world.tick(5.0).code)
        assert Reason.WITHDRAWN in codes
        num_adds = sum(move.kind == "add" for move in world.moves)
        world.tick(5.0, num_ticks=20)
        assert sum(move.kind == "add" for move in world.moves) == num_adds, "it pauses"
        world.can_place = True
        world.tick(0.0, num_ticks=600)
        assert len(world.views) == ALL.min_workers, "scaling down goes on meanwhile"

    def test_sizes_changed_by_hand_are_taken_as_they_are(self) -> None:
        world = World(2, 2, ALL)
        world.tick(1.0, num_ticks=50)
        for idx in range(6):
            world.views[f"hand{idx}"] = WorkerView(worker_id=f"hand{idx}", role=P)
        decision = world.tick(1.0)
        assert "8 prefill" in decision.reason.replace(f"{world.num(P)} prefill", "8 prefill")
        world.tick(1.0, num_ticks=400)
        assert len(world.views) <= 6, "surplus workers leave, also those that an operator added"
        for name in list(world.views)[2:]:
            del world.views[name]
        world.tick(3.0, num_ticks=100)
        assert len(world.views) > 3

    def test_requests_that_are_too_long_for_their_slo_do_not_keep_workers(self) -> None:
        """Replicas cannot shorten one request, so it must not set a least number of workers."""
        world = World(6, 4, ALL)
        world.tick(0.01, 20_000, num_ticks=400)
        assert len(world.views) <= 3

    def test_an_slo_that_no_worker_can_meet_adds_none_without_bound(self) -> None:
        world = World(2, 2, replace(ALL, max_workers=1000))
        world.capacity = replace(CAPACITY, costs=StepCosts(5.0, 1e-3, 0.0, 1e-3, 0.0))  # a step takes 5 s
        world.outputs = 10.0
        world.tick(0.1, num_ticks=300)
        assert len(world.views) <= 16
        world.outputs = 100.0
        assert Reason.UNREACHABLE in {world.tick(1.0).code for _ in range(50)}


Load = tuple[float, int, int, int]
LOADS = st.tuples(
    st.floats(0, 50),  # requests per second
    st.integers(1, 100_000),  # prompt tokens
    st.integers(0, 10**6),  # queued tokens
    st.integers(0, 500),  # sequences
)


class TestProperties:
    @given(
        num_prefill=st.integers(0, 6),
        num_decode=st.integers(0, 6),
        loads=st.lists(LOADS, max_size=6),
        outputs=st.floats(0, 5000),
        costs=st.tuples(*[st.floats(0, 10)] * 5),
    )
    @example(num_prefill=0, num_decode=2, loads=[(1.0, 1, 0, 0)], outputs=0.0, costs=(0.0, 0.0, 1e-200, 0.0, 0.0))
    @example(num_prefill=0, num_decode=2, loads=[(1.0, 1, 0, 0)], outputs=0.0, costs=(0.0, 0.0, 2e-311, 1.3, 0.0))
    def test_figures_are_numbers_and_pools_stay_within_their_bounds(
        self, num_prefill: int, num_decode: int, loads: list[Load], outputs: float, costs: tuple[float, ...]
    ) -> None:
        world = World(num_prefill, num_decode, replace(ALL, max_workers=12, remove_after_s=4.0, cooldown_s=0.0))
        world.outputs, world.capacity = outputs, replace(CAPACITY, costs=StepCosts(*costs))
        begin = len(world.views)
        for rate, prompt, queued, seqs in loads:
            world.backlog = Backlog(queued, seqs, 500.0 if seqs else 0.0)
            had_both = world.num(P) >= 1 and world.num(D) >= 1
            world.tick(rate, prompt, num_ticks=3)
            assert min(begin, 2) <= len(world.views) <= max(12, begin)
            if had_both:
                assert world.num(P) >= 1
                assert world.num(D) >= 1

    @pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))])
    def test_constant_load_settles(self, seed: int) -> None:
        rng = random.Random(seed)
        world = World(rng.randint(1, 8), rng.randint(1, 8), replace(ALL, cooldown_s=0.0))
        rate, prompt, world.outputs = rng.uniform(0, 8), rng.randint(1, 8000), rng.uniform(1, 500)
        world.tick(rate, prompt, num_ticks=200)
        num_moves = len(world.moves)
        world.tick(rate, prompt, num_ticks=100)
        assert len(world.moves) - num_moves <= 1, world.moves[num_moves:]

    @pytest.mark.parametrize(("burst", "calm"), [pytest.param(3.0, 0.5, marks=pytest.mark.slow), (10.0, 0.1)])
    def test_recovers_after_a_burst(self, burst: float, calm: float) -> None:
        world = World(2, 2, ALL)
        world.tick(calm, num_ticks=200)
        before = len(world.views)
        world.tick(burst, num_ticks=30)
        world.tick(calm, num_ticks=500)
        assert len(world.views) <= before + 1
        assert world.tick(calm).code in {Reason.ON_TARGET, Reason.AGREEING}


class TestTraffic:
    def test_follows_a_rate_and_its_trend(self) -> None:
        meter, traffic = DemandMeter(), Traffic()
        for tick in range(200):
            for _ in range(tick // 10):
                meter.note(100, 20, None, None)
            traffic = traffic.updated(meter.total, 2.0 * tick)
        assert traffic.rate(400.0, 0.0) == pytest.approx(9.5, rel=0.15)
        assert traffic.rate(400.0, 60.0) > traffic.rate(400.0, 0.0) + 0.7
        assert traffic.hit_ratio == pytest.approx(0.2)

    def test_knows_the_time_of_the_day_from_the_day_before(self) -> None:
        meter, traffic, step_s = DemandMeter(), Traffic(), 300.0
        for tick in range(int(2.4 * DAY_S / step_s)):
            now = tick * step_s
            for _ in range(60 if (now % DAY_S) / DAY_S >= 0.5 else 12):
                meter.note(100, 0, None, None)
            traffic = traffic.updated(meter.total, now)
        assert traffic.rate(now, 0.2 * DAY_S) > 2.5 * traffic.rate(now, 0.0)

    def test_the_last_and_longest_answers_of_a_burst_are_not_taken_for_all(self) -> None:
        meter, traffic = DemandMeter(), Traffic()
        for tick in range(15):
            meter.note(100, 0, None, None)
            for _ in range(20 if tick < 5 else 1):
                meter.note_answer(10 if tick < 5 else 300)
            traffic = traffic.updated(meter.total, 2.0 * tick)
        assert 20 < traffic.output_tokens < 90

    @given(counts=st.lists(st.integers(0, 200), max_size=50), ahead=st.floats(0, 1e6))
    def test_is_never_negative_or_nan(self, counts: list[int], ahead: float) -> None:
        meter, traffic = DemandMeter(), Traffic()
        for tick, count in enumerate(counts):
            for _ in range(count):
                meter.note(10, 0, 1.0, math.inf)
            traffic = traffic.updated(meter.total, float(tick))
        rate = traffic.rate(float(len(counts)), ahead)
        assert math.isfinite(rate)
        assert rate >= 0


def test_observes_the_registry() -> None:
    registry, costs = Registry(), CostModel()
    for worker_id, role in (("p", P), ("d", D), ("leaving", D)):
        add_ready(registry, make_card(worker_id, role))
    registry.set_state("leaving", WorkerState.DRAINING, "test")
    registry.reserve(RequestLoad("p", "d", 1000, 0, 1100)).prefill_done()
    registry.reserve(RequestLoad("p", "d", 1024, 0, 1100))
    registry.note_load("d", WorkerLoad(num_waiting=1), now=0.0)
    registry.demand.num_waiting_tokens = 5000  # in the router
    seen = observe(registry, costs, 64.0)
    assert [(view.worker_id, view.is_ready, view.num_running) for view in seen.workers] == [
        ("p", True, 0),
        ("d", True, 2),
        ("leaving", False, 0),
    ]
    # The second sequence has no token yet: it waits for prefill, and more decode workers would not help it.
    assert seen.backlog == Backlog(1024 + 5000, 1, 1100)
    assert observe(Registry(), costs, 64.0).workers == ()


def test_sequences_that_wait_for_room_wait_for_the_decode_pool() -> None:
    registry = Registry()
    for worker_id, role in (("p0", P), ("p1", P), ("d", D)):
        add_ready(registry, make_card(worker_id, role))
    for number in range(12):
        booking = registry.reserve(RequestLoad("p0", "d", 100, 0, 200))
        if number < 4:
            booking.prefill_done()
    registry.note_load("d", WorkerLoad(num_running=4, num_waiting_for_room=8), now=0.0)
    assert observe(registry, CostModel(), 500.0).backlog[1:] == (12, 200)
    registry.note_load("d", WorkerLoad(num_running=4), now=0.0)
    assert observe(registry, CostModel(), 500.0).backlog[1:] == (4, 200), "the others wait for prefill"
