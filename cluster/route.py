"""`tandem route` from a config to a clean exit: the router in front of engines, in one process or several."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import uvloop
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console

from tandem.cluster.edge_process import EngineEdge
from tandem.cluster.edge_processes import edge_processes
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.router.engines.app import create_engines_app
from tandem.router.engines.config import FleetFile
from tandem.router.engines.fleet.fleet import EngineFleet
from tandem.router.engines.fleet.local_dispatcher import LocalDispatcher
from tandem.router.engines.relay.connections import EngineConnections
from tandem.router.engines.relay.prompts import load_readers
from tandem.router.http.app import RouterApp
from tandem.router.http.listening import listening
from tandem.router.http.server import serve_until
from tandem.router.processes.dispatch_service import DispatchService, EngineNews
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.signals import stop_events, wait_for_any
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

__all__ = ["RouterSetup", "serve_engines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """What the router is started with."""

    fleet_file: FleetFile
    router: RouterConfig
    engines: ExternalEnginesConfig
    admin_token: str = field(default="", repr=False)
    api_keys: dict[bytes, str] = field(default_factory=dict, repr=False)  # tenants by digest
    tenants: Tenants = field(default_factory=Tenants)


def serve_engines(setup: RouterSetup) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises `ConfigError` for what the user can correct."""
    serve = _serve_alone if setup.router.router_processes == 1 else _serve_with_edges
    with (
        listening(setup.router.host, setup.router.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve(setup, listener))
    return 0


async def _serve_alone(setup: RouterSetup, listener: socket.socket) -> None:
    """Decide and relay in this process."""
    stop, stop_now = stop_events(signal.SIGINT, signal.SIGTERM)
    router = setup.router
    await serve_until(
        stop,
        stop_now,
        _app(setup),
        router,
        listener,
        lambda: _welcome(setup, listener),
        drain_timeout_s=router.drain_timeout_s,
    )


async def _serve_with_edges(setup: RouterSetup, listener: socket.socket) -> None:
    """Decide in this process, for edge processes that relay. Listens to nothing itself, but keeps the port."""
    stop, stop_now = stop_events(signal.SIGINT, signal.SIGTERM)
    dispatcher, metrics = _dispatcher(setup), CollectorRegistry()
    dispatcher.register_metrics(metrics)
    service = DispatchService(dispatcher, lambda: generate_latest(metrics))
    _show_num_processes(metrics, lambda: service.num_edges)
    edge = EngineEdge(setup.fleet_file.tokenizers, setup.engines)
    async with (
        dispatcher.running(),
        edge_processes(
            service,
            edge,
            config=setup.router,
            listener=listener,
            api_keys=setup.api_keys,
            tenants=setup.tenants,
            admin_token=setup.admin_token,
        ) as processes,
    ):
        news = EngineNews(processes.hub, service)
        dispatcher.fleet.listen(news)
        dispatcher.fleet.registry.listen(news.worker_changed)
        await wait_for_any(processes.serving, processes.has_started, stop)
        if processes.is_serving:
            freeze_startup_heap()
            _welcome(setup, listener)
        await wait_for_any(processes.serving, stop)
        processes.drain()
        await wait_for_any(processes.serving, stop_now)
        await processes.close()
        processes.serving.result()


def _app(setup: RouterSetup) -> RouterApp:
    """The app of a process that is alone. To be made in the event loop it serves in."""
    readers = load_readers(setup.fleet_file.tokenizers)  # first: it may fail
    dispatcher, metrics = _dispatcher(setup), CollectorRegistry()
    connections = EngineConnections(setup.engines.connect_timeout_s)
    dispatcher.fleet.listen(connections)
    dispatcher.register_metrics(metrics)
    _show_num_processes(metrics, lambda: 1)

    async def scrape() -> bytes:
        return bytes(generate_latest(metrics))

    return create_engines_app(
        dispatcher,
        connections,
        readers,
        metrics,
        config=setup.router,
        engines_config=setup.engines,
        scrape=scrape,
        api_keys=setup.api_keys,
        tenants=setup.tenants,
        admin_token=setup.admin_token,
    )


def _dispatcher(setup: RouterSetup) -> LocalDispatcher:
    fleet = EngineFleet(
        registry=Registry(),
        index=PrefixIndex(),
        costs=CostModel(),
        config=setup.router,
        engines=setup.engines,
        tenants=setup.tenants,
        trusted_urls=(spec.url for spec in setup.fleet_file.engines),
    )
    return LocalDispatcher(fleet, setup.fleet_file.engines, setup.fleet_file.tokenizers)


def _show_num_processes(metrics: CollectorRegistry, count: Callable[[], float]) -> None:
    Gauge("tandem_router_processes", "Processes of this router", registry=metrics).set_function(count)


def _welcome(setup: RouterSetup, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    count = setup.router.router_processes
    by = f" by {count} processes" if count > 1 else ""
    line = f"Routing to {len(setup.fleet_file.engines)} engine(s) on {where}{by}  (Ctrl-C stops it)"
    Console(stderr=True, highlight=False).print(line)
