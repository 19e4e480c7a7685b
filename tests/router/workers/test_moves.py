"""Requests that lose their workers go on elsewhere, behind the tokens that the client has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import CacheScope, block_digests, root_digest
from tandem.protocol.errors import NoWorker, Overloaded, PoisonedRequest, WorkerError, WorkerNotFound, WorkerTimeout
from tandem.protocol.messages import (
    INVALID_REQUEST,
    Cancel,
    CopyKv,
    Decode,
    FinishReason,
    Generate,
    Message,
    Prefill,
    PromptLogprobs,
    RequestFailed,
    Role,
    SequenceDelta,
    WorkerState,
)
from tandem.router.backend import GenerateRequest
from tandem.router.reservation import MAX_DEATHS, MAX_REMEMBERED, REFUSED_S, PoisonedRequests
from tests.support.builders import NAMESPACE
from tests.support.fake_worker import (
    FakeCluster,
    FakeWorker,
    begun,
    collect,
    fake_cluster,
    first_token,
    gives_up,
    make_request,
    one_token,
    remaining_tokens,
    silent,
    take,
    tokens,
)
from tests.support.streams import Pulled
from tests.support.waiting import eventually

Part = Generate | Prefill | Decode


async def rest(stream: Pulled[SequenceDelta]) -> list[int]:
    async with asyncio.timeout(10):
        return tokens([delta async for delta in stream])


def part(worker: FakeWorker, kind: type[Part]) -> Part:
    (message,) = worker.of_type(kind)
    assert isinstance(message, Part)
    return message


def resumed(worker: FakeWorker) -> list[Message]:
    """Requests that go on there; others only copy their KV ahead."""
    return [one for one in worker.of_type(Decode) + worker.of_type(Generate) if one.output_ids]  # type: ignore[attr-defined]


async def test_a_stream_goes_on_after_the_tokens_that_the_client_has() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster, max_tokens=6)
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        cluster.client.mark_dead("d", "exit code -9")
        assert await rest(stream) == [102, 103, 104, 105]
        resumed = part(second, Decode)
        assert (resumed.output_ids, resumed.request_id) == ([100, 101], "r0/1")
        assert resumed.token_ids == make_request().token_ids
        assert resumed.priority.max_step_tokens > 0, "others died with it: it is computed again in short steps"
        assert resumed.sampling == part(cluster.workers["d"], Decode).sampling
        assert dict(cluster.flow.context.moves.num_moves) == {"worker_lost": 1}
        moved, first = await cluster.flow.decisions()
        assert (moved["outcome"], first["outcome"]) == ("moved", "dispatched")
        assert moved["request_id"] == first["request_id"] == "r0"
        assert moved["placement"]["candidates"][0]["decode_worker"] == "d2"


async def test_a_request_without_tokens_starts_over() -> None:
    scores = PromptLogprobs(b"1234", b"", b"")

    def scored(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            worker.output(SequenceDelta(message.request_id, 0, [7], FinishReason.LENGTH, prompt_logprobs=scores))

    async with fake_cluster(decode=silent, local_prefill=True) as cluster:
        plain = make_request()
        request = replace(plain, sampling=msgspec.structs.replace(plain.sampling, num_prompt_logprobs=0))
        serving = asyncio.create_task(collect(cluster, request))
        await eventually(lambda: bool(cluster.workers["d"].of_type(Generate)))
        second = await cluster.add(FakeWorker("d2", Role.DECODE, scored))
        cluster.client.mark_dead("d", "exit code -9")
        (delta,) = await serving
        assert (delta.token_ids, delta.prompt_logprobs) == ([7], scores)
        assert part(second, Generate).output_ids == []


async def test_tokens_that_came_early_are_computed_again() -> None:
    """The decode worker was ahead of the first token, which never came."""
    async with fake_cluster(prefill=silent, decode=one_token) as cluster:
        serving = asyncio.create_task(collect(cluster, make_request()))
        await eventually(lambda: bool(cluster.workers["d"].of_type(Decode)))
        await cluster.add(FakeWorker("p2", Role.PREFILL, first_token))
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        cluster.client.mark_dead("d", "exit code -9")
        cluster.client.mark_dead("p", "exit code -9")
        assert tokens(await serving) == [100, 101, 102, 103]
        assert part(second, Decode).output_ids == []


async def test_where_no_worker_decodes_a_prefill_worker_goes_on() -> None:
    def either(worker: FakeWorker, message: Message) -> None:
        first_token(worker, message)
        if isinstance(message, Generate):
            remaining_tokens(worker, message)

    async with fake_cluster(prefill=either, decode=one_token) as cluster:
        stream = await begun(cluster)
        cluster.client.mark_dead("d", "exit code -9")
        assert await rest(stream) == [102, 103]
        assert part(cluster.workers["p"], Generate).output_ids == [100, 101]
        cluster.workers["p"].received.clear()
        assert tokens(await collect(cluster, make_request(request_id="new"))) == [100, 101, 102, 103]
        assert part(cluster.workers["p"], Generate).output_ids == []


async def test_without_any_worker_streams_wait_for_the_next_one() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        streams = [await begun(cluster, request_id=f"r{i}") for i in range(8)]
        readers = [asyncio.create_task(rest(stream)) for stream in streams]
        cluster.client.mark_dead("p", "exit code -9")
        cluster.client.mark_dead("d", "exit code -9")
        await eventually(lambda: cluster.flow.context.moves.num_moves["worker_lost"] == 8)
        assert cluster.client.num_open_sub_requests == cluster.registry.num_bookings == 0
        await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        assert await asyncio.gather(*readers) == [[102, 103]] * 8


async def test_a_client_that_leaves_as_a_worker_comes_back_holds_up_nobody() -> None:
    async with fake_cluster(decode=silent, local_prefill=True) as cluster:
        leaving = asyncio.create_task(collect(cluster, make_request(request_id="leaving")))
        staying = asyncio.create_task(collect(cluster, make_request(request_id="staying")))
        await eventually(lambda: len(cluster.workers["d"].of_type(Generate)) == 2)
        cluster.client.mark_dead("d", "exit code -9")
        await eventually(lambda: cluster.flow.context.moves.num_moves["worker_lost"] == 2)
        cluster.registry.listen(lambda _: leaving.cancel())  # behind the queue's own listener
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        assert tokens(await staying) == [100, 101, 102, 103]
        assert part(second, Generate).request_id == "staying/1"


def later_choice(*, is_sibling: bool = True) -> GenerateRequest:
    """A choice of an answer whose first choice has given a token."""
    return replace(make_request(request_id="r0-1"), is_later_choice=True, fork_of="r0-0" if is_sibling else "")


async def further_choice(cluster: FakeCluster, *, is_sibling: bool = True) -> asyncio.Task[list[SequenceDelta]]:
    """The same, being served. The first choice did not take it along."""
    serving = asyncio.create_task(collect(cluster, later_choice(is_sibling=is_sibling)))
    if is_sibling:
        await eventually(lambda: bool(cluster.flow.context.forks.waiting("r0-0")))
        cluster.flow.context.forks.let_go("r0-0")
    return serving


async def until_it_waits(cluster: FakeCluster) -> None:
    async with asyncio.timeout(10):
        while [one["outcome"] for one in await cluster.flow.decisions()] != ["waiting"]:  # noqa: ASYNC110 - the queue has no event for it
            await asyncio.sleep(0)


async def waiting_for_a_worker(cluster: FakeCluster, *, is_later_choice: bool) -> asyncio.Task[list[SequenceDelta]]:
    """A request that has lost its worker, or a further choice of an answer that has begun."""
    if is_later_choice:
        waiting = await further_choice(cluster)
        await until_it_waits(cluster)
        return waiting
    worker = await cluster.add(FakeWorker("d", Role.DECODE, silent))
    waiting = asyncio.create_task(collect(cluster, make_request()))
    await eventually(lambda: bool(worker.of_type(Generate)))
    cluster.client.mark_dead("d", "exit code -9")
    await eventually(lambda: cluster.flow.context.moves.num_moves["worker_lost"] == 1)
    return waiting


@pytest.mark.parametrize("is_later_choice", [False, True])
@pytest.mark.parametrize(
    ("how", "error"), [("leaves", asyncio.CancelledError), ("shutdown", NoWorker), ("silence", WorkerTimeout)]
)
async def test_a_request_that_waits_for_a_worker_ends(how: str, error: type[Exception], is_later_choice: bool) -> None:
    config = RouterConfig(request_timeout_s=0.5) if how == "silence" else RouterConfig()
    async with fake_cluster(config=config, local_prefill=True) as cluster:
        waiting = await waiting_for_a_worker(cluster, is_later_choice=is_later_choice)
        if how == "leaves":
            waiting.cancel()
        elif how == "shutdown":
            cluster.flow.shut_down()
        with pytest.raises(error, match=r"request_timeout_s=0\.5" if how == "silence" else None):
            await waiting
        if how == "silence" and is_later_choice:
            assert [one["outcome"] for one in await cluster.flow.decisions()] == ["dropped"]
        late = await cluster.add(FakeWorker("late", Role.DECODE, remaining_tokens))
        assert late.of_type(Generate) == []


@pytest.mark.parametrize("is_sibling", [True, False])
async def test_a_further_choice_of_an_answer_that_has_begun_waits_for_a_worker(is_sibling: bool) -> None:
    async with fake_cluster() as cluster:
        waiting = await further_choice(cluster, is_sibling=is_sibling)
        await until_it_waits(cluster)
        with pytest.raises(NoWorker):  # nobody has seen anything of this one
            await collect(cluster, make_request(request_id="new"))
        worker = await cluster.add(FakeWorker("d", Role.DECODE, remaining_tokens))
        assert tokens(await waiting) == [100, 101, 102, 103]
        assert part(worker, Generate).request_id == "r0-1"
        outcomes = {one["request_id"]: one["outcome"] for one in await cluster.flow.decisions()}
        assert outcomes == {"r0-1": "dispatched", "new": "rejected"}
        assert cluster.flow.admission.stats["default"].num_admitted == 1
        assert cluster.flow.admission.stats["default"].rejected == {"no_worker": 1}


async def test_it_goes_to_a_prefill_worker_while_none_decodes() -> None:
    def alone(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            remaining_tokens(worker, message)

    async with fake_cluster(prefill=alone) as cluster:
        assert tokens(await (await further_choice(cluster))) == [100, 101, 102, 103]


async def test_it_keeps_its_place_in_the_queue_when_the_workers_die() -> None:
    async with fake_cluster(decode=silent, local_prefill=True) as cluster:
        long = make_request(request_id="long", num_prompt_tokens=2000, scope="x")
        running = asyncio.create_task(collect(cluster, long))
        await eventually(lambda: cluster.registry.num_bookings == 1)
        further = replace(make_request(num_prompt_tokens=2000), is_later_choice=True)
        waiting = asyncio.create_task(collect(cluster, further))
        await eventually(lambda: len(cluster.flow.admission) == 1)
        running.cancel()
        cluster.client.mark_dead("d", "exit code -9")
        await eventually(lambda: cluster.registry.num_bookings == 0)
        assert len(cluster.flow.admission) == 1
        await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        assert tokens(await waiting) == [100, 101, 102, 103]
        cluster.assert_nothing_left()
        cluster.flow.admission.check_integrity()


async def test_a_full_queue_refuses_no_choice_of_an_admitted_prompt() -> None:
    config = RouterConfig(max_queued_prompt_tokens=100)
    async with fake_cluster(decode=silent, local_prefill=True, config=config) as cluster:
        running = asyncio.create_task(collect(cluster, make_request(request_id="full", num_prompt_tokens=100)))
        await eventually(lambda: cluster.registry.num_bookings == 1)
        for refused in (make_request(request_id="new"), later_choice(is_sibling=False)):
            with pytest.raises(Overloaded, match="max_queued_prompt_tokens"):
                await collect(cluster, refused)
        sibling = await further_choice(cluster)
        await eventually(lambda: cluster.registry.num_bookings == 2)
        sibling.cancel()
        running.cancel()
        await asyncio.gather(sibling, running, return_exceptions=True)


@pytest.mark.parametrize("max_moves", [0, 1, 2])
async def test_moves_are_limited(max_moves: int) -> None:
    config = RouterConfig(max_moves=max_moves)
    async with fake_cluster(decode=gives_up("worker_failed"), local_prefill=True, config=config) as cluster:
        with pytest.raises(WorkerError, match="odd"):
            await collect(cluster, make_request())
        assert len(cluster.workers["d"].of_type(Generate)) == 1 + max_moves


async def test_kv_that_cannot_be_moved_is_computed_where_it_is_needed() -> None:
    def no_link(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Decode):
            failed = RequestFailed(request_id=message.request_id, message="no link", code="kv_transfer_failed")
            worker.send(failed)
        remaining_tokens(worker, message) if isinstance(message, Generate) else None

    async with fake_cluster(prefill=silent, decode=no_link, local_prefill=True) as cluster:
        assert tokens(await collect(cluster, make_request(num_prompt_tokens=3000))) == [100, 101, 102, 103]
        assert len(cluster.workers["p"].of_type(Prefill)) == 1
        await eventually(lambda: len(cluster.workers["p"].of_type(Cancel)) == 1)
        assert len(cluster.workers["d"].of_type(Generate)) == 1


async def test_a_request_that_workers_die_of_is_refused_by_name() -> None:
    async with fake_cluster() as cluster:
        poison = make_request(num_prompt_tokens=80)

        def dies_of_it(worker: FakeWorker, message: Message) -> None:
            if isinstance(message, Generate) and message.token_ids == poison.token_ids:
                cluster.client.mark_dead(worker.worker_id, "exit code -11")
            else:
                remaining_tokens(worker, message)

        names = [f"d{i}" for i in range(MAX_DEATHS + 1)]
        for name in names:
            await cluster.add(FakeWorker(name, Role.DECODE, dies_of_it))
        with pytest.raises(PoisonedRequest, match=r"3 workers ended .*\(d\d, d\d, d\d\)") as raised:
            await collect(cluster, poison)
        assert raised.value.status == 422  # a client that tries 5xx again would end the next three
        (left,) = [worker.worker_id for worker in cluster.registry]
        again = replace(poison, request_id="r1", sampling=msgspec.structs.replace(poison.sampling, seed=99))
        with pytest.raises(PoisonedRequest, match="like this one"):
            await collect(cluster, again)
        assert cluster.workers[left].of_type(Generate) == []
        assert cluster.flow.context.poisoned.num_added == 1, "what workers died of counts, not what is like it"
        assert tokens(await collect(cluster, make_request(request_id="r2"))) == [100, 101, 102, 103]


async def test_a_request_that_got_tokens_between_the_deaths_is_not_to_blame() -> None:
    """Also where the worker that gave them did not die: the request has left it alive."""

    def every_other_one_speaks(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate) and int(message.request_id.partition("/")[2] or 0) % 2:
            worker.output(SequenceDelta(message.request_id, len(message.output_ids), [7]))
            worker.send(RequestFailed(request_id=message.request_id, message="odd", code="worker_failed"))

    def holders(cluster: FakeCluster, attempt: str) -> list[str]:
        workers = cluster.workers.items()
        return [name for name, one in workers if attempt in [m.request_id for m in one.of_type(Generate)]]  # type: ignore[attr-defined]

    config = RouterConfig(max_moves=10)
    async with fake_cluster(local_prefill=True, config=config) as cluster:
        for idx in range(MAX_DEATHS + 1):
            await cluster.add(FakeWorker(f"d{idx}", Role.DECODE, every_other_one_speaks))
        serving = asyncio.create_task(collect(cluster, make_request(max_tokens=MAX_DEATHS)))
        for number in range(MAX_DEATHS):
            attempt = f"r0/{2 * number}" if number else "r0"
            await eventually(lambda attempt=attempt: serving.done() or holders(cluster, attempt))  # type: ignore[misc]
            cluster.client.mark_dead(holders(cluster, attempt)[0], "exit code -9")
        await eventually(lambda: serving.done() or holders(cluster, f"r0/{2 * MAX_DEATHS}"))
        assert not serving.done(), "it goes on"
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_request_that_workers_never_read_is_not_to_blame() -> None:
    """They were silent before it came: stopped, or hanging in what they had before."""
    config = RouterConfig(max_moves=10)
    async with fake_cluster(local_prefill=True, config=config, heartbeat_interval_s=0.0) as cluster:
        names = [f"d{idx}" for idx in range(MAX_DEATHS)]
        for name in names:
            await cluster.add(FakeWorker(name, Role.DECODE, silent))
        serving = asyncio.create_task(collect(cluster, make_request()))
        for _ in names:
            await eventually(lambda: serving.done() or cluster.client.num_open_sub_requests)
            holder = next(worker.worker_id for worker in cluster.registry if worker.num_booked_seqs)
            cluster.client.mark_dead(holder, "silent for 8.0 s")
        await cluster.add(FakeWorker("last", Role.DECODE, remaining_tokens))
        assert tokens(await serving) == [100, 101, 102, 103]
        assert cluster.flow.context.poisoned.num_added == 0


def test_what_is_refused_is_forgotten_after_a_while_and_never_grows() -> None:
    poisoned = PoisonedRequests()
    requests = [make_request(request_id=f"r{i}") for i in range(MAX_REMEMBERED + 5)]
    for now, request in enumerate(requests):
        poisoned.add(request.request_id.encode(), ["a", "b", "c"], float(now))
    assert len(poisoned) == MAX_REMEMBERED
    poisoned.check(requests[0].request_id.encode, float(len(requests)))  # the oldest were dropped for the latest
    with pytest.raises(PoisonedRequest):
        poisoned.check(requests[-1].request_id.encode, float(len(requests)))
    poisoned.check(requests[-1].request_id.encode, len(requests) + REFUSED_S)
    assert len(poisoned) == 0


async def test_answers_leave_a_worker_that_is_to_decode_no_more() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        streams = [await begun(cluster, request_id=f"r{i}") for i in range(4)]
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        cluster.registry.set_role("d", Role.PREFILL)
        assert [await rest(stream) for stream in streams] == [[102, 103]] * 4
        await eventually(lambda: len(cluster.workers["d"].of_type(Cancel)) == 4)
        assert len(resumed(second)) == 4
        assert dict(cluster.flow.context.moves.num_moves) == {"role_change": 4}


async def test_they_stay_while_no_other_worker_decodes() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        cluster.registry.set_role("d", Role.PREFILL)
        cluster.workers["d"].output(SequenceDelta("r0", 2, [102, 103], FinishReason.LENGTH))
        assert await rest(stream) == [102, 103]
        assert cluster.flow.context.moves.num_moves.total() == 0


async def test_an_answer_whose_handoff_is_under_way_moves_after_it() -> None:
    async with fake_cluster(prefill=first_token, decode=silent) as cluster:
        stream = Pulled(cluster.flow.serve(make_request()))
        assert await take(stream, 1) == [100]
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        cluster.registry.set_role("d", Role.PREFILL)
        assert cluster.flow.context.moves.num_moves.total() == 0
        cluster.workers["d"].output(SequenceDelta("r0", 1, [101]))
        assert await rest(stream) == [101, 102, 103]
        assert len(resumed(second)) == 1


async def test_answers_of_a_prefill_worker_go_to_the_next_decode_worker() -> None:
    def one_more(worker: FakeWorker, message: Message) -> None:
        first_token(worker, message)
        if isinstance(message, Generate):
            offset = len(message.output_ids)
            worker.output(SequenceDelta(message.request_id, offset, [100 + offset]))

    async with fake_cluster(prefill=one_more, decode=one_token) as cluster:
        stream = await begun(cluster, max_tokens=6)
        cluster.client.mark_dead("d", "exit code -9")
        assert await take(stream, 1) == [102]
        await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        assert await rest(stream) == [103, 104, 105]
        assert dict(cluster.flow.context.moves.num_moves) == {"worker_lost": 1, "role_change": 1}


def copies_when_told(worker: FakeWorker, message: Message) -> None:
    """Go on with answers at once; the test answers the requests that copy KV ahead."""
    if isinstance(message, Decode | Generate) and message.output_ids:
        remaining_tokens(worker, message)


async def is_copying(worker: FakeWorker, answer: Sequence[int], *, number: int = 0) -> CopyKv:
    """Wait until the worker is asked for a copy; it is of the prompt and this answer, but not of its last token."""
    await eventually(lambda: len(worker.of_type(CopyKv)) == number + 1)
    copy = worker.of_type(CopyKv)[number]
    assert isinstance(copy, CopyKv)
    root = root_digest(NAMESPACE, cache_salt=CacheScope(""))
    assert copy.digests == block_digests(root, [*make_request().token_ids, *answer[:-1]], 16)
    assert copy.source.worker_id == "d"
    return copy


def is_copied(worker: FakeWorker, copy: CopyKv) -> None:
    worker.output(SequenceDelta(copy.request_id, 0, [], FinishReason.LENGTH))


async def test_an_answer_is_decoded_where_it_is_until_its_kv_is_elsewhere() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster, max_tokens=100)
        second = await cluster.add(FakeWorker("d2", Role.DECODE, copies_when_told))
        cluster.registry.set_role("d", Role.PREFILL)
        copy = await is_copying(second, [100, 101])
        cluster.workers["d"].output(SequenceDelta("r0", 2, list(range(102, 142))))
        assert await take(stream, 1) == list(range(102, 142)), "meanwhile it goes on"
        is_copied(second, copy)
        copy = await is_copying(second, range(100, 142), number=1)  # of what has come since
        cluster.workers["d"].output(SequenceDelta("r0", 42, [142]))
        assert await take(stream, 1) == [142]
        is_copied(second, copy)
        assert await rest(stream) == list(range(143, 200))
        (part,) = resumed(second)
        assert isinstance(part, Generate)
        assert part.output_ids == list(range(100, 143))
        assert dict(cluster.flow.context.moves.num_moves) == {"role_change": 1}


async def test_an_operator_moves_answers() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        streams = [await begun(cluster, request_id=f"r{i}-0") for i in range(3)]
        assert await cluster.flow.migrate("d", "", "") == {"moving": [], "staying": ["r0-0", "r1-0", "r2-0"]}
        second, third = [await cluster.add(FakeWorker(name, Role.DECODE, remaining_tokens)) for name in ("d2", "d3")]
        assert await cluster.flow.migrate("d", "d3", "r1") == {"moving": ["r1-0"], "staying": []}
        assert await rest(streams[1]) == [102, 103]
        assert (len(resumed(second)), len(resumed(third))) == (0, 1)
        assert await cluster.flow.migrate("d", "d2", "") == {"moving": ["r0-0", "r2-0"], "staying": []}
        assert await cluster.flow.migrate("d", "", "r0") == {"moving": [], "staying": ["r0-0"]}, "it moves already"
        assert [await rest(streams[i]) for i in (0, 2)] == [[102, 103]] * 2
        assert (len(resumed(second)), len(resumed(third))) == (2, 1)
        assert await cluster.flow.migrate("d2", "d", "") == {"moving": [], "staying": []}
        assert dict(cluster.flow.context.moves.num_moves) == {"operator": 3}
        for worker, to in (("x", "d"), ("d", "x")):
            with pytest.raises(WorkerNotFound, match="no worker 'x'"):
                await cluster.flow.migrate(worker, to, "")


@pytest.mark.parametrize("end", ["confirmed", "late", "death", "last token"])
async def test_an_answer_goes_on_after_the_step_that_its_worker_is_in(end: str) -> None:
    """That step's token need not be computed again, unless the step is a long one."""
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        first = cluster.workers["d"]
        first.confirms = False
        stream = await begun(cluster, max_tokens=5)
        second = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        (generation,) = cluster.flow.context.running
        generation._step_s = 0.0 if end == "late" else 1000.0
        assert generation.move("test")
        await eventually(lambda: first.of_type(Cancel) == [Cancel(request_id="r0", is_confirmed=True)])
        if end == "last token":
            first.output(SequenceDelta("r0", 2, [102, 103, 104], FinishReason.LENGTH))
        elif end != "late":
            assert not resumed(second)
            first.output(SequenceDelta("r0", 2, [102]))
            assert await take(stream, 1) == [102]
        if end == "death":
            cluster.client.mark_dead("d", "exit code -9")
        elif end == "confirmed":
            first.confirm("r0")
        expected = {"confirmed": [3], "late": [2], "death": [3], "last token": []}[end]
        assert await rest(stream) == ([103, 104] if expected == [3] else [102, 103, 104])
        assert [len(one.output_ids) for one in resumed(second)] == expected  # type: ignore[attr-defined]
        assert (
            cluster.flow.context.moves.num_moves
            == {"confirmed": {"test": 1}, "late": {"test": 1}, "death": {"worker_lost": 1}, "last token": {}}[end]
        )
        assert len(first.of_type(Cancel)) == 1


