from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import PeerAddress, Role, StepStats, WorkerCard, WorkerLoad, WorkerState
from tandem.scheduling.autoscaler import (
    AutoscalerPolicy,
    AutoscalerState,
    Observation,
    ScalingDecision,
    WorkerView,
    decide,
    observe,
)
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card

P, D = Role.PREFILL, Role.DECODE
EAGER = AutoscalerPolicy(num_agreeing=1, cooldown_s=0.0)


def make_views(num_prefill: int, num_decode: int) -> tuple[WorkerView, ...]:
    roles = [P] * num_prefill + [D] * num_decode
    return tuple(WorkerView(worker_id=f"w{i}", role=role) for i, role in enumerate(roles))


def make_observation(
    num_prefill: int = 2, num_decode: int = 2, *, queued: int = 0, seqs: int = 0, waiting: int = 0
) -> Observation:
    return Observation(
        workers=make_views(num_prefill, num_decode),
        queued_prompt_tokens=queued,
        prefill_tokens_per_s=1000.0,
        num_decode_seqs=seqs,
        num_decode_kv_tokens=seqs * 500,
        num_waiting_seqs=waiting,
        decode_costs=CPU_PRIOR,
        expected_output_tokens=100.0,
    )


def flipped(observation: Observation, decision: ScalingDecision) -> Observation:
    """The observation after the decision was carried out."""
    flip = decision.flip
    if flip is None:
        return observation
    views = [replace(v, role=flip.to_role) if v.worker_id == flip.worker_id else v for v in observation.workers]
    return replace(observation, workers=tuple(views))


def num_role(observation: Observation, role: Role) -> int:
    return sum(view.role == role for view in observation.workers)


def test_a_long_prefill_queue_takes_a_decode_worker() -> None:
    decision, state = decide(make_observation(1, 3, queued=20_000), 0.0, AutoscalerState(), EAGER)
    assert decision.flip is not None
    assert (decision.flip.worker_id, decision.flip.to_role) == ("w1", P)
    assert "prefill waits 20.00 s on 1 workers, decode 0.00 s on 3" in decision.reason
    assert "longer wait after the flip 10.00 s" in decision.reason
    assert state.moving == decision.flip


def test_crowded_decode_workers_take_a_prefill_worker() -> None:
    decision, _ = decide(make_observation(3, 1, seqs=64), 0.0, AutoscalerState(), EAGER)
    assert decision.flip is not None
    assert decision.flip.to_role == D
    assert decision.decode_wait_s > decision.prefill_wait_s == 0


def test_sequences_without_room_count_as_waiting() -> None:
    calm, _ = decide(make_observation(2, 2, seqs=8), 0.0, AutoscalerState(), EAGER)
    pressed, _ = decide(make_observation(2, 2, seqs=8, waiting=5), 0.0, AutoscalerState(), EAGER)
    assert pressed.decode_wait_s > calm.decode_wait_s + 1


def test_the_cheapest_worker_is_flipped() -> None:
    observation = make_observation(1, 3, queued=20_000)
    views = (
        observation.workers[0],
        *(replace(view, num_running=n) for view, n in zip(observation.workers[1:], (5, 2, 9), strict=True)),
    )
    decision, _ = decide(replace(observation, workers=views), 0.0, AutoscalerState(), EAGER)
    assert decision.flip is not None
    assert decision.flip.worker_id == "w2"


def test_only_a_sustained_need_moves_a_worker() -> None:
    policy = AutoscalerPolicy(num_agreeing=3, cooldown_s=0.0)
    busy, idle = make_observation(1, 3, queued=20_000), make_observation(1, 3)
    state = AutoscalerState()
    flips = []
    for observation in (busy, busy, idle, busy, busy, busy):
        decision, state = decide(observation, 0.0, state, policy)
        flips.append(decision.flip is not None)
    assert flips == [False, False, False, False, False, True]


