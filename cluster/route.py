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
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console

from tandem.cluster.processes import ParentPipe, ProcessGroup
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.router.engines.app import create_engines_app
from tandem.router.engines.config import FleetFile
from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.prompts import PromptReader, TokenReader
from tandem.router.http.app import RouterApp
from tandem.router.http.listening import listening
from tandem.router.http.server import serve_until
from tandem.router.processes.sibling_bus import PeerRouterBus
from tandem.router.processes.siblings import PeerRouters
from tandem.router.text.tokenizer import Tokenizer
from tandem.runtime.no_torch import keep_torch_out
from tandem.runtime.signals import stop_events
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.tenants import Tenants

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
    engines: ExternalEnginesConfig
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
    stop, stop_now = stop_events(signal.SIGINT, signal.SIGTERM)
    await _serve_until(stop, stop_now, setup, listener, lambda: _welcome(setup, listener))
    return 0


async def _serve_together(setup: RouterSetup, listener: socket.socket, folder: Path) -> int:
    """The parent: it serves nothing itself."""
    count = setup.router.router_processes
    endpoints = tuple(f"ipc://{folder}/{number}" for number in range(count))

    def make_setup(number: int) -> bytes:
        return msgspec.json.encode(replace(setup, number=number, epoch=time.time_ns(), bus=endpoints))

    stop, stop_now = stop_events(signal.SIGINT, signal.SIGTERM)
    # A child has drain_timeout_s for its answers, and some time to close what it has.
    group = ProcessGroup(
        "tandem.cluster.route",
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
    keep_torch_out()
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
    async with pipe.obeying() as (stop, stop_now):
        await _serve_until(stop, stop_now, setup, listener, lambda: pipe.say("ready"))


async def _serve_until(
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    setup: RouterSetup,
    listener: socket.socket,
    on_serving: Callable[[], None],
) -> None:
    """Serve in this process."""
    app, router = _app(setup), setup.router
    await serve_until(stop, stop_now, app, router, listener, on_serving, drain_timeout_s=router.drain_timeout_s)


def _app(setup: RouterSetup) -> RouterApp:
    """The app of one process, with a fleet of its own. To be made in the event loop it serves in."""
    readers = token_readers(setup.fleet_file.tokenizers)
    registry = Registry()
    siblings = PeerRouters(registry, name=str(setup.number), epoch=setup.epoch)
    fleet = EngineFleet(
        registry=registry,
        index=PrefixIndex(),
        costs=CostModel(),
        config=setup.router,
        engines=setup.engines,
        tenants=setup.tenants,
        siblings=siblings,
    )
    bus = PeerRouterBus(siblings, setup.bus[setup.number], setup.bus) if setup.bus else None
    specs = setup.fleet_file.engines
    return create_engines_app(
        fleet,
        specs,
        readers,
        CollectorRegistry(),
        admin_token=setup.admin_token,
        bus=bus,
        api_keys=setup.api_keys,
    )


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


if __name__ == "__main__":
    sys.exit(_serve_as_child())
