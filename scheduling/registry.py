"""The one owner of worker state: cards, roles, life cycle, load, and what is booked on each worker.

No I/O and no clock. A worker that is dead is gone: no map of the registry knows it any more.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from tandem.protocol.messages import (
    FetchStats,
    LinkLoad,
    PinLoad,
    PrefillPriority,
    Quarantine,
    Role,
    StepStats,
    TierLoad,
    WorkerCard,
    WorkerLoad,
    WorkerState,
    holder_name,
)
from tandem.scheduling.cost_model import CostModel, Mask, Rows, StepCosts, StepModel, Vector, prefill_attention
from tandem.scheduling.load import RequestLoad

__all__ = [
    "Booking",
    "RegisteredWorker",
    "Registry",
    "WorkerChange",
    "WorkerTable",
    "Workers",
    "can_decode",
    "can_prefill",
    "queue_s",
]

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
NO_REPORTERS: Mapping[str, str] = {}

_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.DEAD: frozenset(),
}


@dataclass(eq=False, slots=True)
class RegisteredWorker:
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
    quarantines: Sequence[Quarantine] = ()
    num_dropped_there: Mapping[str, int] = field(default_factory=dict)  # messages, by reason
    num_dropped_here: Mapping[str, int] = field(default_factory=dict)  # of its messages
    queued_prompt_tokens: int = 0  # booked uncached prompt tokens whose first token has not come
    queued_attention: float = 0.0  # of these tokens
    computed_prompt_tokens: int = 0  # of these, already computed by steps reported since
    num_booked_seqs: int = 0  # booked to decode here; each will need a seat
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

    @property
    def last_order(self) -> float:
        """Order of the prompt that is computed last."""
        return self.prompts[-1].order if self.prompts else -math.inf

    def uncomputed_tokens_before(self, order: float) -> int:
        """Of these tokens, those that are computed before a prompt of this order that comes now."""
        if self.last_order <= order:
            return self.uncomputed_tokens
        num_before = sum(booking.num_new_tokens for booking in self.prompts if booking.order <= order)
        return min(num_before, self.uncomputed_tokens)

    def stepping_tokens(self, order: float) -> int:
        """What is left of the step in progress, if one of this order overtakes its prompt: half of it, on average."""
        step_tokens = next((booking.step_tokens for booking in self.prompts if booking.order > order), 0)
        return math.ceil(min(step_tokens, self.uncomputed_tokens) / 2)

    @property
    def uncomputed_attention(self) -> float:
        """Attention work of these."""
        num_tokens = self.uncomputed_tokens
        return self.queued_attention * (num_tokens / self.queued_prompt_tokens) if num_tokens > 0 else 0.0

    @property
    def num_queued_steps(self) -> int:
        """Steps in which they are computed."""
        return math.ceil(self.uncomputed_tokens / self.card.max_num_batched_tokens)


class TierCosts(NamedTuple):
    """What it costs each worker to load from a tier, and whose word in the index tells what it finds there."""

    latency_s: Vector
    block_s: Vector  # inf for those without it
    readers: dict[str, list[int]]  # rows by name in the index; a store that workers share goes by one worker's name


class Pace(NamedTuple):
    """Predictions for each worker, as arrays."""

    steps: StepCosts
    step_s: Vector  # its next step, without prefill
    wait_s: Vector  # see `wait_s`


class WorkerTable:
    """What decisions are made from, of all workers at once: arrays, one element per worker, in the registry's order.

    A decision is then some dozens of operations on arrays, and takes hardly longer with a thousand workers than with
    ten. Only `Registry` changes it.
    """

    def __init__(self, workers: Sequence[RegisteredWorker], reporters: Mapping[str, str] = NO_REPORTERS) -> None:
        """`reporters`: by store that workers share, the worker whose events the index follows."""
        self.workers = workers
        self._reporters = reporters
        self.rows = {worker.worker_id: row for row, worker in enumerate(workers)}
        cards = [worker.card for worker in workers]
        self.block_size = _vector(card.block_size for card in cards)
        self.block_bytes = _vector(card.block_bytes for card in cards)
        self.token_bytes = self.block_bytes / self.block_size
        self.least_chunk_tokens = min((float(card.max_num_batched_tokens) for card in cards), default=0.0)
        self.chunk_tokens = _column(card.max_num_batched_tokens for card in cards)
        self.capacity_tokens = _vector(card.num_blocks * card.block_size for card in cards)
        self.capacity_seqs = _vector(card.max_num_seqs or math.inf for card in cards)
        # The prompt and its first token must fit, or the worker could never run it.
        self.max_prompt_tokens = np.minimum(self.capacity_tokens, _vector(card.max_model_len for card in cards)) - 1
        self.fits_all_tokens = min(self.max_prompt_tokens.tolist(), default=0.0)
        self.kinds, self.kind_idx = _numbered([card.kind for card in cards])
        # Workers can read each other's blocks where these are equal, and take handoffs alike where those are.
        caches, self.cache_idx = _numbered([(card.namespace, card.block_size) for card in cards])
        shapes, self.shape_idx = _numbered([(card.kind, card.block_size, card.block_bytes) for card in cards])
        self.is_one_cache, self.is_one_shape = len(caches) == 1, len(shapes) == 1
        self.has_peers = len(caches) < len(cards)  # that can read from each other
        # By the name of a state in which nothing can be taken, for those that some worker is in: who is not.
        states = sorted({worker.state for worker in workers} - {WorkerState.READY})
        self.not_in_state = {s.value: _mask(worker.state is not s for worker in workers) for s in states}
        self.is_colocated = _mask(worker.role == Role.COLOCATED for worker in workers)
        self.can_prefill = _mask(can_prefill(worker) for worker in workers)
        self.can_decode = _mask(can_decode(worker) for worker in workers)
        # Of those that decode, together.
        self.decode_capacity_tokens = float(self.capacity_tokens[self.can_decode].sum())
        self.decode_capacity_seqs = float(self.capacity_seqs[self.can_decode].sum())
        self._none = np.zeros(len(workers), dtype=bool)
        self.everyone, self.zeros = ~self._none, np.zeros(len(workers))  # not to be written to
        self._serving = {adapter: _mask(adapter in card.adapters for card in cards) for adapter in _adapters(cards)}
        self._named: dict[tuple[str, ...], Mask] = {}
        self.is_decoder = _vector(worker.role == Role.DECODE for worker in workers)
        self.tiers: dict[str, TierCosts] = {}  # by name, from fast to slow
        for worker in workers:
            self.note_tiers(worker)
        self._loads = np.zeros((7, len(workers)))
        self.num_booked_seqs: Vector = self._loads[0]
        self.booked_kv_tokens: Vector = self._loads[1]
        self.uncomputed_tokens: Vector = self._loads[2]
        self.uncomputed_attention: Vector = self._loads[3]
        self.num_queued_steps: Vector = self._loads[4]
        self.num_placed_tokens: Vector = self._loads[5]
        self.last_order: Vector = self._loads[6]
        self.update(workers)

    def __len__(self) -> int:
        return len(self.workers)

    def named(self, patterns: tuple[str, ...]) -> Mask:
        """Workers whose id matches one of these glob patterns."""
        mask = self._named.get(patterns)
        if mask is None:
            matches = (any(fnmatchcase(worker_id, pattern) for pattern in patterns) for worker_id in self.rows)
            mask = self._named[patterns] = _mask(matches)
        return mask

    def serving(self, adapter: str) -> Mask:
        """Workers that serve this adapter."""
        return self._serving.get(adapter, self._none)

    def update(self, workers: Iterable[RegisteredWorker]) -> None:
        """Take over what is booked on these workers; those that are gone are ignored."""
        for worker in workers:
            row = self.rows.get(worker.worker_id)
            if row is not None and self.workers[row] is worker:  # not the next one of this name
                self.num_booked_seqs[row] = worker.num_booked_seqs
                self.booked_kv_tokens[row] = worker.booked_kv_tokens
                self.uncomputed_tokens[row] = worker.uncomputed_tokens
                self.uncomputed_attention[row] = worker.uncomputed_attention
                self.num_queued_steps[row] = worker.num_queued_steps
                self.num_placed_tokens[row] = worker.num_placed_tokens
                self.last_order[row] = worker.last_order

    def update_from(self, table: WorkerTable, rows: Rows) -> None:
        """Take over what is booked on all workers from another table, where they are in these rows."""
        np.take(table._loads, rows, axis=1, out=self._loads)

    def note_tiers(self, worker: RegisteredWorker) -> None:
        """Take over what it costs this worker to load from its tiers."""
        row = self.rows[worker.worker_id]
        for tier in worker.tiers:
            if tier.name not in self.tiers:
                self.tiers[tier.name] = TierCosts(np.zeros(len(self)), np.full(len(self), math.inf), {})
            costs = self.tiers[tier.name]
            costs.latency_s[row], costs.block_s[row] = tier.latency_s, tier.block_s
            store = worker.card.tiers.get(tier.name, "")
            reporter = self._reporters.get(store, "") if store else worker.worker_id
            rows = costs.readers.setdefault(holder_name(reporter, tier.name), [])
            if row not in rows:
                rows.append(row)

    def pace(self, costs: CostModel, order: float = math.inf) -> Pace:
        """How fast each worker is, with what is booked on it and goes before a prompt of this order."""
        steps = costs.steps_of(self.kinds, self.kind_idx)
        step_s = steps.step_s(self.num_booked_seqs, self.booked_kv_tokens)
        work_s = steps.prefill_work_s(self.uncomputed_tokens, self.uncomputed_attention)
        waits_s = self.num_queued_steps * step_s + work_s
        if order < math.inf:
            for row in (self.last_order > order).nonzero()[0].tolist():  # few, if any: whose prompts are overtaken
                worker = self.workers[row]
                waits_s[row] = wait_s(worker, costs.steps(worker.card.kind), order)
        return Pace(steps, step_s, waits_s)

    def column(self, values: Mapping[str, float]) -> Vector:
        """A number per worker, from those given by worker id; 0 for the others."""
        column = np.zeros(len(self.workers))
        for worker_id, value in values.items():
            if (row := self.rows.get(worker_id)) is not None:
                column[row] = value
        return column


class Workers(Protocol):
    """What decisions are made from: those of a `Registry`, or a part of them."""

    def __iter__(self) -> Iterator[RegisteredWorker]:
        """All of them."""

    @property
    def queued_prompt_tokens(self) -> int:
        """Uncomputed prompt tokens booked on them."""

    @property
    def table(self) -> WorkerTable:
        """Them as arrays, as they are now: get it anew for each decision."""

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The worker, or None when it is gone."""