def test_one_move_at_a_time_and_a_pause_after_it() -> None:
    policy = AutoscalerPolicy(num_agreeing=1, cooldown_s=15.0)
    before = make_observation(1, 5, queued=50_000)
    decision, state = decide(before, 100.0, AutoscalerState(), policy)
    assert decision.flip is not None
    held, state = decide(before, 101.0, state, policy)
    assert "w1 is moving to prefill" in held.reason
    after = flipped(before, decision)
    held, state = decide(after, 114.0, state, policy)
    assert "14.0 of cooldown_s=15.0" in held.reason
    decision, state = decide(after, 115.0, state, policy)
    assert decision.flip is not None


def test_a_worker_that_dies_while_moving_does_not_block_the_next_move() -> None:
    before = make_observation(1, 4, queued=50_000)
    decision, state = decide(before, 0.0, AutoscalerState(), EAGER)
    assert decision.flip is not None
    without = tuple(view for view in before.workers if view.worker_id != decision.flip.worker_id)
    decision, _ = decide(replace(before, workers=without), 1.0, state, EAGER)
    assert decision.flip is not None


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (make_observation(1, 1, queued=10**6), "fewer than three workers"),
        (make_observation(4, 1, queued=10**6), "the last decode worker stays"),
        (make_observation(2, 2, queued=100), "no wait reaches min_wait_s"),
        (make_observation(2, 2, queued=8000, seqs=100), "differ by less than min_ratio"),
        (make_observation(1, 2, queued=9700, seqs=73), "would make the longer wait"),
    ],
)
def test_holds_and_says_why(observation: Observation, reason: str) -> None:
    decision, _ = decide(observation, 0.0, AutoscalerState(), EAGER)
    assert decision.flip is None
    assert reason in decision.reason
    assert f"{decision.prefill_wait_s:.2f}" in decision.reason


def test_an_empty_pool_gets_a_worker() -> None:
    decision, _ = decide(make_observation(3, 0, seqs=1), 0.0, AutoscalerState(), EAGER)
    assert decision.flip is not None
    assert decision.flip.to_role == D
    assert decision.decode_wait_s == math.inf


def test_a_policy_that_would_flap_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_ratio=1\.0"):
        AutoscalerPolicy(min_ratio=1.0)


LOADS = st.tuples(st.integers(0, 200_000), st.integers(0, 300), st.integers(0, 50))


@settings(max_examples=200)
@given(num_prefill=st.integers(1, 8), num_decode=st.integers(1, 8), loads=st.lists(LOADS, max_size=30))
def test_never_empties_a_pool(num_prefill: int, num_decode: int, loads: list[tuple[int, int, int]]) -> None:
    observation, state = make_observation(num_prefill, num_decode), AutoscalerState()
    for now, (queued, seqs, waiting) in enumerate(loads):
        load = make_observation(1, 1, queued=queued, seqs=seqs, waiting=waiting)
        observation = replace(load, workers=observation.workers)
        decision, state = decide(observation, float(now), state, EAGER)
        observation = flipped(observation, decision)
        assert num_role(observation, P) >= 1
        assert num_role(observation, D) >= 1
        assert num_role(observation, P) + num_role(observation, D) == num_prefill + num_decode


@settings(max_examples=200)
@given(num_prefill=st.integers(1, 8), num_decode=st.integers(1, 8), load=LOADS)
def test_constant_load_never_moves_a_worker_back(num_prefill: int, num_decode: int, load: tuple[int, int, int]) -> None:
    queued, seqs, waiting = load
    observation = make_observation(num_prefill, num_decode, queued=queued, seqs=seqs, waiting=waiting)
    state, directions = AutoscalerState(), []
    for now in range(40):
        decision, state = decide(observation, float(now), state, EAGER)
        observation = flipped(observation, decision)
        directions += [decision.flip.to_role] if decision.flip else []
    assert len(set(directions)) <= 1
    assert len(directions) < num_prefill + num_decode


