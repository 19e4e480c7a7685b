"""What goes wrong on real workers, or waits there, is in the samples of `/metrics`.

Links that lose writes are in test_loop.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.sampling import sampler
from tandem.engine.sequence import Sequence
from tandem.protocol.config import TierConfig
from tandem.protocol.digest import EVERYONE
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import Prefetch, Role
from tandem.router.backend import PinRequest
from tests.support.cluster_harness import BLOCK_BYTES, BLOCK_SIZE, Client, Cluster, make_prompt, running_cluster
from tests.support.waiting import eventually
from tests.worker.test_roles import damaging, flip_a_bit
from tests.worker.test_worker_pins import hold_disk_reads

pytestmark = pytest.mark.cluster


def of_worker(cluster: Cluster, what: str, role: str = "decode", worker: str = "d") -> float:
    return cluster.sample(f"tandem_worker_{what}", worker=worker, role=role)


async def test_prompts_that_wait_for_blocks_are_shown_until_they_have_them(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, overrides={"d": {"num_blocks": 16}}) as cluster:
        pool = cluster.worker("d").parts.engine.pool
        held = await cluster.call("d", lambda: pool.try_allocate(10))
        answers = [asyncio.create_task(cluster.generate(make_prompt(8 * BLOCK_SIZE, seed=seed))) for seed in (1, 2)]
        await eventually(lambda: of_worker(cluster, "waiting_for_room") == 2)
        await cluster.call("d", lambda: pool.release(held))
        await asyncio.gather(*answers)
        await eventually(lambda: of_worker(cluster, "waiting_for_room") == 0)
        await cluster.becomes_idle()


async def test_each_prompt_that_is_computed_again_is_counted(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, judge=damaging(flip_a_bit)) as cluster:
        for number in (1, 2):
            await cluster.generate(make_prompt(40, seed=number))
            await eventually(lambda number=number: of_worker(cluster, "recomputed_total") == number)  # type: ignore[misc]
        await cluster.becomes_idle()


async def test_each_internal_error_of_a_worker_is_counted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sampler.plan_of

    def fail(sequence: Sequence) -> Any:
        if sequence.request_id in ("r1", "r3"):
            raise ZeroDivisionError
        return original(sequence)

    monkeypatch.setattr(sampler, "plan_of", fail)
    async with running_cluster(tiny_model, {"c": Role.COLOCATED}) as cluster:
        count = lambda: of_worker(cluster, "errors_total", "colocated", "c")  # noqa: E731
        for expected in (1, 1, 2):
            with contextlib.suppress(ServingError):
                await cluster.generate(make_prompt(20), temperature=1.0)
            await eventually(lambda expected=expected: count() == expected)  # type: ignore[misc]
        await cluster.becomes_idle()


async def test_dropped_messages_are_counted_where_they_were_dropped(tiny_model: Path) -> None:
    async with running_cluster(tiny_model) as cluster:
        worker = cluster.worker("d")
        with contextlib.closing(Client(worker)) as client:
            client.send_bytes(b"this is not a message")
            await eventually(
                lambda: cluster.sample("tandem_dropped_messages_total", worker="d", at="worker", reason="malformed")
            )
        (identity,) = worker.parts.replies._routers
        await cluster.call("d", lambda: worker.parts.sockets._router.send_multipart([identity, b"nor is this"]))
        await eventually(
            lambda: cluster.sample("tandem_dropped_messages_total", worker="d", at="router", reason="malformed")
        )


async def test_a_listener_that_raises_is_counted(tiny_model: Path) -> None:
    async with running_cluster(tiny_model) as cluster:

        def fail(*_: object) -> None:
            raise RuntimeError("injected")

        cluster.registry.listen(fail)
        assert cluster.sample("tandem_listener_failures_total") == 0
        await asyncio.to_thread(cluster.workers["d"].stop)
        cluster.client.mark_dead("d", "it was stopped")
        assert cluster.sample("tandem_listener_failures_total") == 1


async def test_pinned_blocks_are_shown_where_they_are_kept(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, {"c": Role.COLOCATED}) as cluster:
        prompt = make_prompt(8 * BLOCK_SIZE + 3)
        shown = lambda: cluster.sample("tandem_pinned_blocks", worker="c", place="pool")  # noqa: E731
        await cluster.generate(prompt)
        assert shown() == cluster.sample("tandem_router_pinned_blocks") == 0
        pin = await cluster.flow.cache.pin(
            PinRequest(tenant="", cache_scope=EVERYONE, token_ids=prompt, prefetch=Prefetch.NONE)
        )
        await eventually(lambda: shown() == 8)
        assert cluster.sample("tandem_router_pinned_blocks") == 8
        assert cluster.sample("tandem_router_pins") == 1
        await cluster.flow.cache.unpin(pin.pin_id, None)
        await eventually(lambda: shown() == 0)
        assert cluster.sample("tandem_router_pins") == 0


@pytest.mark.usefixtures("patient")
async def test_loads_from_a_tier_are_shown(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher._probe", lambda *_: None)
    gate = hold_disk_reads(monkeypatch)
    tiers = TierConfig(disk_cache_path=str(tmp_path), disk_cache_gb=500 * BLOCK_BYTES / 1e9)
    engine = {"num_blocks": 48}
    async with running_cluster(tiny_model, {"c": Role.COLOCATED}, engine=engine, tiers=tiers) as cluster:
        prompts = [make_prompt(12 * BLOCK_SIZE + 3, seed=seed) for seed in range(6)]
        for prompt in prompts:  # the first one is evicted to disk
            await cluster.generate(prompt)
            await eventually(lambda: not cluster.worker("c").parts.cache.is_busy)
        queued = lambda: cluster.sample("tandem_tier_queued_loads", worker="c", tier="disk")  # noqa: E731
        answer = asyncio.create_task(cluster.generate(prompts[0]))
        try:
            await eventually(lambda: queued() == 12)
        finally:
            gate.set()
        assert (await answer).num_loaded_tokens == {"disk": 12 * BLOCK_SIZE}
        await eventually(lambda: queued() == 0)
        assert cluster.sample("tandem_tier_hits_total", worker="c", tier="disk") >= 12
        await cluster.becomes_idle()
