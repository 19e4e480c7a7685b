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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import DeadlineUnmet, Overloaded, ServingError
from tandem.protocol.messages import PrefillPriority, Role, WorkerState
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.fair_queue import CREDIT_S, FairQueue, Ticket, Work
from tandem.scheduling.lru_dict import LruDict
from tandem.scheduling.placement import Held, Placement
from tandem.scheduling.placer import Placer
from tandem.scheduling.request import PlacementRequest, PromptDigests, ServiceClass
from tandem.scheduling.tenants import Tenants
from tandem.scheduling.worker_table import Workers
from tandem.scheduling.workers import RegisteredWorker, can_prefill, queue_s

__all__ = [
    "WAIT_BUCKETS_S",
    "Admission",
    "Dispatch",
    "Drop",
    "Forecast",
    "OutputLengths",
    "TenantStats",
    "Waiting",
]

# Full steps of prompts that a worker may have left, before a request, when it gets that too: short prompts fill a step
# together, and the worker does not run dry. Other tenants' requests overtake what is there.
ROOM_STEPS = 2.0
# More urgent ones of the same tenant do not, and a deadline is kept best by who decides late. While there are such it
# is what is computed while the worker's report and the router's answer are on their way.
ROOM_STEPS_URGENT = 0.5
RIVAL_MEMORY_S = 60.0  # another tenant, or another priority, that came this lately is counted with
LEAD_S = 10.0  # of a request within its tenant's share: at its worker it overtakes others that came this much earlier
SHORT_STEP_LOSS = 0.1  # of a step that is soon over, its fixed part
MAX_QUEUED_REQUESTS = 16_384  # each holds a connection and its prompt, however few of its tokens are new
NUM_ROUNDS = 2  # of a forecast
_NOTHING_HELD: Mapping[str, Held] = {}
MAX_SCANNED = 64  # waiting requests looked at for one that a free worker is best for
MAX_PLACED = 8  # of these, how many are placed again
PLACEMENT_AGE_S = 0.05  # younger ones are not made again but for the first in line
FIRST_GUESS_TOKENS = 128.0  # of an answer
OUTPUT_LENGTH_WEIGHT = 0.05  # of the newest answer in the mean length
MAX_TENANTS = 4096  # whose mean length of answers, and whose latest priority, is remembered: clients name tenants
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


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

    request: PlacementRequest
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
    turn: PrefillPriority  # at the worker that computes the prompt


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
        self._means = LruDict[str, float](MAX_TENANTS)

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Of the tenant's next request, which may not be longer than `max_tokens`."""
        return max(1, min(max_tokens, round(self._means.get(tenant, self.mean_tokens))))

    def note(self, tenant: str, num_tokens: int) -> None:
        """An answer has ended by itself after so many tokens."""
        mean = self._means.get(tenant, self.mean_tokens)
        self._means[tenant] = mean + OUTPUT_LENGTH_WEIGHT * (num_tokens - mean)
        self.mean_tokens += OUTPUT_LENGTH_WEIGHT * (num_tokens - self.mean_tokens)


