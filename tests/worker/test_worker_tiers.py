"""Workers with tiers behind a real router: what it is told, and what prompts get out of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Literal

import pytest

from tandem.protocol.config import TierConfig
from tandem.protocol.messages import Role, TurnEnd
from tandem.scheduling.workers.registry import Registry
from tests.support.cluster_harness import BLOCK_BYTES, BLOCK_SIZE, Cluster, Oracle, prompt_of, running_cluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("patient")]

NUM_BLOCKS = 48


async def flood(cluster: Cluster, rng: random.Random) -> None:
    for _ in range(5):
        await cluster.generate(prompt_of(rng, 12))
    await cluster.becomes_idle()


async def test_the_router_knows_what_is_in_host_memory(tiny_model: Path, oracle: Oracle) -> None:
    tiers = TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9)
    rng = random.Random(1)
    async with running_cluster(
        tiny_model, {"c": Role.COLOCATED}, engine={"num_blocks": NUM_BLOCKS}, tiers=tiers
    ) as cluster:
        first = await cluster.generate(tokens := prompt_of(rng, 12))
        await flood(cluster, rng)
        await eventually(lambda: cluster.index.num_blocks("c/host") > NUM_BLOCKS)
        assert cluster.index.num_blocks("c") <= NUM_BLOCKS
        again = await cluster.generate(tokens)
        assert again.token_ids == first.token_ids == oracle.answer(tokens)
        assert again.num_cached_tokens == 12 * BLOCK_SIZE
        assert (first.num_loaded_tokens, again.num_loaded_tokens) == ({}, {"host": 12 * BLOCK_SIZE})
        for place, holder in (("pool", "c"), ("host", "c/host")):
            held = await cluster.call("c", lambda place=place: cluster.worker("c").parts.cache.digests(place))
            await eventually(lambda holder=holder, held=held: cluster.index.num_blocks(holder) == len(held))


async def test_a_tier_learns_how_answers_ended(tiny_model: Path) -> None:
    tiers = TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9)
    async with running_cluster(tiny_model, {"c": Role.COLOCATED}, tiers=tiers) as cluster:
        await cluster.generate(prompt_of(random.Random(3), 12))
        await cluster.becomes_idle()
        tier = cluster.worker("c").parts.cache.tiers[0].tier
        await eventually(lambda: len(tier.digests()) >= 12)
        noted: list[tuple[object, bool]] = []
        tier._index._policy.note_end = lambda key, *, has_calls: noted.append((key, has_calls))  # type: ignore[method-assign]
        stored = tier.digests()
        for digests, has_calls in (([b"?" * 16], True), ([], True), ([stored[0], stored[3], b"?" * 16], False)):
            cluster.client.send("c", TurnEnd(digests=digests, has_calls=has_calls))
        await eventually(lambda: bool(noted))
        assert noted == [(stored[3], False)]


async def test_what_a_client_is_done_with_leaves_a_tier_first(tiny_model: Path) -> None:
    tiers = TierConfig(host_cache_gb=40 * BLOCK_BYTES / 1e9)
    rng = random.Random(4)
    async with running_cluster(tiny_model, {"c": Role.COLOCATED}, tiers=tiers) as cluster:
        tier = cluster.worker("c").parts.cache.tiers[0].tier

        async def stored_by(num_blocks: int) -> set[bytes]:
            before = set(tier.digests())
            await cluster.generate(prompt_of(rng, num_blocks))
            await cluster.becomes_idle()
            await eventually(lambda: len(set(tier.digests()) - before) >= num_blocks)
            return set(tier.digests()) - before

        older, done = await stored_by(12), await stored_by(12)
        policy = tier._index._policy
        chain = sorted(done, key=lambda digest: policy._nodes[digest].num_children)  # its leaf first
        cluster.client.send("c", TurnEnd(digests=chain[:1], has_calls=False, is_demoted=True))
        await eventually(lambda: policy.victim() == chain[0])
        await stored_by(20)
        assert older <= set(tier.digests())
        assert not done <= set(tier.digests())


def readers(registry: Registry) -> list[list[int]]:
    """Rows of the workers that read from the same store, by store."""
    return [sorted(rows) for costs in registry.table.tiers.values() for rows in costs.readers.values()]


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_a_pair_shares_what_is_on_disk_and_finds_it_after_a_restart(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, encryption: Literal["off", "on"]
) -> None:
    tiers = TierConfig(disk_cache_path=str(tmp_path), disk_cache_gb=500 * BLOCK_BYTES / 1e9, kv_encryption=encryption)
    rng = random.Random(2)
    tokens = prompt_of(rng, 12)

    async def run(*, is_cached: bool) -> None:
        async with running_cluster(tiny_model, engine={"num_blocks": NUM_BLOCKS}, tiers=tiers) as cluster:
            scanned = [lambda w=w: not w.worker.parts.cache.is_busy for w in cluster.workers.values()]
            await eventually(lambda: all(is_done() for is_done in scanned))
            answer = await cluster.generate(tokens)
            assert answer.token_ids == oracle.answer(tokens)
            assert answer.num_cached_tokens == (12 * BLOCK_SIZE if is_cached else 0)
            assert answer.num_loaded_tokens == ({"disk": 12 * BLOCK_SIZE} if is_cached else {})
            await cluster.becomes_idle()
            await eventually(lambda: cluster.registry.get("p").fetches is not None)
            await eventually(lambda: not cluster.worker("p").parts.cache.is_busy)
            # One of the two tells the router what is on the disk that they share.
            await eventually(lambda: cluster.index.num_blocks("p/disk") + cluster.index.num_blocks("d/disk") >= 12)
            assert min(cluster.index.num_blocks("p/disk"), cluster.index.num_blocks("d/disk")) == 0
            await eventually(lambda: readers(cluster.registry) == [[0, 1]])

    asyncio.run(run(is_cached=False))
    asyncio.run(run(is_cached=True))
