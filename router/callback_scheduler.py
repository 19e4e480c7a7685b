"""Spreads callbacks over iterations of the event loop, so that a burst of tokens does not delay new requests.

Workers compute in steps, so the tokens of all streams arrive at once, and turning those of 64 streams into text takes
some milliseconds. A request that arrives meanwhile would wait for the last of them. So each iteration of the event loop
makes only some of the calls, and the loop looks at its sockets before the next. Tokens that arrive for a stream whose
call is still to come are delivered together by that call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Each call takes about 60 us where tokens are turned into text, and an iteration itself 9 us. So each iteration makes
# several calls while many wait. Otherwise it makes one: a new request waits about four iterations for its first token.
MIN_CALLS, MAX_CALLS = 1, 8
_WAITING_PER_CALL = 16  # one call is made for each 16 that wait


class CallbackScheduler:
    """Makes calls in the order they were added, a few per iteration of the event loop; more while many wait."""

    def __init__(self, min_calls: int = MIN_CALLS, max_calls: int = MAX_CALLS) -> None:
        self._min_calls = min_calls
        self._max_calls = max_calls
        self._calls: deque[Callable[[], bool]] = deque()

    def add(self, call: Callable[[], bool]) -> None:
        """Schedule a call in the running event loop. It returns whether it did anything; if not, it does not count."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._run)
        self._calls.append(call)

    def _run(self) -> None:
        calls = self._calls
        num_left = min(max(len(calls) // _WAITING_PER_CALL, self._min_calls), self._max_calls)
        try:
            while calls and num_left:
                try:
                    num_left -= calls[0]()
                finally:
                    calls.popleft()  # NOTE: only now; `add` takes an empty queue to mean that `_run` is not scheduled
        finally:
            if calls:  # also after a call that raised, which the event loop logs
                asyncio.get_running_loop().call_soon(self._run)
