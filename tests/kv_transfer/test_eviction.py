from __future__ import annotations

import itertools
import os
import pickle
import random
from collections import Counter

import pytest

from tandem.kv_transfer.eviction import POLICIES, EvictionPolicy
from tandem.kv_transfer.eviction.hit_density import HitDensity
from tandem.kv_transfer.eviction.lru import LRU
from tests.support.trace_replay import CAPACITIES, TRACES, load, load_ends, optimal, replay

SEED = int(os.environ.get("TEST_SEED", "0"))

# Token hit ratios (%) that an independent implementation of LRU gives for these traces at CAPACITIES.
LRU_REFERENCE = {
    "mooncake_conversation_a": [4.05, 4.40, 5.35, 8.84, 17.61, 25.71, 32.32, 34.56, 34.65],
    "mooncake_synthetic_a": [1.27, 1.87, 4.01, 6.76, 13.62, 25.77, 32.21, 32.21, 32.21],
    "weka_replay512_a": [1.83, 7.62, 28.91, 65.67, 88.30, 94.03, 95.35, 95.62, 95.63],
}


def store(policy: EvictionPolicy, *keys: object) -> None:
    """Use a chain: resident keys are its hit, the others are added, root first."""
    parent = None
    hits = [key for key in keys if key in policy]
    if hits:
        policy.touch(hits[-1])
    for key in keys:
        if key not in policy:
            policy.add(key, parent)
        parent = key


def evict(policy: EvictionPolicy, count: int) -> list[object]:
    victims: list[object] = []
    for _ in range(count):
        victim = policy.victim()
        if victim is not None:
            policy.remove(victim)
        victims.append(victim)
    return victims


