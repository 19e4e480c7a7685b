"""Every eviction policy: leaves first, pins kept, books in order; and the reference numbers of plain LRU."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from benchmarks.eviction import CAPACITIES, TRACES, load, token_hit_ratio
from kv_transfer.eviction import POLICIES, EvictionPolicy, create_policy
from protocol.errors import ConfigError

# Token hit ratio in %, by capacity in blocks of 512 tokens: published with the traces.
REFERENCE = {
    "mooncake_conversation_a": (4.05, 4.40, 5.35, 8.84, 17.61, 25.71, 32.32, 34.56, 34.65),
    "mooncake_synthetic_a": (1.27, 1.87, 4.01, 6.76, 13.62, 25.77, 32.21, 32.21, 32.21),
    "weka_replay512_a": (1.83, 7.62, 28.91, 65.67, 88.30, 94.03, 95.35, 95.62, 95.63),
}


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def chain(policy: EvictionPolicy, *keys: Hashable) -> None:
    """Add what is missing of a chain, root first, as a tier does."""
    for idx, key in enumerate(keys):
        if key not in policy:
            policy.add(key, keys[idx - 1] if idx else None)


def test_a_victim_is_a_leaf(name: str) -> None:
    policy = create_policy(name, 3)
    chain(policy, "a", "b", "c")
    for expected in ("c", "b", "a"):
        assert policy.victim() == expected
        policy.remove(expected)
    assert policy.victim() is None
    assert len(policy) == 0


def test_a_pin_keeps_a_key_and_its_ancestors(name: str) -> None:
    policy = create_policy(name, 4)
    chain(policy, "a", "b")
    chain(policy, "x")
    policy.pin("b")
    policy.pin("b")
    assert policy.victim() == "x"
    policy.remove("x")
    assert policy.victim() is None
    policy.unpin("b")
    assert policy.victim() is None
    policy.unpin("b")
    assert policy.victim() == "b"


def test_a_child_may_come_before_its_parent_and_outlive_it(name: str) -> None:
    policy = create_policy(name, 4)
    policy.add("child", "parent")
    policy.add("parent", None)
    assert policy.victim() == "child"
    policy.remove("parent")  # lost, not evicted
    policy.add("parent", None)
    assert policy.victim() == "child"


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = create_policy("lru", 4)
    chain(policy, "a", "b")
    chain(policy, "x", "y")
    policy.touch("b")
    assert policy.victim() == "y"


@pytest.mark.parametrize("name", ["s3-fifo", "lfu", "sieve", "arc"])
def test_what_is_used_again_outlives_a_scan(name: str) -> None:
    policy = create_policy(name, 20)
    chain(policy, "hot")
    for _ in range(3):
        policy.touch("hot")
    for number in range(200):
        policy.add(number, None)
        while len(policy) > 20:
            policy.remove(policy.victim())
        if number % 50 == 0 and "hot" in policy:
            policy.touch("hot")
    assert "hot" in policy


def test_what_was_popular_once_ages() -> None:
    policy = create_policy("lfu", 5)
    chain(policy, "old hit")
    for _ in range(50):
        policy.touch("old hit")
    for number in range(2000):
        policy.add(number, None)
        while len(policy) > 5:
            policy.remove(policy.victim())
    assert "old hit" not in policy


@pytest.mark.parametrize("seed", range(10))
def test_random_walks_never_break_a_rule(name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(f"{name}/{seed}")
    capacity = rng.randint(3, 30)
    policy = create_policy(name, capacity)
    parents: dict[Hashable, Hashable | None] = {}
    pins: dict[Hashable, int] = {}
    for _ in range(800):
        keys = [f"{rng.randrange(4)}/" + "".join(rng.choices("ab", k=depth)) for depth in range(rng.randint(1, 6))]
        branch = rng.choices("ab", k=6)
        keys = [f"{rng.randrange(4)}/{''.join(branch[:depth])}" for depth in range(len(keys))]
        keys = [f"{keys[0][0]}{key[1:]}" for key in keys]
        depth = next((idx for idx, key in enumerate(keys) if key not in policy), len(keys))
        if depth:
            policy.touch(keys[depth - 1])
        for idx in range(depth, len(keys)):
            if keys[idx] not in policy:
                parents[keys[idx]] = keys[idx - 1] if idx else None
                policy.add(keys[idx], parents[keys[idx]])
        if parents and rng.random() < 0.3:
            key = rng.choice(sorted(parents, key=str))
            pins[key] = pins.get(key, 0) + 1
            policy.pin(key)
        if pins and rng.random() < 0.5:
            key = rng.choice(sorted(pins, key=str))
            policy.unpin(key)
            pins[key] -= 1
            if not pins[key]:
                del pins[key]
        while len(policy) > capacity and (victim := policy.victim()) is not None:
            assert victim not in parents.values(), f"{victim} has a resident child"
            assert victim not in pins, f"{victim} is pinned"
            policy.remove(victim)
            del parents[victim]
        assert set(policy) == parents.keys()
        assert len(policy) == len(parents)
        if len(policy) > capacity:
            leaves = parents.keys() - set(parents.values())
            assert leaves <= pins.keys(), "there was something to evict"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"random.*lru"):
        create_policy("random", 5)


@pytest.mark.parametrize("capacity", [500, 4000, 16000])
def test_lru_gives_the_reference_numbers(capacity: int) -> None:
    trace = "mooncake_synthetic_a"
    expected = REFERENCE[trace][CAPACITIES.index(capacity)]
    measured = token_hit_ratio(create_policy("lru", capacity), load(trace))
    assert round(100 * measured, 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_lru_gives_all_reference_numbers(trace: str) -> None:
    requests = load(trace)
    for capacity, expected in zip(CAPACITIES, REFERENCE[trace], strict=True):
        assert round(100 * token_hit_ratio(create_policy("lru", capacity), requests), 2) == expected, capacity
