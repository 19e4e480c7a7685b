"""KV that a router wants at another worker too: read, never computed, and nothing is left behind however that ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.protocol.digest import block_digests, root_digest
from tandem.protocol.messages import (
    Cancel,
    CopyKv,
    FinishReason,
    Generate,
    PeerAddress,
    RequestFailed,
    Role,
    StepOutput,
)
from tandem.protocol.sampling import SamplingParams
from tests.support.cluster_harness import BLOCK_SIZE, Client, Cluster, Oracle, prompt_of, running_cluster
from tests.support.judged_hub import Verdict
from tests.support.waiting import eventually
from tests.worker.kv.test_peer_reads import FAILING_READS, Judge, only_reads

pytestmark = pytest.mark.cluster

TWO = {"a": Role.DECODE, "b": Role.DECODE}
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make_prompt(num_blocks: int, seed: int = 1) -> list[int]:
    return prompt_of(random.Random(seed), num_blocks)


@contextmanager
def connected(cluster: Cluster, worker_id: str) -> Iterator[Client]:
    client = Client(cluster.worker(worker_id))
    try:
        yield client
    finally:
        client.close()


def finished(client: Client) -> int:
    """Wait for the end of a request; how many tokens it got."""
    num_tokens = 0
    while True:
        output = client.receive(StepOutput | RequestFailed)
        assert isinstance(output, StepOutput), output
        for delta in output.deltas:
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH
                return num_tokens


async def generate(cluster: Cluster, worker_id: str, tokens: list[int], request_id: str = "g") -> None:
    with connected(cluster, worker_id) as client:
        client.send(Generate(request_id=request_id, token_ids=tokens, sampling=SAMPLING))
        assert await asyncio.to_thread(finished, client) == SAMPLING.max_tokens


def chain(cluster: Cluster, tokens: list[int]) -> list[bytes]:
    namespace = cluster.worker("a").parts.engine.namespace
    return block_digests(root_digest(namespace), tokens, BLOCK_SIZE)


async def copy(cluster: Cluster, tokens: list[int], source: PeerAddress | None = None, request_id: str = "c") -> int:
    """Have "b" copy a prompt's KV. How many of its blocks are there then."""
    digests = chain(cluster, tokens)
    with connected(cluster, "b") as client:
        source = source or cluster.worker("a").address
        client.send(CopyKv(request_id=request_id, digests=digests, source=source))
        assert await asyncio.to_thread(finished, client) == 0
    return cluster.worker("b").parts.engine.pool.count_cached(digests)


def num_steps(cluster: Cluster) -> list[int]:
    """Counts the chunks that "b" computes from now on."""
    chunks: list[int] = []
    engine = cluster.worker("b").parts.engine
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: [chunks.append(1) or chunk for chunk in schedule()]  # type: ignore[method-assign,func-returns-value]
    return chunks


@pytest.mark.parametrize(
    "transport",
    ["in_process", "nixl", pytest.param("nccl", marks=pytest.mark.cpu_engine("two on one GPU cannot use NCCL"))],
)
async def test_a_copy_is_read_and_nothing_is_computed(tiny_model: Path, oracle: Oracle, transport: str) -> None:
    async with running_cluster(tiny_model, TWO, transfer={"transport": transport, "checksums": "all"}) as cluster:
        tokens = make_prompt(28)
        await generate(cluster, "a", tokens)
        chunks = num_steps(cluster)
        assert await copy(cluster, tokens[: 20 * BLOCK_SIZE]) == 20
        assert await copy(cluster, tokens) == 28, "the rest of it"
        assert await copy(cluster, tokens) == 28, "nothing is missing"
        assert chunks == []
        assert cluster.worker("b").parts.copies.num_blocks == 28
        answer = await cluster.generate(tokens, max_tokens=6, ignore_eos=True)
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert cluster.worker("a").parts.engine.pool.count_cached(chain(cluster, tokens)) == 28, "its source keeps it"
        await cluster.becomes_idle()


async def test_a_source_that_has_less_gives_what_it_has(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, TWO) as cluster:
        tokens = make_prompt(28)
        assert await copy(cluster, tokens) == 0
        await generate(cluster, "a", tokens[: 11 * BLOCK_SIZE])
        assert await copy(cluster, tokens) == 11
        await cluster.becomes_idle()


async def test_a_source_that_is_gone_ends_the_copy_with_its_lease(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, TWO, transfer={"lease_ttl_s": 0.5}) as cluster:
        gone = cluster.worker("a").address
        digests = chain(cluster, make_prompt(28))
        await asyncio.to_thread(cluster.workers.pop("a").stop)
        with connected(cluster, "b") as client:
            client.send(CopyKv(request_id="c", digests=digests, source=gone))
            assert await asyncio.to_thread(finished, client) == 0
            await cluster.call("b", lambda: cluster.worker("b").peer_died(gone))
            client.send(CopyKv(request_id="d", digests=digests, source=gone))
            assert await asyncio.to_thread(finished, client) == 0
        await eventually(lambda: not cluster.worker("b").parts.reader.is_reading)
        await cluster.call("b", lambda: cluster.worker("b").check_integrity(idle=True))


@pytest.mark.parametrize("judge", FAILING_READS, ids=["fails", "is lost", "is damaged"])
async def test_a_read_that_fails_ends_the_copy(tiny_model: Path, judge: Judge) -> None:
    async with running_cluster(tiny_model, TWO, judge=judge, transfer={"checksums": "all"}) as cluster:
        tokens = make_prompt(28)
        await generate(cluster, "a", tokens)
        assert await copy(cluster, tokens) == 0
        cluster.hub.stop_judging()
        assert await copy(cluster, tokens) == 28
        await cluster.becomes_idle()


async def test_a_copy_takes_no_room_that_a_sequence_needs(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, TWO, engine={"num_blocks": 40}) as cluster:
        tokens = make_prompt(20)
        await generate(cluster, "a", tokens)
        with connected(cluster, "b") as client:
            long = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
            client.send(Generate(request_id="long", token_ids=make_prompt(15, 2), sampling=long))
            await eventually(lambda: cluster.worker("b").parts.engine.scheduler.running)
            assert await copy(cluster, tokens) == 0
            assert await asyncio.to_thread(finished, client) == long.max_tokens
        assert cluster.worker("b").parts.engine.scheduler.num_preemptions == 0
        await cluster.becomes_idle()


async def test_a_copy_that_nobody_waits_for_ends(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, TWO, judge=only_reads(Verdict.HOLD)) as cluster:
        tokens = make_prompt(28)
        await generate(cluster, "a", tokens)
        with connected(cluster, "b") as client:
            client.send(CopyKv(request_id="c", digests=chain(cluster, tokens), source=cluster.worker("a").address))
            await eventually(lambda: cluster.hub.held)
            client.send(CopyKv(request_id="c", digests=chain(cluster, tokens), source=cluster.worker("a").address))
            refused = await asyncio.to_thread(client.receive, RequestFailed)
            assert "in use" in refused.message
            client.send(Cancel(request_id="c"))
            await eventually(lambda: not cluster.worker("b").parts.replies.request_ids)
        cluster.hub.release_held()
        await cluster.becomes_idle()
