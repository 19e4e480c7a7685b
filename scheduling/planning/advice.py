"""Which size of a cache pays: where loading is faster than computing, and a larger one still finds more.

    dV/dC = tokens/s * dhit/dC * (compute_s - load_s) * $/worker-second - $/byte-second

The hit ratios of caches of every size come from a miss-ratio curve (Mattson et al. 1970; `scheduling/miss_ratio.py`).
Such curves are not concave: a cache may find nothing more until a whole conversation fits. So all sizes are compared,
not the next one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEAST_GAIN = 0.005  # share of prompt tokens: a doubling that finds less is not worth its trouble
MONTH_S = 30 * 86400.0


class Worth(NamedTuple):
    """What a found token saves, and what a byte costs. Without prices, hits alone decide."""

    compute_s: float  # of a token, by one worker
    load_s: float  # of a token, from this tier
    tokens_per_s: float = 0.0  # prompt tokens of the traffic
    dollars_per_s: float = 0.0  # of one worker
    dollars_per_byte_s: float = 0.0  # of this tier's memory

    @property
    def is_faster(self) -> bool:
        """The first inequality: load < compute."""
        return self.load_s < self.compute_s

    def value_per_s(self, hits: Sequence[float], num_bytes: Sequence[float]) -> np.ndarray:
        """Dollars per second that caches of these sizes earn over the first one."""
        saved = self.tokens_per_s * (np.array(hits) - hits[0]) * (self.compute_s - self.load_s) * self.dollars_per_s
        return saved - (np.array(num_bytes) - num_bytes[0]) * self.dollars_per_byte_s


def best_size(num_bytes: Sequence[float], hits: Sequence[float], worth: Worth) -> int:
    """The place in `num_bytes`, a series of doublings, of the size to have; 0 = not more than there is.

    With prices the most valuable one. Without, the last whose doubling still found `LEAST_GAIN` more (the second
    inequality: the curve still rises).
    """
    if not worth.is_faster:
        return 0
    if worth.dollars_per_s:
        return int(np.argmax(worth.value_per_s(hits, num_bytes)))
    return int(max(np.flatnonzero(np.diff(hits) >= LEAST_GAIN), default=-1)) + 1


def advise(
    tier: str, num_bytes: Sequence[float], hits: Sequence[float], worth: Worth, *, present: float
) -> dict[str, Any]:
    """Advice on one tier as JSON. `num_bytes` doubles from the size that everything found so far fits in.

    `present` is the tier's own size in bytes. "gain" is the share of prompt tokens found beyond those found now.
    """
    best = best_size(num_bytes, hits, worth)
    following = hits[best + 1] - hits[best] if best + 1 < len(hits) else 0.0
    return {
        "tier": tier,
        "present_bytes": round(present),
        "recommended_bytes": round(num_bytes[best]) if best else round(present),
        "gain": hits[best] - hits[0],
        "next_bytes": round(num_bytes[min(best + 1, len(num_bytes) - 1)]),
        "next_gain": following,
        "load_s": worth.load_s,
        "compute_s": worth.compute_s,
        "saved_share": (hits[best] - hits[0]) * (1 - worth.load_s / worth.compute_s) if worth.is_faster else 0.0,
        "is_saturated": worth.is_faster and not best and following < LEAST_GAIN,
        "text": _words(tier, num_bytes, hits, worth, best),
    }


def _words(tier: str, num_bytes: Sequence[float], hits: Sequence[float], worth: Worth, best: int) -> str:
    """Such as "host 64 GB: +11.0 points, pays back; 128 GB: +0.4, does not"."""
    if not worth.is_faster:
        return (
            f"{tier}: loading a token takes {1e6 * worth.load_s:.0f} us and computing it "
            f"{1e6 * worth.compute_s:.0f}: does not pay back"
        )
    parts = [f"{size_text(num_bytes[best])}: +{100 * (hits[best] - hits[0]):.1f} points, pays back"] if best else []
    if best + 1 < len(hits):
        gain = 100 * (hits[best + 1] - hits[best])
        parts.append(f"{size_text(num_bytes[best + 1])}: +{gain:.1f}{'' if best else ' points'}, does not")
    return f"{tier} {'; '.join(parts)}"


def size_text(num_bytes: float) -> str:
    """A size with its unit, such as 64 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size or unit == "MB":
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    raise AssertionError
