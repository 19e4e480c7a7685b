"""Answers that continue on another worker have the same tokens as on one undisturbed engine."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages import Role
from tandem.router import reservation
from tandem.router.workers import copy_ahead, hot_spots
from tandem.scheduling import cost_model
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel
from tandem.scheduling.workers.hot_spots import HotSpotCause
from tests.support.cluster_harness import (
    BLOCK_SIZE,
    DEADLINE_S,
    Answer,
    Cluster,
    Oracle,
    hold_steps,
    make_prompt,
    running_cluster,
)
from tests.support.streams import Pulled
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "p2": Role.PREFILL, "d2": Role.DECODE}
NUM_TOKENS = 20
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalised": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "min_tokens": 12},
    "stop token": {"temperature": 1.0, "seed": 3, "stop_token_ids": tuple(range(3, 40)), "min_tokens": 9},
}
Requests = list[tuple[list[int], dict[str, Any]]]


def random_requests(rng: random.Random, num: int, lengths: list[int], kinds: int = 4, **fields: Any) -> Requests:
    """Prompts of these lengths, each with the sampling of one of the first `kinds` kinds."""
    names, fields = list(SAMPLING)[:kinds], fields | {"ignore_eos": True}
    return [(make_prompt(rng.choice(lengths), number), SAMPLING[rng.choice(names)] | fields) for number in range(num)]


def serve(cluster: Cluster, requests: Requests) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(cluster.generate(prompt, **sampling)) for prompt, sampling in requests]


async def progress(cluster: Cluster, answers: list[asyncio.Task[Answer]], num_tokens: int) -> None:
    """Wait until the clients have this many more tokens, or all answers have ended."""
    wanted = cluster.num_tokens + num_tokens
    await eventually(lambda: cluster.num_tokens >= wanted or all(answer.done() for answer in answers))


async def check(answers: list[asyncio.Task[Answer]], requests: Requests, oracle: Oracle) -> None:
    for answer, (prompt, sampling) in zip(answers, requests, strict=True):
        assert (await answer).token_ids == oracle.answer(prompt, **sampling)


class Deaths:
    """Makes the router treat running workers as dead: what they still write and send must do no harm."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.killed: list[str] = []

    async def kill(self, side: str) -> None:
        """Kill the worker that does this part of the newest request."""
        newest = (await self.cluster.flow.decisions())[0]
        worker_id = newest["placement"]["candidates"][0][f"{side}_worker"]
        self.cluster.client.mark_dead(worker_id, "killed by the test")
        self.killed.append(worker_id)

    async def revive(self) -> None:
        while self.killed:
            await self.cluster.client.add_worker(self.cluster.worker(self.killed.pop()).address)

    async def answer(self, prompt: list[int], deaths: dict[int, str], **sampling: Any) -> Answer:
        """The answer to a prompt. `deaths`: which part's worker dies once the client has that many tokens."""
        out: list[int] = []
        reason = None
        left = dict(deaths)
        request = self.cluster.request(prompt, **sampling)
        async with asyncio.timeout(DEADLINE_S), aclosing(Pulled(self.cluster.flow.serve(request))) as deltas:
            async for delta in deltas:
                out += delta.token_ids
                reason = delta.finish_reason
                for count in [count for count in left if count <= len(out) and reason is None]:
                    await self.kill(left.pop(count))
        await self.revive()
        return Answer(out, reason, 0)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", SAMPLING)
async def test_death_while_decoding_changes_no_token(tiny_model: Path, oracle: Oracle, name: str, every: int) -> None:
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | SAMPLING[name]
    async with running_cluster(tiny_model, ROLES, router={"max_moves": 3}) as cluster:
        deaths = Deaths(cluster)
        for count in range(1, NUM_TOKENS, every):
            prompt = make_prompt(3 * BLOCK_SIZE - 5, count)
            answer = await deaths.answer(prompt, {count: "decode"}, **sampling)
            assert answer.token_ids == oracle.answer(prompt, **sampling), f"death after {count} tokens"
        assert cluster.flow.context.moves.num_moves["worker_lost"] > 0, "no death met a running answer"
        await cluster.becomes_idle()


