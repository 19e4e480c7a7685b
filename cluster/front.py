"""`tandem route` from a config to a clean exit: the router in front of engines, in one process or several on one port.

python -m cluster.front     one of several; its parent is a `ProcessGroup`, which tells it all it needs
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console

from cluster.heap import settle_heap
from cluster.http_protocol import HttpProtocol
from cluster.listening import listening
from cluster.processes import ParentPipe, ProcessGroup
from protocol.config import RouterConfig
from protocol.errors import ConfigError
from router.cost_model import CostModel
from router.engines.app import create_engines_app
from router.engines.config import EnginesConfig, FleetFile
from router.engines.fleet import Fleet
from router.engines.prompts import PromptReader, TokenReader
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.sibling_bus import SiblingBus
from router.siblings import Siblings
from router.tenants import Tenants
from router.tokenizer import Tokenizer

__all__ = ["RouterSetup", "serve_engines", "token_readers"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """All that one process of the router is told.

    Keys and tenants are read once, so those that take another's place have the same when the files have changed.
    """

    fleet_file: FleetFile
    router: RouterConfig
    engines: EnginesConfig
    admin_token: str = field(default="", repr=False)
    api_keys: dict[bytes, str] = field(default_factory=dict, repr=False)  # tenants by digest
    tenants: Tenants = field(default_factory=Tenants)
    number: int = 0  # among its siblings
    epoch: int = 0  # larger in each life of this number
    bus: tuple[str, ...] = ()  # ZMQ endpoints of all siblings by number; none of a process that is alone


def serve_engines(setup: RouterSetup) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Raises `ConfigError` for what the user can mend."""
    router = setup.router
    if setup.router.router_processes == 1:
        with listening(router.host, router.port) as listener:
            return _run(_serve_alone(setup, listener))
    with listening(router.host, router.port) as listener:
        port = listener.getsockname()[1]  # asked for without sharing first: another router there would share silently
    # Held, but not listened on: only the children get connections, and the port is ours while one is replaced.
    with listening(router.host, port, is_shared=True) as listener, _bus_folder() as folder:
        return asyncio.run(_serve_together(replace(setup, router=replace(router, port=port)), listener, folder))


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result: T = runner.run(work)
        return result


def token_readers(tokenizers: dict[str, str]) -> dict[str, PromptReader]:
    """A reader for each model whose tokenizer is given. Raises `ConfigError` for one that cannot be loaded."""
    readers: dict[str, PromptReader] = {}
    for model, folder in tokenizers.items():
        try:
            readers[model] = TokenReader(Tokenizer(folder))
        except (OSError, ValueError) as exc:
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise ConfigError(f"tokenizers: {model!r} = {folder!r} cannot be loaded: {reason}") from exc
    return readers


async def _serve_alone(setup: RouterSetup, listener: socket.socket) -> int:
    server = _server(setup, lambda: _welcome(setup, listener))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.serve(sockets=[listener])
    return 0


async def _serve_together(setup: RouterSetup, listener: socket.socket, folder: Path) -> int:
    """The parent: it serves nothing itself."""
    count = setup.router.router_processes
    endpoints = tuple(f"ipc://{folder}/{number}" for number in range(count))

    def make_setup(number: int) -> bytes:
        return msgspec.json.encode(replace(setup, number=number, epoch=time.time_ns(), bus=endpoints))

    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, lambda: (stop_now if stop.is_set() else stop).set())
    # A child has drain_timeout_s for its answers, and some time to close what it has.
    group = ProcessGroup(
        "cluster.front",
        make_setup,
        count,
        stop_timeout_s=setup.router.drain_timeout_s + 5.0,
        silence_timeout_s=setup.router.worker_timeout_s,
    )
    await group.run(stop, stop_now, lambda: _welcome(setup, listener))
    return 0


def _serve_as_child() -> int:
    """One of several processes: obeys its parent, and ends with it. The exit code."""
    pipe, parent = ParentPipe(), os.getppid()
    if not pipe.setup:
        return 0  # the parent ended before it said anything
    setup = msgspec.json.decode(pipe.setup, type=RouterSetup)
    try:
        with listening(setup.router.host, setup.router.port, is_shared=True) as listener:
            _run(_serve_for_parent(setup, listener, pipe))
    except ConfigError as exc:
        pipe.say(f"error: {exc.message}")
        return 1
    if os.getppid() != parent:  # it can do so no more
        shutil.rmtree(Path(setup.bus[0].removeprefix("ipc://")).parent, ignore_errors=True)
    return 0


async def _serve_for_parent(setup: RouterSetup, listener: socket.socket, pipe: ParentPipe) -> None:
    server = _server(setup, lambda: pipe.say("ready"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    obeying = asyncio.create_task(pipe.obey(lambda word: server.stop(is_now=word == "now")))
    try:
        await server.serve(sockets=[listener])
    finally:
        obeying.cancel()
        await asyncio.gather(obeying, return_exceptions=True)


def _server(setup: RouterSetup, on_started: Callable[[], None]) -> _Server:
    """A process's own server, ready to be run in its event loop."""
    readers = token_readers(setup.fleet_file.tokenizers)
    registry = Registry()
    siblings = Siblings(registry, name=str(setup.number), epoch=setup.epoch)
    fleet = Fleet(
        registry=registry,
        index=PrefixIndex(),
        costs=CostModel(),
        config=setup.router,
        engines=setup.engines,
        tenants=setup.tenants,
        siblings=siblings,
    )
    bus = SiblingBus(siblings, setup.bus[setup.number], setup.bus) if setup.bus else None
    specs = setup.fleet_file.engines
    app = create_engines_app(
        fleet,
        specs,
        readers,
        CollectorRegistry(),
        admin_token=setup.admin_token,
        bus=bus,
        api_keys=setup.api_keys,
    )
    config = uvicorn.Config(
        app,
        host=setup.router.host,
        port=setup.router.port,
        log_level="warning",
        access_log=False,
        http=HttpProtocol,
        timeout_graceful_shutdown=max(1, round(setup.router.drain_timeout_s)),
    )
    return _Server(config, on_started)


def _welcome(setup: RouterSetup, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    count = setup.router.router_processes
    by = f" by {count} processes" if count > 1 else ""
    line = f"Routing to {len(setup.fleet_file.engines)} engine(s) on {where}{by}  (Ctrl-C stops it)"
    Console(stderr=True, highlight=False).print(line)


@contextlib.contextmanager
def _bus_folder() -> Iterator[Path]:
    """A folder for the siblings' sockets that only this user may enter."""
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of an exit code."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so once it is true."""
        await super().startup(sockets)
        if self.started:
            settle_heap()
            self._on_started()

    def stop(self, *, is_now: bool = False) -> None:
        """Accept nothing more and let answers end; the second time, or `is_now`, end now."""
        if self.should_exit or is_now:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    sys.exit(_serve_as_child())
