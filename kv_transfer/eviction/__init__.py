"""Eviction policies: which block a tier gives up next. Pure bookkeeping over keys; knows neither bytes nor time."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.eviction.hit_density import HitDensity
from tandem.kv_transfer.eviction.lru import LRU

# What makes the policy of a tier of so many keys, by `TierConfig.eviction_policy`.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "hit-density": HitDensity,
    "lru": LRU,
}
