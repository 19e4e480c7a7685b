"""Divides the event loop's time between what many connections bring at once and everything else.

A TLS handshake takes as long as hundreds of tokens. Those of many new clients, done as they arrive, would hold up every
stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["SlicedWork", "TimeSlicer"]

BUDGET_S = 0.001  # for one iteration of the event loop, by default; the piece of work that exceeds it is the last

SlicedWork: TypeAlias = Callable[[float], object]  # its argument is the time at which it must stop


class TimeSlicer:
    """The work of one event loop, done in order of arrival, a little in each iteration."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, budget_s: float = BUDGET_S) -> None:
        """`budget_s`: the time for one iteration of the event loop."""
        self.clock = clock
        self._budget_s = budget_s
        self._waiting: deque[SlicedWork] = deque()
        self._is_scheduled = False

    def end_s(self) -> float:
        """When work that begins now must stop."""
        return self.clock() + self._budget_s

    def add(self, work: SlicedWork) -> None:
        """Call `work` soon. If it raises, the event loop reports that, and the others still get their time."""
        self._waiting.append(work)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        end_s = self.end_s()
        try:
            for _ in range(len(self._waiting)):  # what is added meanwhile waits for the next iteration
                self._waiting.popleft()(end_s)
                if self.clock() >= end_s:
                    break
        finally:
            self._schedule()
