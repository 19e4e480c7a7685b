"""Counts and logs requests that go on elsewhere. A worker's death moves hundreds of them, which is one event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

GATHER_S = 1.0  # moves within this time are logged together
MAX_REASONS = 5  # lines at one time


class MoveLog:
    """Counts moves by their cause, and logs each reason once with its number of requests."""

    def __init__(self) -> None:
        self.num_moves: Counter[str] = Counter()  # by cause: an error's code, or why a worker was left
        self._reasons: Counter[str] = Counter()  # to log
        self._timer: asyncio.TimerHandle | None = None

    def add(self, cause: str, reason: str) -> None:
        """Note a move. Call it in the event loop."""
        self.num_moves[cause] += 1
        self._reasons[reason] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.tell)

    def tell(self) -> None:
        """Log what was noted, without waiting for more."""
        reasons, self._reasons = self._reasons, Counter()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reason, number in reasons.most_common(MAX_REASONS):
            logger.warning("%d %s on elsewhere: %s", number, "request goes" if number == 1 else "requests go", reason)
        if len(reasons) > MAX_REASONS:
            rest = reasons.total() - sum(number for _, number in reasons.most_common(MAX_REASONS))
            logger.warning("%d requests go on elsewhere for %d other reasons", rest, len(reasons) - MAX_REASONS)
