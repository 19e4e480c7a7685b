"""Does the faults of a trial: signals to workers and router processes, and a disk that vanishes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tandem.loadtest.chaos.plan import ChaosEvent
from tandem.loadtest.chaos.server import TrialServer, chosen, has_ended

_DISK_LOST_S = 5.0


class ChaosFaults:
    """All faults of one trial."""

    def __init__(self, server: TrialServer, disk_folder: Path | None) -> None:
        self._server = server
        self._disk_folder = disk_folder
        self._repairs: set[asyncio.Task[None]] = set()

    async def do(self, event: ChaosEvent) -> str:
        """Do one; what it was, or "" if there was nothing to do it to."""
        match event.kind:
            case "lose-disk":
                return self._lose_disk()
            case "kill-router":
                edges = [one for one in self._server.process.children() if _is_edge(one)]
                self._server.router_killed_s = time.monotonic()
                return _signal(chosen(edges, event.drawn), "a router process", signal.SIGKILL)
        async with self._server.choosing:
            workers = await self._server.workers()
            worker = chosen(workers, event.drawn)
            if worker is None or not self._server.leaves_another(worker, workers):
                return ""
            if event.kind != "kill" and not self._server.serves(worker):
                return ""  # it may be stopped, and would go on too early
            self._server.mark(worker.process, is_down=True)
            if event.kind == "kill":
                return _signal(worker.process, worker.name, signal.SIGKILL)
            return self._stop(worker.name, worker.process, float(event.kind.removeprefix("stop-")))

    async def repair(self) -> None:
        """Undo what is undone after a while."""
        await asyncio.gather(*self._repairs)

    def _stop(self, name: str, process: psutil.Process, stopped_s: float) -> str:
        def go_on() -> None:
            self._server.mark(process, is_down=False)
            _signal(process, name, signal.SIGCONT)

        self._later(stopped_s, go_on)
        return _signal(process, f"{name} for {stopped_s:g} s", signal.SIGSTOP)

    def _lose_disk(self) -> str:
        folder = self._disk_folder
        if folder is None or not folder.exists():
            return ""
        # Another one may still be away, if a worker has created the folder again.
        away = Path(tempfile.mkdtemp(prefix=f"{folder.name}.away-", dir=folder.parent))
        os.rename(folder, away)

        def bring_back() -> None:
            if folder.exists():  # a worker has created it again: what was in the old one is lost
                shutil.rmtree(away)
            else:
                os.rename(away, folder)

        self._later(_DISK_LOST_S, bring_back)
        return f"the folder of the disk cache is gone for {_DISK_LOST_S:g} s"

    def _later(self, delay_s: float, undo: Callable[[], object]) -> None:
        async def wait_and_undo() -> None:
            await asyncio.sleep(delay_s)
            undo()

        task = asyncio.create_task(wait_and_undo())
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)


def _signal(process: psutil.Process | None, name: str, number: signal.Signals) -> str:
    if process is None or has_ended(process):
        return ""
    process.send_signal(number)
    return f"{number.name} to {name} (pid {process.pid})"


def _is_edge(process: psutil.Process) -> bool:
    try:
        return "tandem.frontend.processes.child" in process.cmdline()
    except psutil.Error:
        return False
