"""Idle timeouts that do not blame peers for our own pauses.

A process whose event loop stood still, or that was not scheduled, has read nothing meanwhile: by its clock every peer
was idle. So a check that runs late blames its own process first, and every peer gets the whole timeout again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

LATE_SHARE = 1 / 4  # share of the timeout: a check this late shows that our own process stood still
CHECKS = 8  # within a timeout


class IdleClock:
    """Measures how long peers have been idle while this process was awake. Pure: the time is passed in.

    NOTE: if every check runs late, no peer is ever found idle: then this process is the one to be fixed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_since_s = -math.inf
        self._due_s = math.inf  # the next check

    def check(self, now: float, next_s: float) -> None:
        """Note that a check runs now; the next one is due in `next_s`."""
        if now - self._due_s > self._timeout_s * LATE_SHARE:
            self._awake_since_s = now
        self._due_s = now + next_s

    def idle_s(self, heard_s: float, now: float) -> float:
        """How long a peer last heard at `heard_s` has been idle, not counting our own pauses."""
        return now - max(heard_s, self._awake_since_s)

    def is_idle(self, heard_s: float, now: float) -> bool:
        """Whether the peer has been idle for longer than the timeout."""
        return self.idle_s(heard_s, now) > self._timeout_s


async def answered_in_time(answer: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether the future is done within the time. It is never cancelled."""
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    clock = IdleClock(timeout_s)
    while not answer.done():
        now = loop.time()
        clock.check(now, timeout_s / CHECKS)
        if clock.is_idle(asked_s, now):
            return False
        await asyncio.wait((answer,), timeout=timeout_s / CHECKS)
    return True


class IdleTimeout:
    """Calls back when a wait has lasted between `timeout_s` and twice that. The owner calls `close`.

    It needs no timer for each wait: `asyncio.timeout` costs as much as a token does.
    """

    def __init__(self, timeout_s: float, on_idle: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._since_s = math.inf  # start of the current wait
        self._clock = IdleClock(timeout_s)
        self._clock.check(self._loop.time(), timeout_s)
        self._timer = self._loop.call_later(timeout_s, self._check)

    def begin(self) -> None:
        """A wait begins."""
        self._since_s = self._loop.time()

    def end(self) -> None:
        """The wait ended, or was given up."""
        self._since_s = math.inf

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
        self._on_idle = _do_nothing  # breaks the cycle with the owner, which would need the garbage collector

    def _check(self) -> None:
        now = self._loop.time()
        self._clock.check(now, 0)
        left_s = self._timeout_s - self._clock.idle_s(self._since_s, now)
        if left_s <= 0:
            self._on_idle()
        else:
            next_s = min(left_s, self._timeout_s)
            self._clock.check(now, next_s)
            self._timer = self._loop.call_later(next_s, self._check)


def _do_nothing() -> None:
    """The callback after `close`."""
