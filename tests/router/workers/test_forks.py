from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import WorkerTimeout
from tandem.protocol.messages import Cancel, Decode, FinishReason, Fork, Generate, Message, Prefill, Role, SequenceDelta
from tandem.router.backend import GenerateRequest
from tandem.router.workers.fork_line import ForkLine
from tests.support.fake_worker import FakeCluster, FakeWorker, collect, fake_cluster, make_request, silent, tokens
from tests.support.waiting import eventually


def siblings(num_answers: int, **fields: object) -> list[GenerateRequest]:
    """The requests of one prompt, the first one first."""
    first, *others = (make_request(request_id=f"a-{number}", **fields) for number in range(num_answers))
    return [first, *(replace(one, fork_of="a-0", is_later_choice=True) for one in others)]


def all_tokens(worker: FakeWorker, message: Message) -> None:
    """Each answer gets its number four times."""
    if isinstance(message, Generate):
        for name in message.request_ids:
            worker.output(SequenceDelta(name, 0, 4 * [int(name[-1])], FinishReason.LENGTH))


def start(cluster: FakeCluster, requests: list[GenerateRequest]) -> list[asyncio.Task[list[SequenceDelta]]]:
    """Serve them as a frontend does: the first one last."""
    tasks = [asyncio.create_task(collect(cluster, one)) for one in (*requests[1:], requests[0])]
    return [tasks[-1], *tasks[:-1]]


async def test_one_request_carries_all_answers() -> None:
    async with fake_cluster(decode=all_tokens, local_prefill=True) as cluster:
        requests = siblings(4)
        answers = [tokens(await one) for one in start(cluster, requests)]
        assert answers == [4 * [number] for number in range(4)]
        (sent,) = cluster.workers["d"].of_type(Generate)
        assert isinstance(sent, Generate)
        assert (sent.request_id, sent.sampling) == ("a-0", requests[0].sampling)
        assert sent.forks == [Fork(one.request_id, one.sampling.seed) for one in requests[1:]]
        placed = {one["request_id"]: one["placement"]["num_new_tokens"] for one in await cluster.flow.decisions()}
        num_prompt_tokens = len(requests[0].token_ids)
        assert placed == {"a-0": num_prompt_tokens, "a-1": 0, "a-2": 0, "a-3": 0}
        assert cluster.flow.admission.stats["default"].num_admitted == 4
        cluster.assert_nothing_left()


async def test_both_workers_of_a_pair_learn_of_them() -> None:
    def first(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Prefill):
            for name in message.request_ids:
                worker.output(SequenceDelta(name, 0, [int(name[-1])]))

    def others(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Decode):
            for name in message.request_ids:
                worker.output(SequenceDelta(name, 1, 3 * [int(name[-1])], FinishReason.LENGTH))

    async with fake_cluster(prefill=first, decode=others) as cluster:
        answers = [tokens(await one) for one in start(cluster, siblings(3))]
        assert answers == [4 * [number] for number in range(3)]
        assert cluster.flow.num_handoffs == 3
        cluster.assert_nothing_left()


async def test_a_fork_books_only_what_its_answer_adds() -> None:
    async with fake_cluster(decode=silent, local_prefill=True) as cluster:
        tasks = start(cluster, siblings(3, num_prompt_tokens=100))
        await eventually(lambda: cluster.registry.num_bookings == 3)
        worker = cluster.registry.get("d")
        assert worker is not None
        assert (worker.num_booked_seqs, worker.queued_prompt_tokens) == (3, 100)
        num_output_tokens = (worker.booked_kv_tokens - 100) // 3
        assert worker.booked_kv_tokens == 100 + 3 * num_output_tokens
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: len(cluster.workers["d"].of_type(Cancel)) == 3)
        cluster.assert_nothing_left()


async def test_those_without_room_follow_the_first_token() -> None:
    held: list[Generate] = []

    def hold_first(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate) and message.request_id == "a-0":
            held.append(message)
        else:
            all_tokens(worker, message)

    async with fake_cluster(local_prefill=True) as cluster:
        worker = FakeWorker("d", Role.DECODE, hold_first)
        worker.card = msgspec.structs.replace(worker.card, max_num_seqs=2)
        await cluster.add(worker)
        tasks = start(cluster, siblings(4))
        await eventually(lambda: bool(held))
        assert len(held[0].forks) == 1
        assert len(cluster.flow.context.forks.waiting("a-0")) == 2
        all_tokens(worker, held[0])
        assert [tokens(await one) for one in tasks] == [4 * [number] for number in range(4)]
        assert len(worker.of_type(Generate)) == 3
        cluster.assert_nothing_left()


async def test_a_lost_worker_loses_no_answer() -> None:
    async with fake_cluster(decode=silent, local_prefill=True) as cluster:
        tasks = start(cluster, siblings(3))
        await eventually(lambda: bool(cluster.workers["d"].of_type(Generate)))
        await cluster.add(FakeWorker("d2", cluster.workers["d"].card.role, all_from_the_name))
        cluster.client.mark_dead("d", "exit code -9")
        assert [tokens(await one) for one in tasks] == [4 * [number] for number in range(3)]
        cluster.assert_nothing_left()


def all_from_the_name(worker: FakeWorker, message: Message) -> None:
    """As `all_tokens`, for a request that was moved."""
    if isinstance(message, Generate):
        assert message.forks == []
        number = int(message.request_id.partition("/")[0][-1])
        worker.output(SequenceDelta(message.request_id, 0, 4 * [number], FinishReason.LENGTH))


async def test_a_fork_without_its_leader_does_not_wait_for_ever() -> None:
    async with fake_cluster(config=RouterConfig(request_timeout_s=0.1)) as cluster:
        with pytest.raises(WorkerTimeout):
            await collect(cluster, siblings(2)[1])
        assert not cluster.flow.context.forks.waiting("a-0")


async def test_who_leaves_the_line_is_not_taken() -> None:
    line: ForkLine[str] = ForkLine()
    waits = {name: asyncio.create_task(line.wait("a", name, 10.0)) for name in ("x", "y", "z")}
    await eventually(lambda: len(line.waiting("a")) == 3)
    line.take("a", "y")
    waits["y"].cancel()  # at the same moment
    waits["x"].cancel()
    await asyncio.gather(waits["x"], waits["y"], return_exceptions=True)
    assert line.waiting("a") == ["z"]
    line.let_go("a")
    assert await waits["z"] is False
    assert line.waiting("a") == []
