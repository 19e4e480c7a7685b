"""Scored prompts in real workers: the scores are those of one engine, wherever a prompt is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.config import TierConfig
from tandem.protocol.messages import Role
from tests.support.cluster_harness import BLOCK_BYTES, PAIR, Oracle, make_prompt, running_cluster
from tests.support.judged_hub import Verdict
from tests.worker.test_roles import LENGTHS, garbling, num_recomputed

pytestmark = pytest.mark.cluster

COLOCATED = {"c": Role.COLOCATED}
NUM_TOP = 3


@pytest.mark.exact_bits("the same rows are scored beside others")
@pytest.mark.parametrize("roles", [PAIR, COLOCATED], ids=["pair", "colocated"])
async def test_scores_are_those_of_one_engine(tiny_model: Path, oracle: Oracle, roles: dict[str, Role]) -> None:
    tiers = TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9)
    async with running_cluster(tiny_model, roles, tiers=tiers) as cluster:
        prompts = [make_prompt(length) for length in LENGTHS]
        for turn in range(2):  # in the second one all prompts are in the pool and in host memory
            num_tokens = 6 if turn else 1
            fields = {"num_prompt_logprobs": NUM_TOP, "ignore_eos": True, "max_tokens": num_tokens}
            answers = await asyncio.gather(*(cluster.generate(prompt, **fields) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.prompt_logprobs == oracle.scores(prompt, NUM_TOP), (turn, len(prompt))
                assert answer.token_ids == oracle.answer(prompt, **fields)
                assert answer.num_cached_tokens == 0
        plain = await cluster.generate(prompts[-1])
        assert plain.num_cached_tokens == (LENGTHS[-1] - 1) // 16 * 16, "what was scored serves others"
        assert plain.prompt_logprobs is None
        await cluster.becomes_idle()


@pytest.mark.exact_bits("the same rows are scored beside others")
async def test_a_prompt_that_is_computed_again_keeps_its_scores(tiny_model: Path, oracle: Oracle) -> None:
    transfer = {"lease_ttl_s": 0.6, "handoff_timeout_s": 2.0}
    async with running_cluster(tiny_model, judge=garbling(), transfer=transfer) as cluster:
        prompts = [make_prompt(length) for length in (40, 65, 200)]
        answers = await asyncio.gather(*(cluster.generate(p, num_prompt_logprobs=NUM_TOP) for p in prompts))
        assert [answer.prompt_logprobs for answer in answers] == [oracle.scores(p, NUM_TOP) for p in prompts]
        assert [answer.token_ids for answer in answers] == [oracle.answer(p) for p in prompts]
        assert await num_recomputed(cluster) == len(prompts)
        await cluster.becomes_idle()


async def test_blocks_the_decode_worker_has_of_a_scored_prompt_are_not_sent(tiny_model: Path, oracle: Oracle) -> None:
    sent: list[int] = []

    def judge(write: InProcessWrite) -> Verdict:
        sent.append(len(write.local_block_ids))
        return Verdict.DELIVER

    async with running_cluster(tiny_model, judge=judge) as cluster:
        prompt = make_prompt(200)
        for expected in (13, 1):
            sent.clear()
            answer = await cluster.generate(prompt, num_prompt_logprobs=NUM_TOP)
            assert answer.prompt_logprobs == oracle.scores(prompt, NUM_TOP)
            assert sum(sent) == expected
        await cluster.becomes_idle()
