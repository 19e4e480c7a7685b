"""Eviction policies: which block a tier gives up next. Pure bookkeeping over keys; knows neither bytes nor time."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.eviction.hit_density import HitDensity
from tandem.kv_transfer.eviction.lru import LRU
from tandem.protocol.errors import ConfigError

__all__ = ["POLICIES", "EvictionPolicy", "create_policy"]

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "hit-density": HitDensity,
    "lru": LRU,
}


def create_policy(name: str, capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` keys. Raises `ConfigError` if there is none of that name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy={name!r} is unknown; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
