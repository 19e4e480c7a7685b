"""Offloading: full blocks of the pool are copied to every tier, and neither a step nor the pool waits for that.

On a CPU the tiers' I/O threads read and encode a block when its turn has come. They hold no reference: that would keep
the pool from evicting, and make a block more recent than its parent when it is given back. Instead a block counts only
if the pool has kept it without a break while it was read. A GPU encodes blocks between two steps, in the order of its
work, and the copies arrive in host memory some time later.

A prompt that was just received may fill a hundred blocks at once. So digests wait in a backlog of each tier, from which
its queue is filled. Blocks that are evicted from the pool before their turn are not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.device import HostStream, to_device
from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.tiers.base import Block, BlockName, StoreFailure
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.host_copy import HostCopy

# Offered between two steps: 4 MiB, or a share of the backlog if that is more.
_BATCH_BYTES = 4 << 20
_BACKLOG_SHARE = 1 / 4
_BATCHES_WHEN_IDLE = 8
MAX_IN_FLIGHT_BYTES = 256 << 20  # encoded but not in host memory yet: none on a CPU, about 10 ms of a GPU's link


class _Backlog:
    """What a tier has not been offered yet: of more blocks than the pool has, the oldest are evicted."""

    def __init__(self, cached: CachedTier, num_blocks: int) -> None:
        self.cached = cached
        self.names: deque[BlockName] = deque(maxlen=num_blocks)
        self.num_in_flight = 0  # blocks on their way to the tier

    def add(self, names: Sequence[BlockName]) -> None:
        """Note blocks that the tier may want."""
        num_lost = len(self.names) + len(names) - (self.names.maxlen or 0)
        self.cached.tier.note_dropped(StoreFailure.EVICTED.value, max(num_lost, 0))
        self.names.extend(names)

    def take(self, num_blocks: int) -> list[BlockName]:
        """The oldest ones for which the tier has room in its queue, without those that it has."""
        room = self.cached.tier.num_free_writes - self.num_in_flight
        names = [self.names.popleft() for _ in range(min(num_blocks, room, len(self.names)))]
        return [name for name in names if name.digest not in self.cached.tier]


class _OffloadBatch(NamedTuple):
    """Encoded blocks on their way from the device to a tier."""

    backlog: _Backlog
    names: list[BlockName]
    copy: HostCopy


class Offloader:
    """Copies an engine's full blocks into its tiers."""

    def __init__(self, engine: Engine, tiers: Sequence[CachedTier]) -> None:
        self._engine = engine
        self._backlogs = [_Backlog(cached, engine.pool.num_blocks) for cached in tiers]
        self._in_flight: deque[_OffloadBatch] = deque()
        self._num_bytes_in_flight = 0

    @property
    def is_busy(self) -> bool:
        """Whether blocks wait or are on their way to a tier."""
        return bool(self._in_flight) or any(backlog.names for backlog in self._backlogs)

    def published(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Offer blocks [first, end) of a sequence, which hold their final KV, to the tiers."""
        digests = sequence.digests
        names = [BlockName(digests[idx], digests[idx - 1] if idx else None) for idx in range(first, end)]
        for backlog in self._backlogs:
            backlog.add(names)

    def pump(self) -> None:
        """Offer some of the backlogs, and give the tiers the blocks that have arrived in host memory."""
        for backlog in self._backlogs:
            if backlog.names:
                self._offer_some(backlog)
        while self._in_flight and self._in_flight[0].copy.is_done:
            backlog, names, copy = self._in_flight.popleft()
            self._num_bytes_in_flight -= copy.num_bytes
            backlog.num_in_flight -= len(names)
            for name, row in zip(names, copy.host.numpy(), strict=True):
                backlog.cached.tier.store(*name, partial(self._checked, backlog.cached, row))

    def _offer_some(self, backlog: _Backlog) -> None:
        per_batch = max(_BATCH_BYTES // self._engine.block_bytes, 1)
        num_blocks = max(per_batch, int(len(backlog.names) * _BACKLOG_SHARE))
        if not self._engine.has_work:
            num_blocks = max(num_blocks, per_batch * _BATCHES_WHEN_IDLE)
        cached = backlog.cached
        if isinstance(self._engine.stream, HostStream):
            for name in backlog.take(num_blocks):
                cached.tier.store(*name, partial(self._read, cached, name.digest))
        else:
            room = max(MAX_IN_FLIGHT_BYTES - self._num_bytes_in_flight, 0) // cached.block_bytes
            self._launch_copy(backlog, backlog.take(min(num_blocks, room)))

    def _launch_copy(self, backlog: _Backlog, names: Sequence[BlockName]) -> None:
        """Begin to encode those of these blocks that are in the pool on the device, and to copy them to host memory."""
        find = self._engine.pool.block_of
        present = [(name, block) for name in names if (block := find(name.digest)) is not None]
        kv, cached = self._engine.kv, backlog.cached
        cached.tier.note_dropped(StoreFailure.EVICTED.value, len(names) - len(present))
        if not present:
            return
        blocks = to_device(np.array([block for _, block in present], dtype=np.int64), kv.device)
        data = torch.empty(len(present), cached.block_bytes, dtype=torch.uint8, device=kv.device)
        cached.codec.gather(kv.shards, blocks, data)
        copy = HostCopy(data, self._engine.stream, cached.buffers)
        self._in_flight.append(_OffloadBatch(backlog, [name for name, _ in present], copy))
        self._num_bytes_in_flight += data.numel()
        backlog.num_in_flight += len(present)

    # What follows runs on the tiers' I/O threads.

    def _read(self, cached: CachedTier, digest: bytes, scratch: Block) -> Block | StoreFailure:
        """The encoded block, unless the pool lacks it or drops it meanwhile."""
        pool = self._engine.pool
        since = pool.num_drops
        if (block := pool.block_of(digest)) is None:
            return StoreFailure.EVICTED
        if torch.get_num_threads() > 1:  # of this thread alone: a team of its own would stall the engine's
            torch.set_num_threads(1)
        cached.codec.gather(self._engine.kv.shards, torch.tensor([block]), torch.from_numpy(scratch).unsqueeze(0))
        if not pool.has_kept(block, since):
            return StoreFailure.EVICTED
        return self._checked(cached, scratch, scratch)

    def _checked(self, cached: CachedTier, encoded: Block, _: Block) -> Block | StoreFailure:
        holds = cached.codec.holds(encoded, self._engine.kv.block_shape)
        return encoded if holds else StoreFailure.UNFIT
