"""Virtual time: events in order of their time; events of equal times in the order they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """The one clock of a simulation. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._num_planned = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_s: float, event: Callable[..., None], *arguments: Any) -> None:
        """Call `event(*arguments)` at this time."""
        assert time_s >= self.now, f"an event at {time_s} s was planned at {self.now} s"
        self._num_planned += 1
        heapq.heappush(self._events, (time_s, self._num_planned, event, arguments))

    def run(self) -> None:
        """Run all events, until none is planned."""
        while self._events:
            self.now, _, event, arguments = heapq.heappop(self._events)
            self.num_events += 1
            event(*arguments)
