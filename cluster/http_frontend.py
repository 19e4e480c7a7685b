"""The HTTP side of `tandem serve`: one server in this process, or several frontend processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from tandem.cluster.frontend import HttpFrontend
from tandem.frontend.http.exposition import registry_text
from tandem.frontend.http.server import http_server
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.metrics import KeyCollector
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.child import ServeFrontend
from tandem.frontend.processes.parent import frontend_processes
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import ClusterConfig
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.readiness import ReadinessCheck, ReadinessProbe
from tandem.router.workers.flow import RequestFlow
from tandem.router.workers.metrics import (
    CacheSizingCollector,
    LoadCollector,
    MoveCollector,
    PinCollector,
    WorkerCollector,
)
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.workers.registry import Registry
from tandem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing


@contextlib.asynccontextmanager
async def serve_http(
    flow: RequestFlow,
    tokenizer: Tokenizer,
    metrics: CollectorRegistry,
    config: ClusterConfig,
    listener: socket.socket,
    api_keys: ApiKeys,
    tenants: Tenants,
    tracing: Tracing | None = None,
) -> AsyncIterator[tuple[HttpFrontend, ReadinessCheck]]:
    """Serve HTTP while the block runs: here, or in frontend processes if `router_processes` is more than 1."""
    metrics.register(KeyCollector(api_keys))
    if config.router.router_processes == 1:
        app = create_app(flow, tokenizer, config.router, metrics, api_keys=api_keys, tenants=tenants, tracing=tracing)
        async with (
            app.router.lifespan_context(app),
            http_server(app, config.router, listener, metrics, on_leave=app.leave, on_drain=app.drain) as server,
        ):
            yield server, app.state.readiness
        return
    async with (
        ReadinessProbe(flow, tokenizer.start_id or 0) as readiness,
        frontend_processes(
            BackendService(flow, readiness, lambda: registry_text(metrics, config.router, [flow.model])),
            ServeFrontend(config.engine.model),
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
    metrics.register(LoadCollector(registry))
    metrics.register(WorkerCollector(registry))
    metrics.register(MoveCollector(flow.context))
    metrics.register(CacheSizingCollector(sizing))
    metrics.register(PinCollector(flow.cache, registry))
    metrics.register(AdmissionCollector(flow.admission))
    return metrics