async def test_a_worker_that_cancels_a_request_by_itself_has_failed_it() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        cluster.workers["d"].confirm("r0")
        assert await take(stream, 2) == [102, 103], "the prefill worker and this one go on"
        assert cluster.flow.context.moves.num_moves == {"cancelled": 1}
        await stream.aclose()


async def test_an_operator_moves_no_request_whose_id_only_begins_alike() -> None:
    ids = ["job.0123456789abcdef-0", "job.0123456789abcdef-1", "job-1.0123456789abcdef-0", "req-ab-0", "req-ab.c-0"]
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        streams = [await begun(cluster, request_id=name) for name in ids]
        for named, found in {
            "job": ids[:2],
            "job-1": ids[2:3],
            "req": [],
            "req-ab": ids[3:4],
            ids[1]: ids[1:2],
        }.items():
            assert await cluster.flow.migrate("d", "", named) == {"moving": [], "staying": found}
        for stream in streams:
            await stream.aclose()


async def test_an_answer_whose_next_worker_dies_stays_where_it_is() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster, max_tokens=6)
        second = await cluster.add(FakeWorker("d2", Role.DECODE, copies_when_told))
        cluster.registry.set_role("d", Role.PREFILL)
        await is_copying(second, [100, 101])
        cluster.client.mark_dead("d2", "exit code -9")
        cluster.workers["d"].output(SequenceDelta("r0", 2, [102]))
        assert await take(stream, 1) == [102]
        assert cluster.registry.num_bookings == 1
        third = await cluster.add(FakeWorker("d3", Role.DECODE, copies_when_told))  # it leaves for the next one
        is_copied(third, await is_copying(third, [100, 101, 102]))
        assert await rest(stream) == [103, 104, 105]


