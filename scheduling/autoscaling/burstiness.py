"""How unevenly requests arrive, at several time scales.

Arrivals can be even within seconds and uneven within minutes, or the other way round. The index of dispersion, the
variance of the number of arrivals in a window over its mean, measures this: it is 1 at all scales for independent
arrivals (Poisson), and grows with the scale where bursts last. It is below 1 for clients that wait for their answers:
a lone client never finds another request before its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_MAX_SCALE_S = 80.0  # longer bursts are changes of the level, which the forecast follows
_NUM_SCALES = 8
_MEMORY_S = 1800.0
_LEAST = 0.1
_PRIOR = 20.0  # requests: the weight of the prior, a dispersion of 1
_MAX_GROWTH = 4.0  # factor by which one window may raise a dispersion: it may be a change of the level


class _Scale(NamedTuple):
    """Windows of one length: the current one, the two before it, and sums over the completed ones.

    The variance is taken from second differences of neighbours: a steady rise has none, and a change of the level
    shows in two windows only.
    """

    num: float = 0.0  # arrivals in the current window
    filled_s: float = 0.0
    last: tuple[float, ...] = ()
    squares: float = _PRIOR  # sum of squared second differences, scaled to equal `mean` for independent arrivals
    mean: float = _PRIOR

    def updated(self, num: float, elapsed_s: float, length_s: float) -> _Scale:
        num, filled_s = self.num + num, self.filled_s + elapsed_s
        if filled_s < length_s * (1 - 1e-6):
            return self._replace(num=num, filled_s=filled_s)
        if len(self.last) < 2:
            return self._replace(num=0.0, filled_s=0.0, last=(*self.last, num))
        first, second = self.last
        mean = (first + second + num) / 3
        kept = math.exp(-filled_s / _MEMORY_S)
        prior, index = (1 - kept) * _PRIOR, max(self.squares / self.mean, 1.0)
        total = kept * self.mean + mean + prior
        squares = kept * self.squares + (first - 2 * second + num) ** 2 / 6 + prior
        return _Scale(last=(second, num), squares=min(squares, _MAX_GROWTH * index * total), mean=total)


@dataclass(frozen=True, slots=True)
class Burstiness:
    """The index of dispersion of windows of a tick, two ticks, four ticks and so on."""

    tick_s: float = 0.0
    scales: tuple[_Scale, ...] = (_Scale(),) * _NUM_SCALES

    def updated(self, num: float, elapsed_s: float) -> Burstiness:
        """The state after a tick with `num` arrivals."""
        tick_s = self.tick_s or elapsed_s
        scales = tuple(scale.updated(num, elapsed_s, tick_s * 2**idx) for idx, scale in enumerate(self.scales))
        return Burstiness(tick_s, scales)

    def by_scale(self, longest_s: float = _MAX_SCALE_S) -> Iterator[tuple[float, float]]:
        """Lengths of windows in seconds, and their index of dispersion."""
        for idx, scale in enumerate(self.scales):
            length_s = self.tick_s * 2**idx
            if 0 < length_s <= min(longest_s, _MAX_SCALE_S):
                yield length_s, max(scale.squares / scale.mean, _LEAST)

    def dispersion(self, length_s: float) -> float:
        """The index of dispersion of windows of about this length, or of the longest that are known."""
        found = 1.0
        for known_s, dispersion in self.by_scale():
            found = dispersion
            if known_s >= length_s:
                break
        return found
