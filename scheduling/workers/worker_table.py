"""All workers as arrays, one element per worker: what a decision computes with.

A decision takes a few dozen operations on arrays, and hardly longer with a thousand workers than with ten.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.protocol.messages import Role, WorkerCard, WorkerState, holder_name
from tandem.scheduling.cost_model import CostModel, Mask, Rows, StepCosts, Vector
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode, can_prefill, wait_s

Key = TypeVar("Key", bound=Hashable)
NO_REPORTERS: Mapping[str, str] = {}


class TierCosts(NamedTuple):
    """The cost of loading from a tier, for each worker, and the names under which the index knows its contents."""

    latency_s: Vector
    block_s: Vector  # inf for workers without the tier
    readers: dict[str, list[int]]  # rows by name in the index; a shared store has its reporter's name


class Pace(NamedTuple):
    """How fast each worker is, as arrays."""

    steps: StepCosts
    step_s: Vector  # duration of its next step, without prefill
    wait_s: Vector  # see `wait_s`


class WorkerTable:
    """All workers as arrays, in the registry's order. Only `Registry` changes it."""

    def __init__(self, workers: Sequence[RegisteredWorker], reporters: Mapping[str, str] = NO_REPORTERS) -> None:
        """`reporters`: the worker whose events the index follows, for each store that workers share."""
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
        # The prompt and its first token must fit, or the worker could never run the request.
        self.max_prompt_tokens = np.minimum(self.capacity_tokens, _vector(card.max_model_len for card in cards)) - 1
        self.fits_all_tokens = min(self.max_prompt_tokens.tolist(), default=0.0)
        self.serves_alone = _mask(card.serves_alone for card in cards)
        self.has_halves = not all(card.serves_alone for card in cards)
        self.loads_all = _mask(card.loads_all for card in cards)
        self.some_load_all = any(card.loads_all for card in cards)
        self._set_kinds(cards)
        self._set_roles(workers)
        self.everyone, self.zeros = np.ones(len(workers), dtype=bool), np.zeros(len(workers))  # read-only
        self._serving: dict[str, Mask] = {}  # by adapter
        self._named: dict[tuple[str, ...], Mask] = {}
        self.tiers: dict[str, TierCosts] = {}  # by name, fastest first
        for worker in workers:
            self.note_tiers(worker)
        self._loads = np.zeros((9, len(workers)))
        self.num_booked_seqs: Vector = self._loads[0]
        self.booked_kv_tokens: Vector = self._loads[1]
        self.uncomputed_tokens: Vector = self._loads[2]
        self.uncomputed_attention: Vector = self._loads[3]
        self.num_queued_steps: Vector = self._loads[4]
        self.num_placed_tokens: Vector = self._loads[5]
        self.last_order: Vector = self._loads[6]
        self.num_incoming_seqs: Vector = self._loads[7]
        self.last_booking: Vector = self._loads[8]
        self.update(workers)

    def __len__(self) -> int:
        return len(self.workers)

    def _set_kinds(self, cards: Sequence[WorkerCard]) -> None:
        """Number the workers' kinds, caches and shapes."""
        self.kinds, self.kind_idx = _numbered([card.kind for card in cards])
        # Workers of one cache can read each other's blocks; handoffs to workers of one shape take equally long.
        caches, self.cache_idx = _numbered([(card.namespace, card.block_size) for card in cards])
        shapes, self.shape_idx = _numbered([(card.kind, card.block_size, card.block_bytes) for card in cards])
        self.is_one_cache, self.is_one_shape = len(caches) == 1, len(shapes) == 1
        self.has_peers = len(caches) < len(cards)  # whether some worker can read from another

    def _set_roles(self, workers: Sequence[RegisteredWorker]) -> None:
        """Set the masks that follow from roles and states."""
        # For each state that occurs and takes no requests: a mask of the workers in other states.
        states = sorted({worker.state for worker in workers} - {WorkerState.READY})
        self.not_in_state = {s.value: _mask(worker.state is not s for worker in workers) for s in states}
        self.is_fallback = _mask(worker.is_fallback for worker in workers)
        self.has_fallback = bool(self.is_fallback.any())
        self.is_heard = _mask(not worker.is_silent for worker in workers)
        self.has_silent = not bool(self.is_heard.all())
        self.is_colocated = _mask(worker.role == Role.COLOCATED for worker in workers)
        self.is_decoder = _vector(worker.role == Role.DECODE for worker in workers)
        self.is_prefiller = _mask(worker.role == Role.PREFILL for worker in workers)
        self.can_prefill = _mask(can_prefill(worker) for worker in workers)
        self.can_decode = _mask(can_decode(worker) for worker in workers)
        # Sums over the workers that decode.
        self.decode_capacity_tokens = float(self.capacity_tokens[self.can_decode].sum())
        self.decode_capacity_seqs = float(self.capacity_seqs[self.can_decode].sum())

    @cached_property
    def id_hashes(self) -> npt.NDArray[np.uint64]:
        """A hash of each worker's id, the same in every process."""
        digests = b"".join(blake2b(worker_id.encode(), digest_size=8).digest() for worker_id in self.rows)
        return np.frombuffer(digests, dtype="<u8")

    def named(self, patterns: tuple[str, ...]) -> Mask:
        """Workers whose id matches one of these glob patterns."""
        mask = self._named.get(patterns)
        if mask is None:
            matches = (any(fnmatchcase(worker_id, pattern) for pattern in patterns) for worker_id in self.rows)
            mask = self._named[patterns] = _mask(matches)
        return mask

    def serving(self, adapter: str) -> Mask:
        """Workers that serve this adapter."""
        mask = self._serving.get(adapter)
        if mask is None:
            mask = self._serving[adapter] = _mask(adapter in worker.card.adapters for worker in self.workers)
        return mask

    def update(self, workers: Iterable[RegisteredWorker]) -> None:
        """Copy what is booked on these workers; workers that are gone are ignored."""
        for worker in workers:
            row = self.rows.get(worker.worker_id)
            if row is not None and self.workers[row] is worker:  # not its successor of the same id
                self.num_booked_seqs[row] = worker.num_booked_seqs
                self.booked_kv_tokens[row] = worker.booked_kv_tokens
                self.uncomputed_tokens[row] = worker.uncomputed_tokens
                self.uncomputed_attention[row] = worker.uncomputed_attention
                self.num_queued_steps[row] = worker.num_queued_steps
                self.num_placed_tokens[row] = worker.num_placed_tokens
                self.last_order[row] = worker.last_order
                self.num_incoming_seqs[row] = worker.num_incoming_seqs
                self.last_booking[row] = worker.last_booking

    def update_from(self, table: WorkerTable, rows: Rows) -> None:
        """Copy what changes from another table, in which all workers have these rows: bookings, and costs of tiers."""
        np.take(table._loads, rows, axis=1, out=self._loads)
        for tier, costs in self.tiers.items():
            np.take(table.tiers[tier].latency_s, rows, out=costs.latency_s)
            np.take(table.tiers[tier].block_s, rows, out=costs.block_s)

    def note_silence(self, worker: RegisteredWorker) -> None:
        """Copy whether heartbeats of this worker are missing."""
        self.is_heard[self.rows[worker.worker_id]] = not worker.is_silent
        self.has_silent = not bool(self.is_heard.all())

    def note_tiers(self, worker: RegisteredWorker) -> None:
        """Copy what loading from its tiers costs this worker."""
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
        """How fast each worker is, and how long a prompt of this order waits there for what is booked before it."""
        steps = costs.steps_of(self.kinds, self.kind_idx)
        step_s = steps.step_s(self.num_booked_seqs, self.booked_kv_tokens)
        work_s = steps.prefill_work_s(self.uncomputed_tokens, self.uncomputed_attention)
        waits_s = self.num_queued_steps * step_s + work_s
        if order < math.inf:
            for row in (self.last_order > order).nonzero()[0].tolist():  # few, if any: prompts there are overtaken
                worker = self.workers[row]
                waits_s[row] = wait_s(worker, costs.steps(worker.card.kind), order)
        return Pace(steps, step_s, waits_s)

    def column(self, values: Mapping[str, float]) -> Vector:
        """A vector of values given by worker id; 0 for the other workers."""
        column = np.zeros(len(self.workers))
        for worker_id, value in values.items():
            if (row := self.rows.get(worker_id)) is not None:
                column[row] = value
        return column


class Workers(Protocol):
    """The workers that decisions choose from: all of a `Registry`, or a part of them."""

    def __iter__(self) -> Iterator[RegisteredWorker]:
        """All of them."""

    @property
    def queued_prompt_tokens(self) -> int:
        """Uncomputed prompt tokens booked on them."""

    @property
    def table(self) -> WorkerTable:
        """The workers as arrays, as they are now: get it again for each decision."""

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The worker, or None when it is gone."""


def _vector(values: Iterable[float]) -> Vector:
    return np.array(list(values), dtype=np.float64)


def _column(values: Iterable[float]) -> float | Vector:
    """A vector, or just the number where it is the same for all."""
    column = _vector(values)
    return float(column[0]) if len(set(column.tolist())) == 1 else column


def _mask(values: Iterable[bool]) -> Mask:
    return np.array(list(values), dtype=bool)


def _numbered(keys: Sequence[Key]) -> tuple[list[Key], Rows]:
    """The different keys, and for each key its index among them."""
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return list(places), np.array([places[key] for key in keys], dtype=np.intp)
