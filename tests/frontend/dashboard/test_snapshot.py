"""The content and the size of a dashboard snapshot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.frontend.dashboard.snapshot import SnapshotBuilder
from tandem.scheduling.admission.stats import TenantStats
from tests.support.dashboard_world import DashboardWorld

MAX_BYTES = 100_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def builder_of(world: DashboardWorld, clock: Clock) -> SnapshotBuilder:
    return SnapshotBuilder(world.overview, world.metrics.traffic, "1.2.3", clock=clock, unix_clock=clock)


async def snapshots_of(world: DashboardWorld, num_ticks: int) -> list[dict[str, Any]]:
    clock = Clock()
    builder = builder_of(world, clock)
    found = [json.loads(await builder.build())]
    for _ in range(num_ticks):
        world.tick()
        clock.now += 1.0
        found.append(json.loads(await builder.build()))
    return found


async def test_the_first_snapshot_has_no_rates_and_the_second_has() -> None:
    first, second = await snapshots_of(DashboardWorld(), 1)
    assert first["traffic"] == {"waiting": 0, "running": 0, "window_s": 0}
    assert (first["hits"], first["version"], first["models"]) == ([], "1.2.3", ["org/toy"])
    traffic = second["traffic"]
    assert (traffic["window_s"], traffic["finished_per_s"], traffic["output_tokens_per_s"]) == (1.0, 8.0, 960.0)
    assert traffic["ttft_s"][0] <= traffic["ttft_s"][1] <= traffic["ttft_s"][2]


async def test_shares_add_up() -> None:
    last = (await snapshots_of(DashboardWorld(4, tenants=("a", "b", "c")), 30))[-1]
    assert sum(tenant["share"] for tenant in last["tenants"]) == pytest.approx(1, abs=0.001)
    assert sum(hit["share"] for hit in last["hits"]) == pytest.approx(1, abs=0.001)
    assert {hit["source"] for hit in last["hits"]} == {"pool", "host", "disk", "peer", "computed"}
    assert sum(sum(tenant["refused"].values()) for tenant in last["tenants"]) == 12  # of 240 requests


async def test_the_latest_decisions_have_their_runner_up_and_all_terms() -> None:
    world = DashboardWorld()
    last = (await snapshots_of(world, 5))[-1]
    decisions = last["decisions"]
    assert decisions["terms"] == ["queue", "fetch", "prefill", "delay", "transfer", "memory", "decode"]
    assert [row["id"] for row in decisions["rows"]] == [f"cmpl-{number:08d}" for number in range(40, 20, -1)]
    refused = decisions["rows"][0]
    assert (refused["outcome"], refused["error"]) == ("rejected", "queue_full: The queue is too long.")
    for row in decisions["rows"]:
        assert len(row["chosen"]["terms"]) == len(row["runner_up"]["terms"]) == 7
        assert sum(row["chosen"]["terms"]) <= sum(row["runner_up"]["terms"])


async def test_tiers_show_their_sizes_and_the_curve_predicts_hit_ratios() -> None:
    last = (await snapshots_of(DashboardWorld(4), 20))[-1]
    tiers = {tier["name"]: tier for tier in last["tiers"]}
    assert {name: tier["capacity_blocks"] for name, tier in tiers.items()} == {
        "pool": 4 * 4096,
        "host": 4 * 16384,  # one for each worker
        "disk": 65536,  # all workers are on one host
        "object": 262144,  # all share one
    }
    assert tiers["object"]["num_blocks"] == 90000
    for level in last["curve"]["levels"]:
        assert 0 <= level["hit_ratio"] <= level["twice_hit_ratio"] <= 1
    sizes = [size for size, _ in last["curve"]["points"]]
    assert sizes == sorted(sizes)
    assert isinstance(last["curve"]["advice"], list)


async def test_history_is_a_minute_and_restarts_after_a_time_without_viewers() -> None:
    world, clock = DashboardWorld(), Clock()
    builder = builder_of(world, clock)
    for _ in range(80):
        world.tick()
        clock.now += 1.0
        last = json.loads(await builder.build())
    assert (len(last["history"]["rows"]), len(last["history"]["columns"])) == (60, len(last["history"]["rows"][0]))
    clock.now += 300.0
    last = json.loads(await builder.build())
    assert (len(last["history"]["rows"]), last["traffic"]["window_s"]) == (1, 0)


async def test_the_last_minute_is_known_without_viewers() -> None:
    world, clock = DashboardWorld(), Clock()
    builder = builder_of(world, clock)
    for second in range(300):  # `run` calls it every 5 s
        if second % 5 == 0:
            await builder.keep_up()
        world.tick()
        clock.now += 1.0
    last = json.loads(await builder.build())
    assert (last["traffic"]["window_s"], last["traffic"]["finished_per_s"]) == (60.0, 7.6)
    assert last["hits"]
    rows = len(last["history"]["rows"])
    await builder.keep_up()
    assert len(json.loads(await builder.build())["history"]["rows"]) == rows + 1, "reading it keeps it up to date"


async def test_errors_of_the_last_minute_come_first() -> None:
    world, clock = DashboardWorld(), Clock()
    world.metrics.requests.labels("/v1/chat/completions", "400").inc(50)
    builder = builder_of(world, clock)
    assert json.loads(await builder.build())["errors"] == [
        {"status": "400", "route": "/v1/chat/completions", "recent": 0.0, "all": 50.0}
    ]
    world.metrics.requests.labels("/v1/completions", "503").inc(2)
    clock.now += 1.0
    errors = json.loads(await builder.build())["errors"]
    assert [(row["status"], row["recent"], row["all"]) for row in errors] == [("503", 2.0, 2.0), ("400", 0.0, 50.0)]


async def test_preemptions_and_settings_are_shown() -> None:
    world, clock = DashboardWorld(), Clock()
    builder = builder_of(world, clock)
    await builder.build()
    worker = next(iter(world.registry))
    world.registry.note_load(worker.worker_id, replace(worker.load, num_preemptions=3), 0.0)
    clock.now += 1.0
    snapshot = json.loads(await builder.build())
    assert (snapshot["traffic"]["preemptions"], snapshot["settings"]) == (3, world.settings)


@pytest.mark.parametrize("num_workers", [2, 200])
async def test_a_snapshot_is_small(num_workers: int) -> None:
    world = DashboardWorld(num_workers, tenants=[f"tenant-{number}" for number in range(80)])
    for number in range(80):
        world.admission.stats[f"tenant-{number}"] = TenantStats(num_admitted=number, wait_s=1 / 3)
    builder = builder_of(world, Clock())
    world.tick(40)
    data = await builder.build()
    snapshot = json.loads(data)
    assert len(snapshot["members"]["rows"]) == num_workers
    assert len(data) < MAX_BYTES, len(data)
    assert [tenant["name"] for tenant in snapshot["tenants"]][:1] == ["tenant-79"]
    assert (len(snapshot["tenants"]), snapshot["tenants"][-1]["name"]) == (51, "(all others)")


async def test_moves_of_all_kinds_are_shown_with_their_reasons_newest_first() -> None:
    world = DashboardWorld(4)
    world.fill(1)
    long = world.autoscaler["arrivals"][0] | {"withdrawn": "x" * 10_000, "began": 1.0}
    world.autoscaler["arrivals"].insert(0, long)
    [snapshot] = await snapshots_of(world, 0)
    shown = snapshot["autoscaler"]
    assert [(move["kind"], move["worker"]) for move in shown["moves"]] == [
        ("remove", "decode-8"),
        ("add", "decode-9"),
        ("flip", "decode-3"),
        ("add", "decode-9"),
    ]
    assert shown["moves"][1]["withdrawn"] == "Ray has found no room by its deadline"
    assert len(shown["moves"][3]["withdrawn"]) < 1000
    assert all(move["reason"] for move in shown["moves"])
    assert not {"flips", "arrivals", "departures"} & shown.keys()
