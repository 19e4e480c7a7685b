"""The `Dispatcher` of an edge process, which asks the hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes import dispatch_messages as messages
from tandem.frontend.processes.hub_client import HubClient
from tandem.frontend.processes.worker_questions import RemoteWorkers
from tandem.protocol.errors import NoWorker, ServingError
from tandem.router.engines.dispatcher import GAP_INTERVAL_S, Abort, DispatchRequest, EngineListener, EngineTarget

__all__ = ["RemoteDispatcher", "RemoteReservation"]


class _GapOffers:
    """When a gap between tokens of one engine was last reported."""

    def __init__(self) -> None:
        self.last_s = 0.0


class RemoteDispatcher(RemoteWorkers):
    """The dispatcher of `DispatchService`. Used from one event loop only.

    While the hub is silent for more than `timeout_s` nothing can be placed; answers that have begun go on.
    """

    def __init__(
        self,
        endpoint: str,
        edge_id: str,
        listener: EngineListener,
        *,
        on_lost: Callable[[], object],
        timeout_s: float,
        needs_key: bool = False,
    ) -> None:
        """`listener` gets to know of each engine; `on_lost` is called when the connection to the hub has ended.

        `needs_key`: clients need an API key.
        """
        self._listener = listener
        self._status = messages.FleetStatus({}, {}, {}, [], None)
        self._gaps: dict[str, _GapOffers] = {}  # by engine
        hub = HubClient(
            endpoint,
            edge_id,
            messages.WIRE_FORMAT,
            self._on_news,
            on_lost=on_lost,
            timeout_s=timeout_s,
            needs_key=needs_key,
        )
        super().__init__(hub)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Join the hub; leave at the end. Raises `WorkerError` when it does not answer in time."""
        try:
            await self._hub.start()
            yield
        finally:
            await self._hub.close()

    @property
    def api_keys(self) -> ApiKeys:
        """The hub's API keys."""
        return self._hub.api_keys

    @property
    def num_open(self) -> int:
        """Number of requests and questions at the hub."""
        return self._hub.num_open

    @property
    def models(self) -> list[str]:
        """Names of all models of the fleet, whether or not their engines are ready."""
        return list(self._status.models)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The base model of each LoRA adapter of the fleet."""
        return self._status.adapters

    @property
    def unknown_engines(self) -> list[str]:
        """Names of engines whose model is not known yet."""
        return self._status.unknown_engines

    @property
    def unready(self) -> str | None:
        """Why the router is not ready; None when it is."""
        return "The deciding process does not answer." if self._hub.is_silent else self._status.unready

    def max_model_len(self, model: str) -> int | None:
        """Longest context of the model's engines; None while it is not known."""
        return self._status.models.get(model)

    def capabilities(self, model: str) -> dict[str, Any] | None:
        """The capabilities that all reporting engines of the model share; None if none reports any."""
        return self._status.capabilities.get(model)

    def now(self) -> float:
        """The hub's clock, which all processes of the machine share."""
        return time.monotonic()

    def reserve(self, request: DispatchRequest, abort: Abort) -> RemoteReservation:
        """A reservation that holds nothing yet. `abort` is called when one of its engines is gone."""
        return RemoteReservation(self._hub, request, abort, self._gaps)

    async def explain(self, request: DispatchRequest) -> dict[str, Any]:
        """The decision that the request would get now, as JSON. Raises a `ServingError`."""
        return await self._hub.ask(messages.ExplainDispatch(request), dict[str, Any])

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return await self._hub.ask(messages.DispatchDecisions(), list[dict[str, Any]])

    async def answer_owner(self, answer_id: str, tenant: str) -> str:
        """The engine that keeps this answer of the tenant. Raises `AnswerNotFound`."""
        return await self._hub.ask(messages.AnswerOwner(answer_id, tenant), str)

    async def pools(self) -> dict[str, Any]:
        """Body of `/v1/pools`."""
        return await self._hub.ask(messages.FleetPools(), dict[str, Any])

    async def overview(self) -> dict[str, Any]:
        """What the dashboard shows of the hub's process, as JSON."""
        return await self._hub.ask(messages.FleetOverview(), dict[str, Any])

    async def scrape(self) -> bytes:
        """The metrics of the hub's process."""
        return (await self._hub.ask(messages.ScrapeHub(), str)).encode()

    async def add_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add an engine; returns it as JSON. Raises `RequestError`."""
        return await self._hub.ask(messages.AddEngine(fields), dict[str, Any])

    async def remove_engine(self, name: str) -> dict[str, Any]:
        """Begin to drain an engine; returns it as JSON. Raises `EngineNotFound`."""
        return await self._hub.ask(messages.RemoveEngine(name), dict[str, Any])

    def _on_news(self, news: messages.News) -> None:
        match news:
            case messages.FleetStatus():
                self._status = news
            case messages.EngineAdded(spec, is_trusted):
                self._gaps[spec.name] = _GapOffers()
                self._listener.engine_added(spec, is_trusted=is_trusted)
            case messages.EngineRemoved(name):
                del self._gaps[name]
                self._listener.engine_removed(name)


class RemoteReservation:
    """A reservation that the hub holds."""

    def __init__(self, hub: HubClient, request: DispatchRequest, abort: Abort, gaps: dict[str, _GapOffers]) -> None:
        self._hub = hub
        self._request = request
        self._abort = abort
        self._gaps = gaps
        self._gap_offers = _GapOffers()  # those of the target's engine
        self._call: int | None = None
        # The next target, or the latest one.
        self._target: asyncio.Future[EngineTarget] = asyncio.get_running_loop().create_future()

    async def place(self) -> EngineTarget:
        """Wait in the queue if necessary, and book a target. Raises a `ServingError`."""
        self._call = self._hub.open(self._request, self._receive)
        return await self._next_target()

    async def place_elsewhere(self) -> EngineTarget:
        """Give the target up and book another one. Raises a `ServingError`."""
        return await self._ask_for_target(messages.PlaceElsewhere())

    async def go_on(self, cause: str, prompt: bytes, num_output_tokens: int) -> EngineTarget:
        """Give the target up and book another one, which goes on with a stream. Raises a `ServingError`."""
        return await self._ask_for_target(messages.GoOn(cause, prompt, num_output_tokens))

    def answered(self) -> None:
        """The first byte of the answer came."""
        self._note(messages.EngineAnswered())

    def failed(self, engine: str, *, is_absent: bool = False, is_lost: bool = False) -> None:
        """The engine failed the request."""
        self._note(messages.EngineFailure(engine, is_absent, is_lost))

    def refused(self, engine: str, retry_after_s: float) -> None:
        """The engine is busy: it gets no requests of this tenant for `retry_after_s`."""
        self._note(messages.EngineRefusal(engine, retry_after_s))

    def prefilled(self, now: float) -> None:
        """The prefill engine of a pair returned."""
        self._note(messages.Prefilled(now))

    def first_token(self, now: float) -> None:
        """The first token of a stream came."""
        self._note(messages.FirstToken(now))

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now."""
        return now - self._gap_offers.last_s >= GAP_INTERVAL_S

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart."""
        self._gap_offers.last_s = now
        self._note(messages.Gap(duration_s, now))

    def held(self, *, is_held: bool) -> None:
        """The client has stopped reading its stream, or reads it again."""
        self._note(messages.ClientHolds(is_held))

    def stored(self, answer_id: str) -> None:
        """The engine that answers keeps the answer under this id."""
        self._note(messages.Stored(answer_id))

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The answer is complete."""
        self._note(messages.Ended(num_prompt_tokens, num_output_tokens))

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""
        call, self._call = self._call, None
        if call is not None:
            self._hub.close_call(call)

    async def _ask_for_target(self, note: messages.PlaceElsewhere | messages.GoOn) -> EngineTarget:
        if self._call is None or not self._hub.is_open(self._call):
            raise NoWorker("the deciding process can book no other engine for this request")
        self._target = asyncio.get_running_loop().create_future()
        self._note(note)
        return await self._next_target()

    async def _next_target(self) -> EngineTarget:
        target = await self._target
        self._gap_offers = self._gaps.get(target.decode) or _GapOffers()
        return target

    def _note(self, note: messages.Note) -> None:
        if self._call is not None:
            self._hub.note(self._call, note)

    def _receive(self, item: messages.Item | ServingError) -> None:
        if self._target.done():
            # An error now means that the hub is silent: placed requests go on without it.
            if isinstance(item, messages.Aborted):
                self._abort(item.engine, item.reason)
        elif isinstance(item, EngineTarget):
            self._target.set_result(item)
        elif isinstance(item, ServingError):
            self._target.set_exception(item)
        # otherwise an earlier target is gone, which the request no longer uses
