"""Serves a `LocalDispatcher` to the frontend processes of `tandem route`: what they may call, what they are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from typing_extensions import override

from tandem.frontend.http.exposition import Scraper
from tandem.frontend.processes.deciding_process import DecidingProcess, LastingCall
from tandem.frontend.processes.methods import MethodTable, NotCallable, method_of
from tandem.frontend.processes.operator_api import operator_methods
from tandem.frontend.processes.remote_dispatcher import (
    Aborted,
    EngineAdded,
    EngineRemoved,
    FleetState,
    FleetUpdate,
    Reservations,
)
from tandem.frontend.processes.wire import Invocation
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import Dispatcher, DispatchRequest, EngineListener, EngineReservation
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.router.operator_api import OperatorApi
from tandem.scheduling.workers.workers import WorkerChange

# What a frontend process may call of its reservations.
_EVENTS = {
    function.__qualname__: method_of(function)
    for function in (
        EngineReservation.place_elsewhere,
        EngineReservation.go_on,
        EngineReservation.answered,
        EngineReservation.failed,
        EngineReservation.refused,
        EngineReservation.prefilled,
        EngineReservation.first_token,
        EngineReservation.gap,
        EngineReservation.held,
        EngineReservation.stored,
        EngineReservation.ended,
    )
}


class DispatchService:
    """The `DecidingService` of `tandem route`."""

    def __init__(self, dispatcher: LocalDispatcher, scrape: Scraper) -> None:
        self._dispatcher = dispatcher
        self._shared = operator_methods(dispatcher, scrape)
        self._num_calls: Counter[str] = Counter()  # by frontend process, including those without any

    @property
    def num_frontends(self) -> int:
        """Frontend processes that have joined and have not ended."""
        return len(self._num_calls)

    def methods_for(self, frontend_id: str) -> MethodTable:
        """The same for each of them; its reservations are counted as its own."""
        dispatcher, table = self._dispatcher, MethodTable(self._shared)
        table.add(Reservations.hold)(
            lambda request: _HeldReservation(dispatcher, request, self._num_calls, frontend_id)
        )
        table.add(Dispatcher.explain)(dispatcher.explain)
        table.add(Dispatcher.answer_owner)(dispatcher.answer_owner)
        table.add(Dispatcher.add_engine)(dispatcher.add_engine)
        table.add(Dispatcher.remove_engine)(dispatcher.remove_engine)
        table.add(OperatorApi.pools)(self._pools)  # in place of the shared one
        return table

    def joined(self, frontend_id: str) -> Sequence[FleetUpdate]:
        """The state, and all engines: it must know them before it is told to use them."""
        self._num_calls[frontend_id] = 0
        fleet = self._dispatcher.fleet
        specs = [engine.configured for engine in fleet.engines]
        return [self.status(), *(EngineAdded(spec, fleet.trusts(spec)) for spec in specs)]

    def left(self, frontend_id: str) -> None:
        """A frontend process has ended."""
        del self._num_calls[frontend_id]

    def status(self) -> FleetState:
        """The present state."""
        dispatcher = self._dispatcher
        models = {model: dispatcher.max_model_len(model) for model in dispatcher.models}
        capabilities = {model: dispatcher.capabilities(model) for model in models}
        adapters = dict(dispatcher.adapters)
        return FleetState(models, capabilities, adapters, dispatcher.unknown_engines, dispatcher.unready)

    async def _pools(self) -> dict[str, Any]:
        processes = {name: {"num_requests": count} for name, count in sorted(self._num_calls.items())}
        return await self._dispatcher.pools() | {"processes": processes}


class FleetUpdates(EngineListener):
    """Tells all frontend processes which engines there are."""

    def __init__(self, deciding: DecidingProcess, service: DispatchService) -> None:
        self._deciding = deciding
        self._service = service

    @override
    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        self._deciding.publish(EngineAdded(spec, is_trusted))
        self._publish_state()

    @override
    def engine_removed(self, name: str) -> None:
        self._deciding.publish(EngineRemoved(name))
        self._publish_state()

    def worker_changed(self, _: WorkerChange) -> None:
        """Listens to the registry: an engine became ready, was lost, began to drain or has other adapters."""
        self._publish_state()

    def _publish_state(self) -> None:
        self._deciding.publish(self._service.status())


class _HeldReservation(LastingCall):
    """The reservation of one request of a frontend process."""

    def __init__(
        self, dispatcher: LocalDispatcher, request: DispatchRequest, num_calls: Counter[str], frontend_id: str
    ) -> None:
        self.request_id = request.request_id
        self._num_calls = num_calls
        self._frontend_id = frontend_id
        self._put: Callable[[Any], None] | None = None
        self._reservation: EngineReservation = dispatcher.reserve(request, self._aborted)
        self._moves: asyncio.Queue[partial[Any]] = asyncio.Queue()  # calls that book another target

    async def run(self, put: Callable[[Any], None]) -> None:
        """Place it, and hold it until it is cancelled or cannot be placed elsewhere."""
        self._put = put
        self._num_calls[self._frontend_id] += 1
        try:
            put(await self._reservation.place())
            while True:
                move = await self._moves.get()
                put(await move())
        finally:
            if self._frontend_id in self._num_calls:
                self._num_calls[self._frontend_id] -= 1
            self._reservation.release()

    def event(self, event: Invocation[msgspec.Raw]) -> None:
        """Tell the reservation."""
        if (method := _EVENTS.get(event.method)) is None:
            raise NotCallable(event.method)
        call = method.bind(getattr(self._reservation, method.short_name), event.arguments)
        if method.is_coroutine:
            self._moves.put_nowait(call)
        else:
            call()

    def _aborted(self, engine: str, reason: str) -> None:
        if self._put is not None:
            self._put(Aborted(engine, reason))
