"""The KV of one worker beyond its pool: which tiers it has, and what is in them.

Runs in the worker's loop and never waits. Blocks are offered to every tier once they are full (`cluster.offload`), so
an eviction from the pool costs nothing. How a prompt gets them back is up to `cluster.fetcher`.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from cluster.fetcher import Fetcher
from cluster.host_copy import host_buffer
from cluster.kv_source import KvSource, LoadCost, LoadPrior, OpenSource, Piece
from cluster.offload import Offloader
from cluster.peer_reads import PeerReader
from cluster.tier_check import store_key_path
from engine.device import DeviceQueue
from engine.engine import Engine
from engine.sequence import Sequence as EngineSequence
from kv_transfer.codec import Codec, create_codec
from kv_transfer.eviction import create_policy
from kv_transfer.fetch_planner import Source
from kv_transfer.tiers import BlockStore, DiskStore, Load, MemoryStore, ObjectStore, StoreKey, Tier, load_key
from protocol.config import TierConfig
from protocol.messages import POOL_PLACE, StepStats, TierLoad
from router.cost_model import StepModel

__all__ = ["CachedTier", "TieredCache", "create_tiers"]

logger = logging.getLogger(__name__)

_PRIORS = {
    "host": LoadPrior(50e-6, 10e9),
    "disk": LoadPrior(1e-3, 1e9),
    "object": LoadPrior(50e-3, 200e6),
}
_NUM_THREADS = {"host": 1, "disk": 2, "object": 8}
_RESCAN_S = {"disk": 60.0, "object": 60.0}  # other workers add blocks to these


class CachedTier(KvSource):
    """A tier with the codec its blocks are kept in, and what its loads cost.

    `store` names what it shares with tiers of other workers, "" where it is this worker's own.
    """

    def __init__(
        self,
        tier: Tier,
        codec: Codec,
        block_bytes: int,
        *,
        num_threads: int,
        prior: LoadPrior,
        store: str = "",
        device_queue: DeviceQueue = DeviceQueue(torch.device("cpu")),
    ) -> None:
        self.tier = tier
        self.store = store
        self.codec = codec
        self.block_bytes = block_bytes  # encoded
        self.num_threads = num_threads
        self.name = self.kind = tier.name
        self.cost = LoadCost(prior, block_bytes)
        self.device_queue = device_queue

    def look_up(self, first_block: int, digests: Sequence[bytes]) -> Source:
        """What could be loaded from `first_block` on. No I/O."""
        num_present = self.tier.count_present(digests[first_block:])
        cost = self.cost
        return Source(self.name, first_block + num_present, cost.latency_s, cost.block_s, self.tier.num_queued_loads)

    def open(self, digests: Sequence[bytes], first_block: int, end_block: int, now: float) -> OpenSource:
        """Nothing begins before a piece is asked for."""
        return _OpenTier(self, digests, end_block)

    def begin_load(self, digests: Sequence[bytes]) -> tuple[Tensor, Load]:
        """Begin to load blocks into a new buffer [num_blocks, encoded bytes], uint8, which is the load's until done."""
        data = host_buffer(len(digests), self.block_bytes, self.device_queue.device)
        return data, self.tier.load(digests, data.numpy())

    def learn(self, load: Load) -> None:
        """Learn from a load of this tier what blocks cost. Its time in the store is summed over the threads."""
        if load.num_loaded:
            self.cost.observe(load.num_loaded, load.read_s / self.num_threads)

    def decode_into(self, kv: Tensor, blocks: Sequence[int], data: Tensor) -> None:
        """Copy encoded blocks into these blocks of the pool."""
        self.codec.scatter(data.to(kv.device, non_blocking=True), kv, torch.tensor(blocks, device=kv.device))
        self.device_queue.wait()


class _OpenTier(OpenSource):
    def __init__(self, cached: CachedTier, digests: Sequence[bytes], end_block: int) -> None:
        self.kind = cached.kind
        self.end_block = end_block
        self._cached = cached
        self._digests = digests

    def begin(self, first_block: int, end_block: int, now: float) -> Piece:
        return _TierPiece(self._cached, self._digests, first_block, end_block, now)


class _TierPiece(Piece):
    """Blocks that arrive in a buffer and are decoded into the pool."""

    def __init__(
        self, cached: CachedTier, digests: Sequence[bytes], first_block: int, end_block: int, now: float
    ) -> None:
        super().__init__(first_block, end_block, now)
        self.kind = cached.kind
        self._cached = cached
        self._data, self._load = cached.begin_load(digests[first_block:end_block])

    @property
    def is_done(self) -> bool:
        return self._load.is_done

    @property
    def is_complete(self) -> bool:
        return self._load.is_complete

    def learn(self) -> None:
        self._cached.learn(self._load)

    def learn_late(self, now: float) -> None:
        self._cached.cost.observe_at_least(self.num_blocks, now - self.begun_at)

    def place(self, sequence: EngineSequence, first_block: int, kv: Tensor) -> int:
        blocks = sequence.blocks[first_block : self.end_block]
        self._cached.decode_into(kv, blocks, self._data[first_block - self.first_block :])
        return len(blocks) * kv[0].numel() * kv.element_size()

    def drop(self) -> None:
        self._load.abandon()


