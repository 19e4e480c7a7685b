"""The prefix cache of an engine that publishes no KV events, simulated: an LRU of the prompts sent there, with expiry.

A pure value: digests in, changes out. The changes go into the same prefix index as the events of other engines, under
the same rule: blocks leave a chain from its tail, so a cached block implies that all blocks before it are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SimulatedCache:
    """An LRU of `capacity` blocks, each of which expires when it was not used for `ttl_s`."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        # Digest -> when it was last used, oldest first. A chain is touched tail first, so its tail is evicted first.
        self._used_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_s)

    def touch(self, digests: Sequence[bytes], now: float) -> tuple[list[bytes], list[bytes]]:
        """Note that a prompt with this chain is computed. Returns (new blocks, evicted blocks)."""
        kept = digests[: self._capacity]
        stored = [digest for digest in kept if digest not in self._used_s]
        for digest in reversed(kept):
            self._used_s[digest] = now
            self._used_s.move_to_end(digest)
        removed = self.expire(now)
        while len(self._used_s) > self._capacity:
            removed.append(self._used_s.popitem(last=False)[0])
        return stored, removed

    def expire(self, now: float) -> list[bytes]:
        """Drop and return the blocks that have not been used for `ttl_s`."""
        removed = []
        while self._used_s and next(iter(self._used_s.values())) <= now - self._ttl_s:
            removed.append(self._used_s.popitem(last=False)[0])
        return removed
