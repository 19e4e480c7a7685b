"""The KV of one worker beyond its pool: its tiers, and how blocks move into them and back.

Runs in the worker's loop and never waits. Full blocks are offered to every tier (`tandem.worker.kv.offload`), so an
eviction from the pool costs nothing. `tandem.worker.kv.fetcher` brings a prompt's blocks back.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.codec import create_codec
from tandem.kv_transfer.eviction import POLICIES
from tandem.kv_transfer.tiers.base import BlockStore
from tandem.kv_transfer.tiers.disk import DiskStore, folder_id
from tandem.kv_transfer.tiers.key import StoreKey, load_key
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.object import ObjectStore
from tandem.kv_transfer.tiers.tier import Tier
from tandem.protocol.config import TierConfig
from tandem.protocol.messages import POOL_PLACE, StepStats, TierLoad
from tandem.scheduling.cost_model import StepModel
from tandem.scheduling.load_cost import TIER_PRIORS
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.fetcher import Fetcher
from tandem.worker.kv.host_buffers import CudaPages, HostBuffers, PinnedBuffers
from tandem.worker.kv.offload import MAX_IN_FLIGHT_BYTES, Offloader
from tandem.worker.kv.peer_reader import PeerReader
from tandem.worker.kv.tier_check import store_key_path

logger = logging.getLogger(__name__)

_NUM_THREADS = {"host": 1, "disk": 2, "object": 8}
_MAX_LISTED_SHARE, _MIN_LISTED = 4, 100_000  # objects of a bucket that are listed, for each block that it may hold
_RESCAN_S = {"disk": 60.0, "object": 60.0}  # other workers add blocks to these


class TieredCache:
    """Keeps the blocks of one engine in tiers, and brings them back.

    It is a `SchedulerListener`, and must be given to `Scheduler.listen`.
    """

    def __init__(
        self,
        engine: Engine,
        tiers: Sequence[CachedTier],
        steps: StepModel,
        *,
        peers: PeerReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        config: TierConfig = TierConfig(),
    ) -> None:
        self._engine = engine
        self.tiers = list(tiers)  # from fast to slow
        self.fetcher = Fetcher(engine, tiers, steps, peers, clock, config)
        self._offloader = Offloader(engine, self.tiers)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way to a tier or from one."""
        return self._offloader.is_busy or any(cached.tier.is_busy for cached in self.tiers)

    def tier(self, name: str) -> CachedTier | None:
        """The tier of that name, if it is used."""
        return next((cached for cached in self.tiers if cached.name == name), None)

    def admitted(self, sequence: EngineSequence) -> None:
        """Plan what the sequence loads instead of computing it."""
        self.fetcher.admitted(sequence)

    def published(self, sequence: EngineSequence, first_block: int, end_block: int) -> None:
        """Offer blocks that hold their final KV to the tiers."""
        self._offloader.published(sequence, first_block, end_block)

    def after_step(self, stats: StepStats) -> None:
        """Learn the cost of computing from a step."""
        self.fetcher.after_step(stats)

    def pump(self, now: float) -> None:
        """Let offloading, tiers and fetches go on."""
        self._offloader.pump()
        for cached in self.tiers:
            cached.tier.poll()
        self.fetcher.pump(now)

    def loads(self) -> list[TierLoad]:
        """State of the tiers, for the heartbeat."""
        return [
            msgspec.structs.replace(
                cached.tier.stats(),
                latency_s=cached.cost.latency_s,
                block_s=math.inf if cached.tier.is_paused else cached.cost.block_s,
            )
            for cached in self.tiers
        ]

    def digests(self, place: str) -> list[bytes]:
        """Every block in a place: the pool, or a tier."""
        if place == POOL_PLACE:
            return list(self._engine.pool.cached_digests())
        cached = self.tier(place)
        return cached.tier.digests() if cached is not None else []

    def take_events(self) -> dict[str, tuple[list[bytes], list[bytes]]]:
        """By place, disjoint (stored, removed) digests since the last call; places without any are left out."""
        found = {POOL_PLACE: self._engine.pool.take_events()}
        found |= {cached.name: cached.tier.take_events() for cached in self.tiers}
        return {place: events for place, events in found.items() if any(events)}

    def close(self) -> None:
        """Give up all loads and close the tiers."""
        self.fetcher.close()
        for cached in self.tiers:
            cached.tier.close()
        for cached in self.tiers:  # tiers share the I/O threads
            cached.buffers.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the tiers' books agree; with `idle`, nothing may be fetched."""
        for cached in self.tiers:
            cached.tier.check_integrity()
        self.fetcher.check_integrity(idle=idle)


