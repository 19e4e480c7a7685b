"""Exponential backoff between retries."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 62  # keeps the power finite; every `most_s` is reached before


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each consecutive failure."""

    first_s: float
    most_s: float  # no pause is longer

    def pause_s(self, num_failures: int) -> float:
        """The pause after this number of consecutive failures; 0 s after none."""
        if not num_failures:
            return 0.0
        return min(self.first_s * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS), self.most_s)
