"""Workers whose device runs behind its caller, as a GPU does: nobody may get blocks before they are computed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.kv_transfer.transport.in_process import InProcessWrite, Verdict
from tandem.protocol.config import TierConfig
from tandem.protocol.messages import KvHolder, Role
from tests.support.cluster_harness import BLOCK_BYTES, PAIR, Cluster, Oracle, eventually, running_cluster
from tests.support.late_device import GARBAGE, LateDevice
from tests.worker.kv.test_peer_reads import NUM_BLOCKS, TWO, ask, prompt
from tests.worker.test_roles import make_prompt


def no_garbage(write: InProcessWrite) -> Verdict:
    """Deliver, but never blocks that are not computed, nor over blocks that the device still writes."""
    pools = (write.sender.pool, write.local_block_ids), (write.receiver.pool, write.remote_block_ids)
    for pool, blocks in pools:
        assert not (pool[blocks] == GARBAGE).any(), f"{write.sender.worker_id} to {write.receiver.worker_id}"
    return Verdict.DELIVER


async def make_late(cluster: Cluster) -> dict[str, LateDevice]:
    devices = {}
    for worker_id, running in cluster.workers.items():
        worker = running.worker
        device = devices[worker_id] = await cluster.call(
            worker_id, lambda worker=worker: LateDevice(worker.parts.engine)
        )
        for cached in worker.parts.cache.tiers:
            cached.device_queue = device
            device.make_late(cached.codec)
    return devices


async def test_what_is_handed_over_is_computed(tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model, PAIR, judge=no_garbage) as cluster:
        devices = await make_late(cluster)
        prompts = [make_prompt(450, seed) for seed in range(4)]
        answers = await asyncio.gather(*(cluster.generate(prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle.answer(prompt)
        assert devices["p"].num_late > 10
        await cluster.becomes_idle()


@pytest.fixture
def loads_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> TierConfig:
    """A host tier; what it or a peer has is always loaded, however slow that seems."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher.after_step", lambda self, stats: None)
    return TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9)


async def test_what_a_peer_may_read_has_been_brought_up(
    tiny_model: Path, oracle: Oracle, loads_at_any_cost: TierConfig
) -> None:

    rng = random.Random(2)
    async with running_cluster(
        tiny_model, TWO, engine={"num_blocks": NUM_BLOCKS}, tiers=loads_at_any_cost, judge=no_garbage
    ) as cluster:
        devices = await make_late(cluster)
        tokens = prompt(rng, 12)
        expected = oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        await ask(cluster, "a", tokens)
        for number in range(4):
            await ask(cluster, "a", prompt(rng, 14), request_id=f"flood {number}")
            await eventually(lambda: not cluster.worker("a").parts.cache.is_busy)
        before = devices["a"].num_late
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 12))
        assert answer.token_ids == expected
        assert devices["a"].num_late > before, "blocks came up from the host tier"
        await cluster.becomes_idle()


async def test_what_tiers_keep_and_give_back_is_what_was_computed(
    tiny_model: Path, oracle: Oracle, loads_at_any_cost: TierConfig
) -> None:

    rng = random.Random(3)
    roles = {"c": Role.COLOCATED}
    async with running_cluster(
        tiny_model, roles, engine={"num_blocks": NUM_BLOCKS}, tiers=loads_at_any_cost
    ) as cluster:
        await make_late(cluster)
        tokens = prompt(rng, 20)
        expected = oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert (await ask(cluster, "c", tokens)).token_ids == expected
        for number in range(3):
            await ask(cluster, "c", prompt(rng, NUM_BLOCKS // 2), request_id=f"flood {number}")
            await eventually(lambda: not cluster.worker("c").parts.cache.is_busy)
        again = await ask(cluster, "c", tokens, request_id="again")
        assert again.token_ids == expected
        fetches = cluster.worker("c").parts.cache.fetcher.stats()
        assert fetches.num_loaded_blocks["host"] > 10
        await cluster.becomes_idle()
