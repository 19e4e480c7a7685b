"""A KV tier as a source of a prompt's blocks: its codec, and the cost of its loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tandem.engine.device import to_device
from tandem.engine.kv_pool import KvPool
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.codec import Codec
from tandem.kv_transfer.fetch_planner import FetchSource
from tandem.kv_transfer.tiers.tier import Tier, TierRead
from tandem.protocol.load_prior import LoadPrior
from tandem.scheduling.load_cost import LoadCost
from tandem.worker.kv.host_buffers import HostBuffers
from tandem.worker.kv.kv_source import KvSource, OpenSource, Piece


class CachedTier(KvSource):
    """A tier, the codec of its blocks and the learned cost of its loads.

    `store` names a store that tiers of other workers share; "" for a store of this worker's own. `is_memory` says that
    its blocks are in this worker's memory.
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
        is_memory: bool = False,
        buffers: HostBuffers = HostBuffers(),
    ) -> None:
        self.tier = tier
        self.store = store
        self.is_memory = is_memory
        self.codec = codec
        self.block_bytes = block_bytes  # of an encoded block
        self.num_threads = num_threads
        self.name = self.kind = tier.name
        self.cost = LoadCost(prior, block_bytes)
        self.buffers = buffers

    def look_up(self, first_block: int, digests: Sequence[bytes]) -> FetchSource:
        """How many blocks could be loaded from `first_block` on. No I/O."""
        num_present = self.tier.count_present(digests[first_block:])
        cost, num_queued = self.cost, self.tier.num_queued_loads
        return FetchSource(self.name, first_block + num_present, cost.latency_s, cost.block_s, num_queued)

    def open(self, digests: Sequence[bytes], first_block: int, end_block: int, now: float) -> OpenSource:
        """Prepare loads; nothing is read before a piece is requested."""
        return _OpenTier(self, digests)

    def begin_load(self, digests: Sequence[bytes]) -> tuple[Tensor, TierRead]:
        """Begin to load blocks into a new buffer [num_blocks, encoded bytes], uint8, and do not wait."""
        data = self.buffers.take(len(digests), self.block_bytes)
        return data, self.tier.load(digests, data.numpy())

    def learn(self, load: TierRead) -> None:
        """Learn the cost of a block from a load. The time of its reads is a sum over the I/O threads."""
        if load.num_loaded:
            self.cost.observe(load.num_loaded, load.read_s / self.num_threads)

    def decode_into(self, kv: KvPool, blocks: Sequence[int], data: Tensor) -> None:
        """Decode blocks into these blocks of the pool. On a GPU only later work of its stream may see them yet."""
        index = to_device(np.array(blocks, dtype=np.int64), kv.device)
        self.codec.scatter(data.to(kv.device, non_blocking=True), kv.shards, index)


class _OpenTier(OpenSource):
    def __init__(self, cached: CachedTier, digests: Sequence[bytes]) -> None:
        self.kind = cached.kind
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

    def place(self, sequence: EngineSequence, first_block: int, kv: KvPool) -> int:
        blocks = sequence.blocks[first_block : self.end_block]
        self._cached.decode_into(kv, blocks, self._data[first_block - self.first_block :])
        return len(blocks) * kv.block_bytes

    def drop(self) -> None:
        self._load.abandon()
