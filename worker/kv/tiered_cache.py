"""The KV of one worker beyond its pool: its tiers, and how blocks move into them and back.

Runs in the worker's loop and never waits. Full blocks are offered to every tier (`tandem.worker.kv.offload`), so an
eviction from the pool costs nothing. `tandem.worker.kv.fetcher` brings a prompt's blocks back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.tiers.base import StoreSettings
from tandem.kv_transfer.tiers.key import StoreKey, load_key
from tandem.kv_transfer.tiers.kinds import is_shared_by_all, open_store
from tandem.kv_transfer.tiers.tier import Tier
from tandem.protocol.config import TierConfig, TierSpec
from tandem.protocol.messages import POOL_PLACE, StepStats, TierLoad
from tandem.protocol.plugins import EVICTION_POLICIES
from tandem.scheduling.cost_model import StepModel
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.cpu_codec import codec_for
from tandem.worker.kv.fetcher import Fetcher
from tandem.worker.kv.host_buffers import CudaPages, HostBuffers, PinnedBuffers
from tandem.worker.kv.offload import MAX_IN_FLIGHT_BYTES, Offloader
from tandem.worker.kv.peer_reader import PeerReader
from tandem.worker.kv.tier_check import store_key_path

logger = logging.getLogger(__name__)


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

    @property
    def memory_tier(self) -> CachedTier | None:
        """The fastest tier in this worker's memory: peers read from it, and pins are loaded into it."""
        return next((cached for cached in self.tiers if cached.is_memory), None)

    def admitted(self, sequence: EngineSequence) -> None:
        """Plan what the sequence loads instead of computing it."""
        self.fetcher.admitted(sequence)

    def published(self, sequence: EngineSequence, first_block: int, end_block: int) -> None:
        """Offer blocks that hold their final KV to the tiers."""
        self._offloader.published(sequence, first_block, end_block)

    def note_end(self, digests: Sequence[bytes], *, has_calls: bool, is_demoted: bool = False) -> None:
        """Tell the tiers how the answer at the end of this chain ended."""
        for cached in self.tiers:
            cached.tier.note_end(digests, has_calls=has_calls, is_demoted=is_demoted)

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
    if not config.specs:
        return []
    buffers, key = _make_buffers(config, engine), _load_key(config) if config.is_sealed else None
    return [_make_tier(engine, spec, key, buffers) for spec in config.specs]


def _make_tier(engine: Engine, spec: TierSpec, key: StoreKey | None, buffers: HostBuffers) -> CachedTier:
    codec = codec_for(spec.codec, engine.kv.device)
    block_bytes = codec.encoded_bytes(engine.kv.block_shape, engine.kv.dtype)
    num_blocks = max(int(spec.gb * 1e9) // block_bytes, 1)
    make_policy = EVICTION_POLICIES.load(spec.eviction, spec.setting)
    policy = EVICTION_POLICIES.construct(spec.eviction, spec.setting, lambda: make_policy(num_blocks))
    store = open_store(
        StoreSettings(spec=spec, block_bytes=block_bytes, num_blocks=num_blocks, namespace=engine.namespace, key=key)
    )
    return CachedTier(
        Tier(
            spec.name,
            store,
            policy,
            capacity_blocks=num_blocks,
            num_threads=store.num_threads,
            rescan_s=store.rescan_s,
        ),
        codec,
        block_bytes,
        num_threads=store.num_threads,
        prior=store.prior,
        store=store.identity,
        is_memory=spec.is_memory,
        buffers=buffers,
    )


def _make_buffers(config: TierConfig, engine: Engine) -> HostBuffers:
    """Buffers for the most that the tiers' loads and the offloads may have under way."""
    if engine.kv.device.type != "cuda":
        return HostBuffers()
    return PinnedBuffers(int(config.load_window_mb * 1e6) + MAX_IN_FLIGHT_BYTES, engine.stream, CudaPages())


def _load_key(config: TierConfig) -> StoreKey:
    path, shared = store_key_path(config), [spec.setting for spec in config.specs if is_shared_by_all(spec)]
    if not config.kv_key_file and shared:
        logger.warning(
            "%s: only hosts with the key %s find each other's blocks: set one for all with --kv-key-file",
            ", ".join(shared),
            path,
        )
    return load_key(path, may_make=not config.kv_key_file, encrypts=config.kv_encryption == "on")
