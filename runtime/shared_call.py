"""Costly calls that are made once for all who want the result, and not too often."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["SharedCall"]

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Calls once for everybody who has asked before the call begins, and at most once in an interval.

    A result is never older than the wish for it: who asks during a call gets the result of the next one.
    """

    def __init__(
        self, call: Callable[[], Awaitable[T]], interval_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call = call
        self._interval_s = interval_s
        self._clock = clock
        self._began_s = -math.inf  # the latest call
        self._is_calling = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # the call that has not begun

    async def __call__(self) -> T:
        """The result of a call that begins after this one. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._call_soon())
        return await asyncio.shield(self._next)  # the others wait on if this one is cancelled

    async def _call_soon(self) -> T:
        async with self._is_calling:
            await asyncio.sleep(max(0.0, self._began_s + self._interval_s - self._clock()))
            self._next, self._began_s = None, self._clock()
            return await self._call()
