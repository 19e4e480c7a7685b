"""One edge process: answers HTTP and asks the hub. Started by `cluster/edge_processes.py`, as `python -m` of this file.

Its settings are the first line of its standard input, which then stays open for as long as the parent lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass

import msgspec

from protocol.config import RouterConfig

__all__ = ["EdgeSettings", "main"]

METRICS_FOLDER_ENV = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What one edge process needs to know."""

    edge_id: str
    hub_endpoint: str
    model: str  # folder of the tokenizer
    port: int
    router: RouterConfig
    metrics_folder: str  # where the counters of all processes are
    started_at_s: int  # Unix time


def main() -> None:
    """Serve until drained, terminated, or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's matter
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EdgeSettings)
    os.environ[METRICS_FOLDER_ENV] = settings.metrics_folder  # before prometheus_client is imported
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # text needs none; transformers would import it: 200 MB
    asyncio.run(_serve(settings))


async def _serve(settings: EdgeSettings) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    from cluster.http_server import http_server
    from cluster.listening import listening
    from router.app import create_app
    from router.edges.remote import RemoteBackend
    from router.tokenizer import Tokenizer

    loop, terminated = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, os._exit, 1)  # its end: nobody is left to stop us
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    tokenizer = Tokenizer(settings.model)
    totals = CollectorRegistry()
    MultiProcessCollector(totals, path=settings.metrics_folder)
    backend = RemoteBackend(settings.hub_endpoint, settings.edge_id, timeout_s=settings.router.worker_timeout_s)

    async def scrape() -> bytes:
        return bytes(generate_latest(totals)) + await backend.scrape()

    with listening(settings.router.host, settings.port, is_shared=True) as listener:
        await backend.start()
        app = create_app(
            backend,
            tokenizer,
            settings.router,
            CollectorRegistry(),
            readiness=backend,
            scrape=scrape,
            started_at_s=settings.started_at_s,
        )
        async with http_server(app, settings.router, listener) as server:
            await server.started_serving()
            backend.announce()
            await _first_of(server.serving, backend.drained, terminated)
            server.drain()
            await _first_of(server.serving, terminated)
        await backend.close()


async def _first_of(task: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Return when the task has ended or an event is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait({task, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


if __name__ == "__main__":
    main()
