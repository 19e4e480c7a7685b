"""What an engine that publishes no KV events probably has cached: an LRU of what was sent there, with expiry.

A pure value: digests in, events out. They go into the same index as those of workers that publish theirs, under the
same rule: a chain leaves from its tail, so whoever has a block has all before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["ShadowCache"]


class ShadowCache:
    """Prefix cache of `capacity` blocks as the engine would keep it, least recently used leaves first."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        # Digest -> when it was last used; oldest first. A chain is touched tail first, so its tail is the older end.
        self._used_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_s)

    def touch(self, digests: Sequence[bytes], now: float) -> tuple[list[bytes], list[bytes]]:
        """A prompt with this chain was computed: (blocks that are new, blocks that left)."""
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
        """Drop and return the blocks that were not used for the time to live."""
        removed = []
        while self._used_s and next(iter(self._used_s.values())) <= now - self._ttl_s:
            removed.append(self._used_s.popitem(last=False)[0])
        return removed
