"""Eviction policies: which block a tier gives up next. Pure bookkeeping over keys; knows neither bytes nor time."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.protocol.plugins import EVICTION_POLICIES

# Ours by name: each makes the policy of a tier with room for this number of keys.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    name: EVICTION_POLICIES.load(name, "") for name in EVICTION_POLICIES.ours
}
