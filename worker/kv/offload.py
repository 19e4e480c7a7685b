"""Offloading: full blocks of the pool are copied to every tier, a few between two steps.

A prompt that was just received may fill a hundred blocks at once, and copying all of them would make its next token
late. So their digests wait in a backlog. Blocks that are evicted from the pool before they are copied are not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tandem.engine.device import to_device
from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.tiers.base import BlockName
from tandem.worker.kv.host_copy import HostCopy

if TYPE_CHECKING:
    from tandem.worker.kv.cached_tier import CachedTier

# Copied between two steps: 4 MiB (a ms on a CPU), or a share of the backlog if that is more. glibc serves buffers of
# this size from memory it has; larger ones are fresh pages, which take five times as long to write.
_BATCH_BYTES = 4 << 20
_BACKLOG_SHARE = 1 / 4
_BATCHES_WHEN_IDLE = 8
MAX_IN_FLIGHT_BYTES = 256 << 20  # encoded but not in host memory yet: none on a CPU, about 10 ms of a GPU's link


class _OffloadBatch(NamedTuple):
    """Encoded blocks on their way from the device to a tier."""

    cached: CachedTier
    names: list[BlockName]
    copy: HostCopy


class Offloader:
    """Copies an engine's full blocks into its tiers."""

    def __init__(self, engine: Engine, tiers: Sequence[CachedTier]) -> None:
        self._engine = engine
        self._tiers = tiers
        self._backlog: deque[BlockName] = deque()
        self._in_flight: deque[_OffloadBatch] = deque()
        self._num_bytes_in_flight = 0

    @property
    def is_busy(self) -> bool:
        """Whether blocks wait or are on their way to a tier."""
        return bool(self._backlog or self._in_flight)

    def published(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Offer blocks [first, end) of a sequence, which hold their final KV, to the tiers."""
        if not self._tiers:
            return
        for idx in range(first, end):
            self._backlog.append(BlockName(sequence.digests[idx], sequence.digests[idx - 1] if idx else None))

    def pump(self) -> None:
        """Copy some of the backlog, and give the tiers the blocks that have arrived in host memory."""
        if self._backlog:
            self._copy_some()
        while self._in_flight and self._in_flight[0].copy.is_done:
            cached, names, copy = self._in_flight.popleft()
            self._num_bytes_in_flight -= copy.num_bytes
            for name, row in zip(names, copy.host.numpy(), strict=True):
                cached.tier.store(*name, row)

    def _copy_some(self) -> None:
        per_batch = max(_BATCH_BYTES // self._engine.block_bytes, 1)
        num_batches = max(int(len(self._backlog) * _BACKLOG_SHARE) // per_batch, 1)
        if not self._engine.has_work:
            num_batches = max(num_batches, _BATCHES_WHEN_IDLE)
        for _ in range(num_batches):
            names = [self._backlog.popleft() for _ in range(min(per_batch, len(self._backlog)))]
            for cached in self._tiers:
                self._copy(cached, [name for name in names if name.digest not in cached.tier])

    def _copy(self, cached: CachedTier, names: list[BlockName]) -> None:
        """Begin to copy the blocks among these that are still in the pool."""
        find = self._engine.pool.block_of
        present = [(name, block) for name in names if (block := find(name.digest)) is not None]
        cached.tier.note_dropped("evicted before its turn", len(names) - len(present))
        room = max(MAX_IN_FLIGHT_BYTES - self._num_bytes_in_flight, 0) // cached.block_bytes
        cached.tier.note_dropped("offload queue full", max(len(present) - room, 0))
        if not (present := present[:room]):
            return
        kv = self._engine.kv
        blocks = to_device(np.array([block for _, block in present], dtype=np.int64), kv.device)
        data = torch.empty(len(present), cached.block_bytes, dtype=torch.uint8, device=kv.device)
        cached.codec.gather(kv.shards, blocks, data)
        copy = HostCopy(data, self._engine.stream, cached.buffers)
        self._in_flight.append(_OffloadBatch(cached, [name for name, _ in present], copy))
        self._num_bytes_in_flight += data.numel()