def create_tiers(config: TierConfig, engine: Engine) -> list[CachedTier]:
    """The tiers that are configured, from fast to slow. Raises `ConfigError` for one that cannot be used."""
    tiers: list[CachedTier] = []
    if not config.is_used:
        return tiers
    make = partial(_make_tier, engine, config.eviction_policy, _make_buffers(config, engine))
    if config.host_cache_gb:
        tiers.append(make("host", config.host_cache_codec, config.host_cache_gb, MemoryStore))
    if not config.is_sealed:
        return tiers
    key = _load_key(config)
    name = key.folder_name(engine.namespace)
    if config.disk_cache_path:
        folder = Path(os.path.expanduser(config.disk_cache_path)) / config.disk_cache_codec
        store = f"{folder_id(folder)}#{name}"
        open_disk = lambda size, _: DiskStore(folder, engine.namespace, size, key)  # noqa: E731
        tiers.append(make("disk", config.disk_cache_codec, config.disk_cache_gb, open_disk, store))
    if config.object_cache_url:
        url = f"{config.object_cache_url.rstrip('/')}/{config.object_cache_codec}"
        open_bucket = lambda size, num_blocks: ObjectStore(  # noqa: E731
            url, engine.namespace, size, key, max_listed=_MAX_LISTED_SHARE * num_blocks + _MIN_LISTED
        )
        tiers.append(make("object", config.object_cache_codec, config.object_cache_gb, open_bucket, f"{url}#{name}"))
    return tiers


def _make_tier(
    engine: Engine,
    policy: str,
    buffers: HostBuffers,
    name: str,
    codec_name: str,
    capacity_gb: float,
    open_store: Callable[[int, int], BlockStore],
    store: str = "",
) -> CachedTier:
    """`open_store` gets the bytes of an encoded block and the number of blocks."""
    codec = create_codec(codec_name)
    block_bytes = codec.encoded_bytes(engine.kv.block_shape, engine.kv.dtype)
    num_blocks = max(int(capacity_gb * 1e9) // block_bytes, 1)
    num_threads = _NUM_THREADS[name]
    tier = Tier(
        name,
        open_store(block_bytes, num_blocks),
        POLICIES[policy](num_blocks),
        capacity_blocks=num_blocks,
        num_threads=num_threads,
        rescan_s=_RESCAN_S.get(name, math.inf),
    )
    return CachedTier(
        tier,
        codec,
        block_bytes,
        num_threads=num_threads,
        prior=TIER_PRIORS[name],
        store=store,
        buffers=buffers,
    )


def _make_buffers(config: TierConfig, engine: Engine) -> HostBuffers:
    """Buffers for the most that the tiers' loads and the offloads may have under way."""
    if engine.kv.device.type != "cuda":
        return HostBuffers()
    return PinnedBuffers(int(config.load_window_mb * 1e6) + MAX_IN_FLIGHT_BYTES, engine.stream, CudaPages())


def _load_key(config: TierConfig) -> StoreKey:
    path = store_key_path(config)
    if not config.kv_key_file and config.object_cache_url and not config.object_cache_url.startswith("file:"):
        logger.warning("only hosts with the key %s find each other's blocks: set one for all with --kv-key-file", path)
    return load_key(path, may_make=not config.kv_key_file, encrypts=config.kv_encryption == "on")
