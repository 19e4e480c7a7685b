"""`tandem serve` with workers of Tandem's own engine: the deciding side, its HTTP side, and the workers' places."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

from tandem.cluster.frontend import HttpFrontend
from tandem.cluster.restarts import RestartBudget
from tandem.cluster.service import Service
from tandem.cluster.supervisor import Supervisor
from tandem.cluster.worker_layout import worker_configs
from tandem.cluster.worker_member import WorkerMember
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import ClusterConfig
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.tracing.setup import begin_decider_tracing, close_tracing, tracing_of
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

if TYPE_CHECKING:
    from tandem.text.tokenizer import Tokenizer


class TandemService(Service):
    """Workers of our own engine. Make it in the event loop that will use it."""

    def __init__(
        self,
        config: ClusterConfig,
        tenants: Tenants,
        model: str,
        settings: Mapping[str, str],
        socket_folder: str,
        on_progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._tenants = tenants
        self._export = begin_decider_tracing(config.router)
        self._registry, index, costs = Registry(), PrefixIndex(), CostModel()
        self._sizing = CacheSizing(self._registry, costs)
        heartbeat_interval_s = config.transfer.heartbeat_interval_s
        self._workers = WorkerClient(
            self._registry, index, costs, config.router, heartbeat_interval_s=heartbeat_interval_s
        )
        configs = worker_configs(config, model=model, router_key=self._workers.public_key, socket_folder=socket_folder)
        members = [
            WorkerMember(one, RestartBudget(config.max_restarts), self._workers, self._registry) for one in configs
        ]
        key = self._workers.public_key
        self.supervisor = Supervisor(config, self._registry, costs, members, router_key=key, on_progress=on_progress)
        self._flow = RequestFlow(
            model=config.engine.served_model_name,
            registry=self._registry,
            index=index,
            costs=costs,
            placer=Placer(self._registry, index, costs, config.router),
            sizing=self._sizing,
            workers=self._workers,
            config=config.router,
            tenants=tenants,
            manager=self.supervisor,
            tracing=tracing_of(self._export),
            settings=settings,
        )
        self._background = BackgroundTasks()
        self._http: tuple[ModuleType, Tokenizer] | None = None

    @override
    async def start(self) -> None:
        await self._workers.start()
        self._background.keep("the relief of hot spots", self._flow.hot_spots.run)

    @override
    def load(self) -> None:
        from tandem.cluster import http_frontend  # the tokenizer brings transformers
        from tandem.text.tokenizer import Tokenizer

        self._http = http_frontend, Tokenizer(self._config.engine.model)

    @override
    def mean_output_tokens(self) -> float:
        return self._flow.mean_output_tokens

    @override
    @contextlib.asynccontextmanager
    async def serve_http(
        self, listener: socket.socket, api_keys: ApiKeys
    ) -> AsyncIterator[tuple[HttpFrontend, Callable[[], str | None]]]:
        assert self._http is not None, "it has been loaded"
        http, tokenizer = self._http
        metrics = http.metrics_of(self._flow, self._registry, self._sizing)
        if self._export is not None:
            self._export.register(metrics)
        async with http.serve_http(
            self._flow, tokenizer, metrics, self._config, listener, api_keys, self._tenants, tracing_of(self._export)
        ) as (frontend, readiness):
            yield frontend, lambda: readiness.reason

    @override
    def shut_down(self) -> None:
        self._flow.shut_down()

    @override
    async def close(self) -> None:
        await self._background.close()
        await self._workers.close()
        await close_tracing(self._export)
