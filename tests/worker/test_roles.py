"""Prefill and decode roles in real workers: what is handed over is what one engine would have computed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.errors import ServingError, TransferError, TransferTimeout
from tandem.protocol.messages import FinishReason, Role
from tests.support.cluster_harness import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    Cluster,
    Oracle,
    hold_steps,
    make_prompt,
    running_cluster,
    worker_config,
)
from tests.support.judged_hub import Verdict, damaging
from tests.support.tiny_llama import EOS_TOKEN_ID
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}


# 1, a block and its neighbours, a step's budget (64) and its neighbours, several chunks.
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200, 333]


@pytest.mark.parametrize("checksums", ["off", "all"])
async def test_the_pair_answers_as_one_engine_does(tiny_model: Path, oracle: Oracle, checksums: str) -> None:
    async with running_cluster(tiny_model, transfer={"checksums": checksums}) as cluster:
        for length in LENGTHS:
            for sampling in ({}, dict(SEEDED)):
                prompt = make_prompt(length)
                sampling |= {"max_tokens": 20, "ignore_eos": True}
                answer = await cluster.generate(prompt, **sampling)
                assert answer.token_ids == oracle.answer(prompt, **sampling), f"{length} {sampling}"
        assert cluster.flow.num_handoffs == 2 * len(LENGTHS)
        await cluster.becomes_idle()


async def test_prefix_hits_on_either_side_change_no_token(tiny_model: Path, oracle: Oracle) -> None:
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}
    async with running_cluster(tiny_model, roles) as cluster:
        conversation = make_prompt(100)
        num_cached = []
        for turn in range(4):  # answers are cached where they were decoded: turn 2 and on hit on both sides
            answer = await cluster.generate(conversation, max_tokens=20)
            assert answer.token_ids == oracle.answer(conversation, max_tokens=20), f"turn {turn}"
            num_cached.append(answer.num_cached_tokens)
            conversation += answer.token_ids + make_prompt(9, seed=turn)
        assert num_cached[0] == 0
        assert all(cached >= 96 for cached in num_cached[1:]), num_cached
        await cluster.becomes_idle()


async def test_what_was_written_reaches_the_cost_model_of_the_router(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, {"p": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}) as cluster:
        # Five steps; the first four chunks are written while the next is computed, if the grant is there by then.
        prompts = [make_prompt(4 * 64 + 3 * BLOCK_SIZE, seed) for seed in range(4)]
        worker = cluster.registry.get("p")
        assert worker is not None
        kind = worker.card.kind
        first_expected = cluster.costs.transfer(kind, kind).costs
        for prompt in prompts:
            await cluster.generate(prompt)
        await eventually(lambda: sum(link.num_handoffs for link in worker.links) == 4)
        assert {link.peer_id for link in worker.links} <= {"d", "d2"}
        assert sum(link.num_bytes for link in worker.links) == 4 * 19 * BLOCK_BYTES
        assert 4 * 3 * BLOCK_BYTES <= sum(link.exposed_bytes for link in worker.links) <= 4 * 19 * BLOCK_BYTES
        assert 4 * 2 <= sum(link.num_transfers for link in worker.links) <= 4 * (5 + 1)
        for link in worker.links:
            assert 0 < link.exposed_s <= link.seconds
        assert cluster.flow.num_handoffs == 4
        assert cluster.costs.transfer(kind, kind).costs != first_expected


async def test_a_dead_peer_is_forgotten_by_the_link_counts(tiny_model: Path) -> None:
    async with running_cluster(tiny_model) as cluster:
        await cluster.generate(make_prompt(100))
        await cluster.becomes_idle()
        prefill, decode = cluster.worker("p"), cluster.worker("d")
        assert [link.peer_id for link in await cluster.call("p", lambda: prefill.parts.prefill.writes.loads)] == ["d"]
        await cluster.call("p", lambda: prefill.peer_died(decode.address))
        assert await cluster.call("p", lambda: prefill.parts.prefill.writes.loads) == []


async def test_a_fully_cached_prompt_is_served_again(tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model) as cluster:
        prompt = make_prompt(4 * BLOCK_SIZE)
        for num_cached in (0, 3 * BLOCK_SIZE):  # the last token's block is computed again, for its logits
            answer = await cluster.generate(prompt)
            assert answer.token_ids == oracle.answer(prompt)
            assert answer.num_cached_tokens == num_cached
        await cluster.becomes_idle()


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"max_tokens": 1}, FinishReason.LENGTH), ({"logit_bias": {EOS_TOKEN_ID: 100.0}}, FinishReason.STOP)],
    ids=["max_tokens=1", "EOS"],
)
async def test_a_first_token_can_be_the_last(
    tiny_model: Path, sampling: dict[str, object], reason: FinishReason
) -> None:
    async with running_cluster(tiny_model) as cluster:
        for length in (1, 16, 150):
            for seed in range(10):
                answer = await cluster.generate(make_prompt(length, seed), **sampling)
                assert (len(answer.token_ids), answer.finish_reason) == (1, reason), (length, seed)
        await cluster.becomes_idle()


@pytest.mark.parametrize(
    ("pools", "num_tokens", "max_tokens"),
    [
        # Prompts of whole blocks: each received sequence needs one more block for its second token at once.
        ({"d": 8}, 2 * BLOCK_SIZE, 40),
        ({"d": 12}, 2 * BLOCK_SIZE, 40),
        ({"p": 9, "d": 16}, 3 * BLOCK_SIZE + 5, 8),
    ],
)
async def test_a_small_pool_makes_prompts_queue_and_serves_them_all(
    tiny_model: Path, oracle: Oracle, pools: dict[str, int], num_tokens: int, max_tokens: int
) -> None:
    prompts = [make_prompt(num_tokens, seed=seed) for seed in range(12)]
    overrides = {worker_id: {"num_blocks": num_blocks} for worker_id, num_blocks in pools.items()}
    async with running_cluster(tiny_model, overrides=overrides) as cluster:
        answers = await asyncio.gather(*(cluster.generate(prompt, max_tokens=max_tokens) for prompt in prompts))
        assert [a.token_ids for a in answers] == [oracle.answer(p, max_tokens=max_tokens) for p in prompts]
        await cluster.becomes_idle()


async def test_a_computed_prompt_waits_for_a_full_pool_past_any_timeout(tiny_model: Path, oracle: Oracle) -> None:
    prompt = make_prompt(8 * BLOCK_SIZE)
    timeout_s = 0.5
    transfer = {"handoff_timeout_s": timeout_s, "lease_ttl_s": timeout_s}
    async with running_cluster(tiny_model, transfer=transfer, overrides={"d": {"num_blocks": 16}}) as cluster:
        worker = cluster.worker("d")
        pool = worker.parts.engine.pool
        held = await cluster.call("d", lambda: pool.try_allocate(10))
        request = cluster.request(prompt)
        first = asyncio.create_task(cluster.serve(request, cancel_after=1))
        answer = asyncio.create_task(cluster.generate(prompt))
        await eventually(lambda: worker.parts.engine.scheduler.num_waiting_for_room == 2)
        past_s = time.monotonic() + 4 * timeout_s  # no event shows that a timeout does not fire
        await eventually(lambda: time.monotonic() > past_s)
        assert not answer.done()
        assert not first.done(), "a token was sent, and nothing would have followed it"
        await cluster.call("d", lambda: pool.release(held))
        assert (await answer).token_ids == oracle.answer(prompt)
        assert len((await first).token_ids) >= 1
        await cluster.becomes_idle()


async def test_a_seat_comes_before_a_token(tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = make_prompt(2 * BLOCK_SIZE, seed=1), make_prompt(2 * BLOCK_SIZE, seed=2)
    async with running_cluster(tiny_model, overrides={"d": {"max_num_seqs": 1}}) as cluster:
        engine = cluster.worker("d").parts.engine
        may_end = hold_steps(monkeypatch, engine, lambda: engine.scheduler.running)  # the seat stays taken
        has_seat = asyncio.create_task(cluster.generate(long, max_tokens=100))
        await eventually(lambda: engine.scheduler.running)
        first = asyncio.create_task(cluster.serve(cluster.request(short), cancel_after=1))
        await eventually(lambda: cluster.worker("p").parts.prefill.num_held_tokens)
        assert not first.done(), "a token was sent, and nothing would have followed it"
        may_end.set()
        assert len((await first).token_ids) >= 1
        assert (await has_seat).token_ids == oracle.answer(long, max_tokens=100)
        await cluster.becomes_idle()


def flip_a_bit(pool: Tensor, blocks: list[int]) -> None:
    pool[blocks[0]].view(torch.uint8).view(-1)[7] ^= 16


def tear_a_block(pool: Tensor, blocks: list[int]) -> None:
    """Half of it is what was there before."""
    block = pool[blocks[-1]].view(-1)
    block[len(block) // 2 :] = 0.0


def swap_blocks(pool: Tensor, blocks: list[int]) -> None:
    pool[blocks[:2]] = pool[blocks[1::-1]]


def garbling(is_damaged: Callable[[InProcessWrite], bool] = lambda _: True) -> Callable[[InProcessWrite], Verdict]:
    """A link that flips a bit in the notifications of these writes."""

    def judge(write: InProcessWrite) -> Verdict:
        if is_damaged(write):
            write.notification = bytes([write.notification[0] ^ 1, *write.notification[1:]])
        return Verdict.DELIVER

    return judge


def is_a_chunk(write: InProcessWrite) -> bool:
    return bool(write.local_block_ids)


def is_the_last_word(write: InProcessWrite) -> bool:
    return not write.local_block_ids


@pytest.mark.parametrize(
    ("damage", "sampling"),
    [(flip_a_bit, {}), (tear_a_block, SEEDED), (swap_blocks, SEEDED)],
    ids=["flip", "tear", "swap"],
)
async def test_what_was_damaged_on_the_way_is_never_decoded_from(
    tiny_model: Path, oracle: Oracle, damage: Callable[[Tensor, list[int]], None], sampling: dict[str, Any]
) -> None:
    """A link that damages everything costs time, and neither an answer nor a token of one."""
    async with running_cluster(tiny_model, judge=damaging(damage)) as cluster:  # without a word about checksums
        for number, length in enumerate((40, 65, 200, 333), 1):
            prompt = make_prompt(length)
            answer = await cluster.generate(prompt, max_tokens=20, ignore_eos=True, **sampling)
            assert answer.token_ids == oracle.answer(prompt, max_tokens=20, ignore_eos=True, **sampling)
            assert await num_recomputed(cluster) == number
        await cluster.becomes_idle()


async def num_recomputed(cluster: Cluster) -> int:
    status = await cluster.call("d", cluster.worker("d").status)
    count: int = status.load.num_recomputed
    return count


@pytest.mark.parametrize(
    ("is_damaged", "checksums"),
    [(is_a_chunk, "off"), (is_a_chunk, "all"), (is_the_last_word, "all"), (lambda _: True, "off")],
    ids=["chunk-off", "chunk-all", "done", "all"],
)
async def test_a_prompt_whose_notification_was_damaged_is_computed_again(
    tiny_model: Path, oracle: Oracle, checksums: str, is_damaged: Callable[[InProcessWrite], bool]
) -> None:
    transfer = {"checksums": checksums, "lease_ttl_s": 0.6, "handoff_timeout_s": 2.0}
    async with running_cluster(tiny_model, judge=garbling(is_damaged), transfer=transfer) as cluster:
        prompts = [make_prompt(length) for length in (40, 16, 65, 200)]
        answers = await asyncio.gather(*(cluster.generate(prompt, max_tokens=20) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [oracle.answer(p, max_tokens=20) for p in prompts]
        assert await num_recomputed(cluster) == len(prompts)
        await cluster.becomes_idle()


async def test_a_sender_that_says_nothing_more_of_a_late_prompt_fails_it(tiny_model: Path) -> None:
    """Its last word was damaged, and it does not answer the question for it either."""
    transfer = {"lease_ttl_s": 0.6, "handoff_timeout_s": 0.6}

    def judge(write: InProcessWrite) -> Verdict:
        write.notification = b"garbage"
        return Verdict.DELIVER

    async with running_cluster(tiny_model, judge=judge, transfer=transfer) as cluster:
        role = cluster.worker("p").parts.prefill
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(role, "revoked", lambda message: None)
            with pytest.raises(TransferTimeout, match="did not arrive in time"):
                await cluster.generate(make_prompt(40))
        await cluster.becomes_idle()


async def test_a_write_that_fails_fails_its_request_only(tiny_model: Path, oracle: Oracle) -> None:
    is_failing = True

    def judge(_: InProcessWrite) -> Verdict:
        return Verdict.FAIL if is_failing else Verdict.DELIVER

    async with running_cluster(tiny_model, judge=judge) as cluster:
        with pytest.raises(TransferError, match="KV handoff failed"):
            await cluster.generate(make_prompt(100))
        await cluster.becomes_idle()
        assert await cluster.call("p", lambda: cluster.worker("p").parts.prefill.writes.loads) == [], "none was written"
        is_failing = False
        prompt = make_prompt(100)
        assert (await cluster.generate(prompt)).token_ids == oracle.answer(prompt)
        await cluster.becomes_idle()


@pytest.mark.parametrize("difference", [{"block_size": 32}, {"dtype": "bfloat16"}], ids=["block_size", "dtype"])
def test_workers_that_disagree_never_exchange_kv(tiny_model: Path, difference: dict[str, object]) -> None:
    async def scenario() -> None:
        async with running_cluster(tiny_model, overrides={"d": difference}) as cluster:
            await cluster.generate(make_prompt(20))

    with pytest.raises(ServingError, match=r"cannot join: (namespace is|its KV is computed by) "):
        asyncio.run(scenario())


async def test_a_peer_that_refuses_the_link_gives_the_client_the_reason(tiny_model: Path) -> None:
    async with running_cluster(tiny_model) as cluster:
        worker = cluster.worker("d")
        await cluster.call("d", lambda: worker.parts.compatibility.update(model_revision="another"))
        for _ in range(2):  # a refused link is tried again
            with pytest.raises(TransferError, match="cannot be written to: the two differ in model_revision"):
                await cluster.generate(make_prompt(40))
            await cluster.becomes_idle()


async def test_a_peer_that_checks_less_is_refused(tiny_model: Path) -> None:
    """Its blocks would be decoded from unchecked, though `all` is asked for here."""
    async with running_cluster(tiny_model, {"d": Role.DECODE}) as cluster:
        await cluster.add(worker_config(tiny_model, "p", Role.PREFILL, {"checksums": "off"}))
        with pytest.raises(TransferError, match="d cannot be written to: the two differ in checksums"):
            await cluster.generate(make_prompt(40))
        await cluster.becomes_idle()


async def cancel_at(cluster: Cluster, prompt: list[int], random_: random.Random) -> None:
    """Let the client leave before the first delta, after some, or at any moment between."""
    if random_.random() < 0.5:
        await cluster.serve(cluster.request(prompt, max_tokens=50), cancel_after=random_.randint(1, 12))
        return
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(random_.uniform(0.0, 0.15)):
            await cluster.generate(prompt, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_a_storm_of_faults_and_cancels_leaves_nothing_behind(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    random_ = random.Random(seed)
    is_stormy = True

    def judge(write: InProcessWrite) -> Verdict:
        if not is_stormy:
            return Verdict.DELIVER
        return random_.choices([Verdict.DELIVER, Verdict.HOLD, Verdict.FAIL], [90, 6, 4])[0]

    async def one(cluster: Cluster, prompt: list[int]) -> None:
        if random_.random() < 0.4:
            try:
                await cancel_at(cluster, prompt, random_)
            except (ServingError, pytest.fail.Exception):
                return
        try:
            answer = await cluster.generate(prompt)
        except ServingError:
            return
        assert answer.token_ids == oracle_answers[tuple(prompt)]

    prompts = [make_prompt(random_.randint(1, 120), seed=random_.randint(0, 3)) for _ in range(40)]
    oracle_answers = {tuple(prompt): oracle.answer(prompt) for prompt in prompts}

    async def scenario() -> None:
        nonlocal is_stormy
        roles = {"p": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}
        transfer = {"checksums": "all", "lease_ttl_s": 1.0, "handoff_timeout_s": 5.0}
        async with running_cluster(tiny_model, roles, engine={"num_blocks": 48}, transfer=transfer, judge=judge) as c:
            clients = [asyncio.create_task(one(c, prompt)) for prompt in prompts]
            done = asyncio.gather(*clients)
            while not done.done():
                await asyncio.sleep(0.05)  # part of the fault: how long writes are held
                c.hub.release_held()
            await done
            is_stormy = False
            c.hub.release_held()
            await c.becomes_idle()
            prompt = make_prompt(50, seed=99)
            assert (await c.generate(prompt)).token_ids == oracle.answer(prompt)

    asyncio.run(scenario())
