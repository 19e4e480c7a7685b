"""`tandem route` from a config to a clean exit: the router in front of engines, in one process or several."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from dataclasses import replace

import uvloop

from tandem.cluster.engine_frontend import RouterSetup, make_fleet, serve_engines_http
from tandem.cluster.frontend import stop_serving
from tandem.frontend.http.listening import listening
from tandem.frontend.http.tls import scheme_of
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.settings import changed_settings
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.log_format import show_warnings
from tandem.runtime.ports import bracketed
from tandem.runtime.signals import stop_signals, wait_for_any
from tandem.runtime.status_console import StatusConsole
from tandem.runtime.tracing.setup import begin_decider_tracing, closing_tracing, tracing_of


def serve_engines(setup: RouterSetup, key_file: KeyFile) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises `ConfigError` for what the user can correct."""
    show_warnings()
    with (
        listening(setup.router.host, setup.router.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(setup, key_file, listener))
    return 0


async def _serve(setup: RouterSetup, key_file: KeyFile, listener: socket.socket) -> None:
    signals = stop_signals(signal.SIGINT, signal.SIGTERM)
    fleet, file = make_fleet(setup), setup.fleet_file
    export = begin_decider_tracing(setup.router)
    dispatcher = LocalDispatcher(
        fleet,
        file.engines,
        file.tokenizers,
        tracing=tracing_of(export),
        settings=changed_settings(setup.router, setup.engines),
    )
    async with (
        contextlib.aclosing(fleet),
        closing_tracing(export),
        key_file.followed() as api_keys,
        serve_engines_http(dispatcher, replace(setup, api_keys=api_keys, export=export), listener) as frontend,
    ):
        await wait_for_any(frontend.serving, frontend.has_started, signals.stop)
        if frontend.is_serving:
            freeze_startup_heap()
            _welcome(setup, listener)
        await wait_for_any(frontend.serving, signals.stop)
        if signals.stop.is_set():
            await stop_serving(frontend, signals, dispatcher.shut_down, setup.router, StatusConsole().print)
    frontend.serving.result()


def _welcome(setup: RouterSetup, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    where = f"{scheme_of(setup.router)}://{bracketed(host)}:{port}"
    count = setup.router.router_processes
    by = f" by {count} processes" if count > 1 else ""
    line = f"Routing to {len(setup.fleet_file.engines)} engine(s) on {where}{by}  (Ctrl-C stops it)"
    StatusConsole().print(line)
