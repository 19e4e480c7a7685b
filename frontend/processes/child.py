"""One frontend process: answers HTTP and asks the deciding process. `parent.py` runs this module as its program.

It is a child as `runtime/process_group.py` describes, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from tandem.frontend.http.listening import listening
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import ServingError
from tandem.runtime.log_format import show_warnings
from tandem.runtime.no_torch import keep_torch_out
from tandem.runtime.process_group import ParentPipe
from tandem.runtime.tracing.setup import begin_tracing, closing_tracing, tracing_of
from tandem.scheduling.admission.tenants import Tenants

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from tandem.frontend.http.app import RouterApp
    from tandem.frontend.http.exposition import Scraper
    from tandem.frontend.processes.deciding_client import JoinSettings
    from tandem.frontend.processes.remote import Remote
    from tandem.runtime.tracing.tracing import Tracing

CLOSING_S = 5.0  # for a process to close, after the time in which answers may end
METRICS_FOLDER_ENV = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's


class ServeFrontend(msgspec.Struct, frozen=True, tag=True):
    """One of `tandem serve`: turns text into tokens for the deciding process's backend, and tokens into text."""

    model: str  # folder of the tokenizer


class RouteFrontend(msgspec.Struct, frozen=True, tag=True):
    """One of `tandem route`: relays requests to engines that the deciding process chooses."""

    tokenizers: dict[str, str]  # folder or hub id, by model
    engines: ExternalEnginesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """What one frontend process needs to know.

    Tenants are read once, so that a replacement has the same ones even if the file has changed. API keys
    come from the deciding process, which follows their file.
    """

    frontend_id: str
    number: int  # of all processes that replace one another
    endpoint: str  # the deciding process's socket
    frontend: ServeFrontend | RouteFrontend
    port: int
    router: RouterConfig
    metrics_folder: str  # holds the counters of all processes
    started_at_s: int  # Unix time
    needs_key: bool = False  # whether clients need an API key
    tenants: Tenants = field(default_factory=Tenants)
    admin_token: str = field(default="", repr=False)

    @property
    def longest_drain_s(self) -> float:
        """How long this process may take to end.

        The deciding process ends answers that take too long; this is for the case that it has ended itself.
        """
        return max(self.router.drain_timeout_s, self.router.shutdown_grace_s) + CLOSING_S


def main() -> None:
    """Serve until the parent, a signal or the end of the parent stops it."""
    show_warnings()
    pipe, parent = ParentPipe(), os.getppid()
    if not pipe.setup:
        return  # the parent ended before it said anything
    settings = msgspec.json.decode(pipe.setup, type=FrontendSettings)
    _count_in(settings.metrics_folder, settings.number)
    keep_torch_out()
    try:
        with (
            listening(settings.router.host, settings.port, is_shared=True) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_serve(settings, pipe, listener))
    except (OSError, ServingError, ValueError) as exc:
        pipe.say(f"error: {exc}")
        sys.exit(1)
    if os.getppid() != parent:  # it was killed and cannot remove the folder itself
        shutil.rmtree(settings.metrics_folder, ignore_errors=True)


def _count_in(folder: str, number: int) -> None:
    """Keep the counters of this process in files named by its number. Call it before metrics are created.

    The process that replaces this one goes on with them: totals never fall, and there are never more files.
    """
    os.environ[METRICS_FOLDER_ENV] = folder  # prometheus_client reads it when it is imported
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue(lambda: number)


