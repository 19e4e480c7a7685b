"""Serves a `Backend` to edge processes: what they may ask it, and what they get to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from tandem.frontend.http.exposition import Scraper, shared_scrape
from tandem.frontend.processes.wire import WireFormat
from tandem.frontend.processes.worker_questions import (
    AddWorker,
    DrainWorker,
    Migrate,
    SetRole,
    WorkerQuestion,
    answer_of_workers,
)
from tandem.frontend.response_store import LocalResponses, StoredResponse
from tandem.protocol.digest import CacheScope
from tandem.protocol.messages import Prefetch
from tandem.router.backend import Backend, GenerateRequest, PinRequest, PinState, TokenDelta
from tandem.router.overview import OncePerInterval
from tandem.router.readiness import ReadinessCheck

__all__ = [
    "WIRE_FORMAT",
    "BackendService",
    "Check",
    "Decisions",
    "EndPin",
    "Explain",
    "FetchPin",
    "ForgetResponse",
    "GetResponse",
    "KeepResponse",
    "ListPins",
    "ListPools",
    "MakePin",
    "Overview",
    "Question",
    "Scrape",
    "Status",
]


class _Question(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Explain(_Question, frozen=True):
    """`Backend.explain`."""

    request: GenerateRequest


class Decisions(_Question, frozen=True):
    """`Backend.decisions`."""


class ListPools(_Question, frozen=True):
    """`Backend.pools`."""


class Overview(_Question, frozen=True):
    """`Backend.overview`."""


class Check(_Question, frozen=True):
    """`Backend.check`."""


class Scrape(_Question, frozen=True):
    """The metrics of the hub's process, as Prometheus reads them."""


class MakePin(_Question, frozen=True):
    """`Pins.pin`."""

    request: PinRequest


class EndPin(_Question, frozen=True):
    """`Pins.unpin`."""

    pin_id: str
    tenant: str | None


class FetchPin(_Question, frozen=True):
    """`Pins.prefetch`."""

    pin_id: str
    prefetch: Prefetch
    tenant: str | None


class ListPins(_Question, frozen=True):
    """`Pins.pins`."""

    tenant: str | None
    cache_scope: CacheScope | None


class KeepResponse(_Question, frozen=True):
    """`ResponseStore.put`."""

    stored: StoredResponse


class GetResponse(_Question, frozen=True):
    """`ResponseStore.get`."""

    response_id: str
    tenant: str
    param: str


class ForgetResponse(_Question, frozen=True):
    """`ResponseStore.delete`."""

    response_id: str
    tenant: str
    param: str


PinQuestion = MakePin | EndPin | FetchPin | ListPins
ResponseQuestion = KeepResponse | GetResponse | ForgetResponse
Question = Explain | Decisions | ListPools | Overview | WorkerQuestion | Check | Scrape | PinQuestion | ResponseQuestion
Answer = dict[str, Any] | list[Any] | str | PinState | list[PinState] | StoredResponse | None


class Status(msgspec.Struct, frozen=True, array_like=True):
    """The news: what every request needs to know about the backend."""

    model: str
    max_model_len: int | None
    unready: str | None  # why requests should not be sent here now
    can_serve: bool  # whether there are any workers


WIRE_FORMAT = WireFormat(request=GenerateRequest, question=Question, item=TokenDelta, news=Status)


class BackendService:
    """The `HubService` of `tandem serve`."""

    wire_format = WIRE_FORMAT

    def __init__(self, backend: Backend, readiness: ReadinessCheck, scrape: Scraper) -> None:
        self._backend = backend
        self._overview = OncePerInterval(backend.overview)  # for all edge processes
        self._readiness = readiness
        self._scrape = shared_scrape(scrape)
        self._responses = LocalResponses()

    def open(self, edge_id: str, request: GenerateRequest, put: Callable[[TokenDelta], None]) -> _Generation:
        """A call that generates once it runs."""
        return _Generation(self._backend, request, put)

    async def answer(self, question: Question) -> Answer:
        """Ask the backend. Raises a `ServingError`."""
        backend = self._backend
        match question:
            case Explain(request):
                return await backend.explain(request)
            case Decisions():
                return await backend.decisions()
            case ListPools():
                return await backend.pools()
            case Overview():
                return await self._overview()
            case SetRole() | DrainWorker() | AddWorker() | Migrate():
                return await answer_of_workers(backend, question)
            case Check():
                return dict(await backend.check())
            case Scrape():
                return (await self._scrape()).decode()
            case MakePin(pin):
                return await backend.cache.pin(pin)
            case EndPin(pin_id, tenant):
                await backend.cache.unpin(pin_id, tenant)
                return None
            case FetchPin(pin_id, prefetch, tenant):
                return await backend.cache.prefetch(pin_id, prefetch, tenant)
            case ListPins(tenant, cache_scope):
                return await backend.cache.pins(tenant, cache_scope)
            case KeepResponse() | GetResponse() | ForgetResponse():
                return await self._answer_about_response(question)

    async def _answer_about_response(self, question: ResponseQuestion) -> StoredResponse | None:
        match question:
            case KeepResponse(stored):
                await self._responses.put(stored)
            case ForgetResponse(response_id, tenant, param):
                await self._responses.delete(response_id, tenant, param)
            case GetResponse(response_id, tenant, param):
                return await self._responses.get(response_id, tenant, param)
        return None

    def joined(self, edge_id: str) -> Sequence[Status]:
        """The news for it: the status is all that an edge process needs."""
        return [self.status()]

    def left(self, edge_id: str) -> None:
        """Nothing about it is kept here."""

    def status(self) -> Status:
        """The present status."""
        backend = self._backend
        return Status(backend.model, backend.max_model_len, self._readiness.reason, backend.ready)


class _Generation:
    """One sequence that is generated for an edge process."""

    def __init__(self, backend: Backend, request: GenerateRequest, put: Callable[[TokenDelta], None]) -> None:
        self._backend = backend
        self._request = request
        self._put = put

    @property
    def request_id(self) -> str:
        """As `HubCall.request_id`."""
        return self._request.request_id

    async def run(self) -> None:
        """Generate it."""

        def put(deltas: list[TokenDelta]) -> bool:
            for delta in deltas:
                self._put(delta)
            return True

        async with aclosing(self._backend.serve(self._request)) as deltas:
            await deltas.read_into(put)

    def note(self, note: None) -> None:
        """Edge processes have nothing to tell about a generation."""
