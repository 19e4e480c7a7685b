"""The paged pool's bookkeeping: reference counts, which block is cached under which digest, what to evict.

Only the pool changes a reference count. It knows no tensors; block ids index the first axis of the KV tensor.

A block is in exactly one of four places:
    free      no user, no digest                       (taken first)
    evictable no user, but cached under a digest       (taken when none is free, least recently used first)
    kept      no user, and its cached digest is pinned (taken only when no other is left: a pin never starves a request)
    used      one or more users, cached or not

Sequences release their blocks tail first, and a prefix hit touches every ancestor. So a block is never more recent than
its parent, and LRU order evicts children before parents. There is one harmless exception: a sequence that computed a
block which another had cached keeps its private copy. Then the cached block may be evicted before its children, which
are not found until it is computed again.

A chain that another worker has taken over is demoted: its blocks are evicted first, up to the first with other
children.

All that is kept by block lies in numpy arrays, so the 62,500 blocks of a million tokens are taken, published or
released in one call within milliseconds. Few blocks are treated one by one, which then takes less time. What is decided
is the same: `tests/support/plain_pool.py` says it block by block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from tandem.engine.block_index import NO_BLOCK, BlockIndex, CachedPrefix, num_leading
from tandem.engine.block_lru import BlockLru

Array = np.ndarray[Any, Any]

# Why a cached block is evicted: no sequence used it for longest, or only pinned ones were left.
UNUSED, PINNED = "unused", "pinned"
_FEW = 16  # for up to this many blocks a loop is faster than numpy's calls


class BlockPool:
    """Reference counts, prefix cache and leaf-first LRU over `num_blocks` blocks.

    Every digest that becomes or ceases to be cached is appended to the pending events, in order; `take_events` returns
    them for publishing. Blocks of one call are distinct, and so are its digests.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"num_blocks={num_blocks}"
        self.num_blocks = num_blocks
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: its top is at `num_free` - 1
        self._num_free = num_blocks
        self._evictable = BlockLru(num_blocks)
        self._kept = BlockLru(num_blocks)
        self._pinned: set[bytes] = set()  # cached or not
        self.num_evicted = {UNUSED: 0, PINNED: 0}  # blocks since the start, by reason
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        # The same memory: reading one element takes a third of the time of numpy's.
        self._ref_count, self._free_block = self._ref_counts.data, self._free.data
        self._index = BlockIndex(num_blocks)
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get now, evicting unused ones."""
        return self._num_free + len(self._evictable) + len(self._kept)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could get without evicting any."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - self.num_available

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block is cached under this digest."""
        return digest in self._index.block_of

    def block_of(self, digest: bytes) -> int | None:
        """The block cached under this digest. It stays cached until the next allocation."""
        return self._index.block_of.get(digest)

    @property
    def num_drops(self) -> int:
        """How often cached blocks were dropped since the start: a moment in the life of the cache."""
        return self._index.num_drops

    def has_kept(self, block: int, since: int) -> bool:
        """Whether a block that was cached at that moment still is, without a break: its KV has not changed.

        Any thread may ask this once it has read the block: a block is dropped before anything else is written to it.
        """
        return self._index.has_kept(block, since)

    def cached_digests(self) -> list[bytes]:
        """All digests cached now: a snapshot for a listener that missed events."""
        return list(self._index.block_of)

    def count_cached(self, digests: Sequence[bytes]) -> int:
        """How many leading digests are cached. Changes nothing."""
        return len(self._index.leading(digests))

    def refresh(self, prefix: CachedPrefix, digests: Sequence[bytes], end: int) -> None:
        """Make it the leading blocks of digests[:end] that are cached: `count_cached`, remembered between calls."""
        self._index.refresh(prefix, digests, end)

    def count_used(self, blocks: Array) -> int:
        """How many of these leading blocks have users: sharing those takes no room in the pool."""
        return num_leading(self._ref_counts[blocks] > 0)

    def count_own(self, blocks: Sequence[int], num_ended: Array | None = None) -> int:
        """How many blocks only this sequence uses: they become available when it ends.

        `num_ended` says how many users of each block of the pool are to be taken for gone. Sequences share a prefix, so
        its end is found by bisection.
        """

        def is_own(block: int) -> bool:
            return bool(self._ref_count[block] - (0 if num_ended is None else num_ended[block]) == 1)

        if not blocks or is_own(blocks[0]):
            return len(blocks)
        return len(blocks) - bisect_left(blocks, True, key=is_own)

    def acquire_cached(self, digests: Sequence[bytes]) -> list[int]:
        """Take a reference on the leading cached blocks of a chain and return their ids."""
        blocks = self._index.leading(digests)
        self.acquire(blocks)
        return blocks.tolist()  # type: ignore[no-any-return]

    def acquire(self, blocks: Array) -> None:
        """Take a reference on each of these cached blocks."""
        if len(blocks) > _FEW:
            unused = blocks[self._ref_counts[blocks] == 0]
            self._evictable.discard(unused)
            self._kept.discard(unused)
            self._ref_counts[blocks] += 1
            return
        for block in blocks.tolist():
            if self._ref_count[block] == 0:
                (self._evictable if block in self._evictable else self._kept).remove_one(block)
            self._ref_count[block] += 1

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each of these used blocks."""
        ids = np.asarray(blocks, dtype=np.int32)
        assert self._ref_counts[ids].all(), f"block {self._first_unused(ids)} is shared but has no user"
        self._ref_counts[ids] += 1

    def is_shared(self, block: int) -> bool:
        """Whether a block has several users. Then none of them may write to it."""
        return self._ref_count[block] > 1

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` private blocks with one reference each; None, and no change, if there is no room.

        They come in ascending order, so that blocks which are neighbours in memory are neighbours in the sequence:
        one descriptor moves those to a peer that does the same.
        """
        if num_blocks > self.num_available:
            return None
        if num_blocks <= _FEW:
            return sorted(self._take() for _ in range(num_blocks))
        return np.sort(self._take_run(num_blocks)).tolist()  # type: ignore[no-any-return]

    def publish(self, block: int, digest: bytes, parent: bytes | None = None) -> None:
        """Make a full, computed block findable. If another block caches the same content, this copy stays private.

        `parent` is the digest of the block before it.
        """
        assert self._ref_count[block] > 0, f"block {block} is published without a user"
        if self._index.add(block, digest, parent):
            self._stored.append(digest)

    def publish_chain(
        self, blocks: Sequence[int] | Array, digests: Sequence[bytes], first: int, parent: bytes | None = None
    ) -> None:
        """`publish` consecutive blocks, from digest number `first` on. `digests` begin after `parent`."""
        ids = np.asarray(blocks, dtype=np.int32)
        if len(ids) <= _FEW or self._index.are_cached(ids).any():
            for idx, block in enumerate(ids.tolist(), first):
                self.publish(block, digests[idx], digests[idx - 1] if idx else parent)
            return
        assert self._ref_counts[ids].all(), f"block {self._first_unused(ids)} is published without a user"
        chain = digests[first : first + len(ids)]
        self._stored += self._index.add_chain(ids, chain, digests[first - 1] if first else parent)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block. Pass a sequence's blocks in order; they are released tail first."""
        if len(blocks) > _FEW:
            self._release_run(np.asarray(blocks, dtype=np.int32)[::-1])
            return
        for block in blocks[::-1]:
            assert self._ref_count[block] > 0, f"block {block} is released but has no user"
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                digest = self._index.digest_of(block)
                if digest is None:
                    self._free_block[self._num_free] = block
                    self._num_free += 1
                else:
                    (self._kept if digest in self._pinned else self._evictable).add_one(block)

    def demote(self, digest: bytes) -> None:
        """Evict this block before all others, and its ancestors up to the first with other children.

        A block that is used, pinned or has children is left alone, and so are its ancestors.
        """
        block = self._index.block_of.get(digest)
        if block is not None:
            blocks = np.array(self._index.branch(block, self._evictable.members), dtype=np.int32)
            self._evictable.discard(blocks)
            self._evictable.add_oldest(blocks)

    def pin(self, digests: Sequence[bytes]) -> None:
        """Evict the blocks of these digests, given in chain order, after all others, also if they are cached later.

        A second pin of a digest only makes its block recent again.
        """
        unused = self._unused(digests)[::-1]  # tail first, as for `release`
        self._evictable.discard(unused)
        self._kept.discard(unused)
        self._kept.add(unused)
        self._pinned.update(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these digests; others are ignored."""
        pinned = [digest for digest in digests if digest in self._pinned]
        unused = self._unused(pinned)[::-1]
        self._kept.discard(unused)
        self._evictable.add(unused)
        self._pinned.difference_update(pinned)

    def pinned_digests(self) -> set[bytes]:
        """A copy of all pinned digests, cached or not."""
        return set(self._pinned)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, disjoint: each digest is listed by its current state."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        if not (stored and removed) or set(stored).isdisjoint(removed):  # nearly always
            return stored, removed
        changed = dict.fromkeys((*stored, *removed))
        stored = [digest for digest in changed if digest in self._index.block_of]
        removed = [digest for digest in changed if digest not in self._index.block_of]
        return stored, removed

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless every block is in exactly one place and the cache maps agree.

        With `idle`, also that no block has a user: nothing leaked.
        """
        free, evictable, kept = set(self._free[: self._num_free].tolist()), set(self._evictable), set(self._kept)
        used = set(np.flatnonzero(self._ref_counts).tolist())
        assert (self._ref_counts >= 0).all(), "a reference count is negative"
        assert len(free) == self._num_free, "a block is twice in the free list"
        assert (len(evictable), len(kept)) == (len(self._evictable), len(self._kept)), "evictable blocks are miscounted"
        assert free.isdisjoint(evictable | kept | used), "a free block is used or cached"
        assert (evictable | kept).isdisjoint(used), "an evictable block is used"
        assert evictable.isdisjoint(kept), "a kept block is evictable"
        total = len(free) + len(evictable) + len(kept) + len(used)
        assert total == self.num_blocks, f"{total} blocks accounted for, the pool has {self.num_blocks}"
        self._index.check_integrity()
        assert not any(map(self._index.digest_of, free)), "a free block has a digest"
        assert all(map(self._index.digest_of, evictable | kept)), "an evictable block has no digest"
        pinned = {block for block in evictable | kept if self._index.digest_of(block) in self._pinned}
        assert kept <= pinned, "a kept block is not pinned"
        assert evictable.isdisjoint(pinned), "a pinned block is evictable"
        if idle:
            assert not used, f"{len(used)} blocks still have users: {sorted(used)[:10]}"

    def _take(self) -> int:
        if self._num_free:
            self._num_free -= 1
            block = self._free_block[self._num_free]
        else:
            self.num_evicted[UNUSED if self._evictable else PINNED] += 1
            block = (self._evictable or self._kept).pop_one()
            self._removed.append(self._index.drop(block))
        self._ref_count[block] = 1
        return block

    def _take_run(self, num_blocks: int) -> Array:
        """As many `_take`s."""
        num_free = min(num_blocks, self._num_free)
        self._num_free -= num_free
        free = self._free[self._num_free : self._num_free + num_free][::-1]
        num_unused = min(num_blocks - num_free, len(self._evictable))
        num_pinned = num_blocks - num_free - num_unused
        self.num_evicted[UNUSED] += num_unused
        self.num_evicted[PINNED] += num_pinned
        evicted = self._evictable.pop(num_unused), self._kept.pop(num_pinned)
        blocks = np.concatenate([free, *evicted])
        if num_free < num_blocks:
            self._removed += self._index.drop_run(blocks[num_free:])
        self._ref_counts[blocks] = 1
        return blocks

    def _release_run(self, blocks: Array) -> None:
        """`release` for many, in the order given."""
        assert self._ref_counts[blocks].all(), f"block {self._first_unused(blocks)} is released but has no user"
        self._ref_counts[blocks] -= 1
        unused = blocks[self._ref_counts[blocks] == 0]
        is_cached = self._index.are_cached(unused)
        cached, fresh = unused[is_cached], unused[~is_cached]
        self._free[self._num_free : self._num_free + len(fresh)] = fresh
        self._num_free += len(fresh)
        if self._pinned:
            is_pinned = np.array([digest in self._pinned for digest in self._index.digests_of(cached)], dtype=bool)
            self._kept.add(cached[is_pinned])
            cached = cached[~is_pinned]
        self._evictable.add(cached)

    def _unused(self, digests: Sequence[bytes]) -> Array:
        """The cached blocks of these digests that have no user."""
        found = np.fromiter(map(self._index.block_of.get, digests, repeat(NO_BLOCK)), dtype=np.int32)
        cached = found[found != NO_BLOCK]
        unused: Array = cached[self._ref_counts[cached] == 0]
        return unused

    def _first_unused(self, blocks: Array) -> int:
        return int(blocks[self._ref_counts[blocks].argmin()])
