"""Which requests wait in the router, which go to the workers now, and which are refused: all in predicted seconds.

A request waits here, not at a worker, once the worker it is best placed on has enough to do until it reports again; so
one that is more urgent, or whose tenant has had less than its share, can still go first. It is placed again when its
turn comes. A request whose first token is predicted to come too late is refused at once.

Plain values in, decisions out, and the time is passed in: no I/O, no clock. The caller books each `Dispatch` on the
registry before it asks for the next decision.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from protocol.config import RouterConfig
from protocol.errors import DeadlineUnmet, Overloaded, ServingError
from protocol.messages import Role, WorkerState
from router.cost_model import CostModel
from router.fair_queue import FairQueue, Ticket, Work
from router.placement import Needs, Placement, Placer
from router.registry import Registry, Worker, can_prefill, queue_s
from router.tenants import Tenants

__all__ = [
    "WAIT_BUCKETS_S",
    "Admission",
    "Dispatch",
    "Drop",
    "Forecast",
    "Offer",
    "OutputLengths",
    "TenantStats",
    "Waiting",
]

# Of a full step of a worker: what it may have left when it gets more. It is computed while the worker's report and the
# router's answer are on their way, milliseconds; more would only make those wait who come later and go first.
ROOM_STEPS = 0.5
# While all requests are alike, none goes first and holding them gains nothing; it cost 6 % of a closed loop's tokens/s.
ROOM_STEPS_ALIKE = 2.0
RIVAL_MEMORY_S = 60.0  # requests are not alike if another tenant, another priority or a deadline came this lately
MAX_QUEUED_REQUESTS = 16_384  # each holds a connection and its prompt, however few of its tokens are new
NUM_ROUNDS = 2  # of a forecast
MAX_SCANNED = 64  # waiting requests looked at for one that a free worker is best for
MAX_PLACED = 8  # of these, how many are placed again
PLACEMENT_AGE_S = 0.05  # younger ones are not made again but for the first in line
FIRST_GUESS_TOKENS = 128.0  # of an answer
OUTPUT_LENGTH_WEIGHT = 0.05  # of the newest answer in the mean length
MAX_MEANS = 4096  # tenants whose mean length is remembered
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is asked, as far as admission is concerned."""

    num_prompt_tokens: int
    digests: Sequence[bytes]
    expected_output_tokens: int
    tenant: str
    priority: int = 0  # lower is more urgent, as in vLLM
    ttft_slo_s: float | None = None  # None = the tenant's own; inf = none
    adapter: str = ""


class Forecast(NamedTuple):
    """What admission expects of a request that comes now. All in seconds."""

    placement: Placement
    work: Work
    ahead: Work  # what waits in the router and goes first
    start_s: float  # until its prompt is begun: here and at the worker
    ttft_s: float
    slo_s: float  # inf = none
    error: ServingError | None  # why it is refused, if it is

    @property
    def is_hopeful(self) -> bool:
        """Whether it is worth a try.

        An idle worker is, whatever is predicted: nobody could be faster, and refusing for good all that a wrong model
        takes for slow would leave it wrong.
        """
        return self.ttft_s <= self.slo_s or self.start_s <= 0


@dataclass(eq=False, slots=True, kw_only=True)
class Waiting(Ticket):
    """A request in the queue. `payload` is its owner's."""

    offer: Offer
    forecast: Forecast  # at its arrival
    placement: Placement  # the latest
    placed_s: float
    deadline_s: float  # for its first token; inf = none
    version: int  # of the queue when it came
    payload: Any = None

    @property
    def latest_start_s(self) -> float:
        """When its prompt must be begun at last, by its latest placement."""
        terms = self.placement.best.terms
        return self.deadline_s - terms.fetch_s - terms.prefill_s


class Dispatch(NamedTuple):
    """Book this and send it to its workers now."""

    waiting: Waiting
    placement: Placement
    wait_s: float


class Drop(NamedTuple):
    """Tell this request that it waited in vain."""

    waiting: Waiting
    error: ServingError


