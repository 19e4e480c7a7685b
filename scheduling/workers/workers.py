"""One worker as the router sees it: card, role, state, load, and what is booked on it. No I/O and no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem.protocol.messages import (
    FetchStats,
    KvActions,
    LinkLoad,
    PinLoad,
    Quarantine,
    Role,
    TierLoad,
    WorkerCard,
    WorkerLoad,
    WorkerState,
)
from tandem.scheduling.cost_model import StepModel


class BookedPrompt(Protocol):
    """A prompt that a worker has to compute."""

    @property
    def order(self) -> float:
        """Prompts of a smaller order are computed first."""

    @property
    def num_new_tokens(self) -> int:
        """Its tokens that are not cached."""

    @property
    def step_tokens(self) -> int:
        """The largest step that it takes part in, in prompt tokens."""


@dataclass(slots=True)
class TenantLoad:
    """What the sequences of one tenant take of a worker that decodes them."""

    weight: float
    num_seqs: int = 0
    kv_tokens: int = 0


@dataclass(eq=False, slots=True)
class RegisteredWorker:
    """One worker as the router sees it. Only `Registry` and `Booking` change it.

    The booked numbers are sums over open bookings, so that a decision need not visit every booking.
    """

    card: WorkerCard
    role: Role
    state: WorkerState
    last_seen_s: float
    is_fallback: bool = False  # it drains, but still serves what no other worker can
    is_silent: bool = False  # heartbeats are missing, though not yet for so long that it counts as dead
    load: WorkerLoad = field(default_factory=WorkerLoad)
    progress_age_s: float = 0.0
    tiers: Sequence[TierLoad] = ()
    fetches: FetchStats | None = None
    actions: KvActions | None = None
    links: Sequence[LinkLoad] = ()
    pins: PinLoad | None = None
    quarantines: Sequence[Quarantine] = ()
    num_dropped_there: Mapping[str, int] = field(default_factory=dict)  # messages that the worker dropped, by reason
    num_dropped_here: Mapping[str, int] = field(default_factory=dict)  # messages of the worker that the router dropped
    queued_prompt_tokens: int = 0  # booked uncached tokens of prompts whose first token has not come
    queued_attention: float = 0.0  # attention work of these tokens
    computed_prompt_tokens: int = 0  # how many of these tokens the steps reported since have computed
    num_booked_seqs: int = 0  # sequences booked to decode here; each will need a seat
    booked_kv_tokens: int = 0  # their prompts and expected outputs
    tenants: dict[str, TenantLoad] = field(default_factory=dict)  # whose sequences these are
    num_awaited_seqs: int = 0  # how many of these sequences have no first token yet, wherever it is computed
    awaited_kv_tokens: int = 0
    num_incoming_seqs: int = 0  # awaited sequences whose prompt another worker computes
    prompts: list[BookedPrompt] = field(default_factory=list)  # without a first token, in the order of computing
    num_placed_tokens: int = 0  # all work ever placed here: breaks ties
    last_booking: int = 0  # number of the latest booking here, counted over all workers; 0 = none

    @property
    def worker_id(self) -> str:
        """Id of the worker, the same after a restart."""
        return self.card.address.worker_id

    @property
    def is_booked(self) -> bool:
        """Whether a request is to be computed there, or is."""
        return bool(self.prompts or self.num_booked_seqs)

    @property
    def uncomputed_tokens(self) -> int:
        """Booked prompt tokens that still have to be computed."""
        return self.queued_prompt_tokens - self.computed_prompt_tokens

    @property
    def last_order(self) -> float:
        """Order of the prompt that is computed last."""
        return self.prompts[-1].order if self.prompts else -math.inf

    def gives_way_to(self, tenant: str, num_kv_tokens: int) -> bool:
        """Whether the worker takes this much room from other tenants for this one, as `engine.tenant_room` does.

        Each of them gives up sequences as long as it still holds more afterwards, and keeps the last one.
        """
        mine = self.tenants.get(tenant)
        share = self._share(mine.num_seqs, mine.kv_tokens, mine.weight) if mine is not None else 0.0
        room, gives_way = self.card.num_blocks * self.card.block_size - self.booked_kv_tokens, False
        for name, other in self.tenants.items():
            rest = 1 - 1 / other.num_seqs
            if name != tenant and self._share(other.num_seqs * rest, other.kv_tokens * rest, other.weight) > share:
                gives_way = True
                room += int(other.kv_tokens * rest)
        return gives_way and room >= num_kv_tokens

    def _share(self, num_seqs: float, kv_tokens: float, weight: float) -> float:
        seats = num_seqs / self.card.max_num_seqs if self.card.max_num_seqs else 0.0
        return max(seats, kv_tokens / max(self.card.num_blocks * self.card.block_size, 1)) / weight

    def uncomputed_tokens_before(self, order: float) -> int:
        """Uncomputed tokens that are computed before a prompt of this order that arrives now."""
        if self.last_order <= order:
            return self.uncomputed_tokens
        num_before = sum(prompt.num_new_tokens for prompt in self.prompts if prompt.order <= order)
        return min(num_before, self.uncomputed_tokens)

    def stepping_tokens(self, order: float) -> int:
        """Tokens left of the step in progress where a prompt of this order overtakes its prompt: on average, half."""
        step_tokens = next((prompt.step_tokens for prompt in self.prompts if prompt.order > order), 0)
        return math.ceil(min(step_tokens, self.uncomputed_tokens) / 2)

    @property
    def uncomputed_attention(self) -> float:
        """Attention work of the uncomputed tokens."""
        num_tokens = self.uncomputed_tokens
        return self.queued_attention * (num_tokens / self.queued_prompt_tokens) if num_tokens > 0 else 0.0

    @property
    def num_queued_steps(self) -> int:
        """Steps in which the uncomputed tokens are computed."""
        return math.ceil(self.uncomputed_tokens / self.card.max_num_batched_tokens)


class WorkerChange(NamedTuple):
    """What listeners are told after a worker joined or changed its state."""

    worker: RegisteredWorker
    reason: str


def can_prefill(worker: RegisteredWorker) -> bool:
    """Whether the worker may be given prompts to compute for another worker."""
    return worker.state == WorkerState.READY and worker.role == Role.PREFILL


def can_decode(worker: RegisteredWorker) -> bool:
    """Whether the worker may be given sequences to decode, alone or behind a handoff."""
    return worker.state == WorkerState.READY and worker.role != Role.PREFILL


def queue_s(worker: RegisteredWorker, model: StepModel, order: float = math.inf) -> float:
    """Predicted seconds until the prompts booked on the worker that precede this order are computed."""
    return _compute_s(worker, model, worker.uncomputed_tokens_before(order))


def wait_s(worker: RegisteredWorker, model: StepModel, order: float = math.inf) -> float:
    """Predicted seconds until the worker begins a prompt of this order.

    It begins after the prompts that precede it, and not before the end of the step in progress.
    """
    num_before = worker.uncomputed_tokens_before(order)
    return _compute_s(worker, model, max(num_before, worker.stepping_tokens(order)))


def _compute_s(worker: RegisteredWorker, model: StepModel, num_tokens: int) -> float:
    """Predicted seconds in which the worker computes this number of its prompt tokens."""
    if num_tokens <= 0:
        return 0.0
    costs = model.costs
    step_s = costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
    attention = worker.uncomputed_attention * (num_tokens / worker.uncomputed_tokens)
    num_steps = math.ceil(num_tokens / worker.card.max_num_batched_tokens)
    return num_steps * step_s + costs.prefill_work_s(num_tokens, attention)
