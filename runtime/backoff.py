"""Pauses before what failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 62  # beyond every `most_s`


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each failure in a row."""

    first_s: float
    most_s: float  # no pause is longer

    def pause_s(self, num_failures: int) -> float:
        """The pause after so many failures in a row; none after 0."""
        if not num_failures:
            return 0.0
        return min(self.first_s * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS), self.most_s)
