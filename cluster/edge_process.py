"""One edge process: answers HTTP and asks the hub. Started by `cluster/edge_processes.py`, as `python -m` of this file.

It obeys its parent as `cluster/processes.py` says, and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from dataclasses import dataclass, field

import msgspec
import uvloop

from tandem.cluster.processes import ParentPipe
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ServingError
from tandem.router.http.listening import listening
from tandem.runtime.no_torch import keep_torch_out
from tandem.scheduling.tenants import Tenants

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
    api_keys: dict[bytes, str] = field(default_factory=dict, repr=False)  # tenants by digest
    tenants: Tenants = field(default_factory=Tenants)


def main() -> None:
    """Serve until drained, terminated, or left alone."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    pipe = ParentPipe()
    if not pipe.setup:
        return  # the parent ended before it said anything
    settings = msgspec.json.decode(pipe.setup, type=EdgeSettings)
    os.environ[METRICS_FOLDER_ENV] = settings.metrics_folder  # before prometheus_client is imported
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


async def _serve(settings: EdgeSettings, pipe: ParentPipe, listener: socket.socket) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    from tandem.router.http.server import serve_until
    from tandem.router.openai.app import create_app
    from tandem.router.processes.remote_backend import RemoteBackend
    from tandem.router.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(settings.model)
    totals = CollectorRegistry()
    MultiProcessCollector(totals, path=settings.metrics_folder)
    backend = RemoteBackend(settings.hub_endpoint, settings.edge_id, timeout_s=settings.router.worker_timeout_s)

    async def scrape() -> bytes:
        return bytes(generate_latest(totals)) + await backend.scrape()

    async with pipe.obeying() as (stop, stop_now):
        await backend.start()
        app = create_app(
            backend,
            tokenizer,
            settings.router,
            CollectorRegistry(),
            readiness=backend,
            scrape=scrape,
            started_at_s=settings.started_at_s,
            api_keys=settings.api_keys,
            tenants=settings.tenants,
        )
        await serve_until(stop, stop_now, app, settings.router, listener, lambda: pipe.say("ready"))
        await backend.close()


if __name__ == "__main__":
    main()
