"""The `Dispatcher` of a frontend process, which asks the deciding process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol

import msgspec

from tandem.frontend.processes.deciding_client import DecidingClient, JoinSettings
from tandem.frontend.processes.remote import Remote, asked
from tandem.protocol.errors import NoWorker, ServingError
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import (
    GAP_INTERVAL_S,
    Abort,
    Dispatcher,
    DispatchRequest,
    EngineListener,
    EngineReservation,
    EngineTarget,
)

P = ParamSpec("P")


class _Tagged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class FleetState(_Tagged, frozen=True):
    """What every request needs to know about the fleet."""

    models: dict[str, int | None]  # the longest context of each model
    capabilities: dict[str, dict[str, Any] | None]  # by model
    adapters: dict[str, str]  # the base model of each LoRA adapter
    unknown_engines: list[str]
    unready: str | None


class EngineAdded(_Tagged, frozen=True):
    """An engine joined the fleet. A frontend process hears this before it is told to use it."""

    spec: EngineSpec
    is_trusted: bool


class EngineRemoved(_Tagged, frozen=True):
    """An engine left the fleet."""

    name: str


FleetUpdate = FleetState | EngineAdded | EngineRemoved


class Aborted(_Tagged, frozen=True):
    """An engine of the latest target is gone."""

    engine: str
    reason: str


class Reservations(Protocol):
    """The reservations that the deciding process holds for a frontend process."""

    def hold(self, request: DispatchRequest) -> object:
        """A call that holds a reservation until it is cancelled. Its results are targets, and `Aborted`.

        Its events are calls of methods of `EngineReservation`; `place` needs none.
        """


class _GapOffers:
    """When a gap between tokens of one engine was last reported."""

    def __init__(self) -> None:
        self.last_s = 0.0


class RemoteDispatcher(Remote):
    """The dispatcher of `DispatchService`.

    While the deciding process is silent nothing can be placed; answers that have begun go on.
    """

    def __init__(self, settings: JoinSettings, listener: EngineListener) -> None:
        """`listener` gets to know of each engine."""
        super().__init__(settings, results=EngineTarget | Aborted, states=FleetUpdate)
        self._listener = listener
        self._state = FleetState({}, {}, {}, [], None)
        self._gaps: dict[str, _GapOffers] = {}  # by engine

    @property
    def models(self) -> list[str]:
        """Names of all models of the fleet, whether or not their engines are ready."""
        return list(self._state.models)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The base model of each LoRA adapter of the fleet."""
        return self._state.adapters

    @property
    def unknown_engines(self) -> list[str]:
        """Names of engines whose model is not known yet."""
        return self._state.unknown_engines

    @property
    def unready(self) -> str | None:
        """Why the router is not ready; None when it is."""
        return "The deciding process does not answer." if self._client.is_silent else self._state.unready

    def max_model_len(self, model: str) -> int | None:
        """Longest context of the model's engines; None while it is not known."""
        return self._state.models.get(model)

    def capabilities(self, model: str) -> dict[str, Any] | None:
        """The capabilities that all reporting engines of the model share; None if none reports any."""
        return self._state.capabilities.get(model)

    def now(self) -> float:
        """The deciding process's clock, which all processes of the machine share."""
        return time.monotonic()

    def reserve(self, request: DispatchRequest, abort: Abort) -> RemoteReservation:
        """A reservation that holds nothing yet. `abort` is called when one of its engines is gone."""
        return RemoteReservation(self._client, request, abort, self._gaps)

    explain = asked(Dispatcher.explain)
    answer_owner = asked(Dispatcher.answer_owner)
    add_engine = asked(Dispatcher.add_engine)
    remove_engine = asked(Dispatcher.remove_engine)

    def _on_state(self, state: FleetUpdate) -> None:
        match state:
            case FleetState():
                self._state = state
            case EngineAdded(spec, is_trusted):
                self._gaps[spec.name] = _GapOffers()
                self._listener.engine_added(spec, is_trusted=is_trusted)
            case EngineRemoved(name):
                del self._gaps[name]
                self._listener.engine_removed(name)


def _told(
    method: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[RemoteReservation, P], None]:
    """A method that tells the deciding process to call this method of the reservation, without an answer."""

    def tell(self: RemoteReservation, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.call is not None:
            self.client.event(self.call, method, *args, **kwargs)

    return tell


class RemoteReservation:
    """A reservation that the deciding process holds."""

    def __init__(
        self, client: DecidingClient, request: DispatchRequest, abort: Abort, gaps: dict[str, _GapOffers]
    ) -> None:
        self.client = client
        self.call: int | None = None
        self._request = request
        self._abort = abort
        self._gaps = gaps
        self._gap_offers = _GapOffers()  # those of the target's engine
        # The next target, or the latest one.
        self._target: asyncio.Future[EngineTarget] = asyncio.get_running_loop().create_future()

    async def place(self) -> EngineTarget:
        """Wait in the queue if necessary, and book a target. Raises a `ServingError`."""
        self.call = self.client.open(self._receive, Reservations.hold, self._request)
        return await self._next_target()

    async def place_elsewhere(self) -> EngineTarget:
        """Give the target up and book another one. Raises a `ServingError`."""
        self.client.event(self._asking(), EngineReservation.place_elsewhere)
        return await self._next_target()

    async def go_on(self, cause: str, prompt: bytes, num_output_tokens: int) -> EngineTarget:
        """Give the target up and book another one, which goes on with a stream. Raises a `ServingError`."""
        self.client.event(self._asking(), EngineReservation.go_on, cause, prompt, num_output_tokens)
        return await self._next_target()

    answered = _told(EngineReservation.answered)
    failed = _told(EngineReservation.failed)
    refused = _told(EngineReservation.refused)
    prefilled = _told(EngineReservation.prefilled)
    first_token = _told(EngineReservation.first_token)
    held = _told(EngineReservation.held)
    stored = _told(EngineReservation.stored)
    ended = _told(EngineReservation.ended)
    _tell_gap = _told(EngineReservation.gap)

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now."""
        return now - self._gap_offers.last_s >= GAP_INTERVAL_S

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart."""
        self._gap_offers.last_s = now
        self._tell_gap(duration_s, now)

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""
        call, self.call = self.call, None
        if call is not None:
            self.client.close_call(call)

    def _asking(self) -> int:
        """The call, which is about to be asked for another target. Raises `NoWorker` if it has ended."""
        if self.call is None or not self.client.is_open(self.call):
            raise NoWorker("the deciding process can book no other engine for this request")
        self._target = asyncio.get_running_loop().create_future()
        return self.call

    async def _next_target(self) -> EngineTarget:
        target = await self._target
        self._gap_offers = self._gaps.get(target.decode) or _GapOffers()
        return target

    def _receive(self, result: EngineTarget | Aborted | ServingError) -> None:
        if self._target.done():
            # An error now means that the deciding process is silent: placed requests go on without it.
            if isinstance(result, Aborted):
                self._abort(result.engine, result.reason)
        elif isinstance(result, EngineTarget):
            self._target.set_result(result)
        elif isinstance(result, ServingError):
            self._target.set_exception(result)
        # otherwise an earlier target is gone, which the request no longer uses
