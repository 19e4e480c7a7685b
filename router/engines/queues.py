"""Where requests wait for engines: one queue for each model, as `tandem serve` has one for its own.

Requests of one model never wait behind those of another. `Admission` decides here as it does there; it sees the
engines of its model as the workers there are, and places on those that may be given something just now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from tandem.protocol.errors import NoWorker
from tandem.router.admission_queue import NUM_OTHERS, AdmissionQueue
from tandem.router.engines.booked_attempt import BookedAttempt
from tandem.router.engines.dispatcher import RoutingRequest
from tandem.router.engines.fleet import EngineDigests, EngineFleet
from tandem.scheduling.admission import Admission, Dispatch
from tandem.scheduling.admission_stats import TenantStats
from tandem.scheduling.cost_model import Rows
from tandem.scheduling.decisions import RoutingDecision
from tandem.scheduling.placement import Placement
from tandem.scheduling.placer import Placer
from tandem.scheduling.registry import Registry
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.work import Work
from tandem.scheduling.worker_table import Workers, WorkerTable
from tandem.scheduling.workers import RegisteredWorker, can_decode

__all__ = ["ModelQueue", "Queues"]


class Requester(Protocol):
    """A request on its way through a queue."""

    @property
    def request_id(self) -> str:
        """Its name in the log of decisions."""

    @property
    def explains(self) -> bool:
        """Whether other candidates than the best are recorded too."""

    def book(self, placement_request: PlacementRequest, placement: Placement) -> BookedAttempt:
        """Book a placement that was decided just now."""


class ModelQueue:
    """The queue of one model."""

    def __init__(self, fleet: EngineFleet, model: str, admission: Admission) -> None:
        self.admission = admission
        self._fleet = fleet
        self._model = model
        self.gate: AdmissionQueue[Any, BookedAttempt] = AdmissionQueue(
            admission, fleet.registry, _book, timeout_s=fleet.config.request_timeout_s, clock=fleet.clock
        )

    def placement_request(self, request: RoutingRequest) -> PlacementRequest:
        """The request as admission and placement know it."""
        return self.admission.request(
            request.service_class,
            num_prompt_tokens=max(1, request.num_prompt_tokens),
            digests=EngineDigests(request.prompt, request.cache_scope),
            max_tokens=request.max_tokens,
        )

    def explain(self, request: RoutingRequest) -> dict[str, Any]:
        """What would be decided for this request now, as JSON; nothing is sent or booked. Raises a `ServingError`."""
        now = self._fleet.clock()
        forecast = self.admission.forecast(self.placement_request(request), now, num_others=NUM_OTHERS)
        outcome = "rejected" if forecast.error else "admitted"
        return RoutingDecision("", request.service_class, now, forecast, outcome, error=forecast.error).to_json(now)

    def place_elsewhere(self, placement_request: PlacementRequest, tried: set[str]) -> Placement:
        """Another placement for a request that has waited already. Raises a `ServingError`."""
        return self._fleet.place(self._model, placement_request, self._fleet.clock(), tried)


def _book(requester: Requester, dispatch: Dispatch) -> BookedAttempt:
    return requester.book(dispatch.queued.request, dispatch.placement)


class Queues:
    """The queues of all models, made when they are first asked for. What is counted, is over all."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._queues: dict[str, ModelQueue] = {}

    def of(self, model: str) -> ModelQueue:
        """The queue of a model, which must be one of the fleet's."""
        queue = self._queues.get(model)
        if queue is None:
            fleet = self._fleet
            workers = _ModelWorkers(fleet.registry, model)
            placer = _ModelPlacer(fleet, workers, model)
            # Where prompts may go the placer knows, group by group; to admission every engine with room is one.
            config = replace(fleet.config, local_prefill=True)
            admission = Admission(workers, fleet.costs, placer, fleet.tenants, config)
            queue = self._queues[model] = ModelQueue(fleet, model, admission)
        return queue

    @property
    def stats(self) -> dict[str, TenantStats]:
        """What became of requests, by the tenants' labels."""
        total: dict[str, TenantStats] = {}
        for queue in self._queues.values():
            for label, stats in queue.admission.stats.items():
                known = total.setdefault(label, TenantStats())
                known.num_admitted += stats.num_admitted
                known.rejected.update(stats.rejected)
                known.dropped.update(stats.dropped)
                known.wait_s += stats.wait_s
                known.waits = [sum(pair) for pair in zip(known.waits, stats.waits, strict=True)]
        return total

    def queued(self) -> dict[str, Work]:
        """What waits, by the tenants' labels."""
        total: dict[str, Work] = {}
        for queue in self._queues.values():
            for label, work in queue.admission.queued().items():
                total[label] = total.get(label, Work()) + work
        return total

    def report(self) -> dict[str, Any]:
        """The queues by model, as JSON."""
        return {model: queue.admission.report() for model, queue in self._queues.items()}

    def close(self) -> None:
        """Send everyone who waits away."""
        for queue in self._queues.values():
            queue.gate.close(lambda: NoWorker("the router is shutting down; send the request again"))

    def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        now = self._fleet.clock()
        found = [decision for queue in self._queues.values() for decision in queue.gate.log.to_json(now)]
        return sorted(found, key=lambda decision: cast(float, decision["age_s"]))


class _ModelWorkers:
    """The engines of one model in the registry of all."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry = registry
        self._model = model
        self._all: WorkerTable | None = None  # the registry's table that ours was made of
        self._table = WorkerTable([])
        self._rows: Rows = np.array([], dtype=np.intp)  # of ours in it

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self.table.workers)

    @property
    def queued_prompt_tokens(self) -> int:
        """Uncomputed prompt tokens booked on them."""
        return sum(worker.uncomputed_tokens for worker in self)

    @property
    def table(self) -> WorkerTable:
        """Them as arrays, as they are now; made anew when the registry's is, as that takes 3 us for each engine."""
        table = self._registry.table
        if table is not self._all:
            rows = [row for row, worker in enumerate(table.workers) if worker.card.model == self._model]
            self._all, self._rows = table, np.array(rows, dtype=np.intp)
            is_all = len(rows) == len(table)
            self._table = table if is_all else WorkerTable([table.workers[row] for row in rows])
        elif self._table is not table:
            self._table.update_from(table, self._rows)
        return self._table

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The engine, or None when it is gone or of another model."""
        worker = self._registry.get(worker_id)
        return worker if worker is not None and worker.card.model == self._model else None


class _ModelPlacer(Placer):
    """Places the requests of one model as the fleet does."""

    def __init__(self, fleet: EngineFleet, workers: Workers, model: str) -> None:
        super().__init__(workers, fleet.index, fleet.costs, fleet.config)
        self._fleet = fleet
        self._workers = workers
        self._model = model

    @property
    def can_place(self) -> bool:
        """Whether there is an engine to decode on."""
        return any(can_decode(worker) for worker in self._workers)

    def place(self, request: PlacementRequest, now: float, **options: Any) -> Placement:
        """As `EngineFleet.place`. Raises a `ServingError`."""
        return self._fleet.place(self._model, request, now, **options)
