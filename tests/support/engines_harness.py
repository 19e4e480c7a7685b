"""A router in front of fake engines, in this process; engines are real HTTP servers on threads of their own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.messages import WorkerState
from tandem.router.engines.app import create_engines_app
from tandem.router.engines.config import EngineSpec, spec_from
from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.prompts import PromptReader
from tandem.router.http.api_keys import key_digest
from tandem.router.processes.sibling_bus import PeerRouterBus
from tandem.router.processes.siblings import PeerRouters
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.tenants import Tenants
from tests.support.fake_openai import FakeServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Router:
    app: FastAPI
    fleet: EngineFleet
    client: httpx.AsyncClient

    def engine(self, name: str) -> Any:
        engine = self.fleet.get(name)
        assert engine is not None
        return engine

    async def all_ready(self, *names: str) -> None:
        await until(lambda: all(self.engine(name).state is WorkerState.READY for name in names))

    def assert_nothing_left(self) -> None:
        """Every load is off again: bookings, attempts, trials."""
        assert self.fleet.registry.num_bookings == sum(len(engine.foreign) for engine in self.fleet.engines)
        for engine in self.fleet.engines:
            assert not engine.running
            assert engine.idle.is_set()


def spec_of(fake: FakeServer, name: str, **values: Any) -> EngineSpec:
    return spec_from({"name": name, "url": fake.url, "kind": "vllm"} | values, "test")


def dead_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def completion(prompt: Any = "a b c d", *, max_tokens: int = 4, stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    return body | fields


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Wait for a condition; fail when it does not come true in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is set by other tasks and threads that know no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def routing(
    *specs: EngineSpec,
    config: RouterConfig | None = None,
    tenants: Tenants = Tenants(),
    readers: dict[str, PromptReader] | None = None,
    admin_token: str = "",
    wait: bool = True,
    clock: Callable[[], float] = time.monotonic,
    number: int = 0,
    bus: Sequence[str] = (),
    api_keys: Mapping[str, str] | None = None,
    **engines: Any,
) -> AsyncIterator[Router]:
    """The app with these engines; probes come every 20 ms. At the end nothing may be left.

    With a `bus` it is this number among the processes that publish at those endpoints. `api_keys` are tenants by key.
    """
    registry = Registry()
    siblings = PeerRouters(registry, name=str(number), epoch=time.time_ns())
    fleet = EngineFleet(
        registry=registry,
        index=PrefixIndex(),
        costs=CostModel(),
        config=config or RouterConfig(request_timeout_s=20.0, drain_timeout_s=5.0),
        engines=ExternalEnginesConfig(**({"probe_interval_s": 0.02, "allow_local_engines": True} | engines)),
        tenants=tenants,
        siblings=siblings,
        clock=clock,
    )
    app = create_engines_app(
        fleet,
        specs,
        readers or {},
        CollectorRegistry(),
        admin_token=admin_token,
        bus=PeerRouterBus(siblings, bus[number], bus) if bus else None,
        api_keys={key_digest(key): tenant for key, tenant in (api_keys or {}).items()},
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        router = Router(app, fleet, client)
        if wait:
            await router.all_ready(*(spec.name for spec in specs))
        yield router
        await until(lambda: not any(engine.running for engine in fleet.engines))
        await until(lambda: not any(map(siblings.num_open, siblings.living)))
        router.assert_nothing_left()
