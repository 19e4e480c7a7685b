"""Which worker has which cached blocks, kept from the block events of all workers.

Knows digests and worker ids only. Digests are chained, so a worker that holds block i of a prompt holds all blocks
before it (workers evict the tail of a chain first). So bisection finds the longest prefix, for all workers at once.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.protocol.digest import split_digests
from tandem.protocol.messages import BlockEvents, BlockSnapshot

SPECULATIVE_TTL_S = 2.0
MAX_KNOWN_MASKS = 65_536  # few masks occur: most blocks are held by one worker or by the two of a handoff


@dataclass(eq=False, slots=True)
class _Holder:
    """One worker in the index. `bit` is its bit in every mask; it is reused after the worker left."""

    bit: int
    epoch: int
    sequence: int = 0
    is_synced: bool = True
    num_parts: int = 0  # leading parts of a snapshot that have come, while the others have not
    num_blocks: int = 0


class PrefixIndex:
    """Digest -> bit mask of the workers that hold it.

    With one mask per digest, not one set per worker, a block that many workers hold is stored once, and one lookup
    answers for all of them. The price is a pass over the whole index when a worker leaves or sends a snapshot.
    """

    def __init__(self, *, speculative_ttl_s: float = SPECULATIVE_TTL_S) -> None:
        self._masks: dict[bytes, int] = {}
        self._known_masks: dict[int, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._worker_ids: dict[int, str] = {}  # by the position of the worker's bit
        self._everyone = 0  # the mask of all workers
        # Speculative entries are in two generations, and a whole generation is dropped at a time: an entry lives
        # between half the TTL and the TTL, and needs no timer of its own.
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
        """Follow a worker from event 1 of this epoch on. Forgets its earlier epoch."""
        self.remove_worker(worker_id)
        place = next(place for place in itertools.count() if place not in self._worker_ids)
        self._worker_ids[place] = worker_id
        holder = self._holders[worker_id] = _Holder(1 << place, epoch)
        self._everyone |= holder.bit

    def remove_worker(self, *worker_ids: str) -> None:
        """Forget workers and all their blocks, in one pass; unknown ids are ignored."""
        holders = [self._holders.pop(worker_id) for worker_id in worker_ids if worker_id in self._holders]
        bits = sum(holder.bit for holder in holders)
        for masks in (self._masks, self._young, self._old):
            _clear_bits(masks, bits)
        for holder in holders:
            del self._worker_ids[holder.bit.bit_length() - 1]
        self._everyone ^= bits

    def apply(self, events: BlockEvents) -> bool:
        """Apply one message of events. Returns whether the worker must be asked for a snapshot.

        A snapshot is needed when a message is missing, until it comes, or when the epoch is newer than the known one.
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
        self._remove(holder, split_digests(events.removed))
        self._store(holder, split_digests(events.stored))
        return False

    def apply_snapshot(self, snapshot: BlockSnapshot) -> bool:
        """Replace the worker's blocks, unless newer events are known already. Returns whether no part is to come.

        The parts of a snapshot come in order. Once one is missing, the others are ignored: it must be asked for again.
        """
        holder = self._holders.get(snapshot.holder)
        if holder is None or snapshot.epoch < holder.epoch:
            return snapshot.is_last
        if snapshot.epoch > holder.epoch:
            self._begin_epoch(holder, snapshot.epoch)
            holder.is_synced = False
        if holder.is_synced and snapshot.sequence < holder.sequence:
            return snapshot.is_last
        if snapshot.part not in (0, holder.num_parts):
            holder.num_parts = 0
            return False
        if snapshot.part == 0:
            self._clear(holder)
        self._store(holder, split_digests(snapshot.digests))
        holder.sequence = snapshot.sequence
        holder.is_synced = snapshot.is_last
        holder.num_parts = 0 if snapshot.is_last else snapshot.part + 1
        return snapshot.is_last

    def speculate(self, worker_ids: Iterable[str], digests: Sequence[bytes], now: float) -> None:
        """Count the blocks of a prompt that was just routed as held by these workers, for a short time.

        Requests with the same prefix that arrive before the first block event then follow the decision.
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
        # Open ranges: the workers of `mask` hold at least `low` and at most `high` leading blocks.
        open_ranges = [(0, len(digests), self._everyone)] if self._everyone else []
        while open_ranges:
            low, high, mask = open_ranges.pop()
            while low < high:
                # Most workers hold no part of a prompt: its first block rules them out.
                middle = (low + high + 1) // 2 if low else 1
                digest = digests[middle - 1]
                holding = mask & (masks.get(digest, 0) | young.get(digest, 0) | old.get(digest, 0))
                # `holding` have [middle, high] leading blocks, the others of `mask` have [low, middle - 1].
                if holding == mask:
                    low = middle
                    continue
                if holding:
                    open_ranges.append((middle, high, holding))
                    mask ^= holding
                high = middle - 1
            if low and not mask & (mask - 1):  # one worker, the usual case
                depths[self._worker_ids[mask.bit_length() - 1]] = low
            elif low:
                depths.update((self._worker_ids[place], low) for place in _places(mask))
        return depths

    def count_held(self, worker_id: str, digests: Sequence[bytes], at_most: int) -> int:
        """Number of leading blocks the worker has reported to hold; speculative blocks do not count.

        `at_most` is the result of `longest_prefix`, and nearly always the answer.
        """
        holder = self._holders.get(worker_id)
        if holder is None:
            return 0
        bit, masks = holder.bit, self._masks
        if at_most and masks.get(digests[at_most - 1], 0) & bit:
            return at_most
        return bisect_left(range(at_most), True, key=lambda idx: not masks.get(digests[idx], 0) & bit)

    def _begin_epoch(self, holder: _Holder, epoch: int) -> None:
        self._clear(holder)
        holder.epoch = epoch
        holder.sequence = holder.num_parts = 0

    def _store(self, holder: _Holder, digests: Iterable[bytes]) -> None:
        masks, bit = self._masks, holder.bit
        for digest in digests:
            mask = masks.get(digest, 0)
            if not mask & bit:
                masks[digest] = self._one_object(mask | bit)
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
                masks[digest] = self._one_object(mask ^ bit)

    def _one_object(self, mask: int) -> int:
        """An equal mask that all blocks share: an int object of its own would take a third of an entry's memory."""
        if len(self._known_masks) >= MAX_KNOWN_MASKS:
            self._known_masks.clear()
        return self._known_masks.setdefault(mask, mask)

    def _clear(self, holder: _Holder) -> None:
        if holder.num_blocks:
            _clear_bits(self._masks, holder.bit)
            holder.num_blocks = 0

    def _expire(self, now: float) -> None:
        age_s = now - self._young_since_s
        if age_s < self._generation_s:
            return
        self._old = self._young if age_s < 2 * self._generation_s else {}
        self._young = {}
        self._young_since_s = now


def _clear_bits(masks: dict[bytes, int], bits: int) -> None:
    """Remove workers from every mask, in place."""
    if not bits:
        return
    for digest, rest in [(digest, mask & ~bits) for digest, mask in masks.items() if mask & bits]:
        if rest:
            masks[digest] = rest
        else:
            del masks[digest]


def _places(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first. Searching a large mask as text is faster than shifting it."""
    bits = f"{mask:b}"[::-1]
    place = bits.find("1")
    while place >= 0:
        yield place
        place = bits.find("1", place + 1)