@pytest.mark.parametrize(
    ("roles", "copy_kv_tokens", "speculate"),
    [(ROLES, 0, "off"), ({"c": Role.COLOCATED, "c2": Role.COLOCATED}, 0, "off"), (ROLES, 16, "off"), (ROLES, 16, "2")],
    ids=["pairs", "colocated", "copied", "drafting"],
)
async def test_deaths_among_many_streams_change_no_token(
    tiny_model: Path,
    oracle: Oracle,
    roles: dict[str, Role],
    copy_kv_tokens: int,
    speculate: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers die and come back at any moment, also before the first token and while KV is on its way."""
    monkeypatch.setattr(reservation, "MAX_DEATHS", 1000)  # no request is to blame
    rng = random.Random(7)
    router = {"max_moves": 50, "copy_kv_tokens": copy_kv_tokens}
    async with running_cluster(tiny_model, roles, router=router, engine={"speculate": speculate}) as cluster:
        requests = random_requests(rng, 24, [3, 40, 150, 300], max_tokens=40)
        for prompt, sampling in requests[1::2] if speculate != "off" else []:
            sampling["prediction"] = tuple(oracle.answer(prompt, **sampling))
        answers = serve(cluster, requests)
        while not all(answer.done() for answer in answers):
            victim = rng.choice(list(roles))
            address = cluster.worker(victim).address
            cluster.client.mark_dead(victim, "killed by the test")
            await progress(cluster, answers, rng.randint(0, 10))
            await cluster.client.add_worker(address)
            await progress(cluster, answers, rng.randint(20, 60))
        await check(answers, requests, oracle)
        print(dict(cluster.flow.context.moves.num_moves))
        assert cluster.flow.context.moves.num_moves["worker_lost"] > 3
        await cluster.becomes_idle()


@pytest.mark.parametrize("min_copy_s", [0.0, 1e9], ids=["copied ahead", "at once"])
async def test_answers_follow_the_roles_of_workers_without_losing_a_token(
    tiny_model: Path, oracle: Oracle, min_copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_ahead, "_MIN_COPY_S", min_copy_s)
    rng = random.Random(3)
    async with running_cluster(tiny_model, ROLES) as cluster:
        requests = random_requests(rng, 16, [40, 150, 300], max_tokens=60)
        answers = serve(cluster, requests)
        while not all(answer.done() for answer in answers):
            for worker_id, role in (("p", Role.DECODE), ("d", Role.PREFILL), ("d", Role.DECODE), ("p", Role.PREFILL)):
                await cluster.call(worker_id, lambda name=worker_id, role=role: cluster.worker(name).set_role(role))
                cluster.registry.set_role(worker_id, role)
                await progress(cluster, answers, rng.randint(5, 25))
        await check(answers, requests, oracle)
        assert cluster.flow.context.moves.num_moves["role_change"] > 3
        await cluster.becomes_idle()


async def test_answers_move_to_a_worker_that_joins(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_spots, "_MIN_REMAINING_TOKENS", 1)
    # The router's cost model is fixed: whether a move pays must not depend on the speed of this machine.
    monkeypatch.setattr(cost_model, "CPU_PRIOR", CPU_PRIOR._replace(base_s=0.0, decode_seq_s=0.01))
    monkeypatch.setattr(CostModel, "learn", lambda *_: None)
    rng = random.Random(5)
    async with running_cluster(tiny_model, {"d": Role.COLOCATED, "d2": Role.COLOCATED}) as cluster:
        address = cluster.worker("d2").address
        cluster.client.mark_dead("d2", "it joins later")
        requests = random_requests(rng, 8, [40, 150], kinds=3, max_tokens=200)
        engine = cluster.worker("d").parts.engine
        may_go_on = hold_steps(monkeypatch, engine, lambda: len(engine.scheduler.running) == len(requests))
        answers = serve(cluster, requests)
        registry = cluster.registry
        await eventually(lambda: (d := registry.get("d")) is not None and d.load.num_running == len(requests))
        await cluster.client.add_worker(address)
        may_go_on.set()
        spots = []
        while not all(answer.done() for answer in answers):
            if (spot := cluster.flow.hot_spots.look()) is not None:
                spots.append(spot)
            await progress(cluster, answers, 1)
        await check(answers, requests, oracle)
        # An answer may end before it has left.
        assert 2 <= cluster.flow.context.moves.num_moves[HotSpotCause.PACE] <= len(spots)
        assert {(spot.worker, spot.to) for spot in spots} == {("d", "d2")}
        await cluster.becomes_idle()
