"""Grammars in real workers: the tokens are those of one engine that takes them one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.messages import Role
from tests.support.cluster_harness import PAIR, Oracle, running_cluster
from tests.support.judged_hub import Verdict
from tests.support.structured_requests import random_sampling
from tests.worker.test_roles import garbling, make_prompt, num_recomputed

pytestmark = pytest.mark.cluster

COLOCATED = {"c": Role.COLOCATED}


@pytest.fixture(scope="module")
def oracle(text_model: Path) -> Oracle:
    return Oracle(text_model, max_run=1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))])
@pytest.mark.parametrize(
    ("roles", "judge", "engine"),
    [
        (PAIR, None, {}),
        (PAIR, garbling(), {}),
        (PAIR, None, {"num_blocks": 60}),
        (COLOCATED, None, {}),
        (PAIR, None, {"num_blocks": 60, "speculate": "8"}),
        (PAIR, garbling(), {"speculate": "8"}),
    ],
    ids=["handed over", "computed again", "small pool", "colocated", "drafting", "drafting, computed again"],
)
async def test_answers_are_those_of_one_engine(
    text_model: Path,
    oracle: Oracle,
    roles: dict[str, Role],
    judge: Callable[[InProcessWrite], Verdict] | None,
    engine: dict[str, Any],
    seed: int,
) -> None:
    source = random.Random(seed)
    transfer = {"lease_ttl_s": 0.6, "handoff_timeout_s": 5.0} if judge else {}
    requests = [(make_prompt(source.randint(1, 200)), random_sampling(source, vocab_size=300)) for _ in range(16)]
    requests += [
        (prompt, {**sampling, "seed": sampling["seed"] + 1}) for prompt, sampling in requests[:4]
    ]  # as `n` choices
    if "speculate" in engine:
        for prompt, sampling in requests[::2]:
            sampling["prediction"] = tuple(oracle.answer(prompt, **sampling))
    async with running_cluster(text_model, roles, judge=judge, transfer=transfer, engine=engine) as cluster:
        answers = await asyncio.gather(*(cluster.generate(prompt, **sampling) for prompt, sampling in requests))
        for answer, (prompt, sampling) in zip(answers, requests, strict=True):
            assert answer.token_ids == oracle.answer(prompt, **sampling), (len(prompt), sampling)
        if judge is not None:
            assert await num_recomputed(cluster) > 0
        await cluster.becomes_idle()