async def test_a_copy_that_fails_is_done_without() -> None:
    def refuses_copies(worker: FakeWorker, message: Message) -> None:
        copies_when_told(worker, message)
        if isinstance(message, CopyKv):
            worker.send(RequestFailed(request_id=message.request_id, message="no room", code=INVALID_REQUEST))

    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        await cluster.add(FakeWorker("d2", Role.DECODE, refuses_copies))
        cluster.registry.set_role("d", Role.PREFILL)
        assert await rest(stream) == [102, 103]


async def test_kv_is_copied_to_another_worker_as_the_answer_grows() -> None:
    config = RouterConfig(copy_kv_tokens=30)
    async with fake_cluster(prefill=first_token, decode=one_token, config=config) as cluster:
        stream = Pulled(cluster.flow.serve(make_request(max_tokens=200)))
        assert await take(stream, 2) == [100, 101]  # with no other worker there is no copy
        second = await cluster.add(FakeWorker("d2", Role.DECODE, copies_when_told))
        cluster.workers["d"].output(SequenceDelta("r0", 2, list(range(102, 132))))
        assert await take(stream, 1) == list(range(102, 132))
        copy = await is_copying(second, range(100, 132))
        cluster.workers["d"].output(SequenceDelta("r0", 32, list(range(132, 170))))
        assert await take(stream, 1) == list(range(132, 170)), "it does not wait for its copy"
        is_copied(second, copy)
        await eventually(lambda: cluster.client.num_open_sub_requests == 1)
        cluster.workers["d"].output(SequenceDelta("r0", 70, [170]))
        assert await take(stream, 1) == [170]
        await is_copying(second, range(100, 171), number=1)
        assert (cluster.registry.num_bookings, cluster.flow.context.moves.num_moves.total()) == (1, 0)
        cluster.client.mark_dead("d", "exit code -9")  # the copy that is under way is given up
        assert await rest(stream) == list(range(171, 300))


