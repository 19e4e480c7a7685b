"""Finds an overloaded decode worker, one of whose answers should move to another. Pure.

New requests go where there is room, but those that run stay where they are. So after a worker has joined, or where long
answers have met by chance, one worker's streams are slow, or wait for memory, beside a worker with little to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode

_MIN_RATIO = 1.3  # duration of the steps here / that of the steps that the answer would have there
_MIN_GAIN_S = 0.002  # per step; a move costs its client a pause of a few steps
_MIN_FREE_SHARE = 0.25  # share of the other worker's memory that is free after the move


class HotSpotCause(StrEnum):
    """Why an answer should go on elsewhere."""

    MEMORY = "hot_spot_memory"  # sequences wait for room here
    PACE = "hot_spot_pace"  # steps take longer here


class HotSpot(NamedTuple):
    """An answer of `worker` should go on at `to`."""

    worker: str
    to: str
    cause: HotSpotCause


def find_hot_spot(workers: Iterable[RegisteredWorker], costs: CostModel) -> HotSpot | None:
    """The pair of decode workers between which a move gains most; None where none is worth it.

    A lack of memory comes first: a sequence that waits for room gets no tokens at all.
    """
    able = [worker for worker in workers if can_decode(worker)]
    pairs = [(here, there) for here, there in permutations(able, 2) if here.num_booked_seqs and _has_room(there, here)]
    starved = [pair for pair in pairs if pair[0].load.num_waiting_for_room]
    if starved:
        here, there = max(starved, key=_want_and_room)
        return HotSpot(here.worker_id, there.worker_id, HotSpotCause.MEMORY)
    gains = [(_gain_s(here, there, costs), here.worker_id, there.worker_id) for here, there in pairs]
    gain_s, here_id, there_id = max(gains, default=(0.0, "", ""))
    return HotSpot(here_id, there_id, HotSpotCause.PACE) if gain_s >= _MIN_GAIN_S else None


def _want_and_room(pair: tuple[RegisteredWorker, RegisteredWorker]) -> tuple[int, int, int]:
    here, there = pair
    return here.load.num_waiting_for_room, there.load.num_free_blocks, -there.num_booked_seqs


def _has_room(there: RegisteredWorker, here: RegisteredWorker) -> bool:
    """Whether a sequence of mean length from `here` leaves enough memory and a seat `there`."""
    card, load = there.card, there.load
    if load.num_waiting_for_room or load.num_free_seats < 1:
        return False
    needed_blocks = _mean_tokens(here) / card.block_size
    return load.num_free_blocks - needed_blocks >= _MIN_FREE_SHARE * card.num_blocks


def _gain_s(here: RegisteredWorker, there: RegisteredWorker, costs: CostModel) -> float:
    """Seconds by which a step there, with one more sequence, is shorter than one here; 0 if the gain is too small."""
    here_s = float(costs.steps(here.card.kind).costs.step_s(here.num_booked_seqs, here.booked_kv_tokens))
    there_s = float(
        costs.steps(there.card.kind).costs.step_s(
            there.num_booked_seqs + 1, there.booked_kv_tokens + _mean_tokens(here)
        )
    )
    return here_s - there_s if here_s >= _MIN_RATIO * there_s else 0.0


def _mean_tokens(worker: RegisteredWorker) -> float:
    return worker.booked_kv_tokens / worker.num_booked_seqs
