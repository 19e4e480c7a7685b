"""Names of the places where a worker keeps cached blocks: its pool, or one of its tiers."""

from __future__ import annotations

POOL_PLACE = "pool"  # the paged cache on the worker's device; the other places are tiers, by name
HOST_TIER = "host"  # host memory: the one tier that peers can read from
DISK_TIER = "disk"


def holder_name(worker_id: str, place: str) -> str:
    """Name of a place in the prefix index: a pool is listed under its worker's own name."""
    return worker_id if place == POOL_PLACE else f"{worker_id}/{place}"


def is_readable(holder: str) -> bool:
    """Whether peers can read from this place: a worker's pool or host memory."""
    place = holder.partition("/")[2]
    return place in ("", HOST_TIER)


def worker_of(holder: str) -> str:
    """The worker of a `holder_name`."""
    return holder.partition("/")[0]
