"""A server on this machine, seen from outside: its processes, its pools, and what a trial has done to them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

Json = dict[str, Any]

_LOST_WITH_ROUTER_S = 5.0


@dataclass(frozen=True, slots=True)
class TrialWorker:
    """A worker whose process is running."""

    name: str
    role: str
    is_ready: bool  # as the router sees it
    process: psutil.Process


class TrialServer:
    """Finds the victims of faults and operations."""

    def __init__(self, client: httpx.AsyncClient, process: psutil.Process) -> None:
        """`process` is that of `tandem serve`."""
        self.client = client
        self.process = process
        # Hold it from the choice of a victim until it is marked: two that are chosen at once could be the last two.
        self.choosing = asyncio.Lock()
        self.router_killed_s = -1e9
        self._down: set[psutil.Process] = set()

    @property
    def has_broken_connections(self) -> bool:
        """Whether a router process died just now: a client whose connection broke sends its request again."""
        return time.monotonic() - self.router_killed_s < _LOST_WITH_ROUTER_S

    async def pools(self) -> Json:
        """Workers and their latest moves, as `/v1/pools` shows them. Raises httpx.HTTPError."""
        while True:
            try:
                pools: Json = (await self.client.get("/v1/pools")).raise_for_status().json()
            except httpx.TransportError:
                if not self.has_broken_connections:
                    raise
                await asyncio.sleep(0.1)
            else:
                return pools

    async def workers(self) -> list[TrialWorker]:
        """All workers in the order of their names."""
        found = []
        for role, workers in (await self.pools())["roles"].items():
            for one in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(one["pid"])
                    found.append(TrialWorker(one["worker_id"], role, one["state"] == "ready", process))
        return sorted(found, key=lambda worker: worker.name)

    def serves(self, worker: TrialWorker) -> bool:
        """Whether it gets requests, as far as anyone knows."""
        return worker.is_ready and worker.process not in self._down

    def leaves_another(self, worker: TrialWorker, workers: Sequence[TrialWorker]) -> bool:
        """Whether one serves without this one: if none did, requests would be refused, which would be no trial."""
        return any(self.serves(one) for one in workers if one.name != worker.name)

    def mark(self, process: psutil.Process, *, is_down: bool) -> None:
        """Note that a worker was killed, stopped or told to leave, or that it goes on."""
        if is_down:
            self._down.add(process)
        else:
            self._down.discard(process)


def chosen(among: Sequence[Any], drawn: float) -> Any:
    """One of them by a number in [0, 1), or None."""
    return among[int(drawn * len(among))] if among else None


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, though its parent may not have noticed."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