async def test_no_copy_is_made_unless_it_is_wanted() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        second = await cluster.add(FakeWorker("d2", Role.DECODE, silent))
        stream = Pulled(cluster.flow.serve(make_request(max_tokens=60)))
        await take(stream, 2)
        decoding = next(worker for worker in (second, cluster.workers["d"]) if worker.of_type(Decode))
        decoding.output(SequenceDelta("r0", 2, list(range(102, 160)), FinishReason.LENGTH))
        assert len(await rest(stream)) == 58
        assert not second.of_type(CopyKv)


async def end_it(end: str, cluster: FakeCluster, stream: Pulled[SequenceDelta]) -> None:
    """Let the worker die, the client leave or the router stop, or just read the last tokens."""
    if end == "death":
        cluster.client.mark_dead("d", "exit code -9")
    if end == "shutdown":
        cluster.flow.shut_down()
    if end == "client":
        await stream.aclose()
    elif end == "shutdown":
        with pytest.raises(NoWorker):
            await rest(stream)
    else:
        assert await rest(stream) == [102, 103]


@pytest.mark.parametrize("end", ["death", "last token", "client", "shutdown"])
async def test_whatever_happens_during_a_copy_ends_it(end: str) -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        second = await cluster.add(FakeWorker("d2", Role.DECODE, copies_when_told))
        cluster.registry.set_role("d", Role.PREFILL)
        copy = await is_copying(second, [100, 101])
        if end == "last token":
            cluster.workers["d"].output(SequenceDelta("r0", 2, [102, 103], FinishReason.LENGTH))
        await end_it(end, cluster, stream)
        await eventually(lambda: Cancel(request_id=copy.request_id) in second.of_type(Cancel))


