"""Divides the event loop's time between what many connections bring at once and everything else.

A TLS handshake takes as long as hundreds of tokens. Those of many new clients, done as they arrive, would hold up every
stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

BUDGET_S = 0.001  # for one iteration of the event loop, by default; the piece of work that exceeds it is the last

SlicedWork: TypeAlias = Callable[[float], object]  # its argument is the time at which it must stop


class TimeSlicer:
    """The work of one event loop, a little in each iteration. Clients take turns; each one's is done in order."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, budget_s: float | None = None, rests: bool = False
    ) -> None:
        """`budget_s` is for one iteration of the event loop: 0 = one piece of work; None = a fair part.

        With `rests` others get as much time after it, where the work itself may be to wake a task.
        """
        self.clock = clock
        self._budget_s = BUDGET_S if budget_s is None else budget_s
        self._rests = rests
        self._waiting: OrderedDict[str, deque[SlicedWork]] = OrderedDict()  # by client, whose turn it is first
        self._num_waiting = 0
        self._is_scheduled = False

    def end_s(self) -> float:
        """When work that begins now must stop."""
        return self.clock() + self._budget_s

    def add(self, work: SlicedWork, client: str = "") -> None:
        """Call `work` soon. If it raises, the event loop reports that, and the others still get their time."""
        self._waiting.setdefault(client, deque()).append(work)
        self._num_waiting += 1
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        began_s = self.clock()
        end_s = began_s + self._budget_s
        try:
            for _ in range(self._num_waiting):  # what is added meanwhile waits for the next iteration
                self._next()(end_s)
                if self.clock() >= end_s:
                    break
        finally:
            if self._rests:
                asyncio.get_running_loop().call_soon(self._rest, began_s)  # after the tasks that were woken
            else:
                self._schedule()

    def _rest(self, began_s: float) -> None:
        asyncio.get_running_loop().call_later(self.clock() - began_s, self._schedule)

    def _next(self) -> SlicedWork:
        client, line = next(iter(self._waiting.items()))
        self._num_waiting -= 1
        if len(line) > 1:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return line.popleft()
