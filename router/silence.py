"""Noticing that nothing comes, without a timer for each wait: `asyncio.timeout` costs as much as a token does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

__all__ = ["SilenceWatch"]


class SilenceWatch:
    """Calls back when one wait has lasted `timeout_s`, at most twice that. Whoever makes one closes it."""

    def __init__(self, timeout_s: float, on_silence: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._since_s = math.inf  # the wait under way began
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
        left_s = self._timeout_s - (self._loop.time() - self._since_s)
        if left_s <= 0:
            self._on_silence()
        else:
            self._timer = self._loop.call_later(min(left_s, self._timeout_s), self._look)


def _nobody() -> None:
    """Who is called back after the end."""
