"""Serves a `LocalDispatcher` to edge processes: answers their requests and tells them about engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tandem.frontend.http.exposition import Scraper, shared_scrape
from tandem.frontend.processes.dispatch_messages import (
    WIRE_FORMAT,
    Aborted,
    AddEngine,
    AnswerOwner,
    ClientHolds,
    DispatchDecisions,
    Ended,
    EngineAdded,
    EngineAnswered,
    EngineFailure,
    EngineRefusal,
    EngineRemoved,
    ExplainDispatch,
    FirstToken,
    FleetOverview,
    FleetPools,
    FleetStatus,
    Gap,
    GoOn,
    Item,
    News,
    Note,
    PlaceElsewhere,
    Prefilled,
    Question,
    RemoveEngine,
    ScrapeHub,
    Stored,
)
from tandem.frontend.processes.hub import EdgeHub
from tandem.frontend.processes.worker_questions import AddWorker, DrainWorker, Migrate, SetRole, answer_of_workers
from tandem.protocol.errors import ServingError
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import DispatchRequest, EngineTarget
from tandem.router.engines.local_dispatcher import LocalDispatcher, LocalReservation
from tandem.router.overview import OncePerInterval
from tandem.scheduling.workers.workers import WorkerChange

__all__ = ["DispatchService", "EngineNews"]


class DispatchService:
    """The `HubService` of `tandem route`."""

    wire_format = WIRE_FORMAT

    def __init__(self, dispatcher: LocalDispatcher, scrape: Scraper) -> None:
        self._dispatcher = dispatcher
        self._overview = OncePerInterval(dispatcher.overview)  # for all edge processes
        self._scrape = shared_scrape(scrape)
        self._num_calls: Counter[str] = Counter()  # by edge process, including those without any

    @property
    def num_edges(self) -> int:
        """Edge processes that have joined and have not ended."""
        return len(self._num_calls)

    def open(self, edge_id: str, request: DispatchRequest, put: Callable[[Item], None]) -> _DispatchCall:
        """A call that makes a reservation once it runs."""
        return _DispatchCall(self._dispatcher, request, put, self._num_calls, edge_id)

    async def answer(self, question: Question) -> Any:
        """Ask the dispatcher. Raises a `ServingError`."""
        dispatcher = self._dispatcher
        match question:
            case ExplainDispatch(request):
                return await dispatcher.explain(request)
            case DispatchDecisions():
                return await dispatcher.decisions()
            case AnswerOwner(answer_id, tenant):
                return await dispatcher.answer_owner(answer_id, tenant)
            case FleetPools():
                processes = {edge_id: {"num_requests": count} for edge_id, count in sorted(self._num_calls.items())}
                return await dispatcher.pools() | {"processes": processes}
            case FleetOverview():
                return await self._overview()
            case ScrapeHub():
                return (await self._scrape()).decode()
            case SetRole() | DrainWorker() | AddWorker() | Migrate():
                return await answer_of_workers(dispatcher, question)
            case AddEngine(fields):
                return await dispatcher.add_engine(fields)
            case RemoveEngine(name):
                return await dispatcher.remove_engine(name)

    def joined(self, edge_id: str) -> Sequence[News]:
        """The news for it: all engines, which it must know before it is told to use them, and the status."""
        self._num_calls[edge_id] = 0
        fleet = self._dispatcher.fleet
        specs = [engine.configured for engine in fleet.engines]
        return [self.status(), *(EngineAdded(spec, fleet.trusts(spec)) for spec in specs)]

    def left(self, edge_id: str) -> None:
        """An edge process has ended."""
        del self._num_calls[edge_id]

    def status(self) -> FleetStatus:
        """As it is now."""
        dispatcher = self._dispatcher
        models = {model: dispatcher.max_model_len(model) for model in dispatcher.models}
        capabilities = {model: dispatcher.capabilities(model) for model in models}
        adapters = dict(dispatcher.adapters)
        return FleetStatus(models, capabilities, adapters, dispatcher.unknown_engines, dispatcher.unready)


class EngineNews:
    """Tells all edge processes of a hub which engines there are. It is an `EngineListener`."""

    def __init__(self, hub: EdgeHub, service: DispatchService) -> None:
        self._hub = hub
        self._service = service

    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        """An engine joined the fleet."""
        self._hub.publish(EngineAdded(spec, is_trusted))
        self._publish_status()

    def engine_removed(self, name: str) -> None:
        """An engine left the fleet."""
        self._hub.publish(EngineRemoved(name))
        self._publish_status()

    def worker_changed(self, _: WorkerChange) -> None:
        """Listens to the registry: an engine became ready, was lost, began to drain or has other adapters."""
        self._publish_status()

    def _publish_status(self) -> None:
        self._hub.publish(self._service.status())


class _DispatchCall:
    """One request of an edge process."""

    def __init__(
        self,
        dispatcher: LocalDispatcher,
        request: DispatchRequest,
        put: Callable[[Item], None],
        num_calls: Counter[str],
        edge_id: str,
    ) -> None:
        self.request_id = request.request_id
        self._put = put
        self._num_calls = num_calls
        self._edge_id = edge_id
        self._reservation: LocalReservation = dispatcher.reserve(
            request, lambda engine, reason: put(Aborted(engine, reason))
        )
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Place it, and hold its reservation until it is cancelled or cannot be placed elsewhere."""
        self._num_calls[self._edge_id] += 1
        try:
            self._put(await self._reservation.place())
            await self._failed
        finally:
            if self._edge_id in self._num_calls:
                self._num_calls[self._edge_id] -= 1
            self._reservation.release()

    def note(self, note: Note) -> None:
        """Tell the reservation."""
        reservation = self._reservation
        match note:
            case FirstToken(now):
                reservation.first_token(now)
            case Gap(duration_s, now):
                reservation.gap(duration_s, now)
            case ClientHolds(is_held):
                reservation.held(is_held=is_held)
            case EngineAnswered():
                reservation.answered()
            case Ended(num_prompt_tokens, num_output_tokens):
                reservation.ended(num_prompt_tokens, num_output_tokens)
            case EngineFailure(engine, is_absent, is_lost):
                reservation.failed(engine, is_absent=is_absent, is_lost=is_lost)
            case EngineRefusal(engine, retry_after_s):
                reservation.refused(engine, retry_after_s)
            case Prefilled(now):
                reservation.prefilled(now)
            case Stored(answer_id):
                reservation.stored(answer_id)
            case PlaceElsewhere():
                self._put_target(reservation.move)
            case GoOn(cause, prompt, num_output_tokens):
                self._put_target(lambda: reservation.move_stream(cause, prompt, num_output_tokens))

    def _put_target(self, place: Callable[[], EngineTarget]) -> None:
        try:
            self._put(place())
        except ServingError as exc:
            if not self._failed.done():
                self._failed.set_exception(exc)
