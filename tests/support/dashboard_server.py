"""The dashboard of a made-up deciding process over HTTP, in a thread: for tests whose own thread drives a browser."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from tandem.frontend.dashboard.routes import add_dashboard
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.metrics import EdgeMetrics
from tandem.frontend.http.server import http_server
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig

START_S = 20.0


class World(Protocol):
    """What the dashboard is of."""

    @property
    def metrics(self) -> EdgeMetrics:
        """The metrics of its requests."""

    async def overview(self) -> dict[str, Any]:
        """As `OperatorApi.overview`."""


@contextmanager
def dashboard_server(world: World, api_keys: ApiKeys | None = None, *, port: int = 0) -> Iterator[str]:
    """Serve the world's dashboard while the block runs; the URL of the server."""
    listener = socket.create_server(("127.0.0.1", port))
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    has_started = threading.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(world, api_keys or ApiKeys(), listener, has_started.set, stop))
    )
    thread.start()
    try:
        assert has_started.wait(START_S), "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        loop.close()
        listener.close()


async def _serve(
    world: World, api_keys: ApiKeys, listener: socket.socket, on_started: Callable[[], None], stop: asyncio.Event
) -> None:
    app = RouterApp(RouterConfig(), EdgeMetrics(CollectorRegistry()), api_keys, version="1.2.3")
    add_dashboard(app, overview=world.overview, traffic=world.metrics.traffic, api_keys=api_keys)
    async with (
        app.router.lifespan_context(app),
        http_server(app, RouterConfig(), listener, CollectorRegistry(), on_drain=app.drain) as server,
    ):
        await server.has_started.wait()
        on_started()
        await stop.wait()
