"""Routing strategies on real workers: each sends requests elsewhere, and no token may show it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tandem.protocol.messages import Role
from tandem.protocol.routing import STRATEGIES
from tests.support.cluster_harness import Oracle, make_prompt, running_cluster

pytestmark = pytest.mark.cluster

ROLES = {"p": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_tokens_are_the_same_under_each_strategy(tiny_model: Path, oracle: Oracle, strategy: str) -> None:
    async with running_cluster(tiny_model, ROLES, router={"routing": strategy}) as cluster:
        prompts = [make_prompt(40 + 16 * (number % 3), seed=number % 4) for number in range(12)]
        requests = []
        for number, prompt in enumerate(prompts):
            request = cluster.request(prompt, max_tokens=8, ignore_eos=True)
            service_class = msgspec.structs.replace(request.service_class, session=str(number % 3))
            requests.append(replace(request, service_class=service_class, explains=number < 6))
        for batch in (requests[:6], requests[6:]):
            answers = await asyncio.gather(*map(cluster.serve, batch))
            for request, answer in zip(batch, answers, strict=True):
                assert answer.token_ids == oracle.answer(request.token_ids, max_tokens=8, ignore_eos=True)
        decisions = await cluster.flow.decisions()
        assert {one["placement"]["strategy"] for one in decisions} == {strategy}
        pools, overview = await cluster.flow.pools(), await cluster.flow.overview()
        assert pools["shadow"] == overview["shadow"]
        assert all(pools["shadow"][name]["num_decisions"] >= 6 for name in STRATEGIES if name != strategy)
        msgspec.json.encode((pools, overview, decisions))
