"""Which block caches which digest, and which cached blocks come one after the other.

Everything but the digests themselves lies in numpy arrays by block, so that a run of a million tokens' blocks is added
or dropped in milliseconds. Digests are keys of one dictionary, which C code fills and empties.

A cached block has a parent if the digest before its own is cached, too. Otherwise it is the first of its chain, or an
orphan: the parent was evicted before it, and takes it back once it is cached again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Any, Final

import numpy as np

from tandem.engine.block_table import BlockTable

Array = np.ndarray[Any, Any]

NO_BLOCK: Final = -1
_NEVER = np.iinfo(np.int64).max
_FIRST_LOOK = 64  # digests looked up at once, at first


class CachedPrefix:
    """The leading blocks of a chain that were cached when it was last looked at. `BlockIndex.refresh` looks again."""

    __slots__ = ("blocks", "seen_at")

    def __init__(self) -> None:
        self.blocks = BlockTable()
        self.seen_at = 0  # drops that the index had counted


class BlockIndex:
    """The cached blocks out of `num_blocks`. Blocks of one call are distinct, and so are its digests."""

    def __init__(self, num_blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}  # by digest, in the order in which they were cached; only read it
        self._digest_of = np.full(num_blocks, None, dtype=object)
        self._cached_at = np.full(num_blocks, _NEVER, dtype=np.int64)  # drops counted when it was cached
        self._parents = np.full(num_blocks, NO_BLOCK, dtype=np.int32)
        self._num_children = np.zeros(num_blocks, dtype=np.int32)
        self._orphans: dict[bytes, set[int]] = {}  # by the digest that their parent had
        self._lost_parents: dict[int, bytes] = {}  # of each orphan
        self.num_drops = 0  # only read it

    def has_kept(self, block: int, since: int) -> bool:
        """Whether a block that was cached when `num_drops` was `since` was not dropped after that."""
        return bool(self._cached_at[block] <= since)

    def digest_of(self, block: int) -> bytes | None:
        """The digest of a block; None if it is not cached."""
        digest: bytes | None = self._digest_of[block]
        return digest

    def digests_of(self, blocks: Array) -> list[bytes]:
        """The digests of cached blocks."""
        return self._digest_of[blocks].tolist()  # type: ignore[no-any-return]

    def are_cached(self, blocks: Array) -> Array:
        """bool [n]: which of these blocks are cached."""
        return np.not_equal(self._cached_at[blocks], _NEVER)

    def branch(self, block: int, among: Array) -> list[int]:
        """A block without children, and its ancestors up to the first with others: as far as they are `among` these.

        `among` is bool [num_blocks].
        """
        parents, goes_on = self._parents.data, (among & (self._num_children == 1)).data
        if not among[block] or self._num_children[block]:
            return []
        blocks = [block]
        while (block := parents[block]) != NO_BLOCK and goes_on[block]:
            blocks.append(block)
        return blocks

    def leading(self, digests: Sequence[bytes], first: int = 0, end: int | None = None) -> Array:
        """The blocks of digests [first, end) up to the first that is not cached, int32 [n]."""
        end = len(digests) if end is None else end
        parts, size = list[Array](), _FIRST_LOOK
        while first < end and digests[first] in self.block_of:
            part = digests[first : min(first + size, end)]
            found = np.fromiter(map(self.block_of.get, part, repeat(NO_BLOCK)), dtype=np.int32, count=len(part))
            parts.append(found[: num_leading(found != NO_BLOCK)])
            first, size = first + len(part), 4 * size
            if len(parts[-1]) < len(part):
                break
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def refresh(self, prefix: CachedPrefix, digests: Sequence[bytes], end: int) -> None:
        """Make it the leading cached blocks of digests[:end]. What was seen before is looked up only if it changed."""
        if prefix.seen_at != self.num_drops:
            # A block that was cached at that time and was not dropped since still has the same digest.
            prefix.blocks.truncate(num_leading(self._cached_at[prefix.blocks.ids] <= prefix.seen_at))
            prefix.seen_at = self.num_drops
        prefix.blocks.truncate(end)
        num_seen = len(prefix.blocks)
        if num_seen < end and digests[num_seen] in self.block_of:
            prefix.blocks += self.leading(digests, num_seen, end)

    def add(self, block: int, digest: bytes, parent: bytes | None) -> bool:
        """Cache a block, unless it has a digest or another block has this one. `parent` is the digest before it."""
        if digest in self.block_of or self._digest_of[block] is not None:
            return False
        self._digest_of[block] = digest
        self.block_of[digest] = block
        self._cached_at[block] = self.num_drops
        self._join(block, parent)
        self._adopt(digest)
        return True

    def add_chain(self, blocks: Array, digests: Sequence[bytes], parent: bytes | None) -> list[bytes]:
        """`add` blocks that have no digests, whose digests follow each other behind `parent`. Returns what is new."""
        ids = blocks.tolist()
        found = list(map(self.block_of.setdefault, digests, ids))
        if found == ids:
            new, added, parents = blocks, list(digests), blocks[:-1]
        else:
            is_new = np.equal(found, blocks)
            new, added = blocks[is_new], list(compress(digests, is_new))
            parents = np.array(found, dtype=np.int32)[:-1][is_new[1:]]
        self._digest_of[new] = added
        self._cached_at[new] = self.num_drops
        self._parents[new[len(new) - len(parents) :]] = parents
        self._num_children[parents] += 1
        if len(new) > len(parents):  # the first one is new
            self._join(ids[0], parent)
        for digest in self._orphans.keys() & added if self._orphans else ():
            self._adopt(digest)
        return added

    def drop(self, block: int) -> bytes:
        """Forget a cached block. Returns its digest."""
        digest: bytes = self._digest_of[block]
        self._leave(block)
        if self._num_children[block]:
            self._bereave(self._parents == block)
            self._num_children[block] = 0
        self._digest_of[block] = None
        self._cached_at[block] = _NEVER
        del self.block_of[digest]
        self.num_drops += 1
        return digest

    def drop_run(self, blocks: Array) -> list[bytes]:
        """`drop` many. Returns their digests."""
        digests, parents = self.digests_of(blocks), self._parents[blocks]
        np.subtract.at(self._num_children, parents[parents != NO_BLOCK], np.int32(1))  # of one type: five times as fast
        for block in blocks[parents == NO_BLOCK].tolist():
            self._leave(block)
        self._parents[blocks] = NO_BLOCK
        with_children = blocks[self._num_children[blocks] > 0]
        if len(with_children):
            self._bereave(np.isin(self._parents, with_children))
            self._num_children[with_children] = 0
        self._digest_of[blocks] = None
        self._cached_at[blocks] = _NEVER
        deque(map(self.block_of.__delitem__, digests), maxlen=0)
        self.num_drops += 1
        return digests

    def check_integrity(self) -> None:
        """Raise AssertionError unless the maps agree."""
        cached = np.flatnonzero(self._cached_at != _NEVER).tolist()
        assert {self._digest_of[block]: block for block in cached} == self.block_of, "digest maps disagree"
        assert np.count_nonzero(self._digest_of) == len(cached), "a block that is not cached has a digest"
        parents = {block: parent for block, parent in enumerate(self._parents.tolist()) if parent != NO_BLOCK}
        assert parents.keys() | set(parents.values()) <= set(cached), "a block that is not cached has a family"
        children = dict(enumerate(self._num_children.tolist()))
        assert Counter(parents.values()) == Counter(children), "children are miscounted"
        orphans = {block: digest for digest, blocks in self._orphans.items() for block in blocks}
        assert orphans == self._lost_parents, "orphans disagree"
        assert orphans.keys() <= set(cached) - parents.keys(), "an orphan has a parent"
        assert self._orphans.keys().isdisjoint(self.block_of), "the parent of an orphan is cached"

    def _join(self, block: int, parent: bytes | None) -> None:
        """Note the parent of a newly cached block."""
        if parent is None:
            return
        holder = self.block_of.get(parent, NO_BLOCK)
        self._parents[block] = holder
        if holder == NO_BLOCK:
            self._orphans.setdefault(parent, set()).add(block)
            self._lost_parents[block] = parent
        else:
            self._num_children[holder] += 1

    def _leave(self, block: int) -> None:
        """Forget the parent of a block that is dropped."""
        parent = self._parents[block]
        if parent != NO_BLOCK:
            self._num_children[parent] -= 1
            self._parents[block] = NO_BLOCK
        elif (lost := self._lost_parents.pop(block, None)) is not None:
            self._orphans[lost].remove(block)
            if not self._orphans[lost]:
                del self._orphans[lost]

    def _bereave(self, is_child: Array) -> None:
        """Make orphans of blocks whose parents are dropped, while those still have their digests."""
        for block in np.flatnonzero(is_child).tolist():
            lost = self._lost_parents[block] = self._digest_of[self._parents[block]]
            self._orphans.setdefault(lost, set()).add(block)
            self._parents[block] = NO_BLOCK

    def _adopt(self, digest: bytes) -> None:
        """Give the orphans of a newly cached digest their parent."""
        orphans = self._orphans.pop(digest, None)
        if orphans is not None:
            block = self.block_of[digest]
            self._num_children[block] += len(orphans)
            for orphan in orphans:
                self._parents[orphan] = block
                del self._lost_parents[orphan]


def num_leading(is_so: Array) -> int:
    """How many leading elements of a bool array are true."""
    return len(is_so) if is_so.all() else int(is_so.argmin())