@dataclass(slots=True)
class TenantStats:
    """What became of one tenant's requests."""

    num_admitted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # at once, by reason
    dropped: Counter[str] = field(default_factory=Counter)  # after waiting, by reason
    wait_s: float = 0.0  # sum over those admitted
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))  # by bucket, the last is +Inf


class OutputLengths:
    """Expected length of answers, in tokens: the moving mean of each tenant, so that each pays for its own."""

    def __init__(self) -> None:
        self.mean_tokens = FIRST_GUESS_TOKENS  # over all
        self._means: dict[str, float] = {}

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Of the tenant's next request, which may not be longer than `max_tokens`."""
        return max(1, min(max_tokens, round(self._means.get(tenant, self.mean_tokens))))

    def note(self, tenant: str, num_tokens: int) -> None:
        """An answer has ended by itself after so many tokens."""
        mean = self._means.get(tenant, self.mean_tokens)
        if len(self._means) >= MAX_MEANS:
            self._means.clear()
        self._means[tenant] = mean + OUTPUT_LENGTH_WEIGHT * (num_tokens - mean)
        self.mean_tokens += OUTPUT_LENGTH_WEIGHT * (num_tokens - self.mean_tokens)


class Admission:
    """The queue of the router, and the decisions about it."""

    def __init__(
        self, registry: Registry, costs: CostModel, placer: Placer, tenants: Tenants, config: RouterConfig
    ) -> None:
        self._registry = registry
        self._costs = costs
        self._placer = placer
        self._tenants = tenants
        self._config = config
        self._queue = FairQueue(lambda tenant: tenants.policy(tenant).weight)
        # (tenant, worker) -> prompts that wait for this worker: their number, and their seconds
        self._held: dict[tuple[str, str], tuple[int, float]] = {}
        self._deadlines: list[tuple[float, int, Waiting]] = []  # heap; entries of requests that left are stale
        self._num_deadlines = 0
        self._version = 0  # counts the calls of `next`
        self._last_kind: tuple[str, int] | None = None  # tenant and priority of the newest request
        self._rivals_until_s = -math.inf
        self._has_rivals = False
        self._waiting: dict[Waiting, None] = {}
        self.lengths = OutputLengths()
        self.stats: dict[str, TenantStats] = {}  # by the tenant's label

    def __len__(self) -> int:
        return len(self._queue)

    def forecast(self, offer: Offer, now: float, *, num_others: int = 0) -> Forecast:
        """What would become of this request; changes nothing. Raises `NoWorker`."""
        placement = self._placer.place(
            offer.num_prompt_tokens,
            offer.digests,
            offer.expected_output_tokens,
            now,
            held_s={worker: held_s for (tenant, worker), (_, held_s) in self._held.items() if tenant == offer.tenant},
            num_others=num_others,
            needs=self._needs(offer),
        )
        policy = self._tenants.policy(offer.tenant)
        terms = placement.best.terms
        work = work_of(placement, self._costs)
        ahead = waiting = self._queue.ahead(offer.tenant, offer.priority, now)
        start_s = max(terms.queue_s, self._start_s(placement, ahead))
        for _ in range(NUM_ROUNDS):  # the longer it waits, the more of others' next requests go first
            ahead = self._queue.ahead(offer.tenant, offer.priority, now, start_s)
            start_s = max(terms.queue_s, self._start_s(placement, ahead))
        ttft_s = start_s + terms.fetch_s + terms.prefill_s
        slo_s = offer.ttft_slo_s if offer.ttft_slo_s is not None else policy.ttft_slo_s
        forecast = Forecast(placement, work, waiting, start_s, ttft_s, math.inf if slo_s is None else slo_s, None)
        return forecast._replace(error=self._refusal(offer, forecast, policy.max_queue_share))

    def enter(self, offer: Offer, forecast: Forecast, now: float, payload: Any = None) -> Waiting:
        """Put a request in the queue, with what was forecast just now; `next` may let it through at once.

        Raises `Overloaded` if it is refused.
        """
        if forecast.error is not None:
            self.reject(offer.tenant, forecast.error)
            raise forecast.error
        kind = (offer.tenant, offer.priority)
        if forecast.slo_s < math.inf or self._last_kind not in (None, kind):
            self._rivals_until_s = now + RIVAL_MEMORY_S
        self._last_kind = kind
        waiting = Waiting(
            tenant=offer.tenant,
            priority=offer.priority,
            arrived_s=now,
            work=forecast.work,
            offer=offer,
            forecast=forecast,
            placement=forecast.placement,
            placed_s=now,
            deadline_s=now + forecast.slo_s if forecast.ttft_s <= forecast.slo_s else math.inf,
            version=self._version,
            payload=payload,
        )
        self._queue.add(waiting)
        self._waiting[waiting] = None
        self._hold(waiting, 1)
        self._note_deadline(waiting)
        return waiting

    def next(self, now: float) -> Dispatch | Drop | None:
        """The next decision; None when all that waits has to wait on. Call it after each change of load."""
        self._version += 1
        self._has_rivals = now < self._rivals_until_s
        if (late := self._next_late(now)) is not None:
            return self._drop(late, _too_late(late, now))
        if not len(self._queue):
            return None
        roomy = self._workers_with_room()
        if not roomy and self._placer.can_place:
            return None
        version, held_s = self._version - 1, defaultdict[str, float](float)
        num_placed = 0
        for num_scanned, ticket in enumerate(self._queue.in_order(now)):
            if num_scanned == MAX_SCANNED:
                break
            waiting = cast(Waiting, ticket)
            is_roomy = waiting.placement.best.prefill.worker_id in roomy
            is_old = now - waiting.placed_s > PLACEMENT_AGE_S
            # What came this moment is placed. The first in line is so again, others where that may change something.
            is_fresh = waiting.version == version and len(self._queue) == 1
            if is_fresh or num_scanned == 0 or (num_placed < MAX_PLACED and (is_roomy or is_old)):
                num_placed += 1
                try:
                    if not is_fresh:
                        self._place_again(waiting, held_s, now)
                except ServingError as exc:
                    return self._drop(waiting, exc)
                best = waiting.placement.best
                if best.prefill.worker_id in roomy and best.terms.memory_s < self._room_s(best.prefill):
                    return self._let_go(waiting, now)
            held_s[waiting.placement.best.prefill.worker_id] += waiting.work.prefill_s
        return None

    def waiting(self) -> list[Waiting]:
        """All that wait, by arrival."""
        return list(self._waiting)

    def leave(self, waiting: Waiting, reason: str) -> None:
        """A request waits no longer: its client is gone, say. One that has left already is ignored."""
        if self._take_out(waiting):
            self._of(waiting.tenant).dropped[reason] += 1

    def clear(self) -> list[Waiting]:
        """Take everything out, oldest first: the server is going."""
        waiting = self.waiting()
        for one in waiting:
            self.leave(one, "shutdown")
        return waiting

    def reject(self, tenant: str, error: ServingError) -> None:
        """Count a request that was refused at once."""
        self._of(tenant).rejected[error.code or "other"] += 1

    def overtime(self, waiting: Waiting, now: float) -> Overloaded:
        """The error for a request that waited longer than anything may."""
        return Overloaded(
            f"The request waited {now - waiting.arrived_s:.1f} s in the queue; "
            f"request_timeout_s={self._config.request_timeout_s:g}",
            retry_after_s=self._start_s(waiting.placement, self._queue.ahead(waiting.tenant, waiting.priority, now)),
            code="queue_timeout",
        )

    @property
    def total(self) -> Work:
        """What all that waits is predicted to take."""
        return self._queue.total

    def queued(self) -> dict[str, Work]:
        """What waits, by the tenants' labels."""
        queued: dict[str, Work] = {label: Work() for label in self.stats}
        for tenant, work in self._queue.tenants().items():
            label = self._tenants.label(tenant)
            queued[label] = queued.get(label, Work()) + work
        return queued

    def report(self) -> dict[str, object]:
        """The queue and what became of requests, as JSON."""
        total, queued = self._queue.total, self.queued()
        return {
            "num_waiting": total.num_requests,
            "waiting_prompt_tokens": total.new_tokens,
            "waiting_worker_s": total.worker_s,
            "max_queued_prompt_tokens": self._config.max_queued_prompt_tokens,
            "tenants": {
                label: {
                    "num_waiting": queued[label].num_requests,
                    "waiting_prompt_tokens": queued[label].new_tokens,
                    "num_admitted": stats.num_admitted,
                    "mean_wait_s": stats.wait_s / max(stats.num_admitted, 1),
                    "rejected": dict(stats.rejected),
                    "dropped": dict(stats.dropped),
                }
                for label, stats in self.stats.items()
            },
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books agree; with nothing waiting they are empty."""
        self._queue.check_integrity()
        assert len(self._queue) == len(self._waiting), f"{len(self._queue)} queued, {len(self._waiting)} waiting"
        held = Counter((one.tenant, one.placement.best.prefill.worker_id) for one in self._waiting)
        assert held == {key: num for key, (num, _) in self._held.items()}, "held prompts disagree"

    def _refusal(self, offer: Offer, forecast: Forecast, max_share: float) -> ServingError | None:
        """Why the request is not taken in, if it is not."""
        waiting = self._queue.total
        num_new, limit = forecast.work.new_tokens, self._config.max_queued_prompt_tokens
        queued = self._registry.queued_prompt_tokens + waiting.new_tokens
        # NOTE: with nothing queued a prompt larger than the limit is taken: waiting would not help it.
        if queued and queued + num_new > limit:
            retry_s = self._drain_s(min(queued + num_new - limit, queued), forecast)
            return Overloaded(
                f"{queued} prompt tokens are queued and this request adds {num_new}; "
                f"max_queued_prompt_tokens={limit}. Retry in {retry_s:.1f} s",
                retry_after_s=retry_s,
                code="queue_full",
            )
        own = self._queue.waiting(offer.tenant).new_tokens
        if own and own + num_new > max_share * limit:
            retry_s = self._drain_s(min(own + num_new - max_share * limit, own), forecast)
            return Overloaded(
                f"{own} prompt tokens of tenant '{offer.tenant}' are queued and this request adds {num_new}; "
                f"max_queue_share={max_share:g} of max_queued_prompt_tokens={limit}. Retry in {retry_s:.1f} s",
                retry_after_s=retry_s,
                code="tenant_queue_full",
            )
        if waiting.num_requests >= MAX_QUEUED_REQUESTS:
            retry_s = self._drain_s(1, forecast)
            message = f"{waiting.num_requests} requests wait. Retry in {retry_s:.1f} s"
            return Overloaded(message, retry_after_s=retry_s, code="queue_full")
        return self._deadline_refusal(forecast)

    def _deadline_refusal(self, forecast: Forecast) -> ServingError | None:
        ttft_s, slo_s = forecast.ttft_s, forecast.slo_s
        if forecast.is_hopeful:
            return None
        # What is ahead shrinks by a second each second, or by less as far as the model has been wrong lately, and
        # that becomes known with the report of a step. With nothing ahead it is let in.
        worker = forecast.placement.best.prefill
        error = self._costs.steps(worker.card.kind).relative_error
        retry_s = min(ttft_s - slo_s, forecast.start_s) * (1 + error) + self._full_step_s(worker)
        return DeadlineUnmet(
            f"The first token is predicted in {ttft_s * 1e3:.0f} ms; the TTFT SLO is {slo_s * 1e3:.0f} ms. "
            f"Retry in {retry_s:.1f} s",
            retry_after_s=retry_s,
        )

    def _start_s(self, placement: Placement, ahead: Work) -> float:
        """Predicted seconds until what is ahead has been begun, by prompts to compute and by memory for answers.

        Prompts are taken as a fluid that the workers of a side share: it fills the shortest queues first.
        """
        table = self._registry.table
        side = table.can_prefill if placement.best.is_pair else table.can_decode
        queues = table.pace(self._costs).queue_s[side].tolist()
        return max(fill_level(queues, ahead.prefill_s), self._memory_s(placement, ahead))

    def _memory_s(self, placement: Placement, ahead: Work) -> float:
        """As `Terms.memory_s`, over all workers that decode: running sequences end evenly over one lifetime."""
        table = self._registry.table
        decoders = table.can_decode
        capacity, booked = float(table.capacity_tokens[decoders].sum()), float(table.booked_kv_tokens[decoders].sum())
        lacking = booked + ahead.kv_tokens + placement.num_kv_tokens - capacity
        if lacking <= 0 or booked == 0:
            return 0.0
        lifetime_s = placement.expected_output_tokens * float(table.pace(self._costs).step_s[decoders].mean())
        return lacking / booked * lifetime_s

    def _drain_s(self, num_tokens: float, forecast: Forecast) -> float:
        """Seconds until so many queued prompt tokens are computed by the workers that are busy now."""
        rate = 0.0
        for worker in self._registry:
            if (waits_s := self._queue_s(worker)) > 0:
                rate += worker.uncomputed_tokens / waits_s
        if not rate:  # all wait for memory
            return forecast.start_s
        return num_tokens / rate + self._full_step_s(forecast.placement.best.prefill)

    def _queue_s(self, worker: Worker) -> float:
        return queue_s(worker, self._costs.steps(worker.card.kind))

    def _full_step_s(self, worker: Worker) -> float:
        """Duration of a step of this worker that is full of prompt."""
        chunk = worker.card.max_num_batched_tokens
        model = self._costs.steps(worker.card.kind)
        return model.prefill_s(
            chunk, 0, chunk, num_decode_seqs=worker.num_booked_seqs, num_kv_tokens=worker.booked_kv_tokens
        )

    def _room_s(self, worker: Worker) -> float:
        """Predicted queue up to which a worker is given more."""
        num_steps = ROOM_STEPS if self._has_rivals else ROOM_STEPS_ALIKE
        return self._config.max_worker_queue_s or num_steps * self._full_step_s(worker)

    def _workers_with_room(self) -> set[str]:
        """Workers that would have their prompts computed soon, of those that prompts may be sent to."""
        workers = [worker for worker in self._registry if worker.state is WorkerState.READY]
        if not self._config.local_prefill and any(can_prefill(worker) for worker in workers):
            workers = [worker for worker in workers if worker.role is not Role.DECODE]
        return {worker.worker_id for worker in workers if self._queue_s(worker) < self._room_s(worker)}

    def _place_again(self, waiting: Waiting, held_s: Mapping[str, float], now: float) -> None:
        """Follow the load; `held_s` is what goes first."""
        offer = waiting.offer
        placement = self._placer.place(
            offer.num_prompt_tokens,
            offer.digests,
            offer.expected_output_tokens,
            now,
            held_s=held_s,
            needs=self._needs(offer),
        )
        self._hold(waiting, -1)
        latest_start_s = waiting.latest_start_s
        waiting.placement, waiting.placed_s = placement, now
        self._queue.update(waiting, work_of(placement, self._costs))
        self._hold(waiting, 1)
        if waiting.latest_start_s < latest_start_s:
            self._note_deadline(waiting)

    def _let_go(self, waiting: Waiting, now: float) -> Dispatch | Drop:
        """It is this request's turn: it goes, unless that is too late for it."""
        if now + waiting.placement.best.terms.ttft_s > waiting.deadline_s:
            return self._drop(waiting, _too_late(waiting, now))
        self._hold(waiting, -1)
        del self._waiting[waiting]
        self._queue.serve(waiting)
        wait_s = now - waiting.arrived_s
        stats = self._of(waiting.tenant)
        stats.num_admitted += 1
        stats.wait_s += wait_s
        stats.waits[bisect_left(WAIT_BUCKETS_S, wait_s)] += 1
        return Dispatch(waiting, waiting.placement, wait_s)

    def _next_late(self, now: float) -> Waiting | None:
        """A request that cannot be begun in time any more."""
        while self._deadlines and self._deadlines[0][0] < now:
            waiting = heapq.heappop(self._deadlines)[2]
            if waiting not in self._waiting:
                continue
            if waiting.latest_start_s < now:
                return waiting
            self._note_deadline(waiting)
        return None

    def _note_deadline(self, waiting: Waiting) -> None:
        """Have `_next_late` look at the request in time. The heap is kept within a few times of what waits."""
        if waiting.deadline_s == math.inf:
            return
        self._num_deadlines += 1
        heapq.heappush(self._deadlines, (waiting.latest_start_s, self._num_deadlines, waiting))
        if len(self._deadlines) > 4 * len(self._waiting) + MAX_SCANNED:
            with_deadline = [one for one in self._waiting if one.deadline_s < math.inf]
            self._deadlines = [(one.latest_start_s, number, one) for number, one in enumerate(with_deadline)]
            heapq.heapify(self._deadlines)

    def _drop(self, waiting: Waiting, error: ServingError) -> Drop:
        self.leave(waiting, error.code or "other")
        return Drop(waiting, error)

    def _take_out(self, waiting: Waiting) -> bool:
        if not self._queue.remove(waiting):
            return False
        self._hold(waiting, -1)
        del self._waiting[waiting]
        return True

    def _hold(self, waiting: Waiting, sign: int) -> None:
        """Count a request's prompt for, or no longer for, the worker it would go to."""
        key = (waiting.tenant, waiting.placement.best.prefill.worker_id)
        num, held_s = self._held.get(key, (0, 0.0))
        self._held[key] = num + sign, held_s + sign * waiting.work.prefill_s
        if num + sign == 0:
            del self._held[key]

    def _needs(self, offer: Offer) -> Needs:
        return Needs(offer.tenant, self._tenants.policy(offer.tenant).workers, offer.adapter)

    def _of(self, tenant: str) -> TenantStats:
        return self.stats.setdefault(self._tenants.label(tenant), TenantStats())


def work_of(placement: Placement, costs: CostModel) -> Work:
    """What the request takes from its workers, in worker seconds: its prompt, and its answer of the expected length.

    Seconds of both roles count alike: a worker flips from one to the other.
    """
    prefill_s = placement.best.terms.fetch_s + placement.best.terms.prefill_s
    decode_s = placement.expected_output_tokens * output_token_s(placement, costs)
    return Work(1, prefill_s + decode_s, prefill_s, placement.num_new_tokens, placement.num_kv_tokens)


def output_token_s(placement: Placement, costs: CostModel) -> float:
    """Worker seconds of one token of the answer: its part of a step's fixed time, and what it adds to the step."""
    worker = placement.best.decode
    step = costs.steps(worker.card.kind).costs
    mean_tokens = placement.num_prompt_tokens + placement.expected_output_tokens / 2
    return step.base_s / (worker.num_booked_seqs + 1) + step.decode_seq_s + step.kv_token_s * mean_tokens


def fill_level(queues_s: Iterable[float], work_s: float) -> float:
    """Seconds until `work_s` of work has been begun by workers with these queues, each taking it when it is free."""
    sum_s = work_s
    level_s = 0.0
    for num, waits_s in enumerate(sorted(queues_s)):
        if num and level_s <= waits_s:
            break
        sum_s += waits_s
        level_s = sum_s / (num + 1)
    return level_s


def _too_late(waiting: Waiting, now: float) -> DeadlineUnmet:
    terms = waiting.placement.best.terms
    ttft_s = now - waiting.arrived_s + terms.ttft_s
    slo_s = waiting.deadline_s - waiting.arrived_s
    # The queue turned out this much longer than it was predicted to be.
    retry_s = max(ttft_s - slo_s, waiting.forecast.start_s)
    return DeadlineUnmet(
        f"After {(now - waiting.arrived_s) * 1e3:.0f} ms in the queue the first token is predicted at "
        f"{ttft_s * 1e3:.0f} ms; the TTFT SLO is {slo_s * 1e3:.0f} ms. Retry in {retry_s:.1f} s",
        retry_after_s=retry_s,
    )
