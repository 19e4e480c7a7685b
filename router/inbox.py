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
from typing import TypeVar

from tandem.router.arrivals import Arrivals

__all__ = ["CallbackScheduler", "Inbox"]

T = TypeVar("T")

# Calls in a turn, of some 60 us each where text is made of tokens. A turn costs 9 us itself, so where many wait several
# are made in one; else it is one, as a request that begins waits for four turns or so up to its first token.
LEAST_PER_TURN, MOST_PER_TURN = 1, 8
_SHARE = 16  # of those that wait, one in so many


class CallbackScheduler:
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


class Inbox(Arrivals[T]):
    """Items from any number of senders for one task."""

    def __init__(self, turns: CallbackScheduler) -> None:
        """`turns` are shared by all inboxes of an event loop."""
        super().__init__()
        self._turns = turns
        self._is_first = True
        self._is_turn_due = False

    def put(self, item: T) -> None:
        """Add an item. The reader gets it in its turn; a task the first one at once."""
        self._items.append(item)
        is_first, self._is_first = self._is_first, False
        if is_first and self._sink is None:
            self.wake()
        elif not self._is_turn_due:
            self._is_turn_due = True
            self._turns.add(self._take_turn)

    def _take_turn(self) -> bool:
        self._is_turn_due = False
        return bool(self._items) and self.wake()
