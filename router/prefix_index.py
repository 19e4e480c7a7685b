"""Which worker has which cached blocks, kept from the block events of all workers.

Knows digests and worker ids only. Digests are chained, so a worker that holds block i of a prompt holds all blocks
before it (workers evict the tail of a chain first): the longest prefix is found by bisection, for all workers at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protocol.messages import BlockEvents, BlockSnapshot

__all__ = ["PrefixIndex"]

SPECULATIVE_TTL_S = 2.0


@dataclass(eq=False, slots=True)
class _Holder:
    """What the index knows of one worker. `bit` is its place in every mask; it is reused after the worker left."""

    worker_id: str
    bit: int
    epoch: int
    sequence: int = 0
    is_synced: bool = True
    num_blocks: int = 0


class PrefixIndex:
    """Digest -> bit mask of the workers that hold it.

    One mask per digest instead of one set per worker: a block that many workers hold is stored once, and one lookup
    answers for all of them. The price is a pass over the whole index when a worker leaves or sends a snapshot.
    """

    def __init__(self, *, speculative_ttl_s: float = SPECULATIVE_TTL_S) -> None:
        self._masks: dict[bytes, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._holder_of_bit: dict[int, _Holder] = {}
        # Speculative entries live in two generations; a whole one is dropped at a time, so an entry lives between
        # half the ttl and the ttl and needs no timer of its own.
        self._generation_s = speculative_ttl_s / 2
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._young_since_s = 0.0

    def __len__(self) -> int:
        return len(self._masks)

    def num_blocks(self, worker_id: str) -> int:
        """Number of blocks the worker is known to hold."""
        holder = self._holders.get(worker_id)
        return holder.num_blocks if holder else 0

    def add_worker(self, worker_id: str, epoch: int) -> None:
        """Start to follow a worker, from event 1 of this epoch. Forgets an earlier epoch of it."""
        self.remove_worker(worker_id)
        bit = 1
        while bit in self._holder_of_bit:
            bit <<= 1
        self._holders[worker_id] = self._holder_of_bit[bit] = _Holder(worker_id, bit, epoch)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all its blocks; unknown ids are ignored."""
        holder = self._holders.pop(worker_id, None)
        if holder is None:
            return
        self._clear(holder)
        for generation in (self._young, self._old):
            _clear_bit(generation, holder.bit)
        del self._holder_of_bit[holder.bit]

    def apply(self, events: BlockEvents) -> bool:
        """Apply one message of events. Returns whether the worker must be asked for a snapshot.

        It must when a message is missing (and until the snapshot came) or the epoch is newer than the known one.
        Duplicates, older epochs and unknown workers are ignored. A digest in both lists counts as stored.
        """
        holder = self._holders.get(events.holder)
        if holder is None or events.epoch < holder.epoch:
            return False
        if events.epoch > holder.epoch:
            self._begin_epoch(holder, events.epoch)
            holder.is_synced = False
            return True
        if events.sequence <= holder.sequence:
            return False
        if not holder.is_synced or events.sequence != holder.sequence + 1:
            holder.is_synced = False
            return True
        holder.sequence = events.sequence
        self._remove(holder, events.removed)
        self._store(holder, events.stored)
        return False

    def apply_snapshot(self, snapshot: BlockSnapshot) -> None:
        """Replace what is known of the worker, unless something newer is known already."""
        holder = self._holders.get(snapshot.holder)
        if holder is None or snapshot.epoch < holder.epoch:
            return
        if snapshot.epoch > holder.epoch:
            self._begin_epoch(holder, snapshot.epoch)
        elif holder.is_synced and snapshot.sequence < holder.sequence:
            return
        self._clear(holder)
        self._store(holder, snapshot.digests)
        holder.sequence = snapshot.sequence
        holder.is_synced = True

    def speculate(self, worker_ids: Iterable[str], digests: Sequence[bytes], now: float) -> None:
        """Count the blocks of a prompt that was just routed as held by these workers, for a short while.

        Its siblings, arriving before the first block event, then see the decision and follow it.
        """
        self._expire(now)
        bits = 0
        for worker_id in worker_ids:
            if (holder := self._holders.get(worker_id)) is not None:
                bits |= holder.bit
        if not bits:
            return
        young = self._young
        for digest in digests:
            young[digest] = young.get(digest, 0) | bits

    def longest_prefix(self, digests: Sequence[bytes], now: float) -> dict[str, int]:
        """Number of leading blocks each worker holds; workers that hold none are left out."""
        self._expire(now)
        masks, young, old = self._masks, self._young, self._old
        depths: dict[str, int] = {}
        # Open questions: the workers of `mask` hold at least `low` and at most `high` leading blocks.
        open_ranges = [(0, len(digests), sum(self._holder_of_bit))]
        while open_ranges:
            low, high, mask = open_ranges.pop()
            if not mask or high == 0:
                continue
            if low == high:
                depths.update((self._holder_of_bit[bit].worker_id, low) for bit in _bits(mask))
                continue
            middle = (low + high + 1) // 2
            digest = digests[middle - 1]
            holding = mask & (masks.get(digest, 0) | young.get(digest, 0) | old.get(digest, 0))
            open_ranges.append((middle, high, holding))
            open_ranges.append((low, middle - 1, mask & ~holding))
        return depths

    def count_held(self, worker_id: str, digests: Sequence[bytes]) -> int:
        """Number of leading blocks the worker has said it holds: what is only expected of it does not count."""
        holder = self._holders.get(worker_id)
        if holder is None:
            return 0
        bit, masks = holder.bit, self._masks
        return bisect_left(range(len(digests)), True, key=lambda idx: not masks.get(digests[idx], 0) & bit)

    def _begin_epoch(self, holder: _Holder, epoch: int) -> None:
        self._clear(holder)
        holder.epoch = epoch
        holder.sequence = 0

    def _store(self, holder: _Holder, digests: Iterable[bytes]) -> None:
        masks, bit = self._masks, holder.bit
        for digest in digests:
            mask = masks.get(digest, 0)
            if not mask & bit:
                masks[digest] = mask | bit
                holder.num_blocks += 1

    def _remove(self, holder: _Holder, digests: Iterable[bytes]) -> None:
        masks, bit = self._masks, holder.bit
        for digest in digests:
            mask = masks.get(digest, 0)
            if not mask & bit:
                continue
            holder.num_blocks -= 1
            if mask == bit:
                del masks[digest]
            else:
                masks[digest] = mask & ~bit

    def _clear(self, holder: _Holder) -> None:
        if holder.num_blocks:
            _clear_bit(self._masks, holder.bit)
            holder.num_blocks = 0

    def _expire(self, now: float) -> None:
        age_s = now - self._young_since_s
        if age_s < self._generation_s:
            return
        self._old = self._young if age_s < 2 * self._generation_s else {}
        self._young = {}
        self._young_since_s = now


def _clear_bit(masks: dict[bytes, int], bit: int) -> None:
    """Take one worker out of every mask, in place."""
    for digest in [digest for digest, mask in masks.items() if mask & bit]:
        if masks[digest] == bit:
            del masks[digest]
        else:
            masks[digest] &= ~bit


def _bits(mask: int) -> Iterator[int]:
    """The single set bits of a mask."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
