"""The edge processes of a server: started, watched, replaced and stopped by the process that decides.

They share the port: the kernel spreads connections over them. The parent's own socket is bound and never listens; it
keeps the port while a process is replaced, and keeps others from sharing it by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from cluster.edge_process import EdgeSettings
from protocol.config import RouterConfig
from protocol.errors import WorkerError
from router.edges.hub import EdgeHub
from router.openai.backend import Backend
from router.openai.readiness import Ready

__all__ = ["EdgeProcesses", "edge_processes"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # the tokenizer's imports take seconds, on a busy machine many
MIN_LIFE_S = 10.0  # a process that ends sooner has failed to start
MAX_FAILED_STARTS = 3  # in a row
STOP_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.1


@contextlib.asynccontextmanager
async def edge_processes(
    backend: Backend,
    readiness: Ready,
    scrape: Callable[[], bytes],
    *,
    model: str,
    config: RouterConfig,
    listener: socket.socket,
) -> AsyncIterator[EdgeProcesses]:
    """`config.router_processes` of them for as long as the block runs; each serves once it has joined."""
    # A folder with a short name: there is a socket in it, whose path must not be long.
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as folder:
        endpoint = f"ipc://{folder}/hub"
        hub = EdgeHub(backend, readiness, scrape, endpoint)
        # Set after the parent's bind, which was refused had anyone been there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first = EdgeSettings(
            edge_id="",
            hub_endpoint=endpoint,
            model=model,
            port=listener.getsockname()[1],
            router=config,
            metrics_folder=folder,
            started_at_s=int(time.time()),
        )
        hub.start()
        processes = EdgeProcesses(hub, first, config.router_processes)
        try:
            yield processes
        finally:
            await processes.close()
            await hub.close()


class EdgeProcesses:
    """A number of edge processes, from its making on. One that ends is replaced until they are drained."""

    def __init__(self, hub: EdgeHub, settings: EdgeSettings, num_processes: int) -> None:
        self._hub = hub
        self._settings = settings
        self._processes: dict[str, Process] = {}
        self._is_draining = False
        self._served: set[int] = set()
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(num_processes)]
        self.serving = asyncio.gather(*self._keeping)

    @property
    def num_running(self) -> int:
        """Sequences that are being generated for clients."""
        return self._hub.num_running

    @property
    def is_serving(self) -> bool:
        """Whether each of them has begun to."""
        return len(self._served) == len(self._keeping)

    def drain(self) -> None:
        """Accept nothing more, let answers end, and end."""
        self._is_draining = True
        self._hub.drain()

    async def close(self) -> None:
        """End them now."""
        self._is_draining = True
        for process in self._processes.values():
            _signal(process.terminate)
        await asyncio.wait(self._keeping, timeout=STOP_TIMEOUT_S)
        for process in self._processes.values():
            _signal(process.kill)
        await asyncio.gather(self.serving, *self._keeping, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """Have one edge process run, and another one when it ends."""
        num_failed_starts = 0
        for life in range(1, 1_000_000):
            edge_id = f"edge-{number}-{life}"
            started_s = time.monotonic()
            process = await self._start(edge_id)
            await self._watch(number, edge_id, process)
            if self._is_draining:
                return
            is_failed_start = time.monotonic() - started_s < MIN_LIFE_S
            num_failed_starts = num_failed_starts + 1 if is_failed_start else 0
            logger.warning("router process %d ended with exit code %s; starting another", number, process.returncode)
            if num_failed_starts == MAX_FAILED_STARTS:
                raise WorkerError(
                    f"router process {number} ended {num_failed_starts} times within {MIN_LIFE_S:g} s of its start, at "
                    f"last with exit code {process.returncode}; its log is above"
                )

    async def _start(self, edge_id: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "cluster.edge_process"),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=PIPE,
            start_new_session=True,  # Ctrl-C reaches all processes of a terminal's group; who stops is for us to say
        )
        self._processes[edge_id] = process
        if self._is_draining:  # meanwhile
            _signal(process.terminate)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(msgspec.json.encode(replace(self._settings, edge_id=edge_id)) + b"\n")
        return process

    async def _watch(self, number: int, edge_id: str, process: Process) -> None:
        """Return when the process has ended, by itself or for its silence; what it asked for is cancelled then."""
        started_s = time.monotonic()
        ending = asyncio.create_task(process.wait())
        while not ending.done():
            silence_s = self._hub.silence_s(edge_id)
            if silence_s is None:
                silence_s, limit_s = time.monotonic() - started_s, START_TIMEOUT_S
            else:
                limit_s = self._settings.router.worker_timeout_s
                self._served |= {number} if self._hub.is_serving(edge_id) else set()
            if silence_s > limit_s:
                logger.warning("router process %d has been silent for %g s", number, limit_s)
                _signal(process.kill)
            await asyncio.wait({ending}, timeout=WATCH_INTERVAL_S)
        self._hub.drop(edge_id)
        del self._processes[edge_id]
        _forget_gauges(process.pid, self._settings.metrics_folder)


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        send()


def _forget_gauges(pid: int, folder: str) -> None:
    """Take what a process had running out of the sums; what it counted stays."""
    for path in Path(folder).glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)
