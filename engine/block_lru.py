"""Blocks in the order of their last use, as a log in one array: a thousand blocks are added in one numpy call.

    log     · · · · 7 6 5 x x 2 1 9 · · · ·        x: a block that was removed, or added again further right
                    ^head           ^tail
    place of block 7 = head, of block 9 = tail - 1

An entry counts if it lies at its block's place. So removing a block only forgets its place, and what is passed by
later is the entry. The log has three times the room of all blocks: when one end is reached, the entries that count are
moved to the middle. This takes one pass after at least as many additions as there are blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

_NOWHERE: Final = -1
_WINDOW = 64  # entries looked at first by `pop`


class BlockLru:
    """An ordered set of blocks out of `num_blocks`, least recently used first. Blocks of one call are distinct."""

    def __init__(self, num_blocks: int) -> None:
        self._middle = num_blocks
        self._log = np.empty(3 * num_blocks, dtype=np.int32)
        self._places = np.full(num_blocks, _NOWHERE, dtype=np.int32)
        # The same memory: reading one element takes a third of the time of numpy's.
        self._log_items, self._place_items = self._log.data, self._places.data
        self._head = self._tail = self._middle
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(self._live().tolist())

    def __contains__(self, block: int) -> bool:
        return self._place_items[block] != _NOWHERE

    @property
    def members(self) -> Array:
        """bool [num_blocks]: which blocks are in it."""
        return np.not_equal(self._places, _NOWHERE)

    def add(self, blocks: Array) -> None:
        """Add blocks that are not in it; the last of them becomes the most recent one."""
        if self._tail + len(blocks) > len(self._log):
            self._compact()
        self._put(self._tail, blocks)
        self._tail += len(blocks)

    def add_one(self, block: int) -> None:
        """`add` for one block."""
        if self._tail == len(self._log):
            self._compact()
        self._log_items[self._tail] = block
        self._place_items[block] = self._tail
        self._tail += 1
        self._size += 1

    def add_oldest(self, blocks: Array) -> None:
        """Add blocks that are not in it; the first of them becomes the least recent one."""
        if self._head < len(blocks):
            self._compact()
        self._head -= len(blocks)
        self._put(self._head, blocks)

    def discard(self, blocks: Array) -> None:
        """Take out those of these blocks that are in it."""
        if self._size:
            self._size -= int(np.count_nonzero(self._places[blocks] != _NOWHERE))
            self._places[blocks] = _NOWHERE
            self._note_removal()

    def remove_one(self, block: int) -> None:
        """Take out a block that is in it."""
        self._place_items[block] = _NOWHERE
        self._size -= 1
        self._note_removal()

    def pop(self, num_blocks: int) -> Array:
        """Take out the `num_blocks` least recent ones, in order. There must be as many."""
        parts, num_missing, window = [np.empty(0, dtype=np.int32)], num_blocks, max(2 * num_blocks, _WINDOW)
        while num_missing:
            end = min(self._head + window, self._tail)
            entries = self._log[self._head : end]
            found = np.flatnonzero(self._places[entries] == np.arange(self._head, end))[:num_missing]
            parts.append(entries[found])
            num_missing -= len(found)
            self._head = end if num_missing else self._head + int(found[-1]) + 1
            window *= 2
        popped = np.concatenate(parts)
        self._places[popped] = _NOWHERE
        self._size -= num_blocks
        self._note_removal()
        return popped

    def pop_one(self) -> int:
        """`pop` for one block."""
        places, log, head = self._place_items, self._log_items, self._head
        while places[block := log[head]] != head:
            head += 1
        places[block] = _NOWHERE
        self._head = head + 1
        self._size -= 1
        self._note_removal()
        return block

    def _put(self, place: int, blocks: Array) -> None:
        self._log[place : place + len(blocks)] = blocks
        self._places[blocks] = np.arange(place, place + len(blocks))
        self._size += len(blocks)

    def _live(self) -> Array:
        entries = self._log[self._head : self._tail]
        live: Array = entries[self._places[entries] == np.arange(self._head, self._tail)]
        return live

    def _compact(self) -> None:
        live = self._live()
        self._head, self._tail, self._size = self._middle, self._middle + len(live), 0
        self._put(self._middle, live)

    def _note_removal(self) -> None:
        if not self._size:
            self._head = self._tail = self._middle
