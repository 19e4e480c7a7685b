"""The backend of `tandem serve`: serves requests on our own workers, and reports what was decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ShuttingDown, WorkerNotFound
from tandem.protocol.messages import Role, SequenceDelta
from tandem.router.admission_queue import AdmissionQueue
from tandem.router.backend import GenerateRequest
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.operator_api import UnmanagedWorkers, WorkerManager
from tandem.router.overview import NUM_DECISIONS, overview_of, workers_overview
from tandem.router.reservation import SHUTTING_DOWN
from tandem.router.streams import DeltaQueue, Stream
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.generation import Generation, GenerationContext
from tandem.router.workers.hot_spots import HotSpotRelief
from tandem.router.workers.pins import PinService
from tandem.router.workers.pool_report import worker_report
from tandem.router.workers.prompt_hasher import PromptHasher
from tandem.router.workers.worker_reservation import WorkerReservation
from tandem.scheduling.admission.admission import Admission
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import WorkerChange

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing

DECIDING_CALLS = 64  # requests whose new tokens go to the frontend processes together, which turn them into text

UNMANAGED = UnmanagedWorkers(
    role_refusal="The workers are not run by this server, so it cannot change their roles.",
    drain_refusal="The workers are not run by this server, so it cannot end them.",
    add_refusal="The workers are not run by this server, so it cannot start another one.",
)


class RequestFlow:
    """Serves requests on the workers of a `WorkerClient`."""

    def __init__(
        self,
        *,
        model: str,
        registry: Registry,
        index: PrefixIndex,
        costs: CostModel,
        placer: Placer,
        sizing: CacheSizing,
        workers: WorkerClient,
        config: RouterConfig,
        manager: WorkerManager = UNMANAGED,
        tenants: Tenants = Tenants(),
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`manager` runs the worker processes. `settings` are shown to operators."""
        self.manager = manager
        self.admission = Admission(registry, costs, placer, tenants, config, registry.demand)
        self._model = model
        self._registry = registry
        self._index = index
        self._costs = costs
        self._placer = placer
        self._sizing = sizing
        self._tenants = tenants
        self._settings = settings
        self._clock = clock
        hasher = PromptHasher(registry)
        self.cache = PinService(registry, index, workers, tenants.pins, hasher.digests, clock=clock)
        self.context = GenerationContext(
            now=clock,
            tracing=tracing,
            config=config,
            registry=registry,
            index=index,
            sizing=sizing,
            admission=self.admission,
            admission_queue=AdmissionQueue(self.admission, registry, timeout_s=config.request_timeout_s, clock=clock),
            hasher=hasher,
            pins=self.cache,
            workers=workers,
        )
        self.hot_spots = HotSpotRelief(self.context.running, registry, costs)
        registry.listen(self._on_worker_change)
        only_decides = config.router_processes > 1  # frontend processes answer HTTP
        self._scheduler = CallbackScheduler(DECIDING_CALLS, DECIDING_CALLS) if only_decides else CallbackScheduler()

    @property
    def model(self) -> str:
        """Name the model is served under."""
        return self._model

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the workers; None while there is no worker."""
        return min((worker.card.max_model_len for worker in self._registry), default=None)

    @property
    def mean_output_tokens(self) -> float:
        """Moving mean of the answers' lengths."""
        return self.admission.lengths.mean_tokens

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return self._placer.can_cover

    @property
    def num_handoffs(self) -> int:
        """Requests for which both workers of a pair sent tokens."""
        return self.context.num_handoffs

    @property
    def num_running(self) -> int:
        """Requests that were dispatched and have not ended."""
        return len(self.context.running)

    def serve(self, request: GenerateRequest) -> Stream[SequenceDelta]:
        """Generate, ending with a delta that has a `finish_reason`.

        The stream raises a `ServingError`. Closing it cancels the request on its workers without waiting for them.
        """
        return Generation(self.context, request, lambda: DeltaQueue(self._scheduler))

    def shut_down(self) -> None:
        """End every request with an error and refuse new ones: the server stops. Call it in the event loop."""
        self.context.is_shut_down = True
        self.context.moves.tell()
        self.context.admission_queue.close(lambda: ShuttingDown(SHUTTING_DOWN))
        for generation in self.context.running:
            generation.fail(ShuttingDown(SHUTTING_DOWN))

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """The decision that this request would get now, as JSON; nothing is sent or booked. Raises `NoWorker`."""
        return await WorkerReservation(self.context, request).explain()

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return self.context.admission_queue.log.to_json(self._clock())

    async def pools(self) -> dict[str, Any]:
        """State of the worker pools, as JSON."""
        roles: dict[str, list[dict[str, object]]] = {role.value: [] for role in Role}
        now = self._clock()
        for worker in self._registry:
            num_cached_blocks = self._index.num_blocks(worker.worker_id)
            steps = self._costs.steps(worker.card.kind)
            roles[worker.role].append(worker_report(worker, steps, num_cached_blocks=num_cached_blocks, now=now))
        return {
            "roles": roles,
            "costs": self._costs.export(),
            "queued_prompt_tokens": self._registry.queued_prompt_tokens,
            "admission": self.admission.report(),
            "shadow": self.admission.shadow.report(),
            "num_requests": self._registry.num_bookings,
            "num_handoffs": self.num_handoffs,
            "num_indexed_blocks": len(self._index),
            "mean_output_tokens": self.mean_output_tokens,
            "cache_sizing": self._sizing.report(),
            "pins": msgspec.to_builtins(self.cache.summary()),
            "autoscaler": self.manager.autoscaler_status,
        }

    async def overview(self) -> dict[str, Any]:
        """What the dashboard shows of the deciding process, as JSON."""
        decisions = self.context.admission_queue.log.to_json(self._clock(), NUM_DECISIONS)
        shared = overview_of(
            self._registry,
            self._costs,
            self.admission,
            self._tenants,
            decisions=decisions,
            autoscaler=self.manager.autoscaler_status,
            settings=self._settings,
        )
        own = workers_overview(self._registry, self._index, self._costs, self._sizing)
        return {"models": [self._model], **shared, **own}

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        """As `OperatorApi.migrate`."""
        for name in filter(None, (worker, to)):
            if self._registry.get(name) is None:
                raise WorkerNotFound(f"There is no worker '{name[:100]}'.")
        others = {one.worker_id for one in self._registry} - {to} if to else set()
        moves: dict[bool, list[str]] = {True: [], False: []}
        for generation in list(self.context.running):
            decoding = generation.decode_worker
            if decoding is not None and decoding.worker_id == worker and generation.is_of(request_id):
                moves[generation.move("operator", excluded=others)].append(generation.request_id)
        return {"moving": sorted(moves[True]), "staying": sorted(moves[False])}

    def _on_worker_change(self, _: WorkerChange) -> None:
        for generation in list(self.context.running):
            generation.leave_pool()
