from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem.protocol.digest import block_digests, join_digests
from tandem.protocol.messages import BlockEvents, FetchStats, TierLoad
from tandem.router.engines.engine_tiers import EngineTiers, ExpectedLoad
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tests.support.builders import make_card

DIGESTS = block_digests(b"r" * 16, list(range(160)), 16)


class Engine:
    """An engine with tiers, and what was reported of them last."""

    def __init__(self, *tiers: str) -> None:
        self.index = PrefixIndex()
        self.index.add_worker("a", 1)
        self.reported: dict[str, TierLoad] = {}
        self.loaded: dict[str, int] = {}
        self.tiers = EngineTiers(make_card("a"), self.index, self._report, host_bytes=10**9)
        for tier in tiers:
            self.tiers.add(tier)

    def holds(self, place: str, num_blocks: int) -> None:
        """Leading blocks of the prompt."""
        stored = join_digests(DIGESTS[:num_blocks])
        self.index.apply(BlockEvents(worker_id="a", epoch=1, sequence=1, place=place, stored=stored, removed=b""))

    def cost_s(self, tier: str, num_blocks: int) -> float:
        self.tiers.report()
        return self.reported[tier].latency_s + num_blocks * self.reported[tier].block_s

    def _report(self, tiers: Sequence[TierLoad], fetches: FetchStats) -> None:
        self.reported, self.loaded = {tier.name: tier for tier in tiers}, fetches.num_loaded_blocks


@pytest.mark.parametrize(
    ("pool", "host", "disk", "expected"),
    [
        (0, 0, 0, None),
        (4, 4, 4, None),
        (5, 4, 2, None),
        (2, 6, 6, ExpectedLoad("host", 2, 6)),
        (2, 6, 10, ExpectedLoad("disk", 2, 10)),
        (0, 10, 3, ExpectedLoad("host", 0, 10)),
    ],
)
def test_a_load_is_expected_from_the_deepest_tier_and_the_fastest_among_equals(
    pool: int, host: int, disk: int, expected: ExpectedLoad | None
) -> None:
    engine = Engine("disk", "host")
    for place, num_blocks in (("pool", pool), ("host", host), ("disk", disk)):
        engine.holds(place, num_blocks)
    assert engine.tiers.expected(DIGESTS) == expected


def test_blocks_that_were_only_sent_there_are_loaded_nevertheless() -> None:
    engine = Engine("host")
    engine.holds("host", 10)
    engine.index.speculate(["a"], DIGESTS, 0.0)
    assert engine.tiers.expected(DIGESTS) == ExpectedLoad("host", 0, 10)
    assert engine.tiers.expected([]) is None


def test_the_costs_follow_loads_of_any_length_and_no_single_one_far() -> None:
    """30 ms for the engine's steps and 0.2 ms for each block, seen with errors and beside other work."""
    engine, rng = Engine("host", "disk"), random.Random(1)
    first = engine.cost_s("host", 100)
    for seconds in (1e9, -1.0, 0.0, float("nan"), float("inf")):  # a stalled engine, and a rest predicted too slow
        engine.tiers.learn(ExpectedLoad("host", 0, 100), seconds)
        assert first / 20 < engine.cost_s("host", 100) < 20 * first
    for _ in range(200):
        num_blocks = rng.choice([4, 16, 64, 512])
        seconds = (0.03 + 2e-4 * num_blocks) * rng.gauss(1.0, 0.2) + rng.gauss(0.0, 0.01)
        engine.tiers.learn(ExpectedLoad("host", 8, 8 + num_blocks), seconds + 5.0 * (rng.random() < 0.03))
    for num_blocks in (4, 64, 512, 4000):
        assert engine.cost_s("host", num_blocks) == pytest.approx(0.03 + 2e-4 * num_blocks, rel=0.35)
    assert engine.cost_s("disk", 1000) == pytest.approx(3e-3 + 1000 * make_card("a").block_bytes / 1e9)


def test_without_tiers_nothing_is_expected_or_reported() -> None:
    engine = Engine()
    engine.tiers.learn(ExpectedLoad("host", 0, 1), 1.0)
    engine.tiers.report()
    assert (engine.tiers.expected(DIGESTS), engine.reported) == (None, {})
    assert engine.tiers.holders == []
    engine.tiers.add("host")
    assert engine.tiers.holders == ["a/host"]


def test_the_size_and_what_the_engine_says_it_loaded_are_reported() -> None:
    engine = Engine("host", "disk")
    engine.holds("host", 5)
    engine.tiers.report({"host": 163})
    block_bytes = make_card("a").block_bytes
    host, disk = engine.reported["host"], engine.reported["disk"]
    assert (host.num_blocks, host.capacity_blocks, host.num_hits) == (5, 10**9 // block_bytes, 10)
    assert (disk.num_blocks, disk.capacity_blocks, disk.num_hits) == (0, 0, 0)
    engine.tiers.report()
    assert engine.loaded == {"host": 10}
