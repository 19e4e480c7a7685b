"""A router in front of fake engines, in this process; engines are real HTTP servers on threads of their own."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.exposition import registry_text
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.dispatch_service import DispatchService, FleetUpdates
from tandem.frontend.processes.remote_dispatcher import RemoteDispatcher
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.relay.prompts import PromptReader
from tandem.frontend.route_app import create_engines_app
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.messages import WorkerState
from tandem.router.engines.config import EngineSpec, spec_from
from tandem.router.engines.dispatcher import Dispatcher
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.runtime.tracing.tracing import Tracing
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tests.support.deciding_relay import DecidingRelay
from tests.support.fake_openai import FakeServer
from tests.support.keys import api_keys_of
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PAIRED = RouterConfig(routing="cost,pairs")


@dataclass
class Deciding:
    """The deciding side of a router."""

    dispatcher: LocalDispatcher

    @property
    def fleet(self) -> EngineFleet:
        return self.dispatcher.fleet

    def engine(self, name: str) -> Any:
        engine = self.fleet.get(name)
        assert engine is not None
        return engine

    async def all_ready(self, *names: str) -> None:
        await eventually(lambda: all(self.engine(name).state is WorkerState.READY for name in names))

    def is_idle(self) -> bool:
        return not any(engine.running for engine in self.fleet.engines)

    def assert_nothing_left(self) -> None:
        """All load was released: bookings, running requests, trials."""
        assert self.fleet.registry.num_bookings == sum(len(engine.foreign) for engine in self.fleet.engines)
        for engine in self.fleet.engines:
            assert not engine.running


@dataclass
class Router(Deciding):
    """An app that relays requests, with its deciding side."""

    app: FastAPI
    client: httpx.AsyncClient


@dataclass
class FrontendProcess(Router):
    """A frontend process, simulated in this process."""

    frontend_id: str
    remote: RemoteDispatcher


class Decider(Deciding):
    """A decider with any number of frontends."""

    def __init__(
        self, folder: Path, settings: RouterSettings, specs: Sequence[EngineSpec], stack: AsyncExitStack
    ) -> None:
        super().__init__(settings.dispatcher(specs))
        self.metrics = CollectorRegistry()
        self.dispatcher.register_metrics(self.metrics)
        self.service = DispatchService(self.dispatcher, self._scrape)
        self.endpoint = f"{folder}/decider"
        self.process = DecidingProcess(self.service, self.endpoint, settings.api_keys, status_interval_s=0.01)
        updates = FleetUpdates(self.process, self.service)
        self.fleet.listen(updates)
        self.fleet.registry.listen(updates.worker_changed)
        self._settings = settings
        self._stack = stack

    async def _scrape(self) -> bytes:
        return await registry_text(self.metrics, self._settings.config, self.dispatcher.models)

    async def relay(self) -> DecidingRelay:
        """Stands between this decider and one frontend."""
        return await self._stack.enter_async_context(DecidingRelay(self.endpoint, f"{self.endpoint}-relay"))

    async def frontend(
        self, frontend_id: str, timeout_s: float = 20.0, relay: DecidingRelay | None = None
    ) -> FrontendProcess:
        """Add a frontend and wait until it has joined."""
        self.process.expect(frontend_id)
        connections = EngineConnections(self._settings.external)
        joining = JoinSettings(
            self.endpoint if relay is None else relay.endpoint,
            frontend_id,
            lambda: None,
            timeout_s,
            self._settings.api_keys.is_required,
            watch_interval_s=0.01,
        )
        remote = RemoteDispatcher(joining, connections)
        counters = CollectorRegistry()

        async def scrape() -> bytes:
            return await registry_text(counters, self._settings.config, remote.models) + await remote.scrape()

        app = self._settings.app(remote, connections, counters, scrape, remote.api_keys)
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        await self._stack.enter_async_context(client)
        return FrontendProcess(self.dispatcher, app, client, frontend_id, remote)


@dataclass
class RouterSettings:
    """Settings that all processes of one router share."""

    config: RouterConfig
    external: ExternalEnginesConfig
    tenants: Tenants
    readers: dict[str, PromptReader]
    admin_token: str
    api_keys: ApiKeys
    clock: Callable[[], float]
    tracing: Tracing | None = None

    def dispatcher(self, specs: Sequence[EngineSpec]) -> LocalDispatcher:
        fleet = EngineFleet(
            registry=Registry(),
            index=PrefixIndex(),
            costs=CostModel(),
            config=self.config,
            engines=self.external,
            tenants=self.tenants,
            trusted_urls=(spec.url for spec in specs),
            clock=self.clock,
        )
        return LocalDispatcher(fleet, specs, self.readers, tracing=self.tracing)

    def app(
        self,
        dispatcher: Dispatcher,
        connections: EngineConnections,
        metrics: CollectorRegistry,
        scrape: Callable[[], Awaitable[bytes]],
        api_keys: ApiKeys,
    ) -> RouterApp:
        return create_engines_app(
            dispatcher,
            connections,
            self.readers,
            metrics,
            config=self.config,
            engines_config=self.external,
            scrape=scrape,
            api_keys=api_keys,
            tenants=self.tenants,
            admin_token=self.admin_token,
            tracing=self.tracing,
        )


def settings_of(
    config: RouterConfig | None = None,
    tenants: Tenants = Tenants(),
    readers: dict[str, PromptReader] | None = None,
    admin_token: str = "",
    api_keys: Mapping[str, str] | ApiKeys | None = None,
    clock: Callable[[], float] = time.monotonic,
    tracing: Tracing | None = None,
    **engines: Any,
) -> RouterSettings:
    """`engines` are settings of external engines.

    By default they are probed every 20 ms, with timeouts that a loaded machine keeps.
    """
    defaults = {
        "probe_interval_s": 0.02,
        "probe_timeout_s": 15.0,
        "connect_timeout_s": 15.0,
        "allow_local_engines": True,
    }
    external = ExternalEnginesConfig(**(defaults | engines))
    config = config or RouterConfig(request_timeout_s=20.0, drain_timeout_s=5.0)
    keys = api_keys if isinstance(api_keys, ApiKeys) else api_keys_of(api_keys or {})
    return RouterSettings(config, external, tenants, readers or {}, admin_token, keys, clock, tracing)


def spec_of(fake: FakeServer, name: str, **values: Any) -> EngineSpec:
    return spec_from({"name": name, "url": fake.url, "kind": "vllm"} | values, "test")


def pair(prefill: FakeServer, decode: FakeServer) -> list[EngineSpec]:
    """Two engines that answer together where `config=PAIRED`."""
    return [spec_of(prefill, "p", role="prefill"), spec_of(decode, "d", role="decode")]


def dead_url() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def completion(prompt: Any = "a b c d", *, max_tokens: int = 4, stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    return body | fields


@asynccontextmanager
async def routing(*specs: EngineSpec, wait: bool = True, **options: Any) -> AsyncIterator[Router]:
    """A router with these engines, alone in its process. `options` are those of `settings_of`.

    At the end nothing may be left.
    """
    settings = settings_of(**options)
    dispatcher, metrics = settings.dispatcher(specs), CollectorRegistry()
    connections = EngineConnections(settings.external)
    dispatcher.fleet.listen(connections)
    dispatcher.register_metrics(metrics)

    async def scrape() -> bytes:
        return await registry_text(metrics, settings.config, dispatcher.models)

    app = settings.app(dispatcher, connections, metrics, scrape, settings.api_keys)
    async with (
        aclosing(dispatcher.fleet),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        router = Router(dispatcher, app, client)
        if wait:
            await router.all_ready(*(spec.name for spec in specs))
        yield router
        await eventually(router.is_idle)
        router.assert_nothing_left()


@asynccontextmanager
async def routing_by_decider(
    folder: Path, *specs: EngineSpec, wait: bool = True, **options: Any
) -> AsyncIterator[Decider]:
    """A decider with these engines and no frontends yet. `options` are those of `settings_of`.

    At the end nothing may be left.
    """
    async with AsyncExitStack() as stack:
        decider = Decider(folder, settings_of(**options), specs, stack)
        stack.push_async_callback(decider.process.close)
        await stack.enter_async_context(aclosing(decider.fleet))
        await decider.process.start()
        await stack.enter_async_context(decider.dispatcher.running())
        if wait:
            await decider.all_ready(*(spec.name for spec in specs))
        yield decider
        await eventually(lambda: decider.is_idle() and decider.process.num_running == 0)
        decider.assert_nothing_left()