class WorkerChange(NamedTuple):
    """What listeners are told, after the change. `before` is None for a worker that just joined."""

    worker: RegisteredWorker
    before: WorkerState | None
    reason: str


class Booking:
    """RequestLoad put on one or two workers by a decision. Whoever reserves it releases it, on every path."""

    def __init__(
        self,
        open_bookings: set[Booking],
        changed_workers: set[RegisteredWorker],
        prefill: RegisteredWorker,
        decode: RegisteredWorker,
        load: RequestLoad,
        turn: PrefillPriority,
    ) -> None:
        self.order = turn.order
        self.step_tokens = turn.max_step_tokens or prefill.card.max_num_batched_tokens
        self._open_bookings = open_bookings
        self._changed_workers = changed_workers
        self._prefill: RegisteredWorker | None = prefill
        self._decode: RegisteredWorker | None = decode
        self.num_new_tokens = load.num_new_tokens
        self._attention = prefill_attention(load.num_new_tokens, load.num_context_tokens)
        self._num_kv_tokens = load.num_kv_tokens
        open_bookings.add(self)
        prefill.queued_prompt_tokens += load.num_new_tokens
        prefill.queued_attention += self._attention
        insort(prefill.prompts, self, key=_order)
        prefill.num_placed_tokens += load.num_new_tokens
        decode.num_booked_seqs += 1
        decode.num_awaited_seqs += 1
        decode.booked_kv_tokens += load.num_kv_tokens
        decode.awaited_kv_tokens += load.num_kv_tokens
        decode.num_placed_tokens += load.num_kv_tokens
        changed_workers |= {prefill, decode}

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
        self._changed_workers.add(worker)
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
        self._changed_workers.add(worker)
        self._open_bookings.discard(self)


