"""Neighbours in the pool are neighbours in a sequence; nothing but the order of its blocks depends on it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.block_pool import BlockPool
from tandem.kv_transfer.transport.base import block_runs
from tests.support.plain_pool import PlainPool
from tests.support.used_pools import UsedPools

NUM_BLOCKS = 64
CHAINS = [[bytes([name, place]) * 8 for place in range(50)] for name in range(4)]


class UnorderedPool(PlainPool):
    """Hands blocks out in the order in which it frees and evicts them."""

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_available:
            return None
        return [self._take() for _ in range(num_blocks)]


class Prompts:
    """The prompts of one pool: what happens to each does not depend on which blocks it has."""

    def __init__(self, pool: BlockPool | PlainPool) -> None:
        self.pool = pool
        self.held: list[list[int]] = []
        self.outcomes: list[object] = []

    def take(self, chain: int, num_blocks: int) -> None:
        """Take what is cached, allocate the rest, publish all but the last block."""
        digests = CHAINS[chain][:num_blocks]
        cached = self.pool.acquire_cached(digests)
        fresh = self.pool.try_allocate(num_blocks - len(cached))
        self.outcomes.append((len(cached), fresh is None))
        blocks = [*cached, *(fresh or [])]
        self.pool.publish_chain(blocks[:-1], digests, 0)
        self.held.append(blocks)

    def release(self, which: int, num_kept: int) -> None:
        if self.held:
            blocks = self.held.pop(which % len(self.held))
            self.pool.release(blocks[num_kept:])
            self.held += [blocks[:num_kept]] if blocks[:num_kept] else []

    def pin(self, chain: int, num_blocks: int) -> None:
        self.pool.pin(CHAINS[chain][:num_blocks])

    def unpin(self, chain: int, num_blocks: int) -> None:
        self.pool.unpin(CHAINS[chain][:num_blocks])

    def demote(self, chain: int, place: int) -> None:
        self.pool.demote(CHAINS[chain][place - 1])


calls = st.tuples(
    st.sampled_from(["take", "take", "release", "release", "pin", "unpin", "demote"]),
    st.integers(0, len(CHAINS) - 1),
    st.integers(1, 50),
)


@given(st.lists(calls, max_size=60))
def test_what_is_cached_and_evicted_and_when_does_not_depend_on_the_order_of_blocks(
    made: list[tuple[str, int, int]],
) -> None:
    ordered, unordered = Prompts(BlockPool(NUM_BLOCKS)), Prompts(UnorderedPool(NUM_BLOCKS))
    for name, which, count in made:
        for one in (ordered, unordered):
            getattr(one, name)(which, count)
            one.outcomes.append((one.pool.take_events(), one.pool.num_free, one.pool.num_available))
        assert ordered.outcomes == unordered.outcomes
        ordered.pool.check_integrity()


@given(st.lists(calls, max_size=40), st.integers(1, NUM_BLOCKS))
def test_an_allocation_has_only_unused_blocks_free_ones_first_in_ascending_order(
    made: list[tuple[str, int, int]], num_blocks: int
) -> None:
    world = Prompts(BlockPool(NUM_BLOCKS))
    for name, which, count in made:
        getattr(world, name)(which, count)
    pool = world.pool
    used = set(itertools.chain.from_iterable(world.held))
    num_free, num_cached = pool.num_free, len(pool.cached_digests())
    blocks = pool.try_allocate(num_blocks)
    if blocks is None:
        assert num_blocks > NUM_BLOCKS - len(used)
        return
    assert blocks == sorted(set(blocks))
    assert used.isdisjoint(blocks)
    assert num_cached - len(pool.cached_digests()) == max(num_blocks - num_free, 0)
    pool.check_integrity()


def num_descriptors(pools: UsedPools) -> tuple[int, int]:
    """(blocks, descriptors) of the prompts 200 to 300: by then each block has been evicted several times."""
    pairs = list(itertools.islice(pools.handoffs(), 200, 300))
    return sum(len(local) for local, _ in pairs), sum(len(block_runs(*pair)) for pair in pairs)


def test_a_handoff_between_used_pools_has_few_descriptors() -> None:
    num_blocks, num_runs = num_descriptors(UsedPools(BlockPool, answer_tokens=20))
    same_blocks, num_unordered = num_descriptors(UsedPools(UnorderedPool, answer_tokens=20))
    assert num_blocks == same_blocks, "the same prefixes are cached"
    assert num_unordered > 0.7 * num_blocks
    assert num_runs < 0.4 * num_unordered


def test_a_pool_without_two_free_neighbours_still_hands_out_all_it_has() -> None:
    pool = BlockPool(NUM_BLOCKS)
    blocks = pool.try_allocate(NUM_BLOCKS)
    assert blocks is not None
    pool.release(blocks[::2])
    assert pool.try_allocate(NUM_BLOCKS // 2 + 1) is None
    scattered = pool.try_allocate(NUM_BLOCKS // 2)
    assert scattered == blocks[::2]
    assert len(block_runs(scattered, scattered)) == NUM_BLOCKS // 2
    pool.check_integrity()
