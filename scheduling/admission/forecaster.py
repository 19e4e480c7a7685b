"""Predicts when a new request would get its first token, from everything that already waits and runs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tandem.protocol.config import RouterConfig
from tandem.scheduling.admission.fair_queue import FairQueue
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.admission.held_work import HeldWork
from tandem.scheduling.admission.queued_request import QueuedRequest
from tandem.scheduling.admission.refusals import Refusals
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.admission.work import Work
from tandem.scheduling.admission.worker_room import WorkerRoom
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.worker_table import Workers

LEAD_S = 10.0  # an under-served tenant's prompt may overtake prompts that arrived up to this much earlier
MAX_SCANNED = 64  # waiting requests that are examined for one that suits a free worker
NUM_ROUNDS = 2  # refinements of a forecast


class Forecaster:
    """Forecasts change nothing: they read the queue, the workers and the cost model."""

    def __init__(
        self,
        workers: Workers,
        costs: CostModel,
        placer: Placer,
        tenants: Tenants,
        config: RouterConfig,
        queue: FairQueue[QueuedRequest],
        held: HeldWork,
        room: WorkerRoom,
    ) -> None:
        self._workers = workers
        self._costs = costs
        self._placer = placer
        self._tenants = tenants
        self._queue = queue
        self._held = held
        self._room = room
        self._refusals = Refusals(workers, costs, config, queue, room)

    def forecast(self, request: PlacementRequest, now: float, *, num_others: int = 0) -> Forecast:
        """Predict what would happen to this request. Raises `NoWorker`."""
        tenant, priority = request.tenant, request.service_class.priority
        policy = self._tenants.policy(tenant)
        slo_s = request.service_class.ttft_slo_s
        slo_s = policy.ttft_slo_s if slo_s is None else slo_s
        slo_s = math.inf if slo_s is None else slo_s
        order = self.order_of(self._queue.start_tag(tenant, priority), slo_s, now)
        placement = self._placer.place(request, now, order=order, held=self._held.of(tenant), num_others=num_others)
        terms = placement.best.terms
        ahead = waiting = self._queue.ahead(tenant, priority, now)
        start_s = max(terms.queue_s, self.start_s(tenant, placement, ahead, order))
        for _ in range(NUM_ROUNDS):  # a longer wait lets more later requests of other tenants go first
            before, ahead = ahead, self._queue.ahead(tenant, priority, now, start_s)
            if ahead == before:
                break
            start_s = max(terms.queue_s, self.start_s(tenant, placement, ahead, order))
        ttft_s = start_s + terms.fetch_s + terms.prefill_s
        forecast = Forecast(placement, work_of(placement, self._costs), waiting, start_s, ttft_s, slo_s, None)
        error = None if request.is_admitted else self._refusals.refusal(tenant, forecast, policy.max_queue_share)
        return forecast if error is None else forecast._replace(error=error)

    def remaining_s(self, queued: QueuedRequest, now: float) -> float:
        """Predicted seconds until a request like this one would start if it arrived now."""
        tenant, priority = queued.tenant, queued.priority
        order = self.order_of(self._queue.start_tag(tenant, priority), queued.forecast.slo_s, now)
        return self.start_s(tenant, queued.placement, self._queue.ahead(tenant, priority, now), order)

    def order_of(self, start_tag: float, slo_s: float, now: float) -> float:
        """The place of a prompt in its worker's queue, as a time: smaller goes first.

        A tenant within its share overtakes the others by `LEAD_S`. Tenants within their share do not overtake each
        other: no tail latency would become shorter. Nobody overtakes a request with a deadline: its first token was
        promised when it was sent. No prompt can be overtaken forever, because the lead is limited.
        """
        return now - LEAD_S if slo_s < math.inf or self._queue.is_within_share(start_tag) else now

    def start_s(self, tenant: str, placement: Placement, ahead: Work, order: float) -> float:
        """Predicted seconds until all work ahead has started: the later of its prefill and its memory for answers.

        Prompts are modelled as a fluid that fills the shortest queues of one kind of worker first. While some worker
        has room, this request overtakes those that wait for the other kind. If no prompt is ahead, only memory counts.
        A worker takes memory back from tenants that hold more than this one.
        """
        gives_way = placement.best.decode.gives_way_to(tenant, placement.num_kv_tokens)
        memory_s = 0.0 if gives_way else self._memory_s(placement, ahead)
        table, is_pair = self._workers.table, placement.best.is_pair
        prefill_s = ahead.pair_s if is_pair else ahead.alone_s
        if prefill_s < ahead.prefill_s and not self._is_passed(ahead):
            prefill_s = ahead.prefill_s
        if prefill_s <= 0:
            return memory_s
        side = table.can_prefill if is_pair else table.can_decode
        # A worker that covers for others, or drains, belongs to no side: then its own queue is all that counts.
        queues = table.pace(self._costs, order).wait_s[side].tolist() or [placement.best.terms.queue_s]
        return max(fill_level(queues, prefill_s), memory_s)

    def _memory_s(self, placement: Placement, ahead: Work) -> float:
        """`Terms.memory_s` over all workers that decode: running sequences end evenly over one lifetime."""
        table = self._workers.table
        decoders = table.can_decode
        booked, num_seqs = float(table.booked_kv_tokens @ decoders), float(table.num_booked_seqs @ decoders)
        tokens = booked + ahead.kv_tokens + placement.num_kv_tokens - table.decode_capacity_tokens
        seqs = num_seqs + ahead.num_requests + 1 - table.decode_capacity_seqs
        if (tokens <= 0 and seqs <= 0) or booked == 0:
            return 0.0
        lifetime_s = placement.expected_output_tokens * float(table.pace(self._costs).step_s[decoders].mean())
        return max(tokens / booked, seqs / max(num_seqs, 1.0)) * lifetime_s

    def _is_passed(self, ahead: Work) -> bool:
        """Whether `Admission.next` would get to a request behind this work even if none of it can be dispatched."""
        return ahead.num_requests < MAX_SCANNED and self._room.is_anywhere()


def work_of(placement: Placement, costs: CostModel) -> Work:
    """The request's work in worker seconds: its prompt, and an answer of the expected length.

    A second of either role counts the same, because workers change roles.
    """
    prefill_s = placement.best.terms.fetch_s + placement.best.terms.prefill_s
    decode_s = placement.expected_output_tokens * output_token_s(placement, costs)
    pair_s, alone_s = (prefill_s, 0.0) if placement.best.is_pair else (0.0, prefill_s)
    return Work(1, prefill_s + decode_s, pair_s, alone_s, placement.num_new_tokens, placement.num_kv_tokens)


def output_token_s(placement: Placement, costs: CostModel) -> float:
    """Worker seconds of one output token: its share of a step's fixed time, and what it adds to the step."""
    worker = placement.best.decode
    step = costs.steps(worker.card.kind).costs
    mean_tokens = placement.num_prompt_tokens + placement.expected_output_tokens / 2
    return step.base_s / (worker.num_booked_seqs + 1) + step.decode_seq_s + step.kv_token_s * mean_tokens


def fill_level(queues_s: Iterable[float], work_s: float) -> float:
    """Seconds until workers with these queues have started `work_s` of work, if each takes some when it is free."""
    sum_s = work_s
    level_s = 0.0
    for num, waits_s in enumerate(sorted(queues_s)):
        if num and level_s <= waits_s:
            break
        sum_s += waits_s
        level_s = sum_s / (num + 1)
    return level_s
