"""The pool against a plain model: blocks in use stay, leaves are evicted first, no block counts twice."""

from __future__ import annotations

import random

from tandem.simulator.pool import Allocation, Pool


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{idx}".encode() for idx in range(length))


def allocate(pool: Pool, digests: tuple[bytes, ...], num_blocks: int) -> Allocation:
    blocks = pool.try_allocate(digests, len(digests), num_blocks)
    assert blocks is not None
    return blocks


def fill(pool: Pool, digests: tuple[bytes, ...]) -> None:
    """Compute a chain and end its use."""
    blocks = allocate(pool, digests, len(digests))
    pool.publish(blocks, len(digests))
    pool.release(blocks)


def test_leaves_go_first_and_the_least_recently_used_chain_before_others() -> None:
    pool = Pool(6)
    a, b = chain("a", 3), chain("b", 3)
    fill(pool, a)
    fill(pool, b)
    assert pool.take_events() == ([*a, *b], [])
    allocate(pool, chain("c", 2), 4)
    assert pool.take_events() == ([], [a[2], a[1], a[0], b[2]])
    assert pool.count_cached(b) == 2


def test_the_slower_of_two_equal_prompts_keeps_its_blocks_private() -> None:
    pool = Pool(10)
    a = chain("a", 3)
    first, second = allocate(pool, a, 4), allocate(pool, a, 4)
    pool.publish(first, 3)
    pool.publish(second, 3)
    assert pool.take_events() == (list(a), [])
    assert pool.num_in_use == 8
    pool.release(first)
    assert pool.num_in_use == 7  # the shared blocks, and four duplicates
    pool.release(second)
    pool.check_integrity()


def test_blocks_that_a_peer_read_go_first_unless_another_chain_needs_them() -> None:
    pool = Pool(8)
    shared = chain("s", 2)
    a, b = shared + chain("a", 2), shared + chain("b", 2)
    for digests in (chain("c", 2), a, b):
        fill(pool, digests)
    user = allocate(pool, a, 4)
    pool.demote(a)  # in use
    pool.demote(shared)  # both chains continue it
    pool.demote(b)
    pool.demote(chain("d", 1))  # not cached here
    pool.release(user)
    pool.take_events()
    allocate(pool, (), 3)
    assert pool.take_events() == ([], [b[3], b[2], b"c1"])


def test_counts_agree_through_random_use() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = Pool(40)
    chains = [chain(rng.choice("abc"), 8) + chain(f"{number}.", 6) for number in range(20)]
    known: set[bytes] = set()
    in_use: list[Allocation] = []
    num_refused = 0
    for _ in range(3000):
        if in_use and rng.random() < 0.5:
            blocks = in_use.pop(rng.randrange(len(in_use)))
            pool.publish(blocks, rng.randint(blocks.num_shared, len(blocks.digests)))
            pool.release(blocks)
        else:
            digests = rng.choice(chains)[: rng.randint(0, 14)]
            taken = pool.try_allocate(digests, rng.randint(0, len(digests)), len(digests) + rng.randint(0, 3))
            num_refused += taken is None
            in_use += [] if taken is None else [taken]
            pool.demote(rng.choice(chains)[: rng.randint(0, 14)])
        stored, removed = pool.take_events()
        assert not known & set(stored) - set(removed)
        known = (known - set(removed)) | set(stored) if not set(stored) & set(removed) else known
        shared = {digest for blocks in in_use for digest in blocks.digests[: blocks.num_shared]}
        assert pool.num_in_use == len(shared) + sum(blocks.num_private for blocks in in_use) <= pool.capacity
        assert all(pool.count_cached(blocks.digests) >= blocks.num_shared for blocks in in_use)
    assert num_refused > 10
    for blocks in in_use:
        pool.release(blocks)
    pool.check_integrity()
