"""Workers whose device runs behind its caller, as a GPU does: nobody may get blocks before they are computed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.config import TierConfig
from tandem.protocol.messages import KvHolder, Role
from tandem.worker.loop import Worker
from tests.support.cluster_harness import BLOCK_BYTES, PAIR, Cluster, Oracle, make_prompt, prompt_of, running_cluster
from tests.support.judged_hub import Verdict
from tests.support.late_device import LateDevice, touched_early
from tests.support.waiting import eventually
from tests.worker.kv.test_peer_reads import NUM_BLOCKS, TWO, ask

pytestmark = pytest.mark.cluster


@pytest.fixture
def devices() -> dict[str, LateDevice]:
    """By worker; `make_late` fills it."""
    return {}


@pytest.fixture
def judge(devices: dict[str, LateDevice]) -> Callable[[InProcessWrite], Verdict]:
    """Delivers, but never blocks that are not computed, nor over blocks that a device still uses."""

    def check_and_deliver(write: InProcessWrite) -> Verdict:
        complaint = touched_early(write, lambda transport: devices.get(transport.worker_id))
        assert not complaint, complaint
        return Verdict.DELIVER

    return check_and_deliver


async def make_late(cluster: Cluster, devices: dict[str, LateDevice], **fields: Any) -> None:
    for seed, (worker_id, running) in enumerate(cluster.workers.items()):
        worker = running.worker

        def replace_device(worker: Worker = worker, seed: int = seed) -> LateDevice:
            device = LateDevice(worker.parts.engine, seed, **fields)
            for cached in worker.parts.cache.tiers:
                device.make_late(cached.codec)
            return device

        devices[worker_id] = await cluster.call(worker_id, replace_device)


async def test_what_is_handed_over_is_computed(
    tiny_model: Path, oracle: Oracle, devices: dict[str, LateDevice], judge: Callable[[InProcessWrite], Verdict]
) -> None:
    async with running_cluster(tiny_model, PAIR, judge=judge) as cluster:
        await make_late(cluster, devices)
        prompts = [make_prompt(450, seed) for seed in range(4)]
        answers = await asyncio.gather(*(cluster.generate(prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle.answer(prompt)
        assert devices["p"].stream.num_late > 10
        await cluster.becomes_idle()


@pytest.fixture
def loads_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> TierConfig:
    """A host tier; what it or a peer has is always loaded, however slow that seems."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher.after_step", lambda self, stats: None)
    return TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9)


async def test_what_a_peer_may_read_has_been_brought_up(
    tiny_model: Path,
    oracle: Oracle,
    loads_at_any_cost: TierConfig,
    devices: dict[str, LateDevice],
    judge: Callable[[InProcessWrite], Verdict],
) -> None:
    rng = random.Random(2)
    async with running_cluster(
        tiny_model, TWO, engine={"num_blocks": NUM_BLOCKS}, tiers=loads_at_any_cost, judge=judge
    ) as cluster:
        await make_late(cluster, devices)
        tokens = prompt_of(rng, 12)
        expected = oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        await ask(cluster, "a", tokens)
        for number in range(4):
            await ask(cluster, "a", prompt_of(rng, 14), request_id=f"flood {number}")
            await eventually(lambda: not cluster.worker("a").parts.cache.is_busy)
        before = devices["a"].stream.num_late
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 12))
        assert answer.token_ids == expected
        assert devices["a"].stream.num_late > before, "blocks came up from the host tier"
        await cluster.becomes_idle()


async def test_what_tiers_keep_and_give_back_is_what_was_computed(
    tiny_model: Path, oracle: Oracle, loads_at_any_cost: TierConfig, devices: dict[str, LateDevice]
) -> None:
    rng = random.Random(3)
    roles = {"c": Role.COLOCATED}
    async with running_cluster(
        tiny_model, roles, engine={"num_blocks": NUM_BLOCKS}, tiers=loads_at_any_cost
    ) as cluster:
        await make_late(cluster, devices)
        tokens = prompt_of(rng, 20)
        expected = oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert (await ask(cluster, "c", tokens)).token_ids == expected
        for number in range(3):
            await ask(cluster, "c", prompt_of(rng, NUM_BLOCKS // 2), request_id=f"flood {number}")
            await eventually(lambda: not cluster.worker("c").parts.cache.is_busy)
        again = await ask(cluster, "c", tokens, request_id="again")
        assert again.token_ids == expected
        fetches = cluster.worker("c").parts.cache.fetcher.stats()
        assert fetches.num_loaded_blocks["host"] > 10
        await cluster.becomes_idle()
