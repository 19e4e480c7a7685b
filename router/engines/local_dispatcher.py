"""The `Dispatcher` that decides in this process, with its fleet and queues, and its reservations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry
from typing_extensions import override

from tandem.protocol.errors import (
    ConfigError,
    ModelNotFound,
    NotServed,
    NoWorker,
    RequestError,
)
from tandem.protocol.fault_boundary import noted_on_error
from tandem.protocol.messages import WorkerPriority
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.admission_queue import AdmittedRequest
from tandem.router.engines.addresses import check_addresses
from tandem.router.engines.booked_attempt import BookedAttempt
from tandem.router.engines.config import EngineSpec, check_tokenizer, ranks_of, spec_from
from tandem.router.engines.dispatcher import Abort, DispatchRequest, EngineTarget
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.engines.errors import AnswerNotFound, EngineNotFound
from tandem.router.engines.metrics import EngineCollector
from tandem.router.engines.overview import fleet_overview
from tandem.router.engines.queues import ModelQueue, Queues
from tandem.router.engines.stored_answers import StoredAnswers
from tandem.router.operator_api import UnmanagedWorkers, WorkerManager
from tandem.router.overview import NUM_DECISIONS
from tandem.router.reservation import SHUTTING_DOWN, PoisonedRequests, Reservation, ReservationContext, fingerprint_of
from tandem.router.workers.generation_trace import admission_node, placement_node
from tandem.router.workers.metrics import LoadCollector, MoveCollector
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.tracing.span_node import SpanNode
from tandem.scheduling.decisions import RoutingDecision
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.request import PlacementRequest

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing

# Keys of engines added over HTTP come from variables with this prefix, or from those that the engines file names: an
# admin of engines must not be able to send any other secret of the process to a URL.
KEY_PREFIX = "TANDEM_ENGINE_"

# Makes a span from its start, its end and the error.
NodeOf: TypeAlias = Callable[[float, float, BaseException | None], SpanNode]

_UNMANAGED = UnmanagedWorkers(
    role_refusal="The engines are not run by this router, so '{worker}' keeps its role: change it in the engines "
    "file, or remove the engine and add it again.",
    drain_refusal="The engines are not run by this router, so it cannot end the process of '{worker}': remove the "
    "engine, and its running requests end before it is forgotten.",
    add_refusal="The engines are not run by this router: start one, then add it by POST /v1/engines.",
)


class LocalDispatcher:
    """Decides for the relaying side, in this process or in frontend processes."""

    def __init__(
        self,
        fleet: EngineFleet,
        specs: Iterable[EngineSpec],
        tokenizers: Container[str],
        manager: WorkerManager = _UNMANAGED,
        tracing: Tracing | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`specs` are the engines of the file, `tokenizers` the models that have a tokenizer.

        `manager` runs the servers. `settings` are shown to operators.
        """
        self.fleet = fleet
        self.max_model_len, self.capabilities, self.now = fleet.max_model_len, fleet.capabilities, fleet.clock
        self.queues = Queues(fleet)
        self.reservations = ReservationContext(now=fleet.clock, tracing=tracing, poisoned=PoisonedRequests("engines"))
        self.num_retries = 0
        self.manager = manager
        self._settings = settings
        self.stored_answers = StoredAnswers()
        self._specs = list(specs)
        self._tokenizers = tokenizers
        self._known_keys = {spec.api_key_env for spec in self._specs}
        self._removals = BackgroundTasks()

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Add the metrics of engines and queues to a registry."""
        registry.register(EngineCollector(self.fleet, lambda: self.num_retries))
        registry.register(MoveCollector(self.reservations))
        registry.register(LoadCollector(self.fleet.registry))
        registry.register(AdmissionCollector(self.queues))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Add the engines of the file; at the end refuse waiting requests. Raises `ConfigError`.

        The maker of the fleet closes it, after everything that adds engines to it has ended.
        """
        try:
            self.fleet.add_all(self._specs)
            yield
        finally:
            self.queues.close()
            await self._removals.close()
            self.reservations.moves.tell()

    def shut_down(self) -> None:
        """End every request with an error and refuse new ones: the server stops."""
        self.reservations.is_shut_down = True
        self.queues.close()
        for engine in self.fleet.engines:
            for request in list(engine.running):
                request.abort(engine.name, SHUTTING_DOWN)

    # -- Dispatcher -----------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[str]:
        """Names of all models of the fleet, whether or not their engines are ready."""
        return self.fleet.models

    @property
    def adapters(self) -> Mapping[str, str]:
        """The base model of each LoRA adapter of the fleet."""
        return self.fleet.adapters

    @property
    def unknown_engines(self) -> list[str]:
        """Names of engines whose model is not known yet."""
        return [engine.name for engine in self.fleet.engines if not engine.spec.model]

    @property
    def unready(self) -> str | None:
        """Why the router is not ready; None when it is."""
        if self.fleet.is_ready:
            return None
        now = self.now()
        reasons = ", ".join(f"{engine.name} ({engine.refusal(now)})" for engine in self.fleet.engines)
        return f"No engine is ready: {reasons or 'none is registered'}."

    def reserve(self, request: DispatchRequest, abort: Abort) -> LocalReservation:
        """A reservation that holds nothing yet. `abort` is called when one of its engines is gone."""
        return LocalReservation(self, request, abort)

    async def explain(self, request: DispatchRequest) -> dict[str, Any]:
        """The decision that would be taken now, as JSON. Raises a `ServingError`."""
        return self.queue_of(request.model).explain(request)

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return self.queues.decisions()

    async def answer_owner(self, answer_id: str, tenant: str) -> str:
        """The engine that keeps this answer of the tenant. Raises `AnswerNotFound`."""
        return self.owner_of(answer_id, tenant, param="response_id").name

    async def pools(self) -> dict[str, Any]:
        """Body of `/v1/pools`."""
        fleet = self.fleet
        now = fleet.clock()
        return {
            "engines": [engine.to_json(now) for engine in fleet.engines],
            "costs": fleet.costs.export(),
            "queued_prompt_tokens": fleet.registry.queued_prompt_tokens,
            "num_requests": sum(len(engine.running) for engine in fleet.engines),
            "num_indexed_blocks": len(fleet.index),
            "mean_output_tokens": fleet.lengths.mean_output_tokens,
            "admission": self.queues.report(),
            "shadow": self.queues.shadow.report(),
            "cache_sizing": {model: sizing.report() for model, sizing in self.queues.sizings.items()},
            "autoscaler": self.manager.autoscaler_status,
        }

    async def overview(self) -> dict[str, Any]:
        """What the dashboard shows of the deciding process, as JSON."""
        return fleet_overview(
            self.fleet,
            self.queues,
            self.queues.sizings.values(),
            decisions=self.queues.decisions(NUM_DECISIONS)[:NUM_DECISIONS],
            autoscaler=self.manager.autoscaler_status,
            settings=self._settings,
        )

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        """Refused with 501: other engines cannot be asked for their KV. Raises `NotServed`."""
        raise NotServed(f"Answers of other engines, such as '{worker[:100]}', cannot be moved while the engine lives.")

    async def add_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add an engine, or each rank of a server; returns it as JSON. Raises `RequestError`."""
        try:
            spec = spec_from(fields, "engine")
            self._check_key(spec)
            check_tokenizer(spec, self._tokenizers)
            if not self.fleet.trusts(spec):
                await check_addresses(spec, self.fleet.engines_config.connect_timeout_s)
            engines = self.fleet.add_all(ranks_of(spec))
        except ConfigError as exc:
            raise RequestError(exc.message, code="invalid_engine") from exc
        return self._to_json(spec.name, engines)

    async def remove_engine(self, name: str) -> dict[str, Any]:
        """Begin to drain an engine, or all ranks of a server; returns it as JSON. Raises `EngineNotFound`."""
        engines = [engine for engine in self.fleet.engines if name in (engine.name, engine.spec.server)]
        if not engines:
            names = ", ".join(engine.name for engine in self.fleet.engines) or "none"
            raise EngineNotFound(f"Engine '{name[:100]}' is not registered; there are: {names}.", param="name")
        for engine in engines:
            if not engine.is_removed:
                # In the background: the caller does not wait, and cannot stop it by disconnecting.
                self._removals.start(f"removal of engine {engine.name}", partial(self.fleet.remove, engine.name))
        await asyncio.sleep(0)  # so that the answer shows them as draining
        return self._to_json(name, engines)

    # -- reservations ---------------------------------------------------------------------------------------------

    def queue_of(self, model: str) -> ModelQueue:
        """The queue of a model. Raises `ModelNotFound`."""
        if model not in self.fleet.models:
            raise ModelNotFound(f"The model '{model[:200]}' does not exist.", param="model")
        return self.queues.of(model)

    def owner_of(self, answer_id: str, tenant: str, *, param: str) -> RemoteEngine:
        """The engine that keeps this answer of the tenant. Raises `AnswerNotFound` that names `param`."""
        engine = self.fleet.get(self.stored_answers.engine_of(answer_id, tenant) or "")
        if engine is None:
            raise AnswerNotFound(answer_id, param)
        return engine

    def _to_json(self, name: str, engines: list[RemoteEngine]) -> dict[str, Any]:
        """The engine of this name, or the server of this name with its ranks."""
        now = self.now()
        if [engine.name for engine in engines] == [name]:
            return engines[0].to_json(now)
        return {"name": name, "ranks": [engine.to_json(now) for engine in engines]}

    def _check_key(self, spec: EngineSpec) -> None:
        if named := next((name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(spec, name)), ""):
            raise ConfigError(  # an admin of engines must not send our certificates to a URL, or learn about our files
                f"engine: {named} cannot be given over HTTP; name the engine in the --engines file, or give --engine-ca"
            )
        key = spec.api_key_env
        if key and key not in self._known_keys and not key.startswith(KEY_PREFIX):
            raise ConfigError(
                f"engine: api_key_env={key!r} cannot be used over HTTP; name a variable that begins with {KEY_PREFIX}"
            )


class LocalReservation(Reservation[BookedAttempt]):
    """An `EngineReservation` of `LocalDispatcher`."""

    def __init__(self, dispatcher: LocalDispatcher, request: DispatchRequest, abort: Abort) -> None:
        super().__init__(dispatcher.reservations, request.request_id, explains=request.explains)
        self._dispatcher = dispatcher
        self._request = request
        self._abort = abort
        self._queue: ModelQueue  # from `place` on
        self._attempt: BookedAttempt | None = None  # the latest one
        self._tried: set[str] = set()  # engines that failed or refused it since its last token

    @override
    def fingerprint(self) -> bytes:
        """Without sampling parameters, which the body has."""
        request = self._request
        return fingerprint_of(request.prompt, request.model, request.adapter, request.max_tokens, request.generates)

    async def place(self) -> EngineTarget:
        """Wait in the queue if necessary, and book a target. Raises a `ServingError`."""
        decision: RoutingDecision | None = None
        with self._traced(lambda start_s, end_s, error: admission_node(start_s, end_s, decision, error)):
            self.check()
            self._queue = self._dispatcher.queue_of(self._request.model)
            self._placement_request = self._queue.placement_request(self._request)
            self.admitted = await self._enter(self._owner())
            decision = self.admitted.decision
        return self._target(self.admitted.placement)

    async def _enter(self, owner: RemoteEngine | None) -> AdmittedRequest[BookedAttempt]:
        """Wait in the queue. If an `owner` keeps the answer that the request builds on, only that one may serve it."""
        queue, request = self._queue.admission_queue, self._placement_request
        if owner is None:
            return await queue.enter(self, request)
        self._placement_request = msgspec.structs.replace(request, allowed_workers=(owner.name,))
        try:
            return await queue.enter(self, self._placement_request)
        except NoWorker as exc:
            reason = owner.refusal(self.context.now(), tenant=request.tenant) or "it cannot take this request"
            raise NoWorker(
                f"engine {owner.name}, which keeps the response before this one: {reason}; "
                "try again later, or send the whole conversation as 'input'"
            ) from exc

    async def place_elsewhere(self) -> EngineTarget:
        """Give the target up and book another one. Raises a `ServingError`."""
        self.release()
        self.check_may_go_on()
        placement = self._place_elsewhere()
        self.admitted.decision.placement = placement
        self._dispatcher.num_retries += 1
        return self._target(placement)

    async def go_on(self, cause: str, prompt: bytes, num_output_tokens: int) -> EngineTarget:
        """As `place_elsewhere`, for a stream after tokens were shown."""
        former, left = self.admitted, self._booked.engine
        self.release()
        self.check_may_go_on("no other engine gets it")
        allowed = self._able_engines()
        if prompt:
            max_tokens = max(self._request.max_tokens - num_output_tokens, 1)
            rest = msgspec.structs.replace(self._request, prompt=prompt, is_exact=True, max_tokens=max_tokens)
            self._placement_request = self._queue.placement_request(rest)
        self._placement_request = msgspec.structs.replace(
            self._placement_request, allowed_workers=allowed, is_resumed=True
        )
        placement = self._place_elsewhere()
        queue, request = self._queue.admission_queue, self._placement_request
        self.admitted = queue.moved(self, request, placement, former.decision, self._booked, former.worker_priority)
        self.context.moves.add(cause, f"{cause} on {left}")
        return self._target(placement)

    def _place_elsewhere(self) -> Placement:
        placement: Placement | None = None
        with self._traced(lambda start_s, end_s, error: placement_node(start_s, end_s, placement, error)):
            placement = self._queue.place_elsewhere(self._placement_request, self._tried)
            self.book(self._placement_request, placement, self.admitted.worker_priority)
        return placement

    def _traced(self, node_of: NodeOf) -> AbstractContextManager[None]:
        """Record a span of what is done meanwhile, if the request is traced."""
        tracing, parent = self.context.tracing, self._request.traceparent
        return nullcontext() if tracing is None or not parent else self._recorded(tracing, parent, node_of)

    @contextmanager
    def _recorded(self, tracing: Tracing, parent: str, node_of: NodeOf) -> Iterator[None]:
        start_s = self.context.now()

        def record(error: BaseException | None) -> None:
            tracing.record(parent, node_of(start_s, self.context.now(), error))

        with noted_on_error(record):
            yield
        record(None)

    def _able_engines(self) -> tuple[str, ...]:
        """The engines that can go on with its stream and that it may use. Raises `NoWorker`."""
        patterns = self._placement_request.allowed_workers
        found = tuple(
            engine.name
            for engine in self._dispatcher.fleet.engines
            if engine.gives_token_ids
            and (not patterns or any(fnmatchcase(engine.name, pattern) for pattern in patterns))
        )
        if not found:
            raise NoWorker("no engine that it may use gives token ids")
        return found

    def book(self, placed: PlacementRequest, placement: Placement, priority: WorkerPriority) -> BookedAttempt:
        """Book a placement that was decided just now."""
        self._attempt = BookedAttempt(
            self._dispatcher.fleet,
            placed,
            placement,
            self._abort,
            is_stream=self._request.is_stream,
            is_exact=self._request.is_exact,
        )
        return self._attempt

    def answered(self) -> None:
        """The first byte of the answer came."""
        self._booked.answered()

    def failed(self, engine: str, *, is_absent: bool = False, is_lost: bool = False) -> None:
        """The engine failed the request."""
        self._tried.add(engine)
        if is_lost:
            self.note_death(engine)
        self._booked.failed(engine, is_absent=is_absent)

    def refused(self, engine: str, retry_after_s: float) -> None:
        """The engine is busy: it gets no requests of this tenant for `retry_after_s`."""
        self._tried.add(engine)
        self._booked.refused(engine, retry_after_s)

    def prefilled(self, now: float) -> None:
        """The prefill engine of a pair returned."""
        self._booked.prefilled(now)

    def first_token(self, now: float) -> None:
        """The first token of a stream came."""
        self._tried.clear()  # an engine that failed long ago may be back
        self._booked.first_token(now)
        self.note_first_token()

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now."""
        attempt = self._attempt
        return attempt is not None and attempt.is_gap_due(now)

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart."""
        self._booked.gap(duration_s, now)

    def held(self, *, is_held: bool) -> None:
        """The client has stopped reading its stream, or reads it again."""
        self._booked.held(is_held=is_held)

    def stored(self, answer_id: str) -> None:
        """The engine that answers keeps the answer under this id."""
        self._dispatcher.stored_answers.note(answer_id, self._booked.engine, self._request.service_class.tenant)

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The answer is complete."""
        self._booked.ended(num_prompt_tokens, num_output_tokens)
        self._queue.note_answer(self._placement_request, self.admitted.placement, num_output_tokens)

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""
        if self._attempt is not None:
            self._attempt.release()

    def _owner(self) -> RemoteEngine | None:
        """The engine that keeps the answer which the request builds on. Raises `AnswerNotFound`."""
        request = self._request
        if not request.stored_before:
            return None
        tenant, name = request.service_class.tenant, "previous_response_id"
        owner = self._dispatcher.owner_of(request.stored_before, tenant, param=name)
        if owner.spec.model != request.model:
            raise AnswerNotFound(request.stored_before, name)
        return owner

    @property
    def _booked(self) -> BookedAttempt:
        assert self._attempt is not None, "it has been placed"
        return self._attempt

    def _target(self, placement: Placement) -> EngineTarget:
        best = placement.best
        decision = self.admitted.explain() if self.explains else None
        engine = self._dispatcher.fleet.get(best.decode.worker_id)
        return EngineTarget(
            best.prefill.worker_id,
            best.decode.worker_id,
            best.num_cached_tokens,
            best.tier,
            decision,
            gives_token_ids=engine is not None and engine.gives_token_ids,
        )