@pytest.mark.parametrize("end", ["death", "last token", "client", "shutdown"])
async def test_whatever_happens_on_the_way_out_leaves_nothing_booked(end: str) -> None:
    """The next place is booked before the reader has left the former one."""
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        (generation,) = cluster.flow.context.running
        if end == "last token":
            cluster.workers["d"].output(SequenceDelta("r0", 2, [102, 103], FinishReason.LENGTH))
            await eventually(lambda: generation._queue.num_items == 1)
        assert generation.move("test")
        assert cluster.registry.num_bookings == 2
        await end_it(end, cluster, stream)


async def test_the_worker_that_drains_serves_while_all_others_are_dead() -> None:
    async with fake_cluster(decode=one_token) as cluster:
        leaving = await cluster.add(FakeWorker("d1", Role.DECODE, one_token))
        running = Pulled(cluster.flow.serve(make_request(request_id="old")))
        await eventually(lambda: bool(cluster.workers["d"].received or leaving.received))
        await running.aclose()
        cluster.registry.set_state("d1", WorkerState.DRAINING, "an operator asked for it", is_fallback=True)
        served = [Pulled(cluster.flow.serve(make_request(request_id=f"r{i}"))) for i in range(3)]
        begun = [asyncio.create_task(anext(stream)) for stream in served]
        await eventually(lambda: len(cluster.workers["d"].of_type(Generate)) >= 3)
        assert not any(one.request_id.startswith("r") for one in leaving.of_type(Generate))  # type: ignore[attr-defined]
        leaving._script = remaining_tokens
        cluster.client.mark_dead("d", "exit code -9")
        assert cluster.flow.ready
        for stream, first in zip(served, begun, strict=True):
            assert tokens([await first]) + await rest(stream) == [100, 101, 102, 103]
        assert tokens(await collect(cluster, make_request(request_id="new"))) == [100, 101, 102, 103]
        assert (await cluster.flow.explain(make_request()))["outcome"] == "admitted"
        assert dict(cluster.flow.context.moves.num_moves) == {"worker_lost": 3}


