"""The deadlines of waiting requests, nearest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from tandem.scheduling.admission.queued_request import QueuedRequest

MAX_STALE = 64  # heap entries of requests that left, beyond a few times the number that waits


class Deadlines:
    """The latest time at which each waiting request must begin. `waiting` is the owner's collection of all requests."""

    def __init__(self, waiting: Collection[QueuedRequest]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[float, int, QueuedRequest]] = []  # entries of requests that left are stale
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, queued: QueuedRequest) -> None:
        """Watch a request, or watch it from an earlier time on. Without a deadline it is ignored."""
        if queued.deadline_s == math.inf:
            return
        self._num_added += 1
        heapq.heappush(self._heap, (queued.latest_start_s, self._num_added, queued))
        if len(self._heap) > 4 * len(self._waiting) + MAX_STALE:
            with_deadline = [one for one in self._waiting if one.deadline_s < math.inf]
            self._heap = [(one.latest_start_s, number, one) for number, one in enumerate(with_deadline)]
            heapq.heapify(self._heap)

    def next_late(self, now: float) -> QueuedRequest | None:
        """A waiting request that can no longer be begun in time, if there is one."""
        while self._heap and self._heap[0][0] < now:
            queued = heapq.heappop(self._heap)[2]
            if queued not in self._waiting:
                continue
            if queued.latest_start_s < now:
                return queued
            self.add(queued)
        return None
