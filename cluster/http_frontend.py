"""The HTTP side of `tandem serve`: one server in this process, or several edge processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from tandem.cluster.edge_process import TextEdge
from tandem.cluster.edge_processes import edge_processes
from tandem.protocol.config import ClusterConfig
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.http.server import http_server
from tandem.router.openai.app import create_app
from tandem.router.openai.readiness import Readiness, Ready
from tandem.router.processes.backend_service import BackendService
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.workers.flow import RequestFlow
from tandem.router.workers.metrics import CacheSizingCollector, WorkerCollector
from tandem.router.workers.pin_metrics import PinCollector
from tandem.runtime.signals import wait_for_any
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.workers.registry import Registry

__all__ = ["HttpFrontend", "drain", "metrics_of", "serve_http"]

_FINAL_EVENTS_S = 2.0  # for clients to read how their answer ended


class HttpFrontend(Protocol):
    """The HTTP server, in this process or in edge processes."""

    @property
    def serving(self) -> asyncio.Future[Any]:
        """Done when the server has ended."""

    @property
    def is_serving(self) -> bool:
        """Whether the server has begun to serve."""

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""

    def drain(self) -> None:
        """Accept nothing more, let running answers end, then end the server."""


@contextlib.asynccontextmanager
async def serve_http(
    flow: RequestFlow,
    tokenizer: Tokenizer,
    metrics: CollectorRegistry,
    config: ClusterConfig,
    listener: socket.socket,
    api_keys: dict[bytes, str],
    tenants: Tenants,
) -> AsyncIterator[tuple[HttpFrontend, Ready]]:
    """Serve HTTP while the block runs: here, or in edge processes if `router_processes` is more than 1."""
    if config.router.router_processes == 1:
        app = create_app(flow, tokenizer, config.router, metrics, api_keys=api_keys, tenants=tenants)
        async with app.router.lifespan_context(app), http_server(app, config.router, listener) as server:
            yield server, app.state.readiness
        return
    async with (
        Readiness(flow, tokenizer.start_id or 0) as readiness,
        edge_processes(
            BackendService(flow, readiness, lambda: generate_latest(metrics)),
            TextEdge(config.engine.model),
            config=config.router,
            listener=listener,
            api_keys=api_keys,
            tenants=tenants,
        ) as processes,
    ):
        yield processes, readiness


def metrics_of(flow: RequestFlow, registry: Registry, sizing: CacheSizing) -> CollectorRegistry:
    """The metrics of the deciding process, without those of HTTP."""
    metrics = CollectorRegistry()
    metrics.register(WorkerCollector(registry))
    metrics.register(CacheSizingCollector(sizing))
    metrics.register(PinCollector(flow.cache, registry))
    metrics.register(AdmissionCollector(flow.admission))
    return metrics


async def drain(
    frontend: HttpFrontend,
    stop_now: asyncio.Event,
    flow: RequestFlow,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Accept nothing more and let answers end for `timeout_s` or until `stop_now`. The rest end with an error."""
    frontend.drain()
    if num_running := frontend.num_running:
        answers = "1 answer" if num_running == 1 else f"{num_running} answers"
        progress(f"stopping: waiting up to {timeout_s:g} s for {answers} (Ctrl-C again stops now)")
    else:
        progress("stopping")
    # Also with no answer in sight: an edge process may still read a request or send the end of an answer.
    await wait_for_any(frontend.serving, stop_now, timeout_s=timeout_s)
    flow.shut_down()
    await asyncio.wait({frontend.serving}, timeout=_FINAL_EVENTS_S)
