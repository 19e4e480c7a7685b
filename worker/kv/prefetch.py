"""Loads the blocks of pinned chains before a request needs them: into host memory, or into free blocks of the pool.

It loads one piece at a time, and none while a prompt waits for its own loads: then the present piece is given up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.kv_transfer.tiers.base import StoreFailure
from tandem.kv_transfer.tiers.tier import TierRead
from tandem.protocol.messages import Prefetch
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.host_copy import HostCopy
from tandem.worker.kv.tiered_cache import TieredCache

_PIECE_BYTES = 8 << 20  # at most this much is in flight; copying it between two steps takes a few ms
_RETRY_S = 1.0  # pause after a failed load or store


class HostBlocks(Protocol):
    """The blocks that pins keep in host memory."""

    @property
    def room(self) -> int:
        """Blocks that may still be kept."""

    def keep(self, digests: Sequence[bytes]) -> None:
        """Keep these blocks too. Pins want them, and there is room."""


@dataclass(frozen=True, eq=False, slots=True)
class _PrefetchPiece:
    """Blocks [first_block, first_block + len(data)) of a chain that are being loaded."""

    pin_id: str
    chain: tuple[bytes, ...]
    first_block: int
    source: CachedTier
    target: CachedTier | None  # None = the pool
    data: Tensor  # [num_blocks, encoded bytes], uint8
    load: TierRead


class _Landing(NamedTuple):
    """A loaded piece that the device still decodes; `finish` says whether anything was put in place."""

    is_done: Callable[[], bool]
    finish: Callable[[], bool]


class Prefetcher:
    """Loads blocks for pins. It looks for work only after `want` or `look_again`."""

    def __init__(self, engine: Engine, cache: TieredCache) -> None:
        self.num_blocks: Counter[str] = Counter()  # loaded so far, by place
        self._engine = engine
        self._cache = cache
        self._host = cache.memory_tier
        self._to_host: set[str] = set()  # pins
        self._to_pool: set[str] = set()  # pins, each until as much of its chain as possible is loaded
        self._piece: _PrefetchPiece | None = None
        self._landing: _Landing | None = None
        self._look_at = math.inf

    @property
    def is_busy(self) -> bool:
        """Whether a piece is being loaded."""
        return self._piece is not None or self._landing is not None

    def want(self, pin_id: str, prefetch: Prefetch) -> None:
        """Load this pin's blocks into host memory from now on, and into the pool once, as `prefetch` says."""
        for wanting, is_wanted in (
            (self._to_host, prefetch is not Prefetch.NONE),
            (self._to_pool, prefetch is Prefetch.POOL),
        ):
            if is_wanted:
                wanting.add(pin_id)
            else:
                wanting.discard(pin_id)
        self.look_again()

    def look_again(self) -> None:
        """Look for something to load at the next `pump`."""
        self._look_at = -math.inf

    def pump(self, chains: Mapping[str, tuple[bytes, ...]], kept: HostBlocks | None, now: float) -> None:
        """Put a loaded piece in place and request the next. `chains` by pin; `kept` is None without host memory."""
        piece = self._piece
        if piece is not None and (self._cache.fetcher.is_loading or chains.get(piece.pin_id) is not piece.chain):
            piece.load.abandon()
            self._piece = None
            self._look_at = now
        elif piece is not None and piece.load.is_done:
            self._piece = None
            self._landing = self._land(piece, kept)
            self._look_at = now + _RETRY_S
        if self._landing is not None and self._landing.is_done():
            self._look_at = now if self._landing.finish() else now + _RETRY_S
            self._landing = None
        if not self.is_busy and now >= self._look_at and not self._cache.fetcher.is_loading:
            self._piece = self._next_piece(chains, 0 if kept is None else kept.room)
            self._look_at = math.inf

    def _next_piece(self, chains: Mapping[str, tuple[bytes, ...]], host_room: int) -> _PrefetchPiece | None:
        self._to_host &= chains.keys()
        self._to_pool &= chains.keys()
        for pin_id, chain in chains.items():
            piece = self._piece_to_host(pin_id, chain, host_room) if pin_id in self._to_host else None
            if piece is None and pin_id in self._to_pool:
                piece = self._piece_to_pool(pin_id, chain)
            if piece is not None:
                return piece
        return None

    def _piece_to_host(self, pin_id: str, chain: tuple[bytes, ...], room: int) -> _PrefetchPiece | None:
        """The first blocks that a lower tier has and host memory lacks."""
        host = self._host
        if host is None or room <= 0:
            return None
        below = [cached for cached in self._cache.tiers if cached is not host]
        for idx, digest in enumerate(chain):
            if digest in host.tier:
                continue
            source = next((cached for cached in below if digest in cached.tier), None)
            if source is not None:
                ends = (end for end in range(idx + 1, len(chain)) if chain[end] in host.tier)
                return self._begin(pin_id, chain, idx, min(next(ends, len(chain)), idx + room), source, host)
        return None

    def _piece_to_pool(self, pin_id: str, chain: tuple[bytes, ...]) -> _PrefetchPiece | None:
        """The blocks after those in the pool, as far as the pool has free blocks for them."""
        pool = self._engine.pool
        first, room = pool.count_cached(chain), pool.num_free
        source = next((c for c in self._cache.tiers if c.tier.count_present(chain[first : first + 1])), None)
        if source is None or not room:
            self._to_pool.discard(pin_id)
            return None
        return self._begin(pin_id, chain, first, first + room, source, None)

    def _begin(
        self, pin_id: str, chain: tuple[bytes, ...], first: int, end: int, source: CachedTier, target: CachedTier | None
    ) -> _PrefetchPiece:
        end = min(end, first + max(_PIECE_BYTES // self._engine.block_bytes, 1), len(chain))
        end = first + max(source.tier.count_present(chain[first:end]), 1)
        data, load = source.begin_load(chain[first:end])
        return _PrefetchPiece(pin_id, chain, first, source, target, data, load)

    def _land(self, piece: _PrefetchPiece, kept: HostBlocks | None) -> _Landing | None:
        """Begin to put a piece in place; None if it is useless."""
        num_loaded = piece.load.num_loaded
        if not num_loaded:
            return None
        piece.source.learn(piece.load)
        if piece.target is None or kept is None:
            return self._land_in_pool(piece, piece.data[:num_loaded])
        num_fitting = min(num_loaded, kept.room)
        return self._land_in_host(piece, piece.data[:num_fitting], piece.target, kept) if num_fitting > 0 else None

    def _land_in_host(self, piece: _PrefetchPiece, data: Tensor, host: CachedTier, kept: HostBlocks) -> _Landing:
        if host.codec.name == piece.source.codec.name:
            return _Landing(lambda: True, lambda: self._store(piece, data, host, kept))
        encoded = torch.empty(len(data), host.block_bytes, dtype=torch.uint8, device=self._engine.kv.device)
        host.codec.encode(self._decoded(piece, data), encoded)
        copy = HostCopy(encoded, self._engine.stream, host.buffers)
        return _Landing(lambda: copy.is_done, lambda: self._store(piece, copy.host, host, kept))

    def _store(self, piece: _PrefetchPiece, data: Tensor, host: CachedTier, kept: HostBlocks) -> bool:
        stored = []
        for idx, row in enumerate(data.numpy()[: max(kept.room, 0)], piece.first_block):
            parent = piece.chain[idx - 1] if idx else None
            if not host.codec.holds(row, self._engine.kv.block_shape):
                host.tier.note_dropped(StoreFailure.UNFIT.value, 1)
            elif host.tier.store(piece.chain[idx], parent, row) is not None:
                stored.append(piece.chain[idx])
        kept.keep(stored)  # at once, or the next piece would count on the same room
        self.num_blocks[host.name] += len(stored)
        return bool(stored)

    def _land_in_pool(self, piece: _PrefetchPiece, data: Tensor) -> _Landing | None:
        engine, pool, first = self._engine, self._engine.pool, piece.first_block
        num_blocks = min(len(data), pool.num_free)
        parents = pool.acquire_cached(piece.chain[:first])
        blocks = pool.try_allocate(num_blocks) if len(parents) == first else None
        if not blocks:
            pool.release(parents)
            return None
        piece.source.decode_into(engine.kv, blocks, data[:num_blocks])
        placed = engine.stream.record()

        def publish() -> bool:
            pool.publish_chain(blocks, piece.chain, first)
            self.num_blocks["pool"] += num_blocks
            # Together with the blocks before them, so that leaves stay less recent than their parents.
            pool.release([*parents, *blocks])
            return True

        return _Landing(lambda: engine.stream.is_done(placed), publish)

    def _decoded(self, piece: _PrefetchPiece, data: Tensor) -> Tensor:
        """Blocks [n, *block_shape] on the engine's device."""
        kv = self._engine.kv
        content = torch.empty(len(data), *kv.block_shape, dtype=kv.dtype, device=kv.device)
        piece.source.codec.decode(data.to(kv.device, non_blocking=True), content)
        return content