class Registry:
    """All workers that are not dead."""

    def __init__(self) -> None:
        self._workers: dict[str, RegisteredWorker] = {}
        self._bookings: set[Booking] = set()
        self._reporters: dict[str, str] = {}  # by store
        self._table: WorkerTable | None = None  # made anew when workers come, go, or change state or role
        self._changed: set[RegisteredWorker] = set()  # whose bookings are not in the table yet
        self._listeners: list[Callable[[WorkerChange], None]] = []
        self._step_listeners: list[Callable[[], None]] = []
        self.num_listener_failures = 0  # calls of listeners that raised

    def __iter__(self) -> Iterator[RegisteredWorker]:
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

    @property
    def table(self) -> WorkerTable:
        """All workers as arrays, as they are now: get it anew for each decision."""
        if self._table is None:
            self._table = WorkerTable(list(self), self._reporters)
        else:
            self._table.update(self._changed)
        self._changed.clear()
        return self._table

    def listen(self, listener: Callable[[WorkerChange], None]) -> None:
        """Call `listener` after each change of a worker's state."""
        self._listeners.append(listener)

    def listen_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step that a worker reported: some of its queue may be gone."""
        self._step_listeners.append(listener)

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The worker, or None when it is gone."""
        return self._workers.get(worker_id)

    def add(self, card: WorkerCard, now: float) -> RegisteredWorker:
        """Take in a worker, in state STARTING. An earlier epoch of it must have been declared dead."""
        worker_id = card.address.worker_id
        assert worker_id not in self._workers, f"worker {worker_id} joined twice"
        worker = RegisteredWorker(card=card, role=card.role, state=WorkerState.STARTING, last_seen_s=now)
        self._workers[worker_id] = worker
        self._table = None
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
        self._table = None
        if state == WorkerState.DEAD:
            del self._workers[worker_id]
            self._reporters = {store: reporter for store, reporter in self._reporters.items() if reporter != worker_id}
        self._tell(WorkerChange(worker, before, reason))

    def set_role(self, worker_id: str, role: Role) -> None:
        """Use a worker for something else from the next decision on; what it runs stays there."""
        worker = self._workers[worker_id]
        logger.info("worker %s flips from %s to %s", worker_id, worker.role, role)
        worker.role = role
        self._table = None

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
            if self._table is not None:
                self._table.note_tiers(worker)

    def tells(self, store: str, worker_id: str) -> bool:
        """Whether what this worker says of a store that it shares with others is what the index follows.

        One of them is enough: the first that is asked for, until it is gone.
        """
        if store not in self._reporters:
            self._reporters[store] = worker_id
            self._table = None
        return self._reporters[store] == worker_id

    def note_links(self, worker_id: str, links: Sequence[LinkLoad]) -> None:
        """Remember what a worker says of its writes to its peers."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.links = links

    def note_quarantines(self, worker_id: str, quarantines: Sequence[Quarantine]) -> None:
        """Remember whose lost writes keep blocks of a worker in quarantine."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.quarantines = quarantines

    def note_pins(self, worker_id: str, pins: PinLoad | None) -> None:
        """Remember what a worker says it keeps for pins."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.pins = pins

    def note_dropped(self, worker_id: str, there: Mapping[str, int], here: Mapping[str, int]) -> None:
        """Remember what a worker says it dropped, and what was dropped here of what it said: counts by reason."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.num_dropped_there, worker.num_dropped_here = there, here

    def note_step(self, worker_id: str, stats: StepStats) -> None:
        """Count what a step computed against the prompt tokens booked there."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            computed = worker.computed_prompt_tokens + max(stats.num_prefill_tokens, 0)
            worker.computed_prompt_tokens = min(computed, worker.queued_prompt_tokens)
            self._changed.add(worker)
            self.tell_progress()

    def tell_progress(self) -> None:
        """Call the listeners to steps: whoever changes bookings behind their back says so."""
        for listener in self._step_listeners:
            try:
                listener()
            except Exception:
                self._note_failure(listener)

    def reserve(self, load: RequestLoad, turn: PrefillPriority = PrefillPriority()) -> Booking:
        """Book a decision's load, at once, so that the next decision sees it."""
        prefill, decode = self._workers[load.prefill], self._workers[load.decode]
        return Booking(self._bookings, self._changed, prefill, decode, load, turn)

    def _tell(self, change: WorkerChange) -> None:
        logger.info("worker %s is %s: %s", change.worker.worker_id, change.worker.state, change.reason)
        for listener in self._listeners:
            try:
                listener(change)
            except Exception:
                self._note_failure(listener)

    def _note_failure(self, listener: Callable[..., None]) -> None:
        """A listener's error is its own: the others are called, and what caused the change goes on."""
        self.num_listener_failures += 1
        logger.exception("the listener %r failed", listener)


