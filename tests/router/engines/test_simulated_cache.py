from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.engines.simulated_cache import SimulatedCache


def chain(*names: str) -> list[bytes]:
    """The digests of a chain: each one contains all before it."""
    return ["/".join(names[: i + 1]).encode() for i in range(len(names))]


def test_the_tail_of_the_least_recently_used_chain_is_evicted_first() -> None:
    cache = SimulatedCache(capacity=4, ttl_s=100.0)
    assert cache.touch(chain("a", "b", "c"), 0.0) == (chain("a", "b", "c"), [])
    stored, removed = cache.touch(chain("x", "y"), 1.0)
    assert (stored, removed) == (chain("x", "y"), [b"a/b/c"])
    assert cache.touch(chain("a", "b"), 2.0) == ([], [])
    assert cache.touch(chain("q"), 3.0) == ([b"q"], [b"x/y"])


def test_blocks_not_used_for_the_time_to_live_expire() -> None:
    cache = SimulatedCache(capacity=10, ttl_s=5.0)
    cache.touch(chain("a", "b"), 0.0)
    cache.touch(chain("a"), 3.0)
    assert cache.expire(4.9) == []
    assert cache.expire(5.0) == [b"a/b"]
    assert cache.expire(8.0) == [b"a"]
    assert len(cache) == 0


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = SimulatedCache(capacity=2, ttl_s=5.0)
    assert cache.touch(chain("a", "b", "c"), 0.0) == (chain("a", "b"), [])
    assert SimulatedCache(capacity=0, ttl_s=5.0).touch(chain("a"), 0.0) == ([], [])


CHAINS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map(lambda names: chain(*names))


@given(st.integers(1, 8), st.lists(st.tuples(CHAINS, st.floats(0.0, 4.0)), max_size=40))
def test_changes_add_up_to_the_cache_without_holes(capacity: int, prompts: list[tuple[list[bytes], float]]) -> None:
    cache, held, now = SimulatedCache(capacity, ttl_s=6.0), set[bytes](), 0.0
    for digests, wait_s in prompts:
        now += wait_s
        stored, removed = cache.touch(digests, now)
        assert not held & set(stored)
        held = (held | set(stored)) - set(removed)
        assert len(held) == len(cache) <= capacity
        assert set(digests[:capacity]) <= held
        for digest in held:
            parent = digest.rpartition(b"/")[0]
            assert not parent or parent in held