class TieredCache:
    """Keeps the blocks of one engine in tiers, and brings them back.

    `tiers` are ordered from fast to slow. Registers itself with the engine's scheduler.
    """

    def __init__(
        self,
        engine: Engine,
        tiers: Sequence[CachedTier],
        steps: StepModel,
        *,
        peers: PeerReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self.tiers = list(tiers)  # from fast to slow
        self.fetcher = Fetcher(engine, tiers, steps, peers, clock)
        self._offloader = Offloader(engine, self.tiers)
        # Told of what `take_events` sees: the place ("pool" or a tier), digests stored there, digests removed.
        self.on_changed: Callable[[str, list[bytes], list[bytes]], None] = _nothing

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to pump for."""
        return self._offloader.is_busy or any(cached.tier.is_busy for cached in self.tiers)

    def tier(self, name: str) -> CachedTier | None:
        """The tier of that name, if it is used."""
        return next((cached for cached in self.tiers if cached.name == name), None)

    def after_step(self, stats: StepStats) -> None:
        """Learn what computing costs."""
        self.fetcher.after_step(stats)

    def pump(self, now: float) -> None:
        """Take in what the tiers have done, and let the fetches go on."""
        self._offloader.pump()
        for cached in self.tiers:
            cached.tier.poll()
        self.fetcher.pump(now)

    def loads(self) -> list[TierLoad]:
        """The tiers as the router is told of them."""
        return [
            TierLoad(
                name=cached.name,
                latency_s=cached.cost.latency_s,
                block_s=math.inf if cached.tier.is_paused else cached.cost.block_s,
                **asdict(cached.tier.stats()),
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
        for place, events in found.items():
            self.on_changed(place, *events)
        return {place: events for place, events in found.items() if any(events)}

    def close(self) -> None:
        """Give up all loads and close the tiers."""
        self.fetcher.close()
        for cached in self.tiers:
            cached.tier.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the tiers' books agree; with `idle`, nothing may be fetched."""
        for cached in self.tiers:
            cached.tier.check_integrity()
        self.fetcher.check_integrity(idle=idle)


def create_tiers(config: TierConfig, engine: Engine) -> list[CachedTier]:
    """The tiers that are configured, from fast to slow. Raises `ConfigError` for one that cannot be used."""
    tiers: list[CachedTier] = []

    def add(
        name: str, codec_name: str, capacity_gb: float, make: Callable[[int, int], BlockStore], store: str = ""
    ) -> None:
        codec = create_codec(codec_name)
        block_bytes = codec.encoded_bytes(engine.kv.shape[1:], engine.kv.dtype)
        num_blocks = max(int(capacity_gb * 1e9) // block_bytes, 1)
        num_threads = _NUM_THREADS[name]
        tier = Tier(
            name,
            make(block_bytes, num_blocks),
            create_policy(config.eviction_policy, num_blocks),
            capacity_blocks=num_blocks,
            num_threads=num_threads,
            rescan_s=_RESCAN_S.get(name, math.inf),
        )
        prior = _PRIORS[name]
        tiers.append(
            CachedTier(
                tier,
                codec,
                block_bytes,
                num_threads=num_threads,
                prior=prior,
                store=store,
                device_queue=engine.device_queue,
            )
        )

    if config.host_cache_gb:
        add("host", config.host_cache_codec, config.host_cache_gb, MemoryStore)
    if not (config.disk_cache_path or config.object_cache_url):
        return tiers
    key = _load_key(config)
    name = key.folder_name(engine.namespace)
    if config.disk_cache_path:
        folder = Path(config.disk_cache_path).expanduser() / config.disk_cache_codec
        add(
            "disk",
            config.disk_cache_codec,
            config.disk_cache_gb,
            lambda size, _: DiskStore(folder, engine.namespace, size, key),
            store=f"{socket.gethostname()}:{folder.resolve()}#{name}",
        )
    if config.object_cache_url:
        url = f"{config.object_cache_url.rstrip('/')}/{config.object_cache_codec}"
        add(
            "object",
            config.object_cache_codec,
            config.object_cache_gb,
            lambda size, _: ObjectStore(url, engine.namespace, size, key),
            store=f"{url}#{name}",
        )
    return tiers


def _load_key(config: TierConfig) -> StoreKey:
    path = store_key_path(config)
    if not config.kv_key_file and config.object_cache_url and not config.object_cache_url.startswith("file:"):
        logger.warning(
            "only hosts with the key %s find each other's blocks: give all the same with --kv-key-file", path
        )
    return load_key(path, may_make=not config.kv_key_file)


def _nothing(*_: object) -> None:
    """Nobody has registered."""
