from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.protocol.messages import Role, TierLoad
from tandem.scheduling.cache_sizing import CacheSizing
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
    return CacheSizing(make_registry(*num_blocks), clock=lambda: 0.0)


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
    sizing = CacheSizing(registry, clock=lambda: 0.0)
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
    assert CacheSizing(registry).levels()["disk"] == 700


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
    sizing = CacheSizing(registry, clock=lambda: now)
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


def test_another_block_size_starts_over() -> None:
    sizing = make_sizing(100)
    observe(sizing, BLOCKS[:10], cached=160)
    sizing.observe(BLOCKS[:10], [], block_size=32, num_prompt_tokens=320, num_cached_tokens=0, tenant="default")
    report = sizing.report()
    assert (report["num_tokens"], report["measured_hit_ratio"]) == (320, 0.0)
