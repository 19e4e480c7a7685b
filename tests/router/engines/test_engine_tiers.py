from __future__ import annotations

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

    def block_s(self, tier: str) -> float:
        self.tiers.report()
        return self.reported[tier].block_s

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


def test_the_cost_follows_the_loads_and_no_single_one_far() -> None:
    engine, load = Engine("host", "disk"), ExpectedLoad("host", 0, 10)
    first = engine.block_s("host")
    assert engine.block_s("disk") == pytest.approx(10 * first)
    for seconds in (1e9, -1.0, 0.0):  # a stalled engine, and predictions that were too high
        engine.tiers.learn(load, seconds)
    assert engine.block_s("host") == pytest.approx(first / 2)
    for _ in range(30):
        engine.tiers.learn(load, 10 * 5e-3)
    assert engine.block_s("host") == pytest.approx(5e-3, rel=0.02)
    assert engine.block_s("disk") == pytest.approx(10 * first)


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