def test_a_swing_of_load_flips_and_flips_back() -> None:
    policy = AutoscalerPolicy()
    observation, state = make_observation(3, 3), AutoscalerState()
    splits = []
    for tick in range(300):
        is_prompts = (tick // 100) % 2 == 0
        load = make_observation(1, 1, queued=60_000) if is_prompts else make_observation(1, 1, seqs=200)
        observation = replace(load, workers=observation.workers)
        decision, state = decide(observation, tick * 2.0, state, policy)
        observation = flipped(observation, decision)
        splits.append(num_role(observation, P))
    assert (splits[99], splits[199], splits[299]) == (5, 1, 5)
    changes = sum(a != b for a, b in itertools.pairwise(splits))
    assert changes + (splits[0] != 3) == 2 + 4 + 4


def test_observes_the_registry_in_the_units_of_the_cost_model() -> None:
    registry, costs = Registry(), CostModel()
    for worker_id, role in (("p", P), ("d", D), ("leaving", D)):
        card = WorkerCard(
            address=PeerAddress(worker_id, 1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
            role=role,
            kind="cpu-1",
            model="toy",
            max_model_len=1024,
            block_size=16,
            num_blocks=64,
            block_bytes=1024,
            max_num_batched_tokens=512,
            namespace=b"n" * 16,
            pid=1,
        )
        registry.add(card, now=0.0)
        registry.set_state(worker_id, WorkerState.READY, "test")
    registry.set_state("leaving", WorkerState.DRAINING, "test")
    registry.reserve(RequestLoad("p", "d", 1000, 0, 1100)).prefill_done()
    registry.reserve(RequestLoad("p", "d", 1024, 0, 1100))
    registry.note_load("d", WorkerLoad(num_waiting=1), now=0.0)
    seen = observe(registry, costs, 64.0)
    assert [(view.worker_id, view.is_ready, view.num_running) for view in seen.workers] == [
        ("p", True, 0),
        ("d", True, 2),
        ("leaving", False, 0),
    ]
    # The second sequence has no token yet: it waits for prefill, and more decode workers would not help it.
    assert seen.num_waiting_seqs == 0
    assert (seen.queued_prompt_tokens, seen.num_decode_seqs, seen.num_decode_kv_tokens) == (1024, 1, 1100)
    assert seen.prefill_tokens_per_s == pytest.approx(1024 / costs.steps("cpu-1").prefill_s(1024, 0, 512))
    assert observe([], costs, 64.0).workers == ()


def test_sequences_that_wait_for_room_or_a_seat_show_that_the_decode_pool_is_short() -> None:
    registry, costs = Registry(), CostModel()
    for worker_id, role in (("p0", P), ("p1", P), ("d", D)):
        add_ready(registry, make_card(worker_id, role))
    for number in range(12):
        booking = registry.reserve(RequestLoad("p0", "d", 100, 0, 200))
        if number < 4:
            booking.prefill_done()
    registry.note_load("d", WorkerLoad(num_running=4, num_waiting_for_room=8), now=0.0)
    registry.note_step("p0", StepStats(duration_s=0.1, num_prefill_tokens=800))
    seen = observe(registry, costs, 500.0)
    assert (seen.queued_prompt_tokens, seen.num_decode_seqs, seen.num_waiting_seqs) == (0, 12, 8)
    assert seen.num_decode_kv_tokens == 12 * 200
    policy, state = AutoscalerPolicy(num_agreeing=1), AutoscalerState()
    decision, _ = decide(seen, 0.0, state, policy)
    assert decision.flip is not None
    assert decision.flip.to_role == D
    registry.note_load("d", WorkerLoad(num_running=4), now=0.0)
    seen = observe(registry, costs, 500.0)
    assert (seen.num_decode_seqs, seen.num_waiting_seqs) == (4, 0), "the others wait for prefill"
