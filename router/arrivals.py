"""What comes for one reader: its task takes it, or has it handed over in the callback that brings it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Arrivals"]

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Items in the order of their coming, up to an end or an error where there is one.

    Whoever brings something adds it to `_items` and calls `wake`. `asyncio.Queue` costs three times as much.
    """

    def __init__(self) -> None:
        self.is_complete = False  # nothing more can come
        self._items: list[T] = []
        self._error: Exception | None = None  # comes behind them
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[list[T]], bool] | None = None

    async def take(self) -> list[T]:
        """All items there are, and at least one; none at the end. Raises the error that came instead of it."""
        while not self._items and not self.is_complete:
            await self._arrival()
        return self._take_all()

    async def pour(self, into: Callable[[list[T]], bool]) -> bool:
        """Give `into` what comes, in the callback that brings it and in no task, until it returns False.

        Returns whether the end came instead. Raises what `into` raises, and as `take` does.
        """
        self._sink = into
        try:
            while True:
                self._give()  # NOTE: each time; more may have come between the arrival and this task's turn
                if self._sink is None or self.is_complete:
                    return self._sink is not None
                await self._arrival()
        finally:
            self._sink = None

    def fail(self, error: Exception) -> None:
        """Let it break off with this error, unless it has ended."""
        if self._error is None and not self.is_complete:
            self._error = error
            self.wake()

    def wake(self) -> bool:
        """Let the reader have what came, be it an end. Returns whether it waited for anything."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        if self._sink is not None and self._items:
            try:
                self._give()
            except Exception as exc:
                if not waiter.done():  # a future cannot take a StopIteration
                    waiter.set_exception(RuntimeError(repr(exc)) if isinstance(exc, StopIteration) else exc)
                return True
            if self._sink is not None and not self.is_complete and self._error is None:
                return True
        if not waiter.done():
            waiter.set_result(None)
        return True

    def _give(self) -> None:
        if self._sink is not None and self._items and not self._sink(self._take_all()):
            self._sink = None

    def _take_all(self) -> list[T]:
        items, self._items = self._items, []
        return items

    def _arrival(self) -> asyncio.Future[None]:
        """To be awaited until something comes. Raises the error it broke off with."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