async def test_what_it_serves_leaves_it_when_another_worker_is_back() -> None:
    def one_more(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            offset = len(message.output_ids)
            worker.output(SequenceDelta(message.request_id, offset, [100 + offset]))

    async with fake_cluster(decode=one_more) as cluster:
        cluster.registry.set_state("d", WorkerState.DRAINING, "it got SIGTERM", is_fallback=True)
        other = await cluster.add(FakeWorker("d1", Role.DECODE, silent))
        cluster.registry.set_state("d1", WorkerState.DRAINING, "it got SIGTERM, too", is_fallback=True)
        stream = Pulled(cluster.flow.serve(make_request()))
        waiting = asyncio.create_task(anext(stream))
        await eventually(lambda: bool(cluster.workers["d"].of_type(Generate) or other.of_type(Generate)))
        if other.of_type(Generate):
            one_more(other, other.of_type(Generate)[0])
        assert (await waiting).token_ids == [100]
        assert cluster.flow.context.moves.num_moves.total() == 0, "it does not go to and fro"
        back = await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        assert await rest(stream) == [101, 102, 103]
        assert len(resumed(back)) == 1
        assert dict(cluster.flow.context.moves.num_moves) == {"drain": 1}


async def test_a_worker_whose_process_is_about_to_end_is_not_used_again() -> None:
    async with fake_cluster(decode=remaining_tokens) as cluster:
        cluster.registry.set_state("d", WorkerState.DRAINING, "it leaves", is_fallback=True)
        assert tokens(await collect(cluster, make_request())) == [100, 101, 102, 103]
        cluster.registry.set_state("d", WorkerState.DRAINING, "its process is about to end")
        assert not cluster.flow.ready
        with pytest.raises(NoWorker, match="1 draining"):
            await collect(cluster, make_request(request_id="late"))
