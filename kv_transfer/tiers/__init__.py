"""KV below the pool: host memory, local disk, object store. They see bytes by digest, never tokens or requests."""

from __future__ import annotations

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure
from tandem.kv_transfer.tiers.disk import DiskStore
from tandem.kv_transfer.tiers.key import StoreKey, load_key
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.object import ObjectStore
from tandem.kv_transfer.tiers.stats import TierStats
from tandem.kv_transfer.tiers.tier import Tier, TierRead, TierWrite

__all__ = [
    "Block",
    "BlockName",
    "BlockStore",
    "DiskStore",
    "MemoryStore",
    "ObjectStore",
    "StoreFailure",
    "StoreKey",
    "Tier",
    "TierRead",
    "TierStats",
    "TierWrite",
    "load_key",
]
