"""Workers of one and of two ranks with each other: handoffs, reads and stores, token for token as one engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.config import TierConfig
from tandem.protocol.messages import KvHolder, Role
from tests.support.cluster_harness import BLOCK_BYTES, BLOCK_SIZE, Oracle, running_cluster
from tests.support.thread_ranks import thread_ranks
from tests.support.waiting import eventually
from tests.worker.kv.test_peer_reads import TWO, ask

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("patient"),
    pytest.mark.cpu_engine("ranks on one machine need a GPU each"),
]

RANKS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(autouse=True)
def _thread_ranks() -> Iterator[None]:
    with thread_ranks():
        yield


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


def of_ranks(**ranks: int) -> dict[str, dict[str, Any]]:
    return {worker_id: {"tensor_parallel_size": number} for worker_id, number in ranks.items()}


@pytest.mark.parametrize("transport", ["in_process", "nccl", "nixl"])
@pytest.mark.parametrize("ranks", RANKS, ids=["2 to 1", "1 to 2", "2 to 2"])
async def test_a_pair_of_any_ranks_answers_as_one_engine(
    tiny_model: Path, oracle: Oracle, ranks: tuple[int, int], transport: str
) -> None:
    rng = random.Random(4)
    prompts = [prompt(rng, num_tokens) for num_tokens in (3, BLOCK_SIZE, 5 * BLOCK_SIZE, 7 * BLOCK_SIZE + 1, 200)]
    sampling: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7, "max_tokens": 20}]
    overrides = of_ranks(p=ranks[0], d=ranks[1])
    async with running_cluster(tiny_model, overrides=overrides, transfer={"transport": transport}) as cluster:
        for settings in sampling:
            found = await asyncio.gather(*(cluster.generate(tokens, **settings) for tokens in prompts))
            expected = [oracle.answer(tokens, **settings) for tokens in prompts]
            assert [answer.token_ids for answer in found] == expected
        await cluster.becomes_idle()
        assert cluster.worker("d").parts.decode.num_recomputed == 0, "KV that was checked arrived as it was sent"


@pytest.mark.parametrize("ranks", RANKS, ids=["2 to 1", "1 to 2", "2 to 2"])
async def test_a_worker_reads_of_other_ranks(tiny_model: Path, oracle: Oracle, ranks: tuple[int, int]) -> None:
    tokens = prompt(random.Random(5), 28 * BLOCK_SIZE + 3)
    overrides = of_ranks(a=ranks[0], b=ranks[1])
    async with running_cluster(tiny_model, TWO, overrides=overrides, transfer={"checksums": "all"}) as cluster:
        await ask(cluster, "a", tokens)
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 28))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert answer.num_cached_tokens > 20 * BLOCK_SIZE
        await cluster.becomes_idle()


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("ranks", RANKS[:2], ids=["2 to 1", "1 to 2"])
def test_what_one_worker_stored_is_found_by_one_of_other_ranks(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, ranks: tuple[int, int], codec: Any
) -> None:
    tiers = TierConfig(disk_cache_path=str(tmp_path), disk_cache_gb=500 * BLOCK_BYTES / 1e9, disk_cache_codec=codec)
    tokens = prompt(random.Random(6), 12 * BLOCK_SIZE + 3)

    async def run(number: int, *, is_cached: bool) -> None:
        roles, overrides = {"c": Role.COLOCATED}, of_ranks(c=number)
        async with running_cluster(tiny_model, roles, overrides=overrides, tiers=tiers) as cluster:
            cache = cluster.worker("c").parts.cache
            await eventually(lambda: not cache.is_busy)
            answer = await cluster.generate(tokens)
            assert answer.num_cached_tokens == (12 * BLOCK_SIZE if is_cached else 0)
            if codec == "raw":
                assert answer.token_ids == oracle.answer(tokens)
            await cluster.becomes_idle()
            await eventually(lambda: not cache.is_busy)

    asyncio.run(run(ranks[0], is_cached=False))
    asyncio.run(run(ranks[1], is_cached=True))
