"""Summary of the gaps between the tokens of one sequence."""

from __future__ import annotations

import math
from collections import deque

from tandem.runtime.tracing.span_node import Attributes

_MAX_GAPS = 4096  # gaps of one sequence that are kept for the percentiles


class ItlSummary:
    """Gaps between the tokens of one sequence: all for count, mean and maximum, the latest 4,096 for percentiles."""

    def __init__(self) -> None:
        self._num = 0
        self._sum_s = self._max_s = 0.0
        self._latest: deque[float] = deque(maxlen=_MAX_GAPS)

    def add(self, gap_s: float) -> None:
        """Note one gap."""
        self._num += 1
        self._sum_s += gap_s
        self._max_s = max(self._max_s, gap_s)
        self._latest.append(gap_s)

    def attributes(self) -> Attributes:
        """The summary, in seconds; empty without a gap."""
        if not self._num:
            return {}
        ordered = sorted(self._latest)
        return {
            "tandem.itl.mean_s": self._sum_s / self._num,
            "tandem.itl.p50_s": ordered[len(ordered) // 2],
            "tandem.itl.p99_s": ordered[min(math.ceil(len(ordered) * 0.99), len(ordered)) - 1],
            "tandem.itl.max_s": self._max_s,
        }
