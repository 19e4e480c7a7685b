"""Nothing grows with the number of requests served: no table, and no memory."""

from __future__ import annotations

import gc
import os

import psutil
import pytest

from tandem.router.workers import pin_ledger, prompt_hasher
from tandem.scheduling.admission import answer_lengths, contention, fair_queue
from tests.support.fake_worker import make_request
from tests.support.memory_world import MemoryWorld, table_sizes

SOAK_ENV = "TANDEM_SOAK_REQUESTS"
TIMED = {"PrefixIndex._young", "PrefixIndex._old"}  # of the last two seconds, however many came in them


async def serve_and_watch(world: MemoryWorld, count: int, parts: int) -> list[tuple[dict[str, int], float]]:
    """Sizes of all tables and MB of memory after each part."""
    seen = []
    for _ in range(parts):
        await world.send(count // parts)
        gc.collect()
        sizes = table_sizes(world.flow, world.cluster.client, world.cluster.sizing)
        seen.append((sizes, psutil.Process().memory_info().rss / 1e6))
    return seen


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Tables with more entries than chance explains."""
    return {
        name: (before.get(name, 0), size)
        for name, size in after.items()
        if size > 1.1 * before.get(name, 0) + 64 and name not in TIMED
    }


async def test_the_walk_sees_what_grows() -> None:
    world = MemoryWorld(0)
    try:
        before = table_sizes(world.flow)
        for number in range(100):
            await world.flow.explain(make_request(scope=f"scope {number}"))
        assert set(grown(before, table_sizes(world.flow))) == {"PromptHasher._roots"}
    finally:
        await world.close()


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1_800, id="short"),
        pytest.param(
            int(os.environ.get(SOAK_ENV, "250000")), id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]
        ),
    ],
)
async def test_nothing_grows_with_the_number_of_requests(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that these tables are at their bounds soon, and come and go by less than what counts as growth.
    monkeypatch.setattr(prompt_hasher, "MAX_ROOTS", 60)
    monkeypatch.setattr(answer_lengths, "MAX_TENANTS", 60)
    monkeypatch.setattr(contention, "MAX_TENANTS", 60)
    monkeypatch.setattr(fair_queue, "MAX_IDLE_TENANTS", 60)
    monkeypatch.setattr(pin_ledger.Conversations.__init__, "__defaults__", (64 * 1024,))
    print("seed 1")
    world = MemoryWorld(seed=1)
    try:
        seen = await serve_and_watch(world, count, parts=6)
    finally:
        await world.close()
    for sizes, rss_mb in seen:
        print(f"{sum(sizes.values())} entries in {len(sizes)} kinds of tables, {rss_mb:.1f} MB")
    first_half: dict[str, int] = {}
    for sizes, _ in seen[:3]:
        first_half |= {name: max(size, first_half.get(name, 0)) for name, size in sizes.items()}
    assert not grown(first_half, seen[-1][0])
    assert seen[-1][1] < seen[2][1] + 8.0
