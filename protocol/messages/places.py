"""Names of the places where a worker keeps cached blocks: its pool, or one of its tiers."""

from __future__ import annotations

POOL_PLACE = "pool"  # the paged cache on the worker's device; the other places are tiers, by name
HOST_TIER = "host"  # names that tiers have by default, and those of other engines always
DISK_TIER = "disk"


def holder_name(worker_id: str, place: str) -> str:
    """Name of a place in the prefix index: a pool is listed under its worker's own name."""
    return worker_id if place == POOL_PLACE else f"{worker_id}/{place}"


def worker_of(holder: str) -> str:
    """The worker of a `holder_name`."""
    return holder.partition("/")[0]
