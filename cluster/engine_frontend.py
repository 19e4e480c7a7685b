"""The HTTP side of a router in front of engines: one server in this process, or several frontend processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge

from tandem.cluster.frontend import HttpFrontend
from tandem.frontend.http.exposition import registry_text
from tandem.frontend.http.server import http_server
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.metrics import KeyCollector
from tandem.frontend.processes.child import RouteFrontend
from tandem.frontend.processes.dispatch_service import DispatchService, FleetUpdates
from tandem.frontend.processes.parent import frontend_processes
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.relay.prompts import load_readers
from tandem.frontend.route_app import create_engines_app
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.router.engines.config import FleetFile
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.runtime.tracing.setup import tracing_of
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

if TYPE_CHECKING:
    from tandem.runtime.tracing.export import SpanExport


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """What the router is started with."""

    fleet_file: FleetFile
    router: RouterConfig
    engines: ExternalEnginesConfig
    admin_token: str = field(default="", repr=False)
    api_keys: ApiKeys = field(default_factory=ApiKeys, repr=False)
    tenants: Tenants = field(default_factory=Tenants)
    export: SpanExport | None = None  # of spans; None = no tracing


def make_fleet(setup: RouterSetup) -> EngineFleet:
    """A fleet without engines. Make it in the event loop that will use it."""
    return EngineFleet(
        registry=Registry(),
        index=PrefixIndex(),
        costs=CostModel(),
        config=setup.router,
        engines=setup.engines,
        tenants=setup.tenants,
        trusted_urls=(spec.url for spec in setup.fleet_file.engines),
    )


def serve_engines_http(
    dispatcher: LocalDispatcher, setup: RouterSetup, listener: socket.socket
) -> contextlib.AbstractAsyncContextManager[HttpFrontend]:
    """Serve HTTP while the block runs: here, or in frontend processes if `router_processes` is more than 1.

    The dispatcher decides while the block runs. Raises `ConfigError` for what the user can correct.
    """
    serve = _one_process if setup.router.router_processes == 1 else _several_processes
    return serve(dispatcher, setup, listener)


@contextlib.asynccontextmanager
async def _one_process(
    dispatcher: LocalDispatcher, setup: RouterSetup, listener: socket.socket
) -> AsyncIterator[HttpFrontend]:
    """Decide and relay in this process."""
    readers, metrics = load_readers(setup.fleet_file.tokenizers), CollectorRegistry()
    connections = EngineConnections(setup.engines)
    dispatcher.fleet.listen(connections)
    dispatcher.register_metrics(metrics)
    metrics.register(KeyCollector(setup.api_keys))
    if setup.export is not None:
        setup.export.register(metrics)
    show_num_processes(metrics, lambda: 1)

    app = create_engines_app(
        dispatcher,
        connections,
        readers,
        metrics,
        config=setup.router,
        engines_config=setup.engines,
        scrape=lambda: registry_text(metrics, setup.router, dispatcher.models),
        api_keys=setup.api_keys,
        tenants=setup.tenants,
        admin_token=setup.admin_token,
        tracing=tracing_of(setup.export),
    )
    async with (
        app.router.lifespan_context(app),
        http_server(app, setup.router, listener, metrics, on_leave=app.leave, on_drain=app.drain) as server,
    ):
        yield server


@contextlib.asynccontextmanager
async def _several_processes(
    dispatcher: LocalDispatcher, setup: RouterSetup, listener: socket.socket
) -> AsyncIterator[HttpFrontend]:
    """Decide in this process, for frontend processes that relay. Listens to nothing itself, but keeps the port."""
    metrics = CollectorRegistry()
    dispatcher.register_metrics(metrics)
    metrics.register(KeyCollector(setup.api_keys))
    if setup.export is not None:
        setup.export.register(metrics)
    service = DispatchService(dispatcher, lambda: registry_text(metrics, setup.router, dispatcher.models))
    show_num_processes(metrics, lambda: service.num_frontends)
    async with (
        dispatcher.running(),
        frontend_processes(
            service,
            RouteFrontend(setup.fleet_file.tokenizers, setup.engines),
            config=setup.router,
            listener=listener,
            api_keys=setup.api_keys,
            tenants=setup.tenants,
            admin_token=setup.admin_token,
        ) as processes,
    ):
        updates = FleetUpdates(processes.deciding, service)
        dispatcher.fleet.listen(updates)
        dispatcher.fleet.registry.listen(updates.worker_changed)
        yield processes


def show_num_processes(metrics: CollectorRegistry, count: Callable[[], float]) -> None:
    """Export how many processes answer HTTP."""
    Gauge("tandem_router_processes", "Processes of this router that answer HTTP", registry=metrics).set_function(count)
