from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.engine.block_lru import BlockLru

NUM_BLOCKS = 5

some_blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


class LruMachine(RuleBasedStateMachine):
    """A log of few blocks, whose ends are reached all the time, beside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lru, self.expected = BlockLru(NUM_BLOCKS), list[int]()

    @rule(blocks=some_blocks, is_oldest=st.booleans())
    def add(self, blocks: list[int], is_oldest: bool) -> None:
        new = [block for block in blocks if block not in self.expected]
        (self.lru.add_oldest if is_oldest else self.lru.add)(ids(new))
        self.expected = new + self.expected if is_oldest else self.expected + new

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def add_one(self, block: int) -> None:
        if block not in self.expected:
            self.lru.add_one(block)
            self.expected.append(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def remove_one(self, block: int) -> None:
        assert (block in self.lru) == (block in self.expected)
        if block in self.expected:
            self.lru.remove_one(block)
            self.expected.remove(block)

    @rule(blocks=some_blocks)
    def discard(self, blocks: list[int]) -> None:
        self.lru.discard(ids(blocks))
        self.expected = [block for block in self.expected if block not in blocks]

    @rule(count=st.integers(0, NUM_BLOCKS))
    def pop(self, count: int) -> None:
        count = min(count, len(self.expected))
        assert self.lru.pop(count).tolist() == self.expected[:count]
        del self.expected[:count]

    @rule()
    def pop_one(self) -> None:
        if self.expected:
            assert self.lru.pop_one() == self.expected.pop(0)

    @invariant()
    def agrees(self) -> None:
        assert list(self.lru) == self.expected
        assert len(self.lru) == len(self.expected)
        assert np.flatnonzero(self.lru.members).tolist() == sorted(self.expected)


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(stateful_step_count=70)


def test_what_was_removed_is_passed_over_however_long_it_is() -> None:
    lru = BlockLru(1000)
    for _ in range(20):  # each round leaves its entries behind
        lru.add(np.arange(1, 1000, dtype=np.int32))
        lru.add_one(0)
        lru.discard(np.arange(1, 900, dtype=np.int32))
        assert lru.pop(100).tolist() == [*range(900, 1000), 0][:100]
        assert lru.pop_one() == 0
        assert len(lru) == 0
