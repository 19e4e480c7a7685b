"""What a frontend process has in place of an object of the deciding process: methods that ask for the same method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes.deciding_client import DecidingClient, JoinSettings
from tandem.frontend.processes.key_uses import RemoteLimiter
from tandem.router.operator_api import ManagedWorkers, OperatorApi

P = ParamSpec("P")
T = TypeVar("T")


class RemoteObject:
    """An object of the deciding process."""

    def __init__(self, client: DecidingClient) -> None:
        self._client = client


def asked(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RemoteObject, P], Coroutine[Any, Any, T]]:
    """A method that asks the deciding process for this method of a Protocol, and raises what that raises there.

    It raises `NoWorker` or `WorkerError` too, if the deciding process does not answer.
    """

    async def ask(self: RemoteObject, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._client.ask(method, *args, **kwargs)

    return ask


class DecidingMetrics(Protocol):
    """The metrics of the deciding process."""

    async def scrape(self) -> bytes:
        """All of them, as Prometheus reads them."""


class RemoteWorkers(RemoteObject):
    """The workers that the deciding process manages."""

    set_role = asked(ManagedWorkers.set_role)
    drain = asked(ManagedWorkers.drain)
    add_worker = asked(ManagedWorkers.add_worker)
    check_integrity = asked(ManagedWorkers.check_integrity)


class Remote(RemoteObject, ABC):
    """The connection to the deciding process, with its `OperatorApi` and keys. Used from one event loop only."""

    def __init__(self, settings: JoinSettings, *, results: Any, states: Any) -> None:
        """`results` is the type of what lasting calls get, `states` that of state updates."""
        client = DecidingClient(
            settings,
            results=results,
            states=states,
            on_state=self._on_state,
            on_keys=lambda keys: self.api_keys.replace(keys),
        )
        super().__init__(client)
        self.manager = RemoteWorkers(client)
        self.api_keys = ApiKeys(is_required=settings.needs_key, limiter=RemoteLimiter(client))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Join; leave at the end. Raises `WorkerError` when the deciding process does not answer in time."""
        try:
            await self.start()
            yield
        finally:
            await self.close()

    async def start(self) -> None:
        """Join. Raises `WorkerError` when the deciding process does not answer in time."""
        await self._client.start()

    async def close(self) -> None:
        """Fail what still runs and leave."""
        await self._client.close()

    @property
    def num_open(self) -> int:
        """Number of calls in progress."""
        return self._client.num_open

    decisions = asked(OperatorApi.decisions)
    pools = asked(OperatorApi.pools)
    overview = asked(OperatorApi.overview)
    migrate = asked(OperatorApi.migrate)
    scrape = asked(DecidingMetrics.scrape)

    @abstractmethod
    def _on_state(self, state: Any) -> None:
        """The state of the deciding process is this now."""
