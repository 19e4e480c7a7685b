"""What comes for one request, until its task takes it; and turns, so that a burst of it does not hold up new requests.

Workers compute in steps, so the tokens of all streams come at once, and turning those of 64 streams into text takes
some milliseconds. A request that comes meanwhile would wait for the last of them. So only some tasks are woken in a
turn of the event loop, which looks at its sockets between two turns; what comes before a task's turn it takes in one
piece: the further behind, the larger the pieces. A task that waits for its first item does not wait for a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Inbox", "Turns"]

T = TypeVar("T")

# Calls in a turn, of some 60 us each where text is made of tokens. A turn costs 9 us itself, so of many that wait more
# are made in one; of few it is one or two, as a request that begins waits for four turns or so up to its first token.
LEAST_PER_TURN, MOST_PER_TURN = 1, 8
_SHARE = 16  # of those that wait, one in so many


class Turns:
    """Makes calls in the order they were asked for, some in each turn of the event loop: the more wait, the more."""

    def __init__(self, least: int = LEAST_PER_TURN, most: int = MOST_PER_TURN) -> None:
        self._least = least
        self._most = most
        self._calls: deque[Callable[[], bool]] = deque()

    def add(self, call: Callable[[], bool]) -> None:
        """Have this called when its turn comes. It returns whether there was anything to do: if not, it is no turn.

        Belongs to the event loop that runs.
        """
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._calls.append(call)

    def _take_turn(self) -> None:
        calls = self._calls
        num_left = min(max(len(calls) // _SHARE, self._least), self._most)
        try:
            while calls and num_left:
                try:
                    num_left -= calls[0]()
                finally:
                    calls.popleft()  # NOTE: only now; to `add` no calls mean that no turn is due
        finally:
            if calls:  # also behind one that raised, which the event loop logs
                asyncio.get_running_loop().call_soon(self._take_turn)


class Inbox(Generic[T]):
    """Items from any number of senders for one task. `asyncio.Queue` costs three times as much."""

    def __init__(self, turns: Turns) -> None:
        """`turns` are shared by all inboxes of an event loop."""
        self._turns = turns
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[list[T]], bool] | None = None
        self._is_first = True
        self._is_turn_due = False

    def put(self, item: T) -> None:
        """Add an item. Its task takes it in its turn; the first one at once."""
        self._items.append(item)
        is_first, self._is_first = self._is_first, False
        if is_first and self._sink is None:
            self._wake()
        elif not self._is_turn_due:
            self._is_turn_due = True
            self._turns.add(self._take_turn)

    async def take(self) -> list[T]:
        """All items there are, and at least one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take_all()

    async def pour(self, into: Callable[[list[T]], bool]) -> None:
        """Give `into` what comes, in its turn of the event loop and in no task, until it returns False.

        What `into` raises comes out here.
        """
        self._sink = into
        try:
            if not self._items or into(self._take_all()):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self._sink = None

    def _take_turn(self) -> bool:
        self._is_turn_due = False
        return self._wake()

    def _wake(self) -> bool:
        """Give what there is to whoever waits for it, if anyone does."""
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._items:
            return False
        try:
            is_enough = self._sink is None or not self._sink(self._take_all())
        except Exception as exc:
            if not waiter.done():  # a future cannot take a StopIteration
                waiter.set_exception(RuntimeError(repr(exc)) if isinstance(exc, StopIteration) else exc)
        else:
            if is_enough and not waiter.done():
                waiter.set_result(None)
        return True

    def _take_all(self) -> list[T]:
        items, self._items = self._items, []
        return items
