from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

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


def pool_of_two_chains() -> BlockPool:
    """The blocks of digests 1 to 3, released before those of 4 to 6."""
    pool = BlockPool(6)
    old, new = chain(pool, 1, 2, 3), chain(pool, 4, 5, 6)
    pool.release(old)
    pool.release(new)
    return pool


@pytest.mark.parametrize("again", ["", "hit", "pin"])
def test_evicts_tail_blocks_first_and_the_oldest_chain_before(again: str) -> None:
    pool = pool_of_two_chains()
    if again == "hit":
        pool.release(pool.acquire_cached([digest(1), digest(2)]))
    elif again == "pin":
        pool.pin([digest(1), digest(2)])
    assert (pool.num_available, pool.num_used) == (6, 0)
    pool.check_integrity(idle=True)
    assert evicted_order(pool) == ([3, 6, 5, 4, 2, 1] if again else [3, 2, 1, 6, 5, 4])


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
