"""An edge process's `Backend`: the one that the hub serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes import backend_service as service
from tandem.frontend.processes.hub_client import HubClient
from tandem.frontend.processes.worker_questions import RemoteWorkers
from tandem.frontend.response_store import StoredResponse
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import Prefetch
from tandem.router.backend import GenerateRequest, PinRequest, PinState, TokenDelta
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.streams import DeltaQueue, QueueStream, Stream

__all__ = ["RemoteBackend", "RemoteResponses"]


class RemoteBackend(RemoteWorkers):
    """The backend of `BackendService`, with its readiness and its pins. Used from one event loop only.

    A hub that sends nothing for `timeout_s` fails every call.
    """

    def __init__(
        self,
        endpoint: str,
        edge_id: str,
        *,
        on_lost: Callable[[], object],
        timeout_s: float,
        needs_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` is called when the connection to the hub has ended: nothing is served from then on.

        `needs_key`: clients need an API key.
        """
        self._status: service.Status | None = None
        self._scheduler = CallbackScheduler()
        hub = HubClient(
            endpoint,
            edge_id,
            service.WIRE_FORMAT,
            self._on_news,
            on_lost=on_lost,
            timeout_s=timeout_s,
            needs_key=needs_key,
            clock=clock,
        )
        super().__init__(hub)
        self.responses = RemoteResponses(hub)

    async def start(self) -> None:
        """Join the hub. Raises `WorkerError` when it does not answer in time."""
        await self._hub.start()

    async def close(self) -> None:
        """Fail what still runs and leave."""
        await self._hub.close()

    @property
    def api_keys(self) -> ApiKeys:
        """The hub's API keys."""
        return self._hub.api_keys

    @property
    def num_open(self) -> int:
        """Number of requests and questions at the hub."""
        return self._hub.num_open

    # -- Backend --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """Name the model is served under."""
        return self._status.model if self._status else ""

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the workers; None while there is no worker."""
        return self._status.max_model_len if self._status else None

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return bool(self._status and self._status.can_serve and not self._hub.is_silent)

    @property
    def cache(self) -> RemoteBackend:
        """What clients may say about the KV cache."""
        return self

    def serve(self, request: GenerateRequest) -> Stream[TokenDelta]:
        """Generate, ending with a delta that has a `finish_reason`. The stream raises a `ServingError`."""
        return _RemoteStream(self._hub, request, DeltaQueue(self._scheduler))

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """The decision that this request would get now, as JSON. Raises a `ServingError`."""
        return await self._hub.ask(service.Explain(request), dict[str, Any])

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return await self._hub.ask(service.Decisions(), list[dict[str, Any]])

    async def pools(self) -> dict[str, Any]:
        """State of the worker pools, as JSON."""
        return await self._hub.ask(service.ListPools(), dict[str, Any])

    async def overview(self) -> dict[str, Any]:
        """What the dashboard shows of the hub's process, as JSON."""
        return await self._hub.ask(service.Overview(), dict[str, Any])

    async def check(self) -> dict[str, str]:
        """What is wrong with, or held by, each worker that should be idle."""
        return await self._hub.ask(service.Check(), dict[str, str])

    # -- Pins -----------------------------------------------------------------------------------------------------

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix. Raises a `ServingError`."""
        return await self._hub.ask(service.MakePin(request), PinState)

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin now. Raises `PinNotFound`."""
        await self._hub.ask(service.EndPin(pin_id, tenant), type(None))

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring a pin's blocks up now. Raises `PinNotFound`."""
        return await self._hub.ask(service.FetchPin(pin_id, prefetch, tenant), PinState)

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins, oldest first; of one scope, or (None) of all."""
        return await self._hub.ask(service.ListPins(tenant, cache_scope), list[PinState])

    # -- readiness and metrics of the hub's process ---------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why requests should not be sent here now; None when they should."""
        if self._status is None or self._hub.is_silent:
            return "The deciding process does not answer."
        return self._status.unready

    async def scrape(self) -> bytes:
        """The metrics of the hub's process."""
        return (await self._hub.ask(service.Scrape(), str)).encode()

    def _on_news(self, status: service.Status) -> None:
        self._status = status


class RemoteResponses:
    """The responses that the hub keeps for all edge processes."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response. Raises a `ServingError` if the hub does not answer."""
        await self._hub.ask(service.KeepResponse(stored), type(None))

    async def get(self, response_id: str, tenant: str, param: str) -> StoredResponse:
        """A tenant's response. Raises `ResponseNotFound` that names the field `param`."""
        return await self._hub.ask(service.GetResponse(response_id, tenant, param), StoredResponse)

    async def delete(self, response_id: str, tenant: str, param: str) -> None:
        """Forget a tenant's response. Raises `ResponseNotFound`."""
        await self._hub.ask(service.ForgetResponse(response_id, tenant, param), type(None))


class _RemoteStream(QueueStream[TokenDelta, TokenDelta]):
    """One request that the hub serves."""

    def __init__(self, hub: HubClient, request: GenerateRequest, queue: DeltaQueue[TokenDelta]) -> None:
        super().__init__(queue)
        self._hub = hub
        self._request = request
        self._call: int | None = None
        self._is_complete = False  # the last delta has arrived

    def close(self) -> None:
        """Expect nothing more; tell the hub unless it has ended the call."""
        call, self._call = self._call, None
        if call is not None:
            self._hub.close_call(call, is_over=self._is_complete)

    async def _begin(self) -> None:
        self._call = self._hub.open(self._request, self._receive)

    def _receive(self, item: TokenDelta | ServingError) -> None:
        if isinstance(item, ServingError):
            self._queue.fail(item)
        else:
            self._queue.put(item)

    def _convert(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        self._has_ended = self._is_complete = deltas[-1].finish_reason is not None
        return deltas