class Model:
    """A naive model of the resident and pinned keys."""

    def __init__(self) -> None:
        self.parent_of: dict[object, object] = {}
        self.pins: Counter[object] = Counter()

    def evictable(self) -> set[object]:
        parents = set(self.parent_of.values())
        return {key for key in self.parent_of if key not in parents and not self.pins[key]}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_any_sequence_of_calls_keeps_the_forest(name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    policy, model = POLICIES[name](30), Model()
    tree = {key: rng.randrange(key) if key and rng.random() < 0.9 else None for key in range(200)}
    num_stuck = 0
    for step in range(3000):
        key = rng.choice(list(tree))
        action = rng.random()
        if key not in model.parent_of:
            policy.add(key, tree[key])
            model.parent_of[key] = tree[key]
            if step // 500 % 2:  # a time in which new keys are in use, until there are only pinned ones
                policy.pin(key)
                model.pins[key] += 1
        elif action < 0.5:
            policy.touch(key)
        elif action < 0.6:
            policy.pin(key)
            model.pins[key] += 1
        elif action < 0.8 and model.pins[key]:
            policy.unpin(key)
            model.pins[key] -= 1
        elif action < 0.85:
            policy.note_end(key, has_calls=rng.random() < 0.5)
        elif action < 0.9:
            policy.demote(key)
        elif action > 0.95:
            policy.remove(key)
            del model.parent_of[key], model.pins[key]
        for _ in range(len(policy) - 30):
            victim = policy.victim()
            assert victim == policy.victim(), "asking changes the answer"
            if victim is None:
                num_stuck += 1
                assert not model.evictable()
                break
            assert victim in model.evictable()
            policy.remove(victim)
            del model.parent_of[victim]
        assert set(policy) == set(model.parent_of)
        policy.check_integrity()
    assert num_stuck > 0
    for key, count in model.pins.items():
        for _ in range(count):
            policy.unpin(key)
    assert None not in evict(policy, len(policy))
    assert len(policy) == 0
    policy.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_bookkeeping_is_bounded(name: str) -> None:
    """Ghosts, heaps and runs stay small: neither new keys nor uses of one key make them grow."""
    policy = POLICIES[name](50)
    sizes = []
    for idx in range(12_000):
        store(policy, f"{idx}a", f"{idx}b")
        policy.touch(f"{idx}b")
        evict(policy, len(policy) - 50)
        if idx in (5999, 11_999):
            sizes.append(len(pickle.dumps(policy)))
    assert sizes[1] <= 1.1 * sizes[0]
    for _ in range(12_000):
        policy.touch("11999b")
    assert len(pickle.dumps(policy)) <= 2 * sizes[0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_tier_without_room_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        POLICIES[name](0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_demoted_chain_is_evicted_first_up_to_its_branch_with_what_comes_later(name: str) -> None:
    policy = POLICIES[name](20)
    for chain in ("ab", "cde", "cfg", "hij"):
        store(policy, *chain)
    policy.demote("g")
    policy.demote("c")  # others go on from it
    policy.add("k", "g")  # the end of the answer was written after the demotion
    policy.pin("j")
    policy.demote("j")
    assert policy.victim() == "k"
    policy.pin("k")
    assert policy.victim() not in set("kgf")
    policy.unpin("k")
    assert evict(policy, 3) == ["k", "g", "f"]
    assert set(evict(policy, 4)) == set("abcde") - {policy.victim()}


@pytest.mark.parametrize("name", POLICIES)
def test_a_hit_ends_a_demotion(name: str) -> None:
    policy = POLICIES[name](20)
    store(policy, *"abc")
    store(policy, *"de")
    policy.demote("c")
    store(policy, *"abcx")
    policy.demote("e")
    assert evict(policy, 2) == ["e", "d"]


def test_lru_evicts_chains_in_the_order_of_their_last_use() -> None:
    policy = LRU(9)
    store(policy, "a1", "a2", "a3")
    store(policy, "b1", "b2")
    store(policy, "a1", "a2")
    assert evict(policy, 5) == ["a3", "b2", "b1", "a2", "a1"]


def test_hit_density_knows_the_turn_of_an_evicted_conversation() -> None:
    policy = HitDensity(10)
    store(policy, "a")
    store(policy, "a", "b")
    evict(policy, 2)
    store(policy, "a", "b")
    assert policy._nodes["b"].num_uses == 2


def test_hit_density_ranks_by_recency_before_it_has_seen_anything() -> None:
    policy = HitDensity(10)
    for key in range(10):
        store(policy, key)
    assert evict(policy, 10) == list(range(10))


def test_hit_density_evicts_a_conversation_that_ended_its_turn_before_one_that_called_a_tool() -> None:
    """Learned, not assumed: where those that end their turn are the ones that come back, it is the other way round."""
    for returns_after_calls in (True, False):
        policy = HitDensity(10)
        for number in range(300):
            has_calls = number % 2 == 0
            store(policy, f"{number}a")
            policy.note_end(f"{number}a", has_calls=has_calls)
            if has_calls == returns_after_calls:
                store(policy, f"{number}a", f"{number}b")
            evict(policy, len(policy))
        for name, has_calls in (("called", True), ("ended", False)):
            store(policy, name)
            policy.note_end(name, has_calls=has_calls)
        first, second = ("ended", "called") if returns_after_calls else ("called", "ended")
        assert evict(policy, 2) == [first, second]


def test_hit_density_knows_how_soon_an_agent_comes_back() -> None:
    policy = HitDensity(10)
    store(policy, "a")
    for idle, pace in ((3, 1), (20, 3), (6, 1), (7, 2), (40, 4)):
        for number in range(idle):
            store(policy, f"{idle} {number}")
            policy.remove(f"{idle} {number}")
        policy.touch("a")
        policy.note_end("a", has_calls=True)
        assert policy._nodes["a"].run.pace == pace, idle


def test_the_end_of_a_turn_says_nothing_of_a_key_with_later_turns() -> None:
    policy = HitDensity(10)
    store(policy, "a", "b")
    before = policy._nodes["a"].queue
    policy.note_end("a", has_calls=True)
    assert policy._nodes["a"].queue == before


def test_ends_that_are_all_alike_change_nothing() -> None:
    """Traffic without agents pays nothing for what tells them apart."""
    requests = load(TRACES[1])[:1000]
    plain, told = (replay(requests, HitDensity(1000), 1000, ends) for ends in ("", "e" * 1000))
    assert plain == told > 0


def test_known_ends_find_more_of_agents() -> None:
    requests, ends = load("weka_replay512_a")[:1000], load_ends("weka_replay512_a")[:1000]
    plain, told = (replay(requests, HitDensity(500), 500, known) for known in ("", ends))
    assert told > plain + 0.02


QUICK = [(TRACES[0], 500), (TRACES[0], 4000), (TRACES[1], 1000), (TRACES[1], 16_000)]


@pytest.mark.parametrize(
    ("trace", "capacity"),
    [
        one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow)
        for one in itertools.product(TRACES, CAPACITIES)
    ],
)
def test_lru_equals_the_reference(trace: str, capacity: int) -> None:
    assert round(100 * replay(load(trace), LRU(capacity), capacity), 2) == _reference(trace, capacity)


def test_the_default_beats_lru_and_not_the_optimum() -> None:
    requests = load("mooncake_conversation_a")
    found = replay(requests, HitDensity(4000), 4000)
    assert _reference("mooncake_conversation_a", 4000) + 1 < 100 * found < 100 * optimal(requests, 4000)


def _reference(trace: str, capacity: int) -> float:
    return LRU_REFERENCE[trace][CAPACITIES.index(capacity)]
