"""Which blocks a tier has, which of them are pinned, and which are evicted next. Knows no bytes and no threads.

A block enters in two steps: `try_reserve` gives it room, `publish` says its bytes are stored. `forget` ends either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.tiers.base import BlockName

_RECONCILED_AT_ONCE = 512  # blocks of a scan that are compared with the index in one go: at most a few milliseconds


@dataclass(eq=False, slots=True)
class StoredBlock:
    """A stored block. A load keeps its blocks, so that it sees which were forgotten meanwhile."""

    name: BlockName
    seen_in: int  # number of the last scan that found it, or during which it was written
    is_forgotten: bool = False


class BlockIndex:
    """At most `capacity` blocks, those being written included. Owns `policy`."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        assert capacity > 0, f"capacity_blocks={capacity}"
        self.capacity = capacity
        self.num_evictions = 0
        self._policy = policy
        self._blocks: dict[bytes, StoredBlock] = {}
        self._pinned: set[bytes] = set()  # there or not
        self._changed: dict[bytes, None] = {}  # digests whose presence changed since they were last taken
        self._num_scans = 0
        self._is_scanning = False
        self._gone: set[bytes] = set()  # forgotten since the last scan began; that scan may still have found them

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block is stored."""
        return digest in self._blocks

    def digests(self) -> list[bytes]:
        """All stored blocks."""
        return list(self._blocks)

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks are stored."""
        for count, digest in enumerate(digests):
            if digest not in self._blocks:
                return count
        return len(digests)

    def use(self, digests: Sequence[bytes]) -> list[StoredBlock]:
        """Note a hit on these blocks, a stored chain, and keep them until `end_use`."""
        blocks = [self._blocks[digest] for digest in digests]
        if blocks:
            self._policy.touch(blocks[-1].name.digest)
            for block in blocks:
                self._policy.pin(block.name.digest)
        return blocks

    def end_use(self, blocks: Iterable[StoredBlock]) -> None:
        """Undo `use`."""
        for block in blocks:
            if not block.is_forgotten:
                self._policy.unpin(block.name.digest)

    def note_end(self, digests: Sequence[bytes], *, has_calls: bool, is_demoted: bool = False) -> None:
        """Note how the answer at the end of this chain ended. Blocks of it that come later belong to it too.

        `is_demoted`: its client is done with the chain, so it is evicted first.
        """
        deepest = next((digest for digest in reversed(digests) if digest in self._policy), None)
        if deepest is not None:
            self._policy.note_end(deepest, has_calls=has_calls)
            if is_demoted:
                self._policy.demote(deepest)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these blocks from eviction until `unpin`, also those stored later; a second pin changes nothing."""
        for digest in digests:
            if digest not in self._pinned and digest in self._blocks:
                self._policy.pin(digest)
            self._pinned.add(digest)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these blocks; others are ignored."""
        for digest in digests:
            if digest in self._pinned and digest in self._blocks:
                self._policy.unpin(digest)
            self._pinned.discard(digest)

    def pinned_digests(self) -> set[bytes]:
        """A copy of all pinned digests, there or not."""
        return set(self._pinned)

    def try_reserve(self, name: BlockName) -> list[BlockName] | None:
        """Make room for a block and keep it. The blocks to delete; None if all others are in use or worth more."""
        evicted = self._try_admit(name)
        if evicted is not None:
            self._policy.pin(name.digest)
        return evicted

    def cancel(self, name: BlockName) -> None:
        """Undo `try_reserve`: the block was not written."""
        self._policy.remove(name.digest)

    def publish(self, name: BlockName) -> None:
        """A reserved block is there now."""
        self._policy.unpin(name.digest)
        self._add(name)

    def forget(self, block: StoredBlock) -> None:
        """Note that the block is gone. Pins of its loads end with it. A second call does nothing."""
        if block.is_forgotten:
            return
        block.is_forgotten = True
        digest = block.name.digest
        if self._is_scanning:
            self._gone.add(digest)
        self._policy.remove(digest)
        del self._blocks[digest]
        self._changed[digest] = None

    def try_evict(self) -> list[BlockName]:
        """Forget one block, if there is one that may go; the caller deletes it."""
        victim = self._victim()
        return [] if victim is None else [self._evict(victim)]

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, disjoint: each digest is listed by its current state."""
        changed, self._changed = self._changed, {}
        stored = [digest for digest in changed if digest in self._blocks]
        removed = [digest for digest in changed if digest not in self._blocks]
        return stored, removed

    def begin_scan(self) -> None:
        """The store is being scanned from now on."""
        self._is_scanning = True
        self._num_scans += 1
        self._gone.clear()

    def end_scan(self) -> None:
        """The scan was reconciled, or failed."""
        self._is_scanning = False

    def reconcile(self, found: Sequence[BlockName], delete: Callable[[list[BlockName]], None]) -> Iterator[None]:
        """Bring the index in line with a scan, a piece at a time; `delete` is called with blocks to delete.

        `found` has parents before the blocks that hang from them, so that no block stays whose parent had to go.
        """
        for count, name in enumerate(found, 1):
            if deleted := self._adopt(name):
                delete(deleted)
            if count % _RECONCILED_AT_ONCE == 0:
                yield
        for count, block in enumerate(list(self._blocks.values()), 1):
            if block.seen_in < self._num_scans:
                self.forget(block)
            if count % _RECONCILED_AT_ONCE == 0:
                yield

    def check_integrity(self, writing: Iterable[bytes]) -> None:
        """Raise AssertionError unless blocks, the digests being written and the policy agree."""
        for digest, block in self._blocks.items():
            assert block.name.digest == digest, f"{digest.hex()} is filed as {block}"
            assert not block.is_forgotten, f"{block} is still in the index"
        writing = set(writing)
        assert not self._blocks.keys() & writing, "a stored block is being written"
        known = self._blocks.keys() | writing
        assert known == set(self._policy), f"the policy has {len(self._policy)} blocks and the tier {len(known)}"
        assert len(known) <= self.capacity, f"{len(known)} blocks, but there is room for {self.capacity}"

    def _adopt(self, name: BlockName) -> list[BlockName]:
        """Add a block that a scan has found. Returns blocks to delete."""
        if name.digest in self._blocks:
            self._blocks[name.digest].seen_in = self._num_scans
        if name.digest in self._policy or name.digest in self._gone:
            return []
        has_lost_parent = name.parent in self._gone and name.parent not in self._policy
        evicted = None if has_lost_parent else self._try_admit(name)
        if evicted is None:
            self.num_evictions += 1
            self._gone.add(name.digest)
            return [name]
        self._add(name)
        return evicted

    def _add(self, name: BlockName) -> None:
        self._blocks[name.digest] = StoredBlock(name, self._num_scans)
        if name.digest in self._pinned:
            self._policy.pin(name.digest)
        self._changed[name.digest] = None

    def _try_admit(self, name: BlockName) -> list[BlockName] | None:
        self._policy.add(name.digest, name.parent)
        if len(self._policy) <= self.capacity:
            return []
        victim = self._victim()
        if victim is None or victim == name.digest:
            self._policy.remove(name.digest)
            return None
        return [self._evict(victim)]

    def _victim(self) -> bytes | None:
        digest = self._policy.victim()
        assert digest is None or isinstance(digest, bytes), f"{digest!r} is not a digest"
        return digest

    def _evict(self, digest: bytes) -> BlockName:
        block = self._blocks[digest]
        self.forget(block)
        self.num_evictions += 1
        return block.name
