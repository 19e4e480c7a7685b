"""The one owner of worker state: cards, roles, life cycle, load, and what is booked on each worker.

No I/O and no clock. A worker that is dead is gone: no map of the registry knows it any more.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages import (
    FetchStats,
    LinkLoad,
    PinLoad,
    Role,
    StepStats,
    TierLoad,
    Turn,
    WorkerCard,
    WorkerLoad,
    WorkerState,
)
from router.cost_model import StepModel, prefill_attention

__all__ = ["Booking", "Registry", "Worker", "WorkerChange", "can_decode", "can_prefill", "queue_s"]

logger = logging.getLogger(__name__)

_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.DEAD: frozenset(),
}


@dataclass(eq=False, slots=True)
class Worker:
    """One worker as the router sees it. Only `Registry` and `Booking` change it.

    The booked numbers are sums over open bookings, kept so that a decision need not visit every booking.
    """

    card: WorkerCard
    role: Role
    state: WorkerState
    last_seen_s: float
    load: WorkerLoad = field(default_factory=WorkerLoad)
    step_age_s: float = 0.0
    tiers: Sequence[TierLoad] = ()
    fetches: FetchStats | None = None
    links: Sequence[LinkLoad] = ()
    pins: PinLoad | None = None
    queued_prompt_tokens: int = 0  # booked uncached prompt tokens whose first token has not come
    queued_attention: float = 0.0  # of these tokens
    computed_prompt_tokens: int = 0  # of these, already computed by steps reported since
    num_booked_seqs: int = 0  # booked to decode here
    booked_kv_tokens: int = 0  # their prompts and expected outputs
    num_awaited_seqs: int = 0  # of these sequences, how many have no first token yet, wherever it is computed
    awaited_kv_tokens: int = 0
    prompts: list[Booking] = field(default_factory=list)  # whose first token has not come, in the order of computing
    num_placed_tokens: int = 0  # all work ever placed here: breaks ties

    @property
    def worker_id(self) -> str:
        """Id of the worker, the same after a restart."""
        return self.card.address.worker_id

    @property
    def uncomputed_tokens(self) -> int:
        """Booked prompt tokens that still have to be computed."""
        return self.queued_prompt_tokens - self.computed_prompt_tokens

    def uncomputed_tokens_before(self, order: float) -> int:
        """Of these, those that are computed before a prompt of this order that comes now."""
        if not self.prompts or self.prompts[-1].order <= order:
            return self.uncomputed_tokens
        num_before = sum(one.num_new_tokens for one in self.prompts if one.order <= order)
        return min(num_before, self.uncomputed_tokens)


class WorkerChange(NamedTuple):
    """What listeners are told, after the change. `before` is None for a worker that just joined."""

    worker: Worker
    before: WorkerState | None
    reason: str


class Booking:
    """Load put on one or two workers by a decision. Whoever reserves it releases it, on every path."""

    def __init__(
        self,
        open_bookings: set[Booking],
        prefill: Worker,
        decode: Worker,
        *,
        num_new_tokens: int,
        num_context_tokens: int,
        num_kv_tokens: int,
        order: float,
    ) -> None:
        self.order = order
        self._open_bookings = open_bookings
        self._prefill: Worker | None = prefill
        self._decode: Worker | None = decode
        self.num_new_tokens = num_new_tokens
        self._attention = prefill_attention(num_new_tokens, num_context_tokens)
        self._num_kv_tokens = num_kv_tokens
        open_bookings.add(self)
        prefill.queued_prompt_tokens += num_new_tokens
        prefill.queued_attention += self._attention
        insort(prefill.prompts, self, key=_order)
        prefill.num_placed_tokens += num_new_tokens
        decode.num_booked_seqs += 1
        decode.num_awaited_seqs += 1
        decode.booked_kv_tokens += num_kv_tokens
        decode.awaited_kv_tokens += num_kv_tokens
        decode.num_placed_tokens += num_kv_tokens

    def prefill_done(self) -> None:
        """The first token came: the prompt no longer waits. Later calls change nothing."""
        worker, self._prefill = self._prefill, None
        if worker is None:
            return
        worker.prompts.remove(self)
        worker.queued_prompt_tokens -= self.num_new_tokens
        worker.queued_attention -= self._attention
        if worker.queued_prompt_tokens == 0:
            worker.queued_attention = 0.0  # sheds rounding
        computed = worker.computed_prompt_tokens - self.num_new_tokens
        worker.computed_prompt_tokens = min(max(computed, 0), worker.queued_prompt_tokens)
        if self._decode is not None:
            self._decode.num_awaited_seqs -= 1
            self._decode.awaited_kv_tokens -= self._num_kv_tokens

    def release(self) -> None:
        """Take the whole load off again. Later calls change nothing."""
        self.prefill_done()
        worker, self._decode = self._decode, None
        if worker is None:
            return
        worker.num_booked_seqs -= 1
        worker.booked_kv_tokens -= self._num_kv_tokens
        self._open_bookings.discard(self)


class Registry:
    """All workers that are not dead."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._bookings: set[Booking] = set()
        self._listeners: list[Callable[[WorkerChange], None]] = []
        self._step_listeners: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_bookings(self) -> int:
        """Bookings not released yet."""
        return len(self._bookings)

    @property
    def queued_prompt_tokens(self) -> int:
        """Uncomputed prompt tokens booked on all workers."""
        return sum(worker.uncomputed_tokens for worker in self)

    def listen(self, listener: Callable[[WorkerChange], None]) -> None:
        """Call `listener` after each change of a worker's state."""
        self._listeners.append(listener)

    def listen_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step that a worker reported: some of its queue may be gone."""
        self._step_listeners.append(listener)

    def get(self, worker_id: str) -> Worker | None:
        """The worker, or None when it is gone."""
        return self._workers.get(worker_id)

    def add(self, card: WorkerCard, now: float) -> Worker:
        """Take in a worker, in state STARTING. An earlier epoch of it must have been declared dead."""
        worker_id = card.address.worker_id
        assert worker_id not in self._workers, f"worker {worker_id} joined twice"
        worker = Worker(card=card, role=card.role, state=WorkerState.STARTING, last_seen_s=now)
        self._workers[worker_id] = worker
        self._tell(WorkerChange(worker, None, "joined"))
        return worker

    def set_state(self, worker_id: str, state: WorkerState, reason: str) -> None:
        """Change a worker's state. Death removes it; a worker that is gone already is ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.state == state:
            return
        before = worker.state
        assert state in _TRANSITIONS[before], f"worker {worker_id} cannot go from {before} to {state} ({reason})"
        worker.state = state
        if state == WorkerState.DEAD:
            del self._workers[worker_id]
        self._tell(WorkerChange(worker, before, reason))

    def set_role(self, worker_id: str, role: Role) -> None:
        """Use a worker for something else from the next decision on; what it runs stays there."""
        worker = self._workers[worker_id]
        logger.info("worker %s flips from %s to %s", worker_id, worker.role, role)
        worker.role = role

    def note_load(self, worker_id: str, load: WorkerLoad, now: float, *, step_age_s: float = 0.0) -> None:
        """Remember a sign of life and the load that came with it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.load = load
            worker.step_age_s = step_age_s
            worker.last_seen_s = now

    def note_tiers(self, worker_id: str, tiers: Sequence[TierLoad], fetches: FetchStats | None) -> None:
        """Remember what a worker says of its KV tiers."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.tiers, worker.fetches = tiers, fetches

    def note_links(self, worker_id: str, links: Sequence[LinkLoad]) -> None:
        """Remember what a worker says of its writes to its peers."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.links = links

    def note_pins(self, worker_id: str, pins: PinLoad | None) -> None:
        """Remember what a worker says it keeps for pins."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.pins = pins

    def note_step(self, worker_id: str, stats: StepStats) -> None:
        """Count what a step computed against the prompt tokens booked there."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            computed = worker.computed_prompt_tokens + max(stats.num_prefill_tokens, 0)
            worker.computed_prompt_tokens = min(computed, worker.queued_prompt_tokens)
            for listener in self._step_listeners:
                listener()

    def reserve(
        self,
        prefill_worker_id: str,
        decode_worker_id: str,
        *,
        num_new_tokens: int,
        num_context_tokens: int,
        num_kv_tokens: int,
        turn: Turn = Turn(),
    ) -> Booking:
        """Book a decision's load, at once, so that the next decision sees it. Both ids may be the same worker.

        `num_new_tokens` of the prompt are computed behind `num_context_tokens` cached ones; `num_kv_tokens` is the
        length the sequence is expected to reach.
        """
        return Booking(
            self._bookings,
            self._workers[prefill_worker_id],
            self._workers[decode_worker_id],
            num_new_tokens=num_new_tokens,
            num_context_tokens=num_context_tokens,
            num_kv_tokens=num_kv_tokens,
            order=turn.order,
        )

    def _tell(self, change: WorkerChange) -> None:
        logger.info("worker %s is %s: %s", change.worker.worker_id, change.worker.state, change.reason)
        for listener in self._listeners:
            listener(change)


def can_prefill(worker: Worker) -> bool:
    """Whether the worker may be given prompts to compute for another worker."""
    return worker.state == WorkerState.READY and worker.role == Role.PREFILL


def can_decode(worker: Worker) -> bool:
    """Whether the worker may be given sequences to decode, alone or behind a handoff."""
    return worker.state == WorkerState.READY and worker.role != Role.PREFILL


def queue_s(worker: Worker, model: StepModel, order: float = math.inf) -> float:
    """Predicted seconds until the prompts booked on the worker are computed that go before one of this order."""
    num_tokens = worker.uncomputed_tokens_before(order)
    if num_tokens <= 0:
        return 0.0
    attention = worker.queued_attention * (num_tokens / worker.queued_prompt_tokens)
    num_steps = math.ceil(num_tokens / worker.card.max_num_batched_tokens)
    step_s = model.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
    return num_steps * step_s + model.prefill_work_s(num_tokens, attention)


def _order(booking: Booking) -> float:
    return booking.order
