"""Noticing that nothing comes from others, by who may itself have been asleep.

A process whose event loop stood still, or that was not scheduled, has read nothing meanwhile: by its clock everybody
was silent. So a watch that comes late to look blames itself first, and everybody has the whole time again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

__all__ = ["IdleClock", "IdleTimeout", "answered_in_time"]

LATE_SHARE = 1 / 4  # of the timeout: a look that comes so much later than it was due was kept from looking
LOOKS = 8  # within a timeout


class IdleClock:
    """How long others have been silent while their watch was awake. Plain values and the time in, no waits.

    NOTE: a watch that comes late to every look finds nobody silent, ever: it is the process to be mended then.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_since_s = -math.inf
        self._due_s = math.inf  # the next look

    def look(self, now: float, next_s: float) -> None:
        """The watch looks now, and `next_s` from now again."""
        if now - self._due_s > self._timeout_s * LATE_SHARE:
            self._awake_since_s = now
        self._due_s = now + next_s

    def idle_s(self, heard_s: float, now: float) -> float:
        """How long somebody has been silent who was heard then: what was slept through does not count."""
        return now - max(heard_s, self._awake_since_s)

    def is_idle(self, heard_s: float, now: float) -> bool:
        """Whether that is too long."""
        return self.idle_s(heard_s, now) > self._timeout_s


async def answered_in_time(answer: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether the answer is there within the time; it is cancelled neither way."""
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    silence = IdleClock(timeout_s)
    while not answer.done():
        now = loop.time()
        silence.look(now, timeout_s / LOOKS)
        if silence.is_idle(asked_s, now):
            return False
        await asyncio.wait((answer,), timeout=timeout_s / LOOKS)
    return True


class IdleTimeout:
    """Calls back when one wait has lasted `timeout_s`, at most twice that. Whoever makes one closes it.

    Without a timer for each wait: `asyncio.timeout` costs as much as a token does.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._since_s = math.inf  # the wait under way began
        self._silence = IdleClock(timeout_s)
        self._silence.look(self._loop.time(), timeout_s)
        self._timer = self._loop.call_later(timeout_s, self._look)

    def begin(self) -> None:
        """A wait begins."""
        self._since_s = self._loop.time()

    def end(self) -> None:
        """It was not in vain, or is given up."""
        self._since_s = math.inf

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()
        self._on_silence = _nobody  # so that its owner, which holds this, is gone without the garbage collector

    def _look(self) -> None:
        now = self._loop.time()
        self._silence.look(now, 0)
        left_s = self._timeout_s - self._silence.idle_s(self._since_s, now)
        if left_s <= 0:
            self._on_silence()
        else:
            next_s = min(left_s, self._timeout_s)
            self._silence.look(now, next_s)
            self._timer = self._loop.call_later(next_s, self._look)


def _nobody() -> None:
    """Who is called back after the end."""
