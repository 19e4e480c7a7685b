"""What a tier counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier's state now (the first four fields) and its counts since the start. Unless named otherwise, in blocks."""

    num_blocks: int
    capacity_blocks: int
    num_queued_loads: int
    num_queued_stores: int
    num_hits: int  # hits and misses together are all blocks that loads asked for
    num_misses: Mapping[str, int]  # by reason
    num_stored: int
    num_drops: Mapping[str, int]  # blocks that were not stored although they were offered, by reason
    num_evictions: int
    bytes_in: int
    bytes_out: int
    seconds_in: float  # that all I/O threads together spent in the store
    seconds_out: float


@dataclass(eq=False, slots=True)
class TierCounters:
    """The counts of a running tier."""

    misses: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    stored: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
