"""The queues of requests for engines: one for each model, so that no request waits for those of another model.

`Admission` decides as in `tandem serve`; the engines of the queue's model are its workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import msgspec

from tandem.protocol.errors import ShuttingDown
from tandem.protocol.routing import COST
from tandem.router.admission_queue import AdmissionQueue
from tandem.router.engines.booked_attempt import BookedAttempt
from tandem.router.engines.digests import EngineDigests
from tandem.router.engines.dispatcher import DispatchRequest
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.engines.engine_placer import EnginePlacer, ModelWorkers
from tandem.scheduling.admission.admission import Admission
from tandem.scheduling.admission.stats import TenantStats
from tandem.scheduling.admission.work import Work
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.decisions import MAX_DECISIONS
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.request import PlacementRequest


class ModelQueue:
    """The queue of one model."""

    def __init__(self, fleet: EngineFleet, model: str, shadow: Shadow) -> None:
        workers = ModelWorkers(fleet.registry, model)
        self._placer = EnginePlacer(model, lambda: fleet.engines, workers, fleet.index, fleet.costs, fleet.config)
        # The placer knows which engines may compute prompts, group by group. For admission, all with room may.
        config = replace(fleet.config, routing=COST)
        self.admission = Admission(
            workers, fleet.costs, self._placer, fleet.tenants, config, fleet.registry.demand, shadow
        )
        self.admission_queue: AdmissionQueue[BookedAttempt] = AdmissionQueue(
            self.admission, fleet.registry, timeout_s=fleet.config.request_timeout_s, clock=fleet.clock
        )
        self.sizing = CacheSizing(workers, fleet.costs, clock=fleet.clock)
        self._clock = fleet.clock

    def placement_request(self, request: DispatchRequest) -> PlacementRequest:
        """The request as admission and placement know it."""
        placement_request = self.admission.placement_request(
            request.service_class,
            num_prompt_tokens=max(1, request.num_prompt_tokens),
            digests=EngineDigests(request.prompt, request.cache_scope, request.adapter, is_exact=request.is_exact),
            max_tokens=request.max_tokens,
            adapter=request.adapter,
        )
        placement_request = msgspec.structs.replace(placement_request, may_fall_back=True)
        if request.can_hand_over:
            return placement_request
        return msgspec.structs.replace(placement_request, can_hand_over=False, generates=request.generates)

    def note_answer(self, request: PlacementRequest, placement: Placement, num_output_tokens: int) -> None:
        """Count a complete answer. Its tokens are not known here, so only its prompt counts for the sizing."""
        self.admission.note_answer(request.tenant, num_output_tokens)
        card = placement.best.prefill.card
        if digests := request.digests.of(card):
            self.sizing.observe(
                digests,
                [],
                block_size=card.block_size,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=placement.best.num_cached_tokens,
                tenant=request.tenant,
            )

    def explain(self, request: DispatchRequest) -> dict[str, Any]:
        """The decision that would be taken now, as JSON. Nothing is sent or booked. Raises a `ServingError`."""
        return self.admission_queue.explain(self.placement_request(request))

    def place_elsewhere(self, placement_request: PlacementRequest, tried: set[str]) -> Placement:
        """Another placement for a request that has already waited. Raises a `ServingError`."""
        return self._placer.place(placement_request, self._clock(), tried=tried)


class Queues:
    """The queues of all models, each made when it is first needed. Counts are totals over all queues."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._queues: dict[str, ModelQueue] = {}
        self.shadow = Shadow()

    def of(self, model: str) -> ModelQueue:
        """The queue of a model, which must be one of the fleet's."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(self._fleet, model, self.shadow)
        return queue

    @property
    def stats(self) -> dict[str, TenantStats]:
        """Outcomes of requests, by the label of their tenant."""
        total: dict[str, TenantStats] = {}
        for queue in self._queues.values():
            for label, stats in queue.admission.stats.items():
                total.setdefault(label, TenantStats()).add(stats)
        return total

    def queued(self) -> dict[str, Work]:
        """Work that waits, by the label of its tenant."""
        total: dict[str, Work] = {}
        for queue in self._queues.values():
            for label, work in queue.admission.queued().items():
                total[label] = total.get(label, Work()) + work
        return total

    @property
    def sizings(self) -> dict[str, CacheSizing]:
        """Hit ratios of caches of other sizes, by model."""
        return {model: queue.sizing for model, queue in self._queues.items()}

    def report(self) -> dict[str, Any]:
        """The queues by model, as JSON."""
        return {model: queue.admission.report() for model, queue in self._queues.items()}

    def close(self) -> None:
        """Refuse all requests that wait."""
        for queue in self._queues.values():
            queue.admission_queue.close(lambda: ShuttingDown("the router is shutting down; send the request again"))

    def decisions(self, limit: int = MAX_DECISIONS) -> list[dict[str, Any]]:
        """The latest decisions of each queue, newest first, as JSON."""
        now, queues = self._fleet.clock(), self._queues.values()
        found = [decision for queue in queues for decision in queue.admission_queue.log.to_json(now, limit)]
        return sorted(found, key=lambda decision: cast(float, decision["age_s"]))
