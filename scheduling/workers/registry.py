"""The one owner of worker state: which workers there are, their life cycle, and the bookings on them.

No I/O and no clock. A dead worker is gone from every map of the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tandem.protocol.fault_boundary import error_of
from tandem.protocol.messages import (
    FetchStats,
    KvActions,
    LinkLoad,
    PinLoad,
    Quarantine,
    Role,
    StepStats,
    TierLoad,
    WorkerCard,
    WorkerLoad,
    WorkerPriority,
    WorkerState,
)
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.demand import DemandMeter
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.worker_table import WorkerTable
from tandem.scheduling.workers.workers import RegisteredWorker, WorkerChange

logger = logging.getLogger(__name__)

_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.DEAD: frozenset(),
}


class Registry:
    """All workers that are not dead."""

    def __init__(self) -> None:
        self.demand = DemandMeter()  # what clients ask of these workers
        self._workers: dict[str, RegisteredWorker] = {}
        self._bookings: set[Booking] = set()
        self._num_reserved = 0  # bookings ever made
        self._reporters: dict[str, str] = {}  # shared store -> the worker whose events the index follows
        self._table: WorkerTable | None = None  # rebuilt when workers join, leave, or change state or role
        self._changed: set[RegisteredWorker] = set()  # workers whose bookings are not in the table yet
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
        """The workers as arrays, as they are now: get it again for each decision."""
        if self._table is None:
            self._table = WorkerTable(list(self), self._reporters)
        else:
            self._table.update(self._changed)
        self._changed.clear()
        return self._table

    def listen(self, listener: Callable[[WorkerChange], None]) -> None:
        """Call `listener` after each change of a worker's state or role."""
        self._listeners.append(listener)

    def listen_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step that a worker reported: its queue may be shorter."""
        self._step_listeners.append(listener)

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The worker, or None when it is gone."""
        return self._workers.get(worker_id)

    def add(self, card: WorkerCard, now: float) -> RegisteredWorker:
        """Add a worker, in state STARTING. An earlier epoch of it must have been declared dead."""
        worker_id = card.address.worker_id
        assert worker_id not in self._workers, f"worker {worker_id} joined twice"
        worker = RegisteredWorker(card=card, role=card.role, state=WorkerState.STARTING, last_seen_s=now)
        self._workers[worker_id] = worker
        self._table = None
        self._notify(WorkerChange(worker, "joined"))
        return worker

    def set_state(self, worker_id: str, state: WorkerState, reason: str, *, is_fallback: bool = False) -> None:
        """Change a worker's state. DEAD removes it; a worker that is gone already is ignored.

        A draining worker that `is_fallback` gets the requests that no ready worker can take.
        """
        worker = self._workers.get(worker_id)
        if worker is None or (worker.state, worker.is_fallback) == (state, is_fallback):
            return
        assert state is worker.state or state in _TRANSITIONS[worker.state], (
            f"worker {worker_id} cannot go from {worker.state} to {state} ({reason})"
        )
        assert not is_fallback or state is WorkerState.DRAINING, f"worker {worker_id} is {state}: no fallback"
        worker.state, worker.is_fallback = state, is_fallback
        self._table = None
        if state == WorkerState.DEAD:
            del self._workers[worker_id]
            self._reporters = {store: reporter for store, reporter in self._reporters.items() if reporter != worker_id}
        self._notify(WorkerChange(worker, reason))

    def set_role(self, worker_id: str, role: Role) -> None:
        """Change a worker's role from the next decision on; its running requests stay there."""
        worker = self._workers[worker_id]
        logger.info("worker %s flips from %s to %s", worker_id, worker.role, role)
        worker.role = role
        self._table = None
        self._notify(WorkerChange(worker, f"plays {role}"))

    def set_adapters(self, worker_id: str, adapters: Sequence[str]) -> None:
        """Change the LoRA adapters that a worker serves, from the next decision on."""
        worker = self._workers[worker_id]
        worker.card = msgspec.structs.replace(worker.card, adapters=list(adapters))
        self._table = None
        self._notify(WorkerChange(worker, "other adapters"))

    def note_load(self, worker_id: str, load: WorkerLoad, now: float, *, progress_age_s: float = 0.0) -> None:
        """Store a sign of life and the load that came with it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.load = load
            worker.progress_age_s = progress_age_s
            worker.last_seen_s = now
            self._set_silent(worker, False)

    def note_silence(self, worker_id: str) -> None:
        """Note that heartbeats of a worker are missing: others are preferred until its next sign of life."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._set_silent(worker, True)

    def _set_silent(self, worker: RegisteredWorker, is_silent: bool) -> None:
        if worker.is_silent != is_silent:
            worker.is_silent = is_silent
            if self._table is not None:
                self._table.note_silence(worker)

    def note_tiers(self, worker_id: str, tiers: Sequence[TierLoad], fetches: FetchStats | None) -> None:
        """Store a worker's report on its KV tiers."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            has_others = [tier.name for tier in tiers] != [tier.name for tier in worker.tiers]
            worker.tiers, worker.fetches = tiers, fetches
            if has_others:
                self._table = None
            elif self._table is not None:
                self._table.note_tiers(worker)

    def note_actions(self, worker_id: str, actions: KvActions | None) -> None:
        """Store why KV left a worker lately."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.actions = actions

    def is_reporter(self, store: str, worker_id: str) -> bool:
        """Whether the index follows this worker's events of a store that several workers share.

        The first worker asked about is the reporter, until it is gone.
        """
        if store not in self._reporters:
            self._reporters[store] = worker_id
            self._table = None
        return self._reporters[store] == worker_id

    def note_links(self, worker_id: str, links: Sequence[LinkLoad]) -> None:
        """Store a worker's report on its writes to its peers."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.links = links

    def note_quarantines(self, worker_id: str, quarantines: Sequence[Quarantine]) -> None:
        """Store whose lost writes keep blocks of a worker in quarantine."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.quarantines = quarantines

    def note_pins(self, worker_id: str, pins: PinLoad | None) -> None:
        """Store a worker's report on what it keeps for pins."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.pins = pins

    def note_dropped(self, worker_id: str, there: Mapping[str, int], here: Mapping[str, int]) -> None:
        """Store how many messages the worker dropped (`there`), and how many of its messages we dropped (`here`)."""
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
            self.notify_progress()

    def notify_progress(self) -> None:
        """Call the step listeners. Call it after releasing bookings that they do not know."""
        for listener in self._step_listeners:
            self._tell(listener)

    def reserve(self, load: RequestLoad, priority: WorkerPriority = WorkerPriority()) -> Booking:
        """Book a decision's load at once, so that the next decision sees it."""
        prefill, decode = self._workers[load.prefill], self._workers[load.decode]
        self._num_reserved += 1
        return Booking(self._bookings, self._changed, prefill, decode, load, priority, self._num_reserved)

    def _notify(self, change: WorkerChange) -> None:
        logger.info("worker %s is %s: %s", change.worker.worker_id, change.worker.state, change.reason)
        for listener in self._listeners:
            self._tell(listener, change)

    def _tell(self, listener: Callable[..., None], *args: object) -> None:
        """Call a listener. Its error is counted and logged: the other listeners are called, and the caller goes on."""
        if (error := error_of(listener, *args)) is not None:
            self.num_listener_failures += 1
            logger.error("the listener %r failed", listener, exc_info=error)