class Admission:
    """The queue of the router, and the decisions about it."""

    def __init__(
        self, registry: Workers, costs: CostModel, placer: Placer, tenants: Tenants, config: RouterConfig
    ) -> None:
        self._registry = registry
        self._costs = costs
        self._placer = placer
        self._tenants = tenants
        self._config = config
        self._queue = FairQueue(lambda tenant: tenants.policy(tenant).weight)
        self._held: dict[str, dict[str, Held]] = {}  # by tenant and worker
        self._num_held: Counter[tuple[str, str]] = Counter()  # parts in each
        self._deadlines: list[tuple[float, int, Waiting]] = []  # heap; entries of requests that left are stale
        self._num_deadlines = 0
        self._version = 0  # counts the calls of `next`
        self._last_tenant: str | None = None
        self._priorities = LruDict[str, int](MAX_TENANTS)  # of each tenant's newest request
        self._tenants_until_s = -math.inf  # until when there is more than one
        self._priorities_until_s = -math.inf
        self._are_urgencies_mixed = False
        self._waiting: dict[Waiting, None] = {}
        self.lengths = OutputLengths()
        self.stats: dict[str, TenantStats] = {}  # by the tenant's label

    def __len__(self) -> int:
        return len(self._queue)

    def request(
        self,
        service_class: ServiceClass,
        *,
        num_prompt_tokens: int,
        digests: PromptDigests,
        max_tokens: int,
        adapter: str = "",
    ) -> PlacementRequest:
        """A request with what is known of its tenant: the expected length of its answer, and the workers it may use."""
        return PlacementRequest(
            num_prompt_tokens=num_prompt_tokens,
            expected_output_tokens=self.lengths.expected(service_class.tenant, max_tokens),
            digests=digests,
            service_class=service_class,
            allowed_workers=self._tenants.policy(service_class.tenant).workers,
            adapter=adapter,
        )

    def forecast(self, request: PlacementRequest, now: float, *, num_others: int = 0) -> Forecast:
        """What would become of this request; changes nothing. Raises `NoWorker`."""
        tenant, priority = request.tenant, request.service_class.priority
        policy = self._tenants.policy(tenant)
        slo_s = request.service_class.ttft_slo_s
        slo_s = policy.ttft_slo_s if slo_s is None else slo_s
        slo_s = math.inf if slo_s is None else slo_s
        order = self._order(self._queue.start_tag(tenant, priority), slo_s, now)
        placement = self._placer.place(
            request, now, order=order, held=self._held.get(tenant, _NOTHING_HELD), num_others=num_others
        )
        terms = placement.best.terms
        work = work_of(placement, self._costs)
        ahead = waiting = self._queue.ahead(tenant, priority, now)
        start_s = max(terms.queue_s, self._start_s(placement, ahead, order))
        for _ in range(NUM_ROUNDS):  # the longer it waits, the more of others' next requests go first
            before, ahead = ahead, self._queue.ahead(tenant, priority, now, start_s)
            if ahead == before:
                break
            start_s = max(terms.queue_s, self._start_s(placement, ahead, order))
        ttft_s = start_s + terms.fetch_s + terms.prefill_s
        forecast = Forecast(placement, work, waiting, start_s, ttft_s, slo_s, None)
        error = self._refusal(tenant, forecast, policy.max_queue_share)
        return forecast if error is None else forecast._replace(error=error)

    def enter(self, request: PlacementRequest, forecast: Forecast, now: float, payload: Any = None) -> Waiting:
        """Put a request in the queue, with what was forecast just now; `next` may let it through at once.

        Raises `Overloaded` if it is refused.
        """
        service_class = request.service_class
        if forecast.error is not None:
            # Late for what others have ahead of it: once they have been served, its tenant's next go before theirs.
            if forecast.placement.best.terms.ttft_s <= forecast.slo_s:
                self._queue.note_asked(service_class.tenant, forecast.work, now)
            self.reject(service_class.tenant, forecast.error)
            raise forecast.error
        self._note_rivals(service_class, forecast.slo_s, now)
        waiting = Waiting(
            tenant=service_class.tenant,
            priority=service_class.priority,
            arrived_s=now,
            work=forecast.work,
            request=request,
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
        self._are_urgencies_mixed = now < self._priorities_until_s
        if (late := self._next_late(now)) is not None:
            return self._drop(late, _too_late(late, now))
        if not len(self._queue):
            return None
        version = self._version - 1
        held: dict[str, Held] = {}
        num_placed = 0
        least_order, last_tag = math.inf, math.inf  # of those looked at
        for num_scanned, ticket in enumerate(self._queue.in_order(now)):
            if num_scanned == MAX_SCANNED:
                break
            waiting = cast(Waiting, ticket)
            order = self._order(waiting.start_tag, waiting.forecast.slo_s, now)
            # What came this moment is placed. The first in line is so again, others where that may change something.
            is_fresh = waiting.version == version and len(self._queue) == 1
            if is_fresh and self._takes(waiting.placement, order):
                return self._let_go(waiting, now)
            if num_scanned == 0 and self._placer.can_place and not self._is_room_anywhere(order):
                if not self._is_room_to_overtake(waiting, order, now):
                    return None
                least_order, last_tag = order, waiting.start_tag + CREDIT_S
            if waiting.start_tag > last_tag:
                break
            if order >= least_order:
                continue  # no room for this one; it is not in front of those that overtake it
            is_roomy = self._has_room(waiting.placement.best.prefill, order)
            is_old = now - waiting.placed_s > PLACEMENT_AGE_S
            if is_fresh or num_scanned == 0 or (num_placed < MAX_PLACED and (is_roomy or is_old)):
                num_placed += 1
                try:
                    if not is_fresh:
                        self._place_again(waiting, held, now)
                except ServingError as exc:
                    return self._drop(waiting, exc)
                if self._takes(waiting.placement, order):
                    return self._let_go(waiting, now)
            for worker_id, part in held_by(waiting):
                held[worker_id] = held[worker_id].plus(part) if worker_id in held else part
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
            retry_after_s=self._start_s(
                waiting.placement,
                self._queue.ahead(waiting.tenant, waiting.priority, now),
                self._order(self._queue.start_tag(waiting.tenant, waiting.priority), waiting.forecast.slo_s, now),
            ),
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
        held = Counter((one.tenant, worker_id) for one in self._waiting for worker_id, _ in held_by(one))
        assert held == self._num_held, "held requests disagree"
        found = {(tenant, worker_id) for tenant, workers in self._held.items() for worker_id in workers}
        assert held.keys() == found, "what is held is of other workers"
        assert all(self._held.values()), "a tenant without anything held is remembered"

    def _refusal(self, tenant: str, forecast: Forecast, max_share: float) -> ServingError | None:
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
        own = self._queue.waiting(tenant).new_tokens
        if own and own + num_new > max_share * limit:
            retry_s = self._drain_s(min(own + num_new - max_share * limit, own), forecast)
            return Overloaded(
                f"{own} prompt tokens of tenant '{tenant}' are queued and this request adds {num_new}; "
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

    def _start_s(self, placement: Placement, ahead: Work, order: float) -> float:
        """Predicted seconds until what is ahead has been begun, by prompts to compute and by memory for answers.

        Prompts are taken as a fluid that the workers of a side share: it fills the shortest queues first. While some
        worker has room, those that wait for the other side's go past this request. Where no prompt is ahead only memory
        counts.
        """
        memory_s = self._memory_s(placement, ahead)
        table, is_pair = self._registry.table, placement.best.is_pair
        prefill_s = ahead.pair_s if is_pair else ahead.alone_s
        if prefill_s < ahead.prefill_s and not self._looks_past(ahead):
            prefill_s = ahead.prefill_s
        if prefill_s <= 0:
            return memory_s
        side = table.can_prefill if is_pair else table.can_decode
        queues = table.pace(self._costs, order).wait_s[side].tolist()
        return max(fill_level(queues, prefill_s), memory_s)

    def _memory_s(self, placement: Placement, ahead: Work) -> float:
        """As `Terms.memory_s`, over all workers that decode: running sequences end evenly over one lifetime."""
        table = self._registry.table
        decoders = table.can_decode
        booked, num_seqs = float(table.booked_kv_tokens @ decoders), float(table.num_booked_seqs @ decoders)
        tokens = booked + ahead.kv_tokens + placement.num_kv_tokens - table.decode_capacity_tokens
        seqs = num_seqs + ahead.num_requests + 1 - table.decode_capacity_seqs
        if (tokens <= 0 and seqs <= 0) or booked == 0:
            return 0.0
        lifetime_s = placement.expected_output_tokens * float(table.pace(self._costs).step_s[decoders].mean())
        return max(tokens / booked, seqs / max(num_seqs, 1.0)) * lifetime_s

    def _drain_s(self, num_tokens: float, forecast: Forecast) -> float:
        """Seconds until so many queued prompt tokens are computed by the workers that are busy now."""
        rate = 0.0
        for worker in self._registry:
            if (waits_s := self._queue_s(worker)) > 0:
                rate += worker.uncomputed_tokens / waits_s
        if not rate:  # all wait for memory
            return forecast.start_s
        return num_tokens / rate + self._full_step_s(forecast.placement.best.prefill)

    def _queue_s(self, worker: RegisteredWorker, order: float = math.inf) -> float:
        return queue_s(worker, self._costs.steps(worker.card.kind), order)

    def _full_step_s(self, worker: RegisteredWorker) -> float:
        """Duration of a step of this worker that is full of prompt."""
        chunk = worker.card.max_num_batched_tokens
        model = self._costs.steps(worker.card.kind)
        return model.prefill_s(
            chunk, 0, chunk, num_decode_seqs=worker.num_booked_seqs, num_kv_tokens=worker.booked_kv_tokens
        )

    def _room_s(self, worker: RegisteredWorker) -> float:
        """Predicted queue up to which a worker is given more."""
        num_steps = ROOM_STEPS_URGENT if self._are_urgencies_mixed else ROOM_STEPS
        return self._config.max_worker_queue_s or num_steps * self._full_step_s(worker)

    def _has_room(self, worker: RegisteredWorker, order: float) -> bool:
        """Whether the worker would soon have computed what goes before a prompt of this order."""
        if worker.state is not WorkerState.READY:
            return False
        waits_s = self._queue_s(worker, order)
        return not waits_s or waits_s < self._room_s(worker)  # there is room for something

    def _takes(self, placement: Placement, order: float) -> bool:
        """Whether the workers of this placement have room for it."""
        worker, terms = placement.best.prefill, placement.best.terms
        return self._has_room(worker, order) and (not terms.memory_s or terms.memory_s < self._room_s(worker))

    def _is_room_anywhere(self, order: float) -> bool:
        """Whether any worker has room, of those that prompts may be sent to."""
        workers = [worker for worker in self._registry if worker.state is WorkerState.READY]
        if not self._config.local_prefill and any(can_prefill(worker) for worker in workers):
            workers = [worker for worker in workers if worker.role is not Role.DECODE]
        return any(self._has_room(worker, order) for worker in workers)

    def _looks_past(self, ahead: Work) -> bool:
        """Whether `next` would come to a request behind these though none of them can go."""
        return ahead.num_requests < MAX_SCANNED and self._is_room_anywhere(math.inf)

    def _is_room_to_overtake(self, first: Waiting, order: float, now: float) -> bool:
        """Whether some worker has room for a deadline's order, though none has for the first in line at its own.

        For those with a deadline that go then, the first in line waits longer, but no longer than it would at a worker.
        """
        is_overtaken = self._deadlines and now - LEAD_S < order and now - first.arrived_s < LEAD_S
        return bool(is_overtaken) and self._is_room_anywhere(now - LEAD_S)

    def _place_again(self, waiting: Waiting, held: Mapping[str, Held], now: float) -> None:
        """Follow the load; `held` is what goes first."""
        order = self._order(waiting.start_tag, waiting.forecast.slo_s, now)
        placement = self._placer.place(waiting.request, now, held=held, order=order)
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
        return Dispatch(waiting, waiting.placement, wait_s, self._turn(waiting, now))

    def _note_rivals(self, service_class: ServiceClass, slo_s: float, now: float) -> None:
        tenant, priority = service_class.tenant, service_class.priority
        if self._last_tenant not in (None, tenant):
            self._tenants_until_s = now + RIVAL_MEMORY_S
        if slo_s < math.inf or self._priorities.get(tenant, priority) != priority:
            self._priorities_until_s = now + RIVAL_MEMORY_S
        self._last_tenant, self._priorities[tenant] = tenant, priority

    def _order(self, start_tag: float, slo_s: float, now: float) -> float:
        """Place at a worker of what is sent there now. Tenants within their share overtake those that are not.

        They do not overtake each other, which would make no tail shorter, nor a request with a deadline, whose first
        token was promised when it was sent; and nobody is overtaken for ever.
        """
        return now - LEAD_S if slo_s < math.inf or self._queue.is_within_share(start_tag) else now

    def _turn(self, waiting: Waiting, now: float) -> PrefillPriority:
        """When its worker computes it. While there are other tenants, one that they may overtake takes short steps."""
        order = self._order(waiting.start_tag, waiting.forecast.slo_s, now)
        if order < now or now >= self._tenants_until_s:
            return PrefillPriority(order=order)
        card = waiting.placement.best.prefill.card
        costs = self._costs.steps(card.kind).costs
        num_tokens = (1 / SHORT_STEP_LOSS - 1) * costs.base_s / max(costs.prefill_token_s, 1e-12)
        num_tokens = min(max(num_tokens, card.max_num_batched_tokens / 4), card.max_num_batched_tokens)
        return PrefillPriority(order=order, max_step_tokens=math.ceil(num_tokens))

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
        """Count a request for, or no longer for, the workers it would go to."""
        tenant = waiting.tenant
        held = self._held.setdefault(tenant, {})
        for worker_id, (prefill_s, num_seqs, kv_tokens) in held_by(waiting):
            part = Held(sign * prefill_s, sign * num_seqs, sign * kv_tokens)
            held[worker_id] = held[worker_id].plus(part) if worker_id in held else part
            num_parts = self._num_held[tenant, worker_id] = self._num_held[tenant, worker_id] + sign
            if num_parts == 0:
                del held[worker_id], self._num_held[tenant, worker_id]
        if not held:
            del self._held[tenant]

    def _of(self, tenant: str) -> TenantStats:
        label = self._tenants.label(tenant)
        stats = self.stats.get(label)
        if stats is None:
            stats = self.stats[label] = TenantStats()
        return stats


def held_by(waiting: Waiting) -> Iterator[tuple[str, Held]]:
    """What a request that waits means to those behind it, by worker id; both may be the same worker's."""
    best = waiting.placement.best
    yield best.prefill.worker_id, Held(prefill_s=waiting.work.prefill_s)
    yield best.decode.worker_id, Held(num_seqs=1, kv_tokens=waiting.placement.num_kv_tokens)


def work_of(placement: Placement, costs: CostModel) -> Work:
    """What the request takes from its workers, in worker seconds: its prompt, and its answer of the expected length.

    Seconds of both roles count alike: a worker flips from one to the other.
    """
    prefill_s = placement.best.terms.fetch_s + placement.best.terms.prefill_s
    decode_s = placement.expected_output_tokens * output_token_s(placement, costs)
    pair_s, alone_s = (prefill_s, 0.0) if placement.best.is_pair else (0.0, prefill_s)
    return Work(1, prefill_s + decode_s, pair_s, alone_s, placement.num_new_tokens, placement.num_kv_tokens)


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
