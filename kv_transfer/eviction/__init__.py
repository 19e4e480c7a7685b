"""Eviction policies: which block a tier gives up next. Pure bookkeeping over keys; knows neither bytes nor time."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.eviction.hit_density import HitDensity
from tandem.kv_transfer.eviction.lru import LRU

# By `TierConfig.eviction_policy`: makes the policy of a tier with room for this number of keys.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "hit-density": HitDensity,
    "lru": LRU,
}