def can_prefill(worker: RegisteredWorker) -> bool:
    """Whether the worker may be given prompts to compute for another worker."""
    return worker.state == WorkerState.READY and worker.role == Role.PREFILL


def can_decode(worker: RegisteredWorker) -> bool:
    """Whether the worker may be given sequences to decode, alone or behind a handoff."""
    return worker.state == WorkerState.READY and worker.role != Role.PREFILL


def queue_s(worker: RegisteredWorker, model: StepModel, order: float = math.inf) -> float:
    """Predicted seconds until the prompts booked on the worker are computed that go before one of this order."""
    return _compute_s(worker, model, worker.uncomputed_tokens_before(order))


def wait_s(worker: RegisteredWorker, model: StepModel, order: float = math.inf) -> float:
    """Predicted seconds until the worker begins a prompt of this order.

    That is when those that go before it are computed, and not before the end of the step in progress.
    """
    num_before = worker.uncomputed_tokens_before(order)
    return _compute_s(worker, model, max(num_before, worker.stepping_tokens(order)))


def _compute_s(worker: RegisteredWorker, model: StepModel, num_tokens: int) -> float:
    """Predicted seconds in which the worker computes so many of its prompt tokens."""
    if num_tokens <= 0:
        return 0.0
    costs = model.costs
    step_s = costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
    attention = worker.uncomputed_attention * (num_tokens / worker.uncomputed_tokens)
    num_steps = math.ceil(num_tokens / worker.card.max_num_batched_tokens)
    return num_steps * step_s + costs.prefill_work_s(num_tokens, attention)


def _order(booking: Booking) -> float:
    return booking.order


def _vector(values: Iterable[float]) -> Vector:
    return np.array(list(values), dtype=np.float64)


def _column(values: Iterable[float]) -> float | Vector:
    """As a vector; just the number where it is the same for all."""
    column = _vector(values)
    return float(column[0]) if len(set(column.tolist())) == 1 else column


def _mask(values: Iterable[bool]) -> Mask:
    return np.array(list(values), dtype=bool)


def _adapters(cards: Iterable[WorkerCard]) -> set[str]:
    return {adapter for card in cards for adapter in card.adapters}


def _numbered(keys: Sequence[Key]) -> tuple[list[Key], Rows]:
    """The different keys, and for each key its place among them."""
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return list(places), np.array([places[key] for key in keys], dtype=np.intp)
