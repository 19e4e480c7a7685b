from __future__ import annotations

import random
from typing import Any

import pytest

from tandem.protocol.messages import Role, WorkerLoad, WorkerState
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.hot_spots import HotSpot, HotSpotCause, find_hot_spot
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker
from tests.support.builders import add_ready, make_card

NUM_BLOCKS = 1000


def worker_of(
    name: str, num_seqs: int, *, num_tokens: int = 500, role: Role = Role.DECODE, **load: Any
) -> RegisteredWorker:
    worker = add_ready(Registry(), make_card(name, role, num_blocks=NUM_BLOCKS))
    worker.num_booked_seqs, worker.booked_kv_tokens = num_seqs, num_seqs * num_tokens
    worker.load = WorkerLoad(**({"num_free_blocks": NUM_BLOCKS, "num_free_seats": 8} | load))
    return worker


def test_a_worker_that_has_joined_takes_answers_of_a_busy_one() -> None:
    spot = find_hot_spot([worker_of("busy", 8), worker_of("new", 0)], CostModel())
    assert spot == HotSpot("busy", "new", HotSpotCause.PACE)


@pytest.mark.parametrize(
    "other",
    [
        worker_of("b", 7),  # about as busy
        worker_of("b", 0, num_free_seats=0),
        worker_of("b", 0, num_free_blocks=NUM_BLOCKS // 4),
        worker_of("b", 0, num_waiting_for_room=1),
        worker_of("b", 0, role=Role.PREFILL),
    ],
    ids=["busy", "no seat", "no memory", "starved", "prefill"],
)
def test_nothing_moves_to_a_worker_that_is_not_better(other: RegisteredWorker) -> None:
    assert find_hot_spot([worker_of("a", 8), other], CostModel()) is None


def test_nothing_moves_to_or_from_a_worker_that_leaves() -> None:
    for states in ((WorkerState.READY, WorkerState.DRAINING), (WorkerState.DRAINING, WorkerState.READY)):
        workers = [worker_of("a", 8), worker_of("b", 0)]
        for worker, state in zip(workers, states, strict=True):
            worker.state = state
        assert find_hot_spot(workers, CostModel()) is None


def test_want_of_memory_comes_before_pace() -> None:
    workers = [worker_of("slow", 16), worker_of("starved", 2, num_waiting_for_room=1), worker_of("new", 0)]
    assert find_hot_spot(workers, CostModel()) == HotSpot("starved", "new", HotSpotCause.MEMORY)


def test_a_short_gain_is_not_worth_a_pause() -> None:
    """On an accelerator a step takes about as long with one sequence as with ten."""
    workers = [worker_of("a", 10), worker_of("b", 1)]
    for worker in workers:
        worker.card = make_card(worker.worker_id, kind="NVIDIA H200", num_blocks=NUM_BLOCKS)
    assert find_hot_spot(workers, CostModel()) is None


def test_moves_come_to_an_end_and_none_goes_back() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        workers = {
            name: worker_of(name, rng.randrange(12), num_tokens=rng.choice([50, 500, 3000])) for name in "abcdef"
        }
        moves: list[HotSpot] = []
        while (spot := find_hot_spot(workers.values(), CostModel())) is not None:
            here, there = workers[spot.worker], workers[spot.to]
            num_tokens = here.booked_kv_tokens // here.num_booked_seqs
            for worker, sign in ((here, -1), (there, 1)):
                worker.num_booked_seqs += sign
                worker.booked_kv_tokens += sign * num_tokens
            moves.append(spot)
            assert len(moves) <= 72, f"seed {seed}: {moves[-6:]}"
        pairs = {(move.worker, move.to) for move in moves}
        assert not any((to, worker) in pairs for worker, to in pairs), f"seed {seed}"
