"""`tandem serve` with servers of another engine: the router of `tandem route`, and the servers' places."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from typing_extensions import override

from tandem.cluster.engine_frontend import RouterSetup, make_fleet, serve_engines_http
from tandem.cluster.engines.layout import engine_facts, engine_servers
from tandem.cluster.engines.member import EngineMember
from tandem.cluster.frontend import HttpFrontend
from tandem.cluster.restarts import RestartBudget
from tandem.cluster.service import Service
from tandem.cluster.supervisor import Supervisor
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import ClusterConfig, ExternalEnginesConfig
from tandem.router.engines.config import FleetFile
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.runtime.tracing.setup import begin_decider_tracing, close_tracing, tracing_of
from tandem.scheduling.admission.tenants import Tenants


class EngineService(Service):
    """Servers of another engine. Make it in the event loop that will use it."""

    def __init__(
        self,
        config: ClusterConfig,
        tenants: Tenants,
        model: str,
        settings: Mapping[str, str],
        _: str,
        on_progress: Callable[[str], None],
    ) -> None:
        engine = config.engine
        export = begin_decider_tracing(config.router)
        self._setup = RouterSetup(
            fleet_file=FleetFile([], {engine.served_model_name: engine.model}),
            router=config.router,
            # Only those that are started here are added; the actor of each replaces it if it stalls.
            engines=ExternalEnginesConfig(allow_local_engines=True, engine_stall_s=0.0),
            tenants=tenants,
            export=export,
        )
        fleet, facts = make_fleet(self._setup), engine_facts(config)
        members = [
            EngineMember(server, role, RestartBudget(config.max_restarts), fleet, facts)
            for server, role in engine_servers(config, model)
        ]
        self.supervisor = Supervisor(config, fleet.registry, fleet.costs, members, on_progress=on_progress)
        self._dispatcher = LocalDispatcher(
            fleet,
            [],
            self._setup.fleet_file.tokenizers,
            self.supervisor,
            tracing_of(export),
            settings=settings,
        )

    @override
    async def start(self) -> None:
        """Do nothing: the fleet probes servers as they are added."""

    @override
    def load(self) -> None:
        """Do nothing: what HTTP needs is loaded already."""

    @override
    def mean_output_tokens(self) -> float:
        return self._dispatcher.fleet.lengths.mean_output_tokens

    @override
    @contextlib.asynccontextmanager
    async def serve_http(
        self, listener: socket.socket, api_keys: ApiKeys
    ) -> AsyncIterator[tuple[HttpFrontend, Callable[[], str | None]]]:
        # Each server has generated a token before it joins the fleet, so readiness needs no probe here.
        setup = replace(self._setup, api_keys=api_keys)
        async with serve_engines_http(self._dispatcher, setup, listener) as frontend:
            yield frontend, lambda: self._dispatcher.unready

    @override
    def shut_down(self) -> None:
        self._dispatcher.shut_down()

    @override
    async def close(self) -> None:
        await self._dispatcher.fleet.aclose()
        await close_tracing(self._setup.export)
