"""Several answers to one prompt on real workers: it is computed and handed over once, and no token may show it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.messages import Fork, Generate, RequestFailed, Role
from tandem.router import reservation
from tandem.router.backend import GenerateRequest
from tests.support.cluster_harness import (
    BLOCK_SIZE,
    PAIR,
    Answer,
    Client,
    Cluster,
    Oracle,
    hold_steps,
    make_prompt,
    running_cluster,
)
from tests.support.judged_hub import Verdict, damaging
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

COLOCATED = {"c": Role.COLOCATED}
DRAWN: dict[str, Any] = {"temperature": 0.9, "max_tokens": 12, "ignore_eos": True}


def siblings(cluster: Cluster, prompt: list[int], num_answers: int, **sampling: Any) -> list[GenerateRequest]:
    """Requests for several answers, as a frontend makes them; the first one computes the prompt."""
    first, *others = (cluster.request(prompt, seed=seed, **DRAWN | sampling) for seed in range(num_answers))
    return [first, *(replace(one, fork_of=first.request_id, is_later_choice=True) for one in others)]


async def serve(cluster: Cluster, requests: list[GenerateRequest], leaves: dict[int, int] | None = None) -> list[Any]:
    """All answers; `leaves` says after how many deltas a client leaves, by answer. Errors are returned."""
    order = [*range(1, len(requests)), 0]
    serving = {
        number: asyncio.create_task(cluster.serve(requests[number], cancel_after=(leaves or {}).get(number)))
        for number in order
    }
    answers = await asyncio.gather(*serving.values(), return_exceptions=True)
    return [answers[order.index(number)] for number in range(len(requests))]


def expected(oracle: Oracle, requests: Iterable[GenerateRequest]) -> list[list[int]]:
    return [oracle.answer(one.token_ids, **msgspec.structs.asdict(one.sampling)) for one in requests]


def tokens(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("roles", [PAIR, COLOCATED], ids=["pair", "colocated"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
async def test_forks_are_as_separate(roles: dict[str, Role], length: int, tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model, roles, transfer={"checksums": "all"}) as cluster:
        requests = siblings(cluster, make_prompt(length), 5)
        answers = await serve(cluster, requests)
        assert tokens(answers) == expected(oracle, requests)
        assert [answer.num_cached_tokens for answer in answers] == [0] + 4 * [length]
        assert cluster.flow.num_handoffs == (5 if roles is PAIR else 0)
        await cluster.becomes_idle()


async def test_the_prompt_is_computed_and_sent_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def judge(write: InProcessWrite) -> Verdict:
        sent.extend(write.local_block_ids)
        return Verdict.DELIVER

    async with running_cluster(tiny_model, judge=judge) as cluster:
        engine = cluster.worker("d").parts.engine
        may_go_on = hold_steps(monkeypatch, engine, lambda: True)
        serving = asyncio.create_task(serve(cluster, siblings(cluster, make_prompt(3 * BLOCK_SIZE + 1), 8)))
        await eventually(lambda: len(engine.scheduler.waiting) == 8)
        most_used = await cluster.call("d", lambda: engine.pool.num_used)
        may_go_on.set()
        await serving
        assert len(sent) == 4
        assert most_used == 4
        (placed, *_) = [one for one in await cluster.flow.decisions() if one["request_id"] == "r1"]
        assert placed["placement"]["num_new_tokens"] == 3 * BLOCK_SIZE + 1
        await cluster.becomes_idle()


@pytest.mark.parametrize("roles", [PAIR, COLOCATED], ids=["pair", "colocated"])
@pytest.mark.parametrize(
    "leaves", [{0: 1}, {2: 1}, {0: 3, 3: 1}, {1: 2, 2: 2, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}], ids=str
)
async def test_others_go_on(roles: dict[str, Role], leaves: dict[int, int], tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model, roles) as cluster:
        requests = siblings(cluster, make_prompt(100), 4)
        answers = await serve(cluster, requests, leaves)
        for number, (answer, whole) in enumerate(zip(answers, expected(oracle, requests), strict=True)):
            assert answer.token_ids == whole[: len(answer.token_ids)] if number in leaves else whole
        await cluster.becomes_idle()


@pytest.mark.parametrize("who", [[0], [2], [0, 1], [0, 1, 2, 3]], ids=str)
async def test_clients_that_leave_while_the_prompt_is_computed(
    who: list[int], tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tiny_model) as cluster:
        engine = cluster.worker("p").parts.engine
        may_go_on = hold_steps(monkeypatch, engine, lambda: True)
        requests = siblings(cluster, make_prompt(100), 4)
        tasks = [asyncio.create_task(cluster.serve(one)) for one in (*requests[1:], requests[0])]
        tasks.insert(0, tasks.pop())
        await eventually(lambda: len(engine.sequences) == 4)
        for number in who:
            tasks[number].cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (answer, whole) in enumerate(zip(found, expected(oracle, requests), strict=True)):
            if number not in who:
                assert isinstance(answer, Answer)
                assert answer.token_ids == whole
        await cluster.becomes_idle()


async def test_answers_that_end_with_their_first_token_are_not_handed_over(tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model) as cluster:
        requests = siblings(cluster, make_prompt(40), 4)
        firsts = [answer[0] for answer in expected(oracle, requests)]
        for stops in (firsts[:1], firsts[1:2], firsts):
            requests = siblings(cluster, make_prompt(40), 4, stop_token_ids=tuple(stops))
            assert tokens(await serve(cluster, requests)) == expected(oracle, requests)
            await cluster.becomes_idle()


def add_one(pool: Tensor, blocks: list[int]) -> None:
    pool[blocks] += 1


async def test_damaged_kv_is_computed_again_for_all(tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model, judge=damaging(add_one), transfer={"checksums": "all"}) as cluster:
        requests = siblings(cluster, make_prompt(70), 4)
        assert tokens(await serve(cluster, requests)) == expected(oracle, requests)
        assert (await cluster.call("d", cluster.worker("d").status)).load.num_recomputed == 1
        await cluster.becomes_idle()


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.LOSE])
async def test_a_handoff_that_fails_moves_every_answer(verdict: Verdict, tiny_model: Path, oracle: Oracle) -> None:
    verdicts = iter([verdict])
    async with running_cluster(
        tiny_model, judge=lambda _: next(verdicts, Verdict.DELIVER), router={"max_moves": 3, "routing": "cost"}
    ) as cluster:
        requests = siblings(cluster, make_prompt(70), 4)
        assert tokens(await serve(cluster, requests)) == expected(oracle, requests)
        await cluster.becomes_idle()


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_death_of_a_worker_changes_no_token(
    side: str, count: int, tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, "MAX_DEATHS", 1000)
    roles = {"p": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}
    async with running_cluster(tiny_model, roles, router={"max_moves": 3}) as cluster:
        requests = siblings(cluster, make_prompt(70), 6)
        victims: list[str] = []
        passed = 0
        convert = type(cluster.flow.serve(requests[0]))._recorded

        def kill(generation: Any, delta: Any, attempt: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == count * len(requests):
                victims.append(getattr(attempt.placement.best, side).worker_id)
                asyncio.get_running_loop().call_soon(cluster.client.mark_dead, victims[0], "killed by the test")
            return convert(generation, delta, attempt)

        monkeypatch.setattr("tandem.router.workers.generation.Generation._recorded", kill)
        assert tokens(await serve(cluster, requests)) == expected(oracle, requests)
        assert len(victims) == 1
        await cluster.client.add_worker(cluster.worker(victims[0]).address)
        await cluster.becomes_idle()


async def test_answers_without_room_are_requests_of_their_own(tiny_model: Path, oracle: Oracle) -> None:
    roles = {"c": Role.COLOCATED, "c2": Role.COLOCATED}
    async with running_cluster(tiny_model, roles, engine={"max_num_seqs": 8}) as cluster:
        requests = siblings(cluster, make_prompt(50), 24)
        assert tokens(await serve(cluster, requests)) == expected(oracle, requests)
        decisions = [one["placement"] for one in await cluster.flow.decisions()]
        assert len(decisions) == 24
        assert sum(one["num_new_tokens"] == 0 for one in decisions) == 7
        assert len({one["candidates"][0]["decode_worker"] for one in decisions}) == 2
        await cluster.becomes_idle()


async def test_a_first_answer_that_is_refused_lets_the_others_go(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, COLOCATED) as cluster:
        requests = siblings(cluster, make_prompt(40), 3, stop_token_ids=(10**6,))
        answers = await serve(cluster, requests)
        assert [type(answer).__name__ for answer in answers] == 3 * ["RequestError"]
        assert not cluster.flow.context.forks.waiting(requests[0].request_id)
        await cluster.becomes_idle()


@pytest.mark.parametrize("kind", ["in use", "malformed", "no such token"])
async def test_a_request_that_is_not_taken_is_refused_for_all_its_answers(kind: str, tiny_model: Path) -> None:
    async with running_cluster(tiny_model, COLOCATED) as cluster:
        worker = cluster.worker("c")
        client = Client(worker)
        request = cluster.request(make_prompt(20), max_tokens=400, ignore_eos=True)
        fields: dict[str, Any] = {"token_ids": request.token_ids, "sampling": request.sampling}
        forks = [Fork("a-1", 1), Fork("a-2", 2)]
        if kind == "in use":
            client.send(Generate(request_id="a-1", **fields))
        if kind == "malformed":
            raw = {"type": "Generate", "request_id": "a", "forks": [["a-1", 1], ["a-2", 2]], "token_ids": "no"}
            client.send_raw(raw)
        else:
            token_ids = [10**6] if kind == "no such token" else request.token_ids
            client.send(Generate(request_id="a", forks=forks, **fields | {"token_ids": token_ids}))
        assert {client.receive(RequestFailed).request_id for _ in range(3)} == {"a", "a-1", "a-2"}
        client.close()
