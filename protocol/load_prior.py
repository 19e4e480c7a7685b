"""What loads of cached blocks are assumed to cost until some have been measured."""

from __future__ import annotations

from typing import NamedTuple


class LoadPrior(NamedTuple):
    """The assumed cost of a load from one source."""

    latency_s: float
    bytes_per_s: float


TIER_PRIORS = {
    "host": LoadPrior(50e-6, 10e9),
    "disk": LoadPrior(1e-3, 1e9),
    "object": LoadPrior(50e-3, 200e6),
}
