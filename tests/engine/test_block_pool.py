from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.block_index import CachedPrefix
from tandem.engine.block_pool import BlockPool
from tests.support.work_count import num_lines_run


def digest(i: int) -> bytes:
    return bytes([i]) * 16


def chain(pool: BlockPool, *names: int, after: int | None = None) -> list[int]:
    """Allocate and publish one block per name, as a chain."""
    blocks = pool.try_allocate(len(names))
    assert blocks is not None
    parent = None if after is None else digest(after)
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, digest(name), parent)
        parent = digest(name)
    return blocks


def evicted_order(pool: BlockPool) -> list[int]:
    """Names in the order in which allocations evict them; leaves the pool full."""
    order = []
    pool.take_events()
    while pool.try_allocate(1):
        order += [removed[0] for removed in pool.take_events()[1]]
    return order


def test_fresh_blocks_come_in_order() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(3) == [0, 1, 2]
    pool.release([0, 1, 2])
    assert pool.try_allocate(4) == [0, 1, 2, 3]
    pool.check_integrity()


def pool_of_two_chains() -> BlockPool:
    """The blocks of digests 1 to 3, released before those of 4 to 6."""
    pool = BlockPool(6)
    old, new = chain(pool, 1, 2, 3), chain(pool, 4, 5, 6)
    pool.release(old)
    pool.release(new)
    return pool


def test_evicts_tail_blocks_first_and_the_oldest_chain_before() -> None:
    pool = pool_of_two_chains()
    assert evicted_order(pool) == [3, 2, 1, 6, 5, 4]


def test_a_hit_makes_a_chain_recent_again() -> None:
    pool = pool_of_two_chains()
    pool.release(pool.acquire_cached([digest(1), digest(2)]))
    assert evicted_order(pool) == [3, 6, 5, 4, 2, 1]