async def _serve(settings: FrontendSettings, pipe: ParentPipe, listener: socket.socket) -> None:
    from prometheus_client import CollectorRegistry

    from tandem.frontend.http.server import serve_until

    metrics = CollectorRegistry()
    async with pipe.obeying() as orders:
        export = begin_tracing("router", is_on=settings.router.tracing)
        # `stop.set`: without the deciding process this one can only finish what runs. Its parent starts another.
        if isinstance(settings.frontend, ServeFrontend):
            making = _serve_app(settings, settings.frontend.model, metrics, tracing_of(export), orders.stop.set)
        else:
            making = _route_app(settings, settings.frontend, metrics, tracing_of(export), orders.stop.set)
        async with closing_tracing(export), making as app:
            await serve_until(
                orders,
                app,
                settings.router,
                listener,
                metrics,
                lambda: pipe.say("ready"),
                drain_timeout_s=settings.longest_drain_s,
            )


@contextlib.asynccontextmanager
async def _serve_app(
    settings: FrontendSettings,
    model: str,
    metrics: CollectorRegistry,
    tracing: Tracing | None,
    on_lost: Callable[[], object],
) -> AsyncIterator[RouterApp]:
    from tandem.frontend.processes.remote_backend import RemoteBackend
    from tandem.frontend.serve_app import create_app
    from tandem.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(model)
    backend = RemoteBackend(_joining(settings, on_lost))
    async with backend.running():
        yield create_app(
            backend,
            tokenizer,
            settings.router,
            metrics,
            readiness=backend,
            responses=backend.responses,
            scrape=_scraper(settings, backend, lambda: [backend.model]),
            traffic=lambda: _merged(settings),
            started_at_s=settings.started_at_s,
            api_keys=backend.api_keys,
            tenants=settings.tenants,
            tracing=tracing,
        )


@contextlib.asynccontextmanager
async def _route_app(
    settings: FrontendSettings,
    frontend: RouteFrontend,
    metrics: CollectorRegistry,
    tracing: Tracing | None,
    on_lost: Callable[[], object],
) -> AsyncIterator[RouterApp]:
    from tandem.frontend.processes.remote_dispatcher import RemoteDispatcher
    from tandem.frontend.relay.connections import EngineConnections
    from tandem.frontend.relay.prompts import load_readers
    from tandem.frontend.route_app import create_engines_app

    connections = EngineConnections(frontend.engines)
    dispatcher = RemoteDispatcher(_joining(settings, on_lost), connections)
    yield create_engines_app(
        dispatcher,
        connections,
        load_readers(frontend.tokenizers),
        metrics,
        config=settings.router,
        engines_config=frontend.engines,
        admin_token=settings.admin_token,
        scrape=_scraper(settings, dispatcher, lambda: dispatcher.models),
        traffic=lambda: _merged(settings),
        started_at_s=settings.started_at_s,
        api_keys=dispatcher.api_keys,
        tenants=settings.tenants,
        tracing=tracing,
    )


def _scraper(settings: FrontendSettings, remote: Remote, models: Callable[[], Iterable[str]]) -> Scraper:
    """Gives what all frontend processes have counted, and the deciding process."""

    async def scrape() -> bytes:
        return await asyncio.to_thread(_counters, settings, models()) + await remote.scrape()

    return scrape


def _joining(settings: FrontendSettings, on_lost: Callable[[], object]) -> JoinSettings:
    from tandem.frontend.processes.deciding_client import JoinSettings

    timeout_s = settings.router.worker_timeout_s
    return JoinSettings(settings.endpoint, settings.frontend_id, on_lost, timeout_s, settings.needs_key)


def _counters(settings: FrontendSettings, models: Iterable[str]) -> bytes:
    """What all frontend processes have counted, as Prometheus reads it."""
    from tandem.frontend.http.exposition import exposition

    return exposition(_merged(settings), settings.router, models)


def _merged(settings: FrontendSettings) -> Iterable[Metric]:
    """What all frontend processes have counted, including those that have ended."""
    from prometheus_client.multiprocess import MultiProcessCollector

    files = [str(path) for path in Path(settings.metrics_folder).glob("*.db") if _num_bytes(path)]
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)
    return merged


def _num_bytes(path: Path) -> int:
    """Size of a counter file: 0 while its process creates it, when it cannot be read, and once it is removed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
