"""uvicorn with our own signal handling and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.connections import NUM_RESERVED, Connections
from tandem.frontend.http.protocol import HttpProtocol
from tandem.frontend.http.tls import ServerTls
from tandem.frontend.http.tls_connection import TlsConnection
from tandem.protocol.config import RouterConfig
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.signals import ServingOrders, wait_for_any

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0  # how long the app has to notice that its clients disconnected
# Clients that one iteration of the event loop accepts: uvloop accepts one by each socket. With one socket, a flood of
# connections whose requests make iterations long would keep others in the queue for seconds.
_NUM_ACCEPTED = 4
_NUM_OTHER_FILES = 256  # files that this process may need besides its clients' connections


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours stop the workers too, and end with an exit code.

    It serves from construction on, for an app whose lifespan has begun.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        listener: socket.socket,
        tls: ServerTls | None = None,
        *,
        on_leave: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._tls = tls
        self._on_leave = on_leave
        self._on_drain = on_drain
        self._clients = Connections(config, _possible_connections(config.max_connections))
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_level="warning",
                access_log=False,
                http=self._protocol,  # type: ignore[arg-type]  # uvicorn only calls it
                ws="none",
                lifespan="off",  # uvicorn would only log its errors; when the caller runs it, they are raised
            )
        )
        self.has_started = asyncio.Event()  # set once it listens
        listeners = [listener, *(listener.dup() for _ in range(_NUM_ACCEPTED - 1))]
        self.serving = asyncio.create_task(self.serve(sockets=listeners))

    def _protocol(self, **uvicorn: Any) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        http = HttpProtocol(self._clients, **uvicorn)
        return TlsConnection(self._clients, self._tls, http) if self._tls else http

    @property
    def is_serving(self) -> bool:
        """Whether it listens."""
        return self.has_started.is_set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.has_started.set()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to end."""
        self._clients.tick()
        if counter % 10 == 0:
            self._clients.sweep(self.server_state.connections)
        return await super().on_tick(counter)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.server_state.tasks)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's handlers as they are."""
        yield

    def leave(self) -> None:
        """Go on, but let the app tell its clients that this server is about to end."""
        self._on_leave()

    def drain(self) -> None:
        """Accept no more connections, finish the running requests, and end."""
        self.should_exit = True
        self._on_drain()

    async def close(self) -> None:
        """End now: close all connections. The app sees its clients disconnect."""
        self.should_exit = True
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while not self.serving.done():
            self.force_exit = time.monotonic() > give_up_s
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self.serving}, timeout=0.1)


@contextlib.asynccontextmanager
async def http_server(
    app: ASGIApp,
    config: RouterConfig,
    listener: socket.socket,
    metrics: CollectorRegistry,
    *,
    on_leave: Callable[[], None] = lambda: None,
    on_drain: Callable[[], None] = lambda: None,
) -> AsyncIterator[HttpServer]:
    """The HTTP server, while the block runs. The caller runs the app's lifespan around it.

    `on_leave` is called when the server is going to end, for the app to tell its clients. `on_drain` is called when it
    begins to drain, to end what the app would otherwise send forever. Raises `ConfigError` if the files of `tls_cert`
    cannot be used.
    """
    tls = ServerTls(config, metrics) if config.tls_cert else None
    async with contextlib.nullcontext() if tls is None else tls.followed():
        server = HttpServer(app, config, listener, tls, on_leave=on_leave, on_drain=on_drain)
        try:
            yield server
        finally:
            await server.close()


async def serve_until(
    orders: ServingOrders,
    app: RouterApp,
    config: RouterConfig,
    listener: socket.socket,
    metrics: CollectorRegistry,
    on_serving: Callable[[], None],
    *,
    drain_timeout_s: float,
) -> None:
    """Serve until the order to stop, then finish the running requests, for `drain_timeout_s` or until `stop_now`.

    Calls `on_serving` once it serves. Raises the error that keeps it from serving.
    """
    async with (
        app.router.lifespan_context(app),
        http_server(app, config, listener, metrics, on_leave=app.leave, on_drain=app.drain) as server,
    ):
        await wait_for_any(server.serving, server.has_started)
        if server.is_serving:
            freeze_startup_heap()
            on_serving()
        await wait_for_any(server.serving, *orders)
        if orders.leave.is_set():
            server.leave()
        await wait_for_any(server.serving, orders.stop, orders.stop_now)
        server.drain()
        await wait_for_any(server.serving, orders.stop_now, timeout_s=drain_timeout_s)
    server.serving.result()


def _possible_connections(wanted: int) -> int:
    """Connections that this process can have at once. Raises the limit on open files as far as needed and allowed."""
    num_other = _NUM_OTHER_FILES + NUM_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + num_other:
        soft = wanted + num_other if hard == resource.RLIM_INFINITY else min(wanted + num_other, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted + num_other:
            possible = max(1, soft - num_other)
            logger.warning(
                "max_connections=%d is more than the limit on open files allows (ulimit -n): %d", wanted, possible
            )
            return possible
    return wanted
