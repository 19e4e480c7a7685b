"""Iterations of the event loop: waiting for them and counting them."""

from __future__ import annotations

import asyncio
from collections import Counter


async def iteration() -> None:
    """One iteration of the event loop: what is scheduled now is called."""
    await asyncio.sleep(0)


class Turns:
    """Counts iterations of the event loop until it is closed, and what comes in each."""

    def __init__(self) -> None:
        self.number = 0
        self.amounts: Counter[int] = Counter()
        self._tick()

    def add(self, amount: int) -> None:
        """This much came in this iteration."""
        self.amounts[self.number] += amount

    def _tick(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def close(self) -> None:
        self._handle.cancel()
