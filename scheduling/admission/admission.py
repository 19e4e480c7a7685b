"""Which requests wait in the router, which go to the workers now, and which are refused: all in predicted seconds.

A request waits here once its best worker has enough to do until it reports again, not at the worker, so that a more
urgent request, or one of a tenant that had less than its share, can still go first. It is placed again before it is
dispatched. A request whose first token is predicted to come too late is refused at once.

Plain values in, decisions out, and the time is passed in: no I/O, no clock. The caller books each `Dispatch` on the
registry before it asks for the next decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import Overloaded, ServingError
from tandem.protocol.messages import WorkerPriority
from tandem.scheduling.admission.answer_lengths import AnswerLengths
from tandem.scheduling.admission.contention import Contention
from tandem.scheduling.admission.deadlines import Deadlines
from tandem.scheduling.admission.fair_queue import CREDIT_S, FairQueue
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.admission.forecaster import LEAD_S, MAX_SCANNED, Forecaster, output_token_s, work_of
from tandem.scheduling.admission.held_work import HeldWork
from tandem.scheduling.admission.queued_request import QueuedRequest, held_by
from tandem.scheduling.admission.refusals import too_late
from tandem.scheduling.admission.stats import AdmissionStats, TenantStats
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.admission.work import NO_WORK, Work
from tandem.scheduling.admission.worker_room import WorkerRoom
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placement import Held, Placement
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.request import PlacementRequest, PromptDigests, ServiceClass
from tandem.scheduling.workers.demand import DemandMeter
from tandem.scheduling.workers.worker_table import Workers

SHORT_STEP_LOSS = 0.1  # share of a short step's duration that is the fixed cost of a step
MAX_PLACED = 8  # requests placed again in one decision
PLACEMENT_AGE_S = 0.05  # younger placements are not renewed, except for the first request in the queue


class Dispatch(NamedTuple):
    """Book this request and send it to its workers now."""

    queued: QueuedRequest
    placement: Placement
    wait_s: float
    worker_priority: WorkerPriority  # the order at the worker that computes the prompt


class Drop(NamedTuple):
    """Fail this request: it waited for nothing."""

    queued: QueuedRequest
    error: ServingError


class Admission:
    """The queue of the router, and the decisions about it."""

    def __init__(
        self,
        workers: Workers,
        costs: CostModel,
        placer: Placer,
        tenants: Tenants,
        config: RouterConfig,
        demand: DemandMeter | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self._costs = costs
        self._demand = demand or DemandMeter()
        self._placer = placer
        self._tenants = tenants
        self._config = config
        self._queue = FairQueue[QueuedRequest](lambda tenant: tenants.policy(tenant).weight)
        self._waiting: dict[QueuedRequest, None] = {}  # by arrival
        self._held = HeldWork()
        self._deadlines = Deadlines(self._waiting.keys())
        self._room = WorkerRoom(workers, costs, config)
        self._stats = AdmissionStats(tenants)
        self._version = 0  # counts the calls of `next`
        self._forecaster = Forecaster(workers, costs, placer, tenants, config, self._queue, self._held, self._room)
        self.shadow = shadow or Shadow()
        self.contention = Contention()
        self.lengths = AnswerLengths()

    def __len__(self) -> int:
        return len(self._queue)

    def note_answer(self, tenant: str, num_output_tokens: int) -> None:
        """An answer has ended by itself: learn from its length."""
        self.lengths.note(tenant, num_output_tokens)
        self._demand.note_answer(num_output_tokens)

    def note_grammar(self, tenant: str, grammar_s: float) -> None:
        """A worker took this time for the grammar of a tenant's request, beside computing it."""
        self._queue.charge(tenant, grammar_s)

    @property
    def stats(self) -> dict[str, TenantStats]:
        """The outcomes of requests, by the tenants' labels."""
        return self._stats.by_label

    @property
    def total(self) -> Work:
        """Predicted work of all waiting requests."""
        return self._queue.total

    @property
    def requests(self) -> list[QueuedRequest]:
        """All waiting requests, by arrival."""
        return list(self._waiting)

    def placement_request(
        self,
        service_class: ServiceClass,
        *,
        num_prompt_tokens: int,
        digests: PromptDigests,
        max_tokens: int,
        adapter: str = "",
    ) -> PlacementRequest:
        """A request with what its tenant adds to it: the expected length of its answer, and the workers it may use."""
        return PlacementRequest(
            num_prompt_tokens=num_prompt_tokens,
            expected_output_tokens=self.lengths.expected(service_class.tenant, max_tokens),
            digests=digests,
            service_class=service_class,
            allowed_workers=self._tenants.policy(service_class.tenant).workers,
            adapter=adapter,
        )

    def forecast(self, request: PlacementRequest, now: float, *, num_others: int = 0) -> Forecast:
        """Predict what would happen to this request; changes nothing. Raises `NoWorker`."""
        return self._forecaster.forecast(request, now, num_others=num_others)

    def enter(self, request: PlacementRequest, forecast: Forecast, now: float, payload: Any = None) -> QueuedRequest:
        """Put a request in the queue, with its forecast of just now; `next` may dispatch it at once.

        Raises `Overloaded` if it is refused.
        """
        service_class = request.service_class
        self._note_demand(request, forecast)
        if forecast.error is not None:
            # Others' work ahead makes it late. Once that is served, its tenant's next requests go before theirs.
            if forecast.placement.best.terms.ttft_s <= forecast.slo_s:
                self._queue.note_demand(service_class.tenant, forecast.work, now)
            self.reject(service_class.tenant, forecast.error)
            raise forecast.error
        self.contention.note(service_class, forecast.slo_s, now)
        queued = QueuedRequest(
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
        self._queue.add(queued)
        self._waiting[queued] = None
        self._held.add(queued)
        self._demand.num_waiting_tokens += forecast.work.new_tokens
        self._deadlines.add(queued)
        return queued

    def place_again(self, request: PlacementRequest, now: float, *, excluded: Collection[str] = ()) -> Placement:
        """Place a request that goes on elsewhere, on none of the workers `excluded`.

        It goes before all others, as it was admitted and counted. Raises `NoWorker`.
        """
        return self._placer.place(request, now, order=-math.inf, excluded=excluded)

    def fork(self, request: PlacementRequest, leader: Placement) -> Placement:
        """Admit a further answer to a prompt that was dispatched just now: its tenant pays for the answer alone.

        Of the memory it takes only what the answer adds. Returns its placement, at the same workers.
        """
        policy = self._tenants.policy(request.tenant)
        self._demand.note(request.num_prompt_tokens, request.num_prompt_tokens, math.inf, policy.itl_slo_s)
        self._queue.charge(request.tenant, request.expected_output_tokens * output_token_s(leader, self._costs))
        self._stats.note_admitted(request.tenant, 0.0)
        return dataclasses.replace(
            leader,
            best=leader.best._replace(num_cached_tokens=leader.num_prompt_tokens),
            expected_output_tokens=request.expected_output_tokens,
            num_shared_tokens=leader.num_prompt_tokens,
        )

    def priority_again(self, request: PlacementRequest, placement: Placement) -> WorkerPriority:
        """The priority of what the worker of `place_again` has to compute: before all prompts, in short steps.

        After a death many streams are computed again at once. The first of them go on soon, and the streams beside
        them get their tokens meanwhile.
        """
        return self._priority(request.tenant, 0.0, self._short_step_tokens(placement))

    def next(self, now: float) -> Dispatch | Drop | None:
        """The next decision; None when all waiting requests have to wait on. Call it after each change of load."""
        self._version += 1
        self._room.are_urgencies_mixed = now < self.contention.urgencies_until_s
        if (late := self._deadlines.next_late(now)) is not None:
            return self._drop(late, too_late(late, now))
        return self._scan(now) if len(self._queue) else None

    def leave(self, queued: QueuedRequest, reason: str) -> None:
        """Remove a request, because its client is gone for example. One that has left already is ignored."""
        if self._queue.remove(queued):
            self._held.remove(queued)
            self._demand.num_waiting_tokens -= queued.work.new_tokens
            del self._waiting[queued]
            self._stats.note_dropped(queued.tenant, reason)

    def clear(self) -> list[QueuedRequest]:
        """Remove all requests, oldest first: the server is shutting down."""
        requests = self.requests
        for queued in requests:
            self.leave(queued, "shutdown")
        return requests

    def reject(self, tenant: str, error: ServingError) -> None:
        """Count a request that was refused at once."""
        self._stats.note_rejected(tenant, error)

    def note_admitted(self, tenant: str, wait_s: float) -> None:
        """Count a request that found no worker at first, and got one from `place_again` after this wait."""
        self._stats.note_admitted(tenant, wait_s)

    def timeout_error(self, queued: QueuedRequest, now: float) -> Overloaded:
        """The error for a request that waited longer than `request_timeout_s`."""
        return Overloaded(
            f"The request waited {now - queued.arrived_s:.1f} s in the queue; "
            f"request_timeout_s={self._config.request_timeout_s:g}",
            retry_after_s=self._forecaster.remaining_s(queued, now),
            code="queue_timeout",
        )

    def queued(self) -> dict[str, Work]:
        """Work of the waiting requests, by the tenants' labels."""
        queued: dict[str, Work] = dict.fromkeys(self.stats, NO_WORK)
        for tenant, work in self._queue.by_tenant().items():
            label = self._tenants.label(tenant)
            queued[label] = queued.get(label, NO_WORK) + work
        return queued

    def report(self) -> dict[str, object]:
        """The queue and the outcomes of requests, as JSON."""
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
        self._held.check_integrity(self._waiting.keys())

    def _note_demand(self, request: PlacementRequest, forecast: Forecast) -> None:
        best, policy = forecast.placement.best, self._tenants.policy(request.tenant)
        self._demand.note(request.num_prompt_tokens, best.num_cached_tokens, forecast.slo_s, policy.itl_slo_s)

    def _scan(self, now: float) -> Dispatch | Drop | None:
        """Decide on the first request, in fair order, whose workers have room."""
        version = self._version - 1
        held: dict[str, Held] = {}  # by the requests examined
        num_placed = 0
        least_order, last_tag = math.inf, math.inf  # limits for those that overtake the first in the queue
        for num_scanned, queued in enumerate(self._queue.in_order(now)):
            if num_scanned == MAX_SCANNED:
                break
            order = self._order_of(queued, now)
            # A request that came just now is placed. The first one is placed again, others where it may help.
            is_fresh = queued.version == version and len(self._queue) == 1
            if is_fresh and self._room.fits(queued.placement, queued.tenant, order):
                return self._dispatch(queued, now)
            if num_scanned == 0 and self._placer.can_place and not self._room.is_anywhere(order):
                if not self._is_room_to_overtake(queued, order, now):
                    return None
                least_order, last_tag = order, queued.start_tag + CREDIT_S
            if queued.start_tag > last_tag:
                break
            if order >= least_order:
                continue  # no worker has room for this one, and those that overtake it do not wait for it
            has_room = self._room.has_room(queued.placement.best.prefill, order)
            is_old = now - queued.placed_s > PLACEMENT_AGE_S
            if is_fresh or num_scanned == 0 or (num_placed < MAX_PLACED and (has_room or is_old)):
                num_placed += 1
                try:
                    if not is_fresh:
                        self._place_again(queued, order, held, now)
                except ServingError as exc:
                    if queued.request.is_resumed:
                        continue  # it keeps its place until there is a worker
                    return self._drop(queued, exc)
                if self._room.fits(queued.placement, queued.tenant, order):
                    return self._dispatch(queued, now)
            for worker_id, part in held_by(queued):
                held[worker_id] = held[worker_id].plus(part) if worker_id in held else part
        return None

    def _is_room_to_overtake(self, first: QueuedRequest, order: float, now: float) -> bool:
        """Whether some worker has room for a request with a deadline, though none has for the first in the queue.

        The first in the queue then waits longer, but no longer than it would wait at a worker.
        """
        is_overtaken = self._deadlines and now - LEAD_S < order and now - first.arrived_s < LEAD_S
        return bool(is_overtaken) and self._room.is_anywhere(now - LEAD_S)

    def _place_again(self, queued: QueuedRequest, order: float, held: dict[str, Held], now: float) -> None:
        """Adapt the placement to the present load; `held` is the work that goes first."""
        placement = self._placer.place(queued.request, now, held=held, order=order)
        self._held.remove(queued)
        self._demand.num_waiting_tokens -= queued.work.new_tokens
        latest_start_s = queued.latest_start_s
        queued.placement, queued.placed_s = placement, now
        self._queue.update(queued, work_of(placement, self._costs))
        self._held.add(queued)
        self._demand.num_waiting_tokens += queued.work.new_tokens
        if queued.latest_start_s < latest_start_s:
            self._deadlines.add(queued)

    def _dispatch(self, queued: QueuedRequest, now: float) -> Dispatch | Drop:
        """Send this request to its workers, unless it is too late for it."""
        if now + queued.placement.best.terms.ttft_s > queued.deadline_s:
            return self._drop(queued, too_late(queued, now))
        self._held.remove(queued)
        self._demand.num_waiting_tokens -= queued.work.new_tokens
        del self._waiting[queued]
        self._queue.serve(queued)
        wait_s = now - queued.arrived_s
        self._stats.note_admitted(queued.tenant, wait_s)
        self.shadow.note(queued.placement)
        return Dispatch(queued, queued.placement, wait_s, self._worker_priority(queued, now))

    def _worker_priority(self, queued: QueuedRequest, now: float) -> WorkerPriority:
        """When its worker computes the prompt. While tenants compete, a prompt that others may overtake takes short
        steps.
        """
        order = self._order_of(queued, now)
        if order < now or now >= self.contention.tenants_until_s:
            return self._priority(queued.tenant, order)
        return self._priority(queued.tenant, order, self._short_step_tokens(queued.placement))

    def _priority(self, tenant: str, order: float, max_step_tokens: int = 0) -> WorkerPriority:
        return WorkerPriority(order, max_step_tokens, tenant, self._tenants.policy(tenant).weight)

    def _short_step_tokens(self, placement: Placement) -> int:
        """Tokens of a step that wastes little of its time and still ends soon, at the worker that computes."""
        card = placement.best.prefill.card
        costs = self._costs.steps(card.kind).costs
        num_tokens = (1 / SHORT_STEP_LOSS - 1) * costs.base_s / max(costs.prefill_token_s, 1e-12)
        return math.ceil(min(max(num_tokens, card.max_num_batched_tokens / 4), card.max_num_batched_tokens))

    def _order_of(self, queued: QueuedRequest, now: float) -> float:
        return self._forecaster.order_of(queued.start_tag, queued.forecast.slo_s, now)

    def _drop(self, queued: QueuedRequest, error: ServingError) -> Drop:
        self.leave(queued, error.code or "other")
        return Drop(queued, error)
