"""The pool beside one that treats each block alone: equal answers, equal order of eviction, equal events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.block_index import CachedPrefix
from tandem.engine.block_pool import BlockPool
from tests.support.plain_pool import PlainPool

LENGTH = 45


def chain(name: int, start: Sequence[bytes] = ()) -> list[bytes]:
    return [*start, *(bytes([name, place]) * 8 for place in range(len(start), LENGTH))]


TRUNK = chain(0)
TWIG = chain(1, TRUNK[:20])
CHAINS = [TRUNK, TWIG, chain(2, TRUNK[:20]), chain(3, TWIG[:33]), chain(4, TRUNK[:1]), chain(5)]

chains = st.sampled_from(CHAINS)
places = st.integers(0, LENGTH)


class BothPools(RuleBasedStateMachine):
    """Each call goes to both. Pieces of every length come in any order, so bulk and single forms meet each other."""

    @initialize(num_blocks=st.sampled_from([3, 20, 30, 60]))
    def begin(self, num_blocks: int) -> None:
        self.pool, self.plain = BlockPool(num_blocks), PlainPool(num_blocks)
        self.held: list[list[int]] = []
        self.prefixes = {idx: CachedPrefix() for idx in range(len(CHAINS))}

    def both(self, name: str, *args: Any) -> Any:
        answer, expected = getattr(self.pool, name)(*args), getattr(self.plain, name)(*args)
        assert answer == expected, f"{name}{args}: {answer}, not {expected}"
        return answer

    @rule(count=st.integers(0, 61))
    def allocate(self, count: int) -> None:
        blocks = self.both("try_allocate", count)
        if blocks:
            self.held.append(blocks)

    @rule(digests=chains, end=places)
    def prefill(self, digests: list[bytes], end: int) -> None:
        """As a prompt does: take what is cached, compute the rest and publish it."""
        cached = self.both("acquire_cached", digests[:end])
        fresh = self.both("try_allocate", end - len(cached))
        self.held.append([*cached, *(fresh or [])])
        self.both("publish_chain", fresh or [], digests, len(cached))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), digests=chains, first=places, parent=st.sampled_from([None, b"elsewhere" * 2, TRUNK[3]]))
    def publish_any(self, data: st.DataObject, digests: list[bytes], first: int, parent: bytes | None) -> None:
        """Blocks that have digests already, digests that others have, parents that are not cached."""
        blocks = data.draw(st.sampled_from(self.held))[: LENGTH - first]
        self.both("publish_chain", blocks, digests, first, parent)

    @rule(digests=chains, end=places)
    def acquire(self, digests: list[bytes], end: int) -> None:
        blocks = self.both("acquire_cached", digests[:end])
        if blocks:
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.both("share", blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), split=places)
    def release(self, data: st.DataObject, split: int) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.both("release", blocks[split:])
        if blocks[:split]:
            self.held.append(blocks[:split])

    @precondition(lambda self: self.held)
    @rule()
    def release_all(self) -> None:
        while self.held:
            self.both("release", self.held.pop())

    @rule(digests=chains, first=places, end=places, is_pinned=st.booleans())
    def pin(self, digests: list[bytes], first: int, end: int, is_pinned: bool) -> None:
        self.both("pin" if is_pinned else "unpin", digests[first:end])

    @rule(digests=chains, place=st.integers(0, LENGTH - 1))
    def demote(self, digests: list[bytes], place: int) -> None:
        self.both("demote", digests[place])

    @rule(which=st.integers(0, len(CHAINS) - 1), end=places)
    def look(self, which: int, end: int) -> None:
        """A prefix that is remembered from any earlier time."""
        digests, prefix = CHAINS[which], self.prefixes[which]
        expected = self.both("count_cached", digests[:end])
        self.pool.refresh(prefix, digests, end)
        assert list(prefix.blocks) == [self.both("block_of", digest) for digest in digests[:expected]]
        assert self.pool.count_used(prefix.blocks.ids) == self.plain.count_used(digests[:end])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def count_own(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        ended = data.draw(st.lists(st.sampled_from(self.held), max_size=2))
        num_ended = Counter(block for one in ended for block in one)
        as_array = np.array([num_ended[block] for block in range(self.pool.num_blocks)])
        assert self.pool.count_own(blocks, as_array) == self.plain.count_own(blocks, num_ended)
        assert self.pool.count_own(blocks) == self.plain.count_own(blocks)
        for block in blocks:
            self.both("is_shared", block)

    @rule()
    def take_events(self) -> None:
        self.both("take_events")

    @invariant()
    def both_are_in_one_state(self) -> None:
        self.pool.check_integrity(idle=not self.held)
        assert list(self.pool._evictable) == list(self.plain._evictable)
        assert list(self.pool._kept) == list(self.plain._kept)
        assert self.pool.num_evicted == self.plain.num_evicted
        assert self.pool._ref_counts.tolist() == self.plain._ref_counts
        for name in ("num_available", "num_free", "num_used"):
            assert getattr(self.pool, name) == getattr(self.plain, name), name
        self.both("cached_digests")
        self.both("pinned_digests")


TestBothPools = BothPools.TestCase
TestBothPools.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize("name", ["release", "share", "publish_chain"])
def test_a_long_run_without_a_reference_is_a_bug(name: str) -> None:
    pool = BlockPool(100)
    blocks = pool.try_allocate(50)
    assert blocks is not None
    arguments = ([bytes([i]) * 16 for i in range(51)], 0) if name == "publish_chain" else ()
    with pytest.raises(AssertionError, match="block 77 is"):
        getattr(pool, name)([*blocks, 77], *arguments)
