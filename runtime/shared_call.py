"""Costly calls that are made once for all who want the result, and not too often."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Calls once for everybody who has asked before the call begins, and at most once in an interval.

    A result is never older than the wish for it: who asks during a call gets the result of the next one. Those who
    wait get it one in each iteration of the event loop, because what they do with it may take time.
    """

    def __init__(
        self, call: Callable[[], Awaitable[T]], interval_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call = call
        self._interval_s = interval_s
        self._clock = clock
        self._began_s = -math.inf  # the latest call
        self._waiting: list[asyncio.Future[asyncio.Future[T]]] = []  # for the next call
        self._calling: asyncio.Task[None] | None = None

    async def __call__(self) -> T:
        """The result of a call that begins after this one. Raises what it raises."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Future[T]] = loop.create_future()
        self._waiting.append(ended)
        if self._calling is None:
            self._calling = loop.create_task(self._call_while_wanted())
        return (await ended).result()

    async def _call_while_wanted(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(0.0, self._began_s + self._interval_s - self._clock()))
            waiting, self._waiting = self._waiting, []
            self._began_s = self._clock()
            call = asyncio.ensure_future(self._call())
            await asyncio.wait({call})
            for ended in waiting:
                if not ended.cancelled():
                    ended.set_result(call)
                    await asyncio.sleep(0)
        self._calling = None
