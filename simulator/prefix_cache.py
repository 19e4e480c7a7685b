"""A private LRU cache of prompt blocks, outside any block pool: host memory, or a whole worker in reference runs."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kv_transfer.eviction.lru import LRU


class PrefixCache:
    """`capacity` blocks. The least recently used leaf is evicted first, so a prefix of every chain remains."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks = LRU(max(capacity, 1))

    def count(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks held."""
        return next((idx for idx, digest in enumerate(digests) if digest not in self._blocks), len(digests))

    def store(self, digests: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Use a prompt's blocks and add the missing ones. Returns those stored and those evicted."""
        num_held = self.count(digests)
        if num_held:
            self._blocks.touch(digests[num_held - 1])
        for idx in range(num_held, len(digests)):
            self._blocks.add(digests[idx], digests[idx - 1] if idx else None)
        removed: list[bytes] = []
        while len(self._blocks) > self._capacity:
            victim = self._blocks.victim()
            assert isinstance(victim, bytes), f"{len(self._blocks)} blocks, none pinned, and no victim"
            self._blocks.remove(victim)
            removed.append(victim)
        return [digest for digest in digests[num_held:] if digest in self._blocks], removed
