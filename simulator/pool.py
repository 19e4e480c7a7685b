"""A worker's block pool: a leaf-first LRU of cached blocks, pinned while in use, and private blocks of sequences.

Like the engine's pool it shares full prompt blocks under their digests; the rest of a sequence is private. A sequence
gets room for its whole length when it is admitted, so none is ever preempted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kv_transfer.eviction.lru import LRU


@dataclass(eq=False, slots=True)
class Allocation:
    """The blocks of one sequence. Others can find [0, num_shared) under the prompt's digests."""

    digests: Sequence[bytes]  # digests of the prompt's full blocks
    num_hits: int  # leading blocks that were cached
    num_shared: int
    num_private: int

    @property
    def deepest(self) -> bytes | None:
        """The last shared block; its pin keeps all blocks before it."""
        return self.digests[self.num_shared - 1] if self.num_shared else None


class Pool:
    """`capacity` blocks. The caller of `try_allocate` releases."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._cached = LRU(capacity)
        self._num_users: dict[bytes, int] = {}  # cached blocks in use
        self._num_private = 0
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def num_in_use(self) -> int:
        """Blocks that cannot be evicted."""
        return self._num_private + len(self._num_users)

    def count_cached(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks cached here: leaf-first eviction leaves a prefix of any chain."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._cached)

    def try_allocate(self, digests: Sequence[bytes], num_usable: int, num_blocks: int) -> Allocation | None:
        """`num_blocks` blocks, up to `num_usable` of them from the cache; None, and nothing changes, without room."""
        num_hits = min(self.count_cached(digests), num_usable)
        # The blocks of a chain that are in use are a prefix of it.
        num_used = bisect_left(digests[:num_hits], True, key=lambda digest: digest not in self._num_users)
        num_private = num_blocks - num_hits
        if self.num_in_use + (num_hits - num_used) + num_private > self.capacity:
            return None
        allocation = Allocation(digests, num_hits, num_hits, num_private)
        self._use(digests[:num_hits])
        if num_hits:
            self._cached.touch(digests[num_hits - 1])
            self._cached.pin(digests[num_hits - 1])
        self._num_private += num_private
        self._evict()
        return allocation

    def publish(self, allocation: Allocation, num_full: int) -> None:
        """Let others find the leading `num_full` blocks, whose KV is computed."""
        first, before = allocation.num_shared, allocation.deepest
        if num_full <= first:
            return
        parent = before
        for digest in allocation.digests[first:num_full]:
            if digest not in self._cached:  # otherwise another sequence was faster, and this block stays private
                self._cached.add(digest, parent)
                self._stored.append(digest)
                self._num_private -= 1
                allocation.num_private -= 1
            parent = digest
        self._use(allocation.digests[first:num_full])
        allocation.num_shared = num_full
        self._cached.pin(allocation.digests[num_full - 1])
        if before is not None:
            self._cached.unpin(before)

    def release(self, allocation: Allocation) -> None:
        """End the use of these blocks; shared blocks can be found until they are evicted."""
        self._num_private -= allocation.num_private
        deepest = allocation.deepest
        if deepest is None:
            return
        for digest in allocation.digests[: allocation.num_shared]:
            self._num_users[digest] -= 1
            if not self._num_users[digest]:
                del self._num_users[digest]
        self._cached.unpin(deepest)
        self._cached.touch(deepest)

    def demote(self, digests: Sequence[bytes]) -> None:
        """A peer has read the cached blocks of this chain, so its copy is the one to keep (see `BlockPool.demote`)."""
        num_cached = self.count_cached(digests)
        if num_cached:
            self._cached.demote(digests[num_cached - 1])

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Digests stored and removed since the last call. A digest in both lists is stored: the block came back."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, []
        return stored, removed

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pool is idle and its counts agree."""
        assert self.num_in_use == 0, f"{self._num_private} private blocks, {len(self._num_users)} shared ones in use"
        assert len(self._cached) <= self.capacity, f"{len(self._cached)} blocks cached in {self.capacity}"

    def _use(self, digests: Sequence[bytes]) -> None:
        users = self._num_users
        for digest in digests:
            users[digest] = users.get(digest, 0) + 1

    def _evict(self) -> None:
        while self._num_private + len(self._cached) > self.capacity:
            victim = self._cached.victim()
            assert isinstance(victim, bytes), f"{len(self._cached)} blocks, all in use: {self.num_in_use}"
            self._cached.remove(victim)
            self._removed.append(victim)
