"""Numbers of a run, made from what happened to each request."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["quantile"]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered values lie, interpolated linearly; NaN of none."""
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
