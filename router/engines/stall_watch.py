"""Finds engines that answer but make no progress, and takes their requests from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from tandem.protocol.messages import WorkerState
from tandem.router.engines.engine import RemoteEngine
from tandem.runtime.idle_timeout import CHECKS, IdleClock

logger = logging.getLogger(__name__)

_MAX_INTERVAL_S = 1.0


class StallWatch:
    """Watches all engines of a fleet. `EngineProgress` says of each whether a step is due."""

    def __init__(self, engines: Callable[[], Iterable[RemoteEngine]], stall_s: float, clock: Callable[[], float]):
        """`stall_s` is the longest silence of an engine while a step is due."""
        self._engines = engines
        self._stall_s = stall_s
        self._clock = clock
        self._interval_s = min(stall_s / CHECKS, _MAX_INTERVAL_S)
        self._silence = IdleClock(stall_s)  # does not blame engines for a pause of this process

    async def run(self) -> None:
        """Look at all engines repeatedly, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._interval_s)

    def look(self) -> None:
        """Look at each engine once."""
        now = self._clock()
        self._silence.check(now, self._interval_s)
        for engine in list(self._engines()):
            self._look_at(engine, now)

    def _look_at(self, engine: RemoteEngine, now: float) -> None:
        since_s = engine.progress.silent_since_s
        if since_s is None or engine.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        if self._silence.is_idle(since_s, now):
            silent_s = self._silence.idle_s(since_s, now)
            reason = f"it has stalled: it computed nothing for {silent_s:.3g} s (engine_stall_s={self._stall_s:g})"
            logger.warning("engine %s: %s; %d requests leave it", engine.name, reason, len(engine.running))
            engine.stall(reason, now)