@pytest.mark.parametrize("misuse", ["release", "publish"])
def test_using_a_block_without_a_reference_is_a_bug(misuse: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0"):
        pool.release([0]) if misuse == "release" else pool.publish(0, digest(1))


def test_idle_check_finds_a_leak() -> None:
    pool = BlockPool(2)
    pool.try_allocate(1)
    with pytest.raises(AssertionError, match="still have users"):
        pool.check_integrity(idle=True)


def test_a_digest_that_came_and_went_between_two_looks_is_listed_once_by_how_it_ended() -> None:
    pool = BlockPool(2)
    pool.release(chain(pool, 1, 2))
    pool.release(chain(pool, 3))  # evicts 2
    pool.release(chain(pool, 2, after=1))  # evicts 1
    assert pool.take_events() == ([digest(2), digest(3)], [digest(1)])
    assert pool.take_events() == ([], [])
    pool.release(chain(pool, 4, 5))
    assert pool.take_events() == ([digest(4), digest(5)], [digest(3), digest(2)])


def test_pinned_blocks_are_evicted_last_and_leaves_first() -> None:
    pool = pool_of_two_chains()
    pool.pin([digest(1), digest(2)])
    assert (pool.num_available, pool.num_used) == (6, 0)
    pool.check_integrity(idle=True)
    assert evicted_order(pool) == [3, 6, 5, 4, 2, 1]


def test_a_longer_pin_keeps_the_order_of_its_chain() -> None:
    pool = BlockPool(4)
    pool.release(chain(pool, 1, 2, 3, 4))
    pool.pin([digest(1), digest(2)])
    pool.pin([digest(1), digest(2), digest(3), digest(4)])
    assert evicted_order(pool) == [4, 3, 2, 1]


def test_a_pin_waits_for_its_block_and_outlives_it() -> None:
    pool = BlockPool(3)
    pool.pin([digest(1)])
    for _ in range(2):
        pool.release(chain(pool, 1))
        pool.release(chain(pool, 2))
        pool.release(chain(pool, 3))
        assert evicted_order(pool) == [2, 3, 1]
        pool.release([0, 1, 2])
    pool.check_integrity(idle=True)


def test_an_unpinned_block_is_the_most_recent_one() -> None:
    pool = BlockPool(3)
    pool.release(chain(pool, 1))
    pool.pin([digest(1)])
    pool.release(chain(pool, 2, 3))
    pool.unpin([digest(1), digest(9)])
    assert pool.pinned_digests() == set()
    assert evicted_order(pool) == [3, 2, 1]


def test_a_block_from_which_another_chain_hangs_is_not_demoted() -> None:
    pool = BlockPool(6)
    pool.release([*chain(pool, 1, 2), *chain(pool, 3, after=2)])
    pool.release([*pool.acquire_cached([digest(1), digest(2)]), *chain(pool, 4, 5, after=2)])
    pool.release(chain(pool, 6))
    pool.demote(digest(2))  # followed by others
    pool.demote(digest(5))
    assert evicted_order(pool) == [5, 4, 3, 2, 1, 6]


@pytest.mark.parametrize("keep", ["use", "pin"])
def test_a_demotion_stops_where_a_block_is_used_or_pinned(keep: str) -> None:
    pool = BlockPool(5)
    pool.release(chain(pool, 5))
    pool.release(chain(pool, 1, 2, 3, 4))
    (pool.acquire_cached if keep == "use" else pool.pin)([digest(1), digest(2)])
    pool.demote(digest(2))
    pool.demote(digest(9))
    pool.demote(digest(4))
    assert evicted_order(pool) == [4, 3, 5, *([2, 1] if keep == "pin" else [])]


def test_a_hit_on_a_demoted_chain_makes_it_recent() -> None:
    pool = BlockPool(4)
    pool.release(chain(pool, 1, 2))
    pool.release(chain(pool, 3, 4))
    pool.demote(digest(4))
    pool.release(pool.acquire_cached([digest(3), digest(4)]))
    assert evicted_order(pool) == [2, 1, 4, 3]


def parent_of(name: int) -> int:
    """Names form a tree below 0."""
    return (name - 1) // 2


class PoolMachine(RuleBasedStateMachine):
    """The pool against a naive model: lists of held blocks and a map from names to blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.names: dict[int, int] = {}  # block -> name while cached
        self.subscriber: set[bytes] = set()
        self.pinned: set[int] = set()  # names

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        users = Counter(block for blocks in self.held for block in blocks)
        blocks = self.pool.try_allocate(count)
        assert (blocks is not None) is (count <= 6 - len(users))
        if blocks is None:
            return
        assert len(set(blocks)) == count
        assert not set(blocks) & set(users)
        unnamed = {block for block in range(6) if block not in users and block not in self.names}
        assert len(unnamed & set(blocks)) == min(count, len(unnamed)), "evicted while free blocks were left"
        evicted = {self.names.pop(block) for block in blocks if block in self.names}
        unpinned = {name for block, name in self.names.items() if block not in users} - self.pinned
        assert not (evicted & self.pinned and unpinned), "a pinned block went before one that is not"
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 9))
    def publish(self, data: st.DataObject, name: int) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.publish(block, digest(name), digest(parent_of(name)) if name else None)
            if name not in self.names.values():
                self.names.setdefault(block, name)

    @rule(names=st.lists(st.integers(0, 9), unique=True, max_size=4))
    def acquire(self, names: list[int]) -> None:
        by_name = {name: block for block, name in self.names.items()}
        expected = []
        for name in names:
            if name not in by_name:
                break
            expected.append(by_name[name])
        assert self.pool.count_cached([digest(name) for name in names]) == len(expected)
        assert self.pool.acquire_cached([digest(name) for name in names]) == expected
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(names=st.lists(st.integers(0, 9), unique=True, max_size=4), is_pinned=st.booleans())
    def pin(self, names: list[int], is_pinned: bool) -> None:
        (self.pool.pin if is_pinned else self.pool.unpin)([digest(name) for name in names])
        self.pinned = self.pinned | set(names) if is_pinned else self.pinned - set(names)
        assert self.pool.pinned_digests() == {digest(name) for name in self.pinned}

    @rule(name=st.integers(0, 9))
    def demote(self, name: int) -> None:
        blocks = {name: block for block, name in self.names.items()}
        kept = {block for held in self.held for block in held} | {blocks[n] for n in self.pinned & set(blocks)}
        demoted: list[int] = []
        before = list(self.pool._evictable)
        self.pool.demote(digest(name))
        while blocks.get(name) not in (None, *kept) and all(
            child in demoted for child in blocks if child and parent_of(child) == name
        ):
            demoted.append(name)
            name = parent_of(name) if name else -1
        first = [blocks[name] for name in demoted]
        assert list(self.pool._evictable) == [*first, *(block for block in before if block not in first)]

    @rule()
    def take_events(self) -> None:
        stored, removed = self.pool.take_events()
        assert not set(stored) & set(removed)
        self.subscriber = (self.subscriber | set(stored)) - set(removed)
        assert self.subscriber == set(self.pool.cached_digests())

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert set(self.pool.cached_digests()) == {digest(name) for name in self.names.values()}
        assert self.pool.num_used == len({block for blocks in self.held for block in blocks})

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        self.pool.check_integrity(idle=True)


TestPoolMachine = PoolMachine.TestCase


def test_blocks_in_use_are_told_from_those_only_cached() -> None:
    pool = BlockPool(8)
    digests = [bytes([idx]) * 16 for idx in range(4)]
    blocks = pool.try_allocate(4)
    assert blocks is not None
    pool.publish_chain(blocks, digests, 0)
    other = pool.acquire_cached(digests[:2])
    ids = np.array(blocks)
    assert (pool.count_used(ids), pool.count_own(blocks), pool.count_own(other)) == (4, 2, 0)
    pool.release(blocks)
    assert (pool.count_used(ids), pool.count_own(other), pool.count_own([])) == (2, 2, 0)
    pool.release(other)
    assert (pool.count_used(ids), pool.count_cached(digests)) == (0, 4)


def many(count: int) -> list[bytes]:
    return [idx.to_bytes(16, "big") for idx in range(count)]


@pytest.mark.parametrize("name", ["allocate", "evict", "publish", "release", "acquire", "share"])
def test_a_long_run_takes_as_many_steps_of_python_as_a_short_one(name: str) -> None:
    def lines(count: int) -> int:
        pool, digests = BlockPool(count), many(count)
        blocks = pool.try_allocate(count)
        assert blocks is not None
        if name == "allocate":
            pool.release(blocks)
        elif name != "publish":
            pool.publish_chain(blocks, digests, 0)
        if name in ("evict", "acquire"):
            pool.release(blocks)
        calls: dict[str, Callable[[], object]] = {
            "publish": lambda: pool.publish_chain(blocks, digests, 0),
            "release": lambda: pool.release(blocks),
            "acquire": lambda: pool.acquire_cached(digests),
            "share": lambda: pool.share(blocks),
        }
        num_lines = num_lines_run(calls.get(name, lambda: pool.try_allocate(count)))
        pool.check_integrity()
        return num_lines

    assert lines(20_000) <= lines(50) + 80


class CountedDigests(Sequence[bytes]):
    """A chain that counts how many of its digests are read."""

    def __init__(self, digests: list[bytes]) -> None:
        self.digests, self.num_read = digests, 0

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, key: Any) -> Any:
        found = self.digests[key]
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_remembered_prefix_is_looked_up_only_where_it_changed() -> None:
    pool, digests = BlockPool(1000), CountedDigests(many(900))
    blocks, other = pool.try_allocate(800), pool.try_allocate(200)
    assert blocks is not None
    assert other is not None
    pool.publish_chain(blocks, digests.digests, 0)
    prefix = CachedPrefix()

    def num_read(end: int = 900) -> int:
        digests.num_read = 0
        pool.refresh(prefix, digests, end)
        assert len(prefix.blocks) == pool.count_cached(digests.digests[:end])
        return digests.num_read

    assert num_read() >= 801
    assert num_read() == 1, "whether it grew"
    pool.publish_chain(other[:50], digests.digests, 800)
    assert 51 <= num_read() <= 110
    pool.release(other)
    assert pool.try_allocate(200) is not None  # evicts blocks 800 to 850
    assert num_read() == 1
    assert len(prefix.blocks) == 800
    assert num_read(700) == 0
    assert num_read() >= 101, "the end was forgotten"
