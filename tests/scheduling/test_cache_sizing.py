from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec
import pytest

from tandem.protocol.messages import Role, TierLoad
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card
from tests.support.exact_miss_ratio import draw_digests

BLOCKS = draw_digests(1000, "blocks")


def make_registry(*num_blocks: int) -> Registry:
    registry = Registry()
    for idx, num in enumerate(num_blocks):
        add_ready(registry, make_card(f"w{idx}", Role.COLOCATED, num_blocks=num, endpoint=f"tcp://10.0.0.{idx}:1"))
    return registry


def make_sizing(*num_blocks: int) -> CacheSizing:
    return CacheSizing(make_registry(*num_blocks), CostModel(), clock=lambda: 0.0)


def observe(
    sizing: CacheSizing, prompt: list[bytes], *, answer: Sequence[bytes] = (), cached: int = 0, tenant: str = "default"
) -> None:
    counts = {"block_size": 16, "num_prompt_tokens": 16 * len(prompt), "num_cached_tokens": cached}
    sizing.observe(prompt, list(answer), tenant=tenant, **counts)


def tier(name: str, capacity_blocks: int) -> TierLoad:
    return TierLoad(name=name, capacity_blocks=capacity_blocks)


def test_without_workers_and_requests_the_report_is_empty() -> None:
    report = make_sizing().report()
    assert (report["num_tokens"], report["capacities"], report["tenants"]) == (0, [], {})


def test_reports_sizes_around_the_pools() -> None:
    rows = make_sizing(30, 40).report()["capacities"]
    assert [row["num_blocks"] for row in rows] == [8, 16, 32, 64, 70, 128, 140, 256, 512, 1024, 2048]
    assert [row["num_blocks"] for row in rows if row["configured"] == ["pool"]] == [70]
    assert rows[3]["num_bytes"] == 64 * 16 * 23_040


def test_tiers_count_by_owner() -> None:
    registry = Registry()
    sizing = CacheSizing(registry, CostModel(), clock=lambda: 0.0)
    for idx in range(2):
        stores = {"host": "", "disk": f"folder {idx}", "object": "s3://bucket"}
        add_ready(registry, make_card(f"w{idx}", Role.COLOCATED, num_blocks=10, tiers=stores))
        registry.note_tiers(f"w{idx}", [tier("host", 100), tier("disk", 700), tier("object", 9000)], None)
    assert sizing.levels() == {"pool": 20, "host": 200, "disk": 1400, "object": 9000}
    rows = sizing.report()["capacities"]
    assert {20, 40, 200, 400, 1400, 2800, 9000, 18000} <= {row["num_blocks"] for row in rows}
    assert next(row["configured"] for row in rows if row["num_blocks"] == 200) == ["host"]


@pytest.mark.parametrize("stores", [{"disk": "one folder"}, {}], ids=["workers", "engines"])
def test_what_several_share_counts_once(stores: dict[str, str]) -> None:
    registry = Registry()
    for worker_id in ("a", "b"):
        add_ready(registry, make_card(worker_id, tiers=stores))
        registry.note_tiers(worker_id, [tier("disk", 700)], None)
    assert CacheSizing(registry, CostModel()).levels()["disk"] == 700


def test_measured_beside_predicted() -> None:
    sizing = make_sizing(100)
    observe(sizing, BLOCKS[:10])
    observe(sizing, BLOCKS[:10], cached=80, tenant="search")
    assert sizing.report()["measured_hit_ratio"] == 0.25
    assert set(sizing.report()["tenants"]) == {"default", "search"}


def test_the_last_hour_of_traffic_is_half_of_the_curve() -> None:
    now = 0.0
    registry = Registry()
    add_ready(registry, make_card())
    sizing = CacheSizing(registry, CostModel(), clock=lambda: now)
    for _ in range(2):
        for minute in range(0, 20 * 60, 2):
            now += 120.0
            observe(sizing, [BLOCKS[minute // 2]], cached=16)
    # 1,200 requests, each fading the former ones by a minute, however long nothing came: 16 / (1 - 0.5 ** (1 / 60))
    assert sizing.report()["num_tokens"] == pytest.approx(16 / (1 - 0.5 ** (1 / 60)), rel=0.01)
    assert sizing.report()["measured_hit_ratio"] == pytest.approx(1.0)
    assert sizing.num_tokens == 1200 * 16


def test_a_burst_within_a_minute_does_not_fade() -> None:
    sizing = make_sizing(100)
    for _ in range(100):
        observe(sizing, BLOCKS[:10])
    assert sizing.report()["num_tokens"] == 16_000


def observe_circle(sizing: CacheSizing, num_blocks: int) -> None:
    """Three rounds through chains of ten blocks: an LRU cache finds nothing until all of them fit."""
    for _ in range(3):
        for start in range(0, num_blocks, 10):
            observe(sizing, BLOCKS[start : start + 10])


def test_advice_names_the_size_that_finds_more_and_the_next_that_does_not() -> None:
    sizing = make_sizing(50)
    observe_circle(sizing, 350)
    host, disk = sizing.advice()
    # 50 blocks double to 400, which hold all and find two of three rounds; a block has 16 * 23,040 bytes.
    assert (host["tier"], host["recommended_bytes"]) == ("host", 400 * 16 * 23_040)
    assert host["gain"] == pytest.approx(2 / 3, abs=0.05)
    assert re.fullmatch(r"host 147 MB: \+6\d\.\d points, pays back; 295 MB: \+0\.0, does not", host["text"])
    assert (disk["tier"], disk["gain"]) == ("disk", host["gain"])
    assert sizing.report()["advice"] == [host, disk]


def test_advice_waits_until_the_traffic_could_have_filled_the_caches() -> None:
    sizing = make_sizing(1000)
    observe(sizing, BLOCKS[:999])
    assert sizing.advice() == []
    observe(sizing, BLOCKS[:1])
    assert [one["is_saturated"] for one in sizing.advice()] == [True, True]
    assert make_sizing().advice() == []


def test_advice_uses_the_learned_cost_of_a_tier_and_leaves_out_faster_ones() -> None:
    registry = make_registry(50)
    sizing = CacheSizing(registry, CostModel(), clock=lambda: 0.0)
    observe_circle(sizing, 400)
    slow = TierLoad(name="disk", capacity_blocks=100, block_s=10.0)
    registry.note_tiers("w0", [slow, tier("host", 70)], None)
    [disk] = sizing.advice()
    assert (disk["tier"], disk["gain"]) == ("disk", 0.0)
    assert "loading a token takes 625000 us" in disk["text"]
    registry.note_tiers("w0", [msgspec.structs.replace(slow, block_s=math.inf)], None)  # out of reach now
    [disk] = sizing.advice()
    assert disk["gain"] > 0.6
    far = TierLoad(name="acme", capacity_blocks=200, block_s=0.05)  # another package's store
    registry.note_tiers("w0", [far], None)
    assert [one["tier"] for one in sizing.advice()] == ["acme"]


def test_another_block_size_starts_over() -> None:
    sizing = make_sizing(100)
    observe(sizing, BLOCKS[:10], cached=160)
    sizing.observe(BLOCKS[:10], [], block_size=32, num_prompt_tokens=320, num_cached_tokens=0, tenant="default")
    report = sizing.report()
    assert (report["num_tokens"], report["measured_hit_ratio"]) == (320, 0.0)
