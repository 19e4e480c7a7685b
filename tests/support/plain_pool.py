"""The paged pool's bookkeeping in its plainest form, one block at a time: what `BlockPool` must answer and evict."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

_NONE: Mapping[int, int] = {}


class PlainPool:
    """Reference counts, prefix cache and leaf-first LRU over `num_blocks` blocks.

    Every digest that becomes or ceases to be cached is appended to the pending events, in order; `take_events` returns
    them for publishing.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"num_blocks={num_blocks}"
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.num_evicted = {"unused": 0, "pinned": 0}
        self._kept: OrderedDict[int, None] = OrderedDict()  # likewise
        self._pinned: set[bytes] = set()  # cached or not
        self._ref_counts = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}  # for cached digests
        self._num_children: Counter[bytes] = Counter()  # cached children, by digest, whether cached itself or not
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get now, evicting unused ones."""
        return len(self._free) + len(self._evictable) + len(self._kept)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could get without evicting any."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - self.num_available

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block is cached under this digest."""
        return digest in self._block_of

    def block_of(self, digest: bytes) -> int | None:
        """The block cached under this digest. It stays cached until the next allocation."""
        return self._block_of.get(digest)

    def cached_digests(self) -> list[bytes]:
        """All digests cached now: a snapshot for a listener that missed events."""
        return list(self._block_of)

    def count_cached(self, digests: Sequence[bytes]) -> int:
        """How many leading digests are cached. Changes nothing."""
        for count, digest in enumerate(digests):
            if digest not in self._block_of:
                return count
        return len(digests)

    def count_used(self, digests: Sequence[bytes]) -> int:
        """How many leading digests are cached in used blocks: sharing those takes no room in the pool."""
        for count, digest in enumerate(digests):
            block = self._block_of.get(digest)
            if block is None or self._ref_counts[block] == 0:
                return count
        return len(digests)

    def count_own(self, blocks: Sequence[int], num_ended: Mapping[int, int] = _NONE) -> int:
        """How many blocks only this sequence uses: they become available when it ends.

        `num_ended` says how many users of a block are to be taken for gone. Sequences share a prefix, so its end is
        found by bisection.
        """

        def is_own(block: int) -> bool:
            return self._ref_counts[block] - num_ended.get(block, 0) == 1

        if not blocks or is_own(blocks[0]):
            return len(blocks)
        return len(blocks) - bisect_left(blocks, True, key=is_own)

    def acquire_cached(self, digests: Sequence[bytes]) -> list[int]:
        """Take a reference on the leading cached blocks of a chain and return their ids."""
        blocks = [self._block_of[digest] for digest in digests[: self.count_cached(digests)]]
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._unused(block)[block]
            self._ref_counts[block] += 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of these used blocks."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is shared but has no user"
            self._ref_counts[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether a block has several users. Then none of them may write to it."""
        return self._ref_counts[block] > 1

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` private blocks with one reference each, ascending; None, and no change, if there is no room."""
        if num_blocks > self.num_available:
            return None
        return sorted(self._take() for _ in range(num_blocks))

    def publish(self, block: int, digest: bytes, parent: bytes | None = None) -> None:
        """Make a full, computed block findable. If another block caches the same content, this copy stays private.

        `parent` is the digest of the block before it.
        """
        assert self._ref_counts[block] > 0, f"block {block} is published without a user"
        if digest in self._block_of or block in self._digest_of:
            return
        self._digest_of[block] = digest
        self._block_of[digest] = block
        if parent is not None:
            self._parent_of[digest] = parent
            self._num_children[parent] += 1
        self._stored.append(digest)

    def publish_chain(
        self, blocks: Iterable[int], digests: Sequence[bytes], first: int, parent: bytes | None = None
    ) -> None:
        """`publish` consecutive blocks, from digest number `first` on. `digests` begin after `parent`."""
        for idx, block in enumerate(blocks, first):
            self.publish(block, digests[idx], digests[idx - 1] if idx else parent)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference on each block. Pass a sequence's blocks in order; they are released tail first."""
        for block in reversed(list(blocks)):
            assert self._ref_counts[block] > 0, f"block {block} is released but has no user"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._digest_of:
                    self._unused(block)[block] = None
                else:
                    self._free.append(block)

    def demote(self, digest: bytes) -> None:
        """Evict this block before all others, and its ancestors up to the first with other children.

        A block that is used, pinned or has children is left alone, and so are its ancestors.
        """
        blocks: list[int] = []
        cached: bytes | None = digest
        while cached is not None and self._num_children[cached] == min(len(blocks), 1):
            block = self._block_of.get(cached)
            if block is None or block not in self._evictable:
                break
            blocks.append(block)
            cached = self._parent_of.get(cached)
        for block in reversed(blocks):
            self._evictable.move_to_end(block, last=False)

    def pin(self, digests: Sequence[bytes]) -> None:
        """Evict the blocks of these digests, given in chain order, after all others, also if they are cached later.

        A second pin of a digest only makes its block recent again.
        """
        for digest in reversed(digests):  # tail first, as for `release`
            block = self._block_of.get(digest)
            if block is not None and self._ref_counts[block] == 0:
                del self._unused(block)[block]
                self._kept[block] = None
            self._pinned.add(digest)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these digests; others are ignored."""
        pinned = [digest for digest in digests if digest in self._pinned]
        for digest in reversed(pinned):
            block = self._block_of.get(digest)
            if block is not None and self._ref_counts[block] == 0:
                del self._kept[block]
                self._evictable[block] = None
            self._pinned.remove(digest)

    def pinned_digests(self) -> set[bytes]:
        """A copy of all pinned digests, cached or not."""
        return set(self._pinned)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, disjoint: each digest is listed by its current state."""
        changed = dict.fromkeys((*self._stored, *self._removed))
        self._stored, self._removed = [], []
        stored = [digest for digest in changed if digest in self._block_of]
        removed = [digest for digest in changed if digest not in self._block_of]
        return stored, removed

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            self.num_evicted["unused" if self._evictable else "pinned"] += 1
            block, _ = (self._evictable or self._kept).popitem(last=False)
            digest = self._digest_of.pop(block)
            del self._block_of[digest]
            self._forget_parent(digest)
            self._removed.append(digest)
        self._ref_counts[block] = 1
        return block

    def _forget_parent(self, digest: bytes) -> None:
        parent = self._parent_of.pop(digest, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]

    def _unused(self, block: int) -> OrderedDict[int, None]:
        """The place of a cached block while it has no user."""
        return self._kept if self._digest_of[block] in self._pinned else self._evictable
