from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import block_digests, cache_scope, root_digest
from tandem.protocol.errors import (
    InternalError,
    NoWorker,
    PeerLost,
    RequestError,
    RoleRefused,
    ServingError,
    WorkerError,
    WorkerTimeout,
)
from tandem.protocol.grammar import GrammarError
from tandem.protocol.messages import (
    INVALID_REQUEST,
    Cancel,
    Decode,
    FinishReason,
    Generate,
    Message,
    Prefill,
    PromptLogprobs,
    RequestFailed,
    Role,
    SequenceDelta,
    TurnEnd,
)
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.workers.attempt import DeltaOrder
from tandem.scheduling.request import ServiceClass
from tests.support.builders import NAMESPACE
from tests.support.fake_worker import (
    FakeCluster,
    FakeWorker,
    Script,
    begun,
    collect,
    fails,
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


async def test_both_sub_requests_make_one_stream() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens) as cluster:
        deltas = await collect(cluster, make_request())
        assert tokens(deltas) == [100, 101, 102, 103]
        assert {delta.finish_reason for delta in deltas[:-1]} <= {None}  # those that came at once are one
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[0].num_cached_tokens == 0
        (first,), (rest,) = cluster.workers["p"].of_type(Prefill), cluster.workers["d"].of_type(Decode)
        assert isinstance(first, Prefill)
        assert isinstance(rest, Decode)
        assert first.decode_worker == cluster.workers["d"].address
        assert rest.prefill_worker == cluster.workers["p"].address


async def test_decode_that_is_ahead_waits_for_the_first_token() -> None:
    async with fake_cluster(prefill=silent, decode=remaining_tokens) as cluster:
        prefill = cluster.workers["p"]
        serving = asyncio.create_task(collect(cluster, make_request()))
        # The whole rest is here (its last delta closed the sub-request) before the first token is sent.
        await eventually(lambda: bool(prefill.of_type(Prefill)) and cluster.client.num_open_sub_requests == 1)
        prefill.output(SequenceDelta("r0", 0, [100]))
        assert tokens(await serving) == [100, 101, 102, 103]


async def test_one_worker_serves_alone_when_that_is_cheaper() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens, local_prefill=True) as cluster:
        # Four tokens are computed sooner than a handoff is made.
        assert tokens(await collect(cluster, make_request(num_prompt_tokens=4))) == [100, 101, 102, 103]
        assert len(cluster.workers["d"].of_type(Generate)) == 1
        assert cluster.workers["p"].of_type(Prefill) == []


async def test_a_first_token_that_ends_the_request_cancels_the_decode_part() -> None:
    def only_token(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Prefill):
            worker.output(SequenceDelta(message.request_id, 0, [7], FinishReason.STOP, stop_token_id=7))

    async with fake_cluster(prefill=only_token, decode=silent) as cluster:
        (delta,) = await collect(cluster, make_request())
        assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, 7)
        await eventually(lambda: len(cluster.workers["d"].of_type(Cancel)) == 1)
        assert cluster.workers["p"].of_type(Cancel) == []


@pytest.mark.parametrize("num_tokens_seen", [0, 1, 2])
async def test_a_client_that_leaves_cancels_both_sub_requests(num_tokens_seen: int) -> None:
    async with fake_cluster(prefill=silent, decode=silent) as cluster:
        prefill, decode = cluster.workers["p"], cluster.workers["d"]
        stream = Pulled(cluster.flow.serve(make_request()))
        reading = asyncio.ensure_future(anext(stream))
        await eventually(lambda: bool(prefill.of_type(Prefill)) and bool(decode.of_type(Decode)))
        if num_tokens_seen == 0:
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            prefill.output(SequenceDelta("r0", 0, [100]))
            await reading
            if num_tokens_seen == 2:
                decode.output(SequenceDelta("r0", 1, [101]))
                await anext(stream)
            await stream.aclose()
        await eventually(lambda: len(decode.of_type(Cancel)) == 1)
        if num_tokens_seen < 2:  # once the decode worker speaks, the prefill worker is done
            await eventually(lambda: len(prefill.of_type(Cancel)) == 1)


async def test_without_moves_the_death_of_a_worker_ends_all_its_streams_at_once() -> None:
    config = RouterConfig(max_moves=0)
    async with fake_cluster(prefill=first_token, decode=one_token, config=config) as cluster:
        streams = [await begun(cluster, request_id=f"r{i}") for i in range(8)]
        readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
        cluster.client.mark_dead("d", "exit code -9")
        async with asyncio.timeout(RouterConfig().worker_timeout_s / 2):  # not when its silence is noticed
            results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, WorkerError) for result in results)
        assert cluster.flow.ready, "new requests go to the prefill worker"
        cluster.assert_nothing_left()
        cluster.client.mark_dead("p", "exit code -9")
        assert not cluster.flow.ready
        with pytest.raises(NoWorker):
            await collect(cluster, make_request())


async def test_a_prefill_worker_may_die_once_the_decode_worker_speaks() -> None:
    async with fake_cluster(prefill=first_token, decode=one_token) as cluster:
        stream = await begun(cluster)
        cluster.client.mark_dead("p", "exit code -9")
        cluster.workers["d"].output(SequenceDelta("r0", 2, [102, 103], FinishReason.LENGTH))
        assert (await anext(stream)).token_ids == [102, 103]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_one_failed_sub_request_cancels_the_other() -> None:
    async with fake_cluster(prefill=fails, decode=silent, config=RouterConfig(max_moves=0)) as cluster:
        with pytest.raises(PeerLost, match="pool is on fire"):
            await collect(cluster, make_request())
        await eventually(lambda: len(cluster.workers["d"].of_type(Cancel)) == 1)


@pytest.mark.parametrize(
    ("code", "error", "status"),
    [("internal_error", InternalError, 500), (INVALID_REQUEST, RequestError, 400), ("?", WorkerError, 502)],
)
async def test_a_workers_reason_tells_whose_fault_it_is(code: str, error: type[ServingError], status: int) -> None:
    async with fake_cluster(decode=gives_up(code), local_prefill=True) as cluster:
        with pytest.raises(error, match="odd") as raised:
            await collect(cluster, make_request())
        assert (raised.value.status, raised.value.code) == (status, code)
        num_moves = RouterConfig().max_moves if code == "?" else 0  # a fault of the request is not tried elsewhere
        assert len(cluster.workers["d"].of_type(Generate)) == 1 + num_moves


def with_grammar(worker: FakeWorker, message: Message) -> None:
    if isinstance(message, Generate):
        worker.output(SequenceDelta(message.request_id, 0, [100]))
        worker.output(SequenceDelta(message.request_id, 1, [101], finish_reason=FinishReason.STOP, grammar_s=2.5))


@pytest.mark.parametrize("fails", [False, True])
async def test_the_time_of_a_grammar_counts_for_its_tenant(fails: bool) -> None:
    script = gives_up("invalid_grammar", num_computed_tokens=7, grammar_s=2.5) if fails else with_grammar
    async with fake_cluster(decode=script, local_prefill=True) as cluster:
        charged: list[tuple[str, float]] = []
        cluster.flow.admission.note_grammar = lambda *charge: charged.append(charge)  # type: ignore[method-assign]
        request = make_request()
        if fails:
            with pytest.raises(GrammarError) as raised:
                await collect(cluster, request)
            assert raised.value.num_computed_tokens == 7
        else:
            await collect(cluster, request)
        assert charged == [(request.service_class.tenant, 2.5)]


async def test_tokens_that_wait_come_together_and_before_an_error() -> None:
    def both_and_an_error(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            worker.output(SequenceDelta(message.request_id, 0, [100]), SequenceDelta(message.request_id, 1, [101, 102]))
            worker.send(RequestFailed(request_id=message.request_id, message="pool is on fire", code="kv_peer_lost"))

    async with fake_cluster(decode=both_and_an_error, local_prefill=True, config=RouterConfig(max_moves=0)) as cluster:
        stream = Pulled(cluster.flow.serve(make_request()))
        taken = await take(stream, 3)
        assert taken == [100, 101, 102]
        with pytest.raises(PeerLost, match="pool is on fire"):
            await anext(stream)


async def test_silence_ends_a_request() -> None:
    config = RouterConfig(request_timeout_s=0.2)
    async with fake_cluster(prefill=first_token, decode=silent, config=config) as cluster:
        with pytest.raises(WorkerTimeout, match=r"request_timeout_s=0\.2"):
            await collect(cluster, make_request())
        await eventually(lambda: len(cluster.workers["d"].of_type(Cancel)) == 1)


@pytest.mark.parametrize(("max_tokens", "holders"), [(4, "pd"), (1, "p")], ids=["handed over", "one token"])
async def test_a_second_request_follows_the_first_by_its_speculative_blocks(max_tokens: int, holders: str) -> None:
    async with fake_cluster(prefill=silent, decode=silent) as cluster:
        stream = Pulled(cluster.flow.serve(make_request(num_prompt_tokens=3000, max_tokens=max_tokens)))
        reading = asyncio.ensure_future(anext(stream))
        await eventually(lambda: cluster.registry.num_bookings == 1)
        digests = block_digests(root_digest(NAMESPACE), range(3000), 16)
        assert cluster.index.longest_prefix(digests, time.monotonic()) == dict.fromkeys(holders, 187)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


class FakeManager:
    @property
    def autoscaler_status(self) -> dict[str, object]:
        return {"reason": "hold"}

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        return {"worker": worker, "to": role}

    async def check_integrity(self) -> dict[str, str]:
        return {"p": "", "d": "one lease is open"}


async def test_role_changes_and_checks_are_left_to_the_manager() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens, manager=FakeManager()) as cluster:
        assert await cluster.flow.manager.set_role("p", Role.DECODE) == {"worker": "p", "to": "decode"}
        assert await cluster.flow.manager.check_integrity() == {"p": "", "d": "one lease is open"}
    async with fake_cluster(prefill=first_token, decode=remaining_tokens) as cluster:
        assert await cluster.flow.manager.check_integrity() == {}
        with pytest.raises(RoleRefused, match="not run by this server"):
            await cluster.flow.manager.set_role("p", Role.DECODE)


async def test_shows_its_pools() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens, manager=FakeManager()) as cluster:
        await collect(cluster, make_request())
        pools = await cluster.flow.pools()
        (worker,) = pools["roles"]["prefill"]
        assert (worker["worker_id"], worker["state"], worker["queue_s"]) == ("p", "ready", 0)
        assert pools["roles"]["colocated"] == []
        assert "cpu-1" in pools["costs"]["steps"]
        assert pools["autoscaler"] == {"reason": "hold"}
        assert (pools["num_handoffs"], worker["links"]) == (1, [])
        assert (cluster.flow.model, cluster.flow.max_model_len) == ("toy", 32768)
        assert cluster.flow.ready


async def test_requests_are_seen_by_the_cache_sizing() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens) as cluster:
        await collect(cluster, make_request(num_prompt_tokens=62))
        await collect(cluster, make_request(num_prompt_tokens=1))  # as the readiness probe
        # Its first 62 tokens are those of the first one, then come others than that one's answer.
        await collect(cluster, make_request(num_prompt_tokens=66, scope="hunter2"))
        await collect(cluster, make_request(num_prompt_tokens=66, scope="hunter2"))
        sizing = (await cluster.flow.pools())["cache_sizing"]
        assert (sizing["num_tokens"], sizing["measured_hit_ratio"]) == (62 + 2 * 66, 0.0)
        assert {name: tenant["num_tokens"] for name, tenant in sizing["tenants"].items()} == {"default": 62 + 132}
        (configured,) = (row for row in sizing["capacities"] if row["configured"] == ["pool"])
        assert configured["num_blocks"] == 8192
        assert configured["hit_ratio"] == pytest.approx(64 / 194)
        assert "hunter2" not in json.dumps(await cluster.flow.pools())


async def test_the_next_turn_finds_the_answer_but_for_its_last_token() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens) as cluster:
        prompt = list(range(16))
        for answer, num_found in ((17, 16), (16, 0)):
            name = str(answer)
            first = GenerateRequest(
                "r0", prompt, SamplingParams(max_tokens=answer), cache_scope(name), service_class=ServiceClass(name)
            )
            token_ids = [*prompt, *tokens(await collect(cluster, first)), 7]
            await collect(cluster, replace(first, request_id="r1", token_ids=token_ids))
            report = (await cluster.flow.pools())["cache_sizing"]["tenants"][name]
            assert report["hit_ratios"][-1] * report["num_tokens"] == pytest.approx(16 + num_found)


@pytest.mark.parametrize(("call_id", "has_calls"), [(100, True), (129, True), (7, False)])
async def test_both_workers_are_told_whether_an_answer_called_a_tool(call_id: int, has_calls: bool) -> None:
    def decode(worker: FakeWorker, message: Message) -> None:
        is_endless = isinstance(message, Decode) and message.request_id == "cancelled"
        (one_token if is_endless else remaining_tokens)(worker, message)

    async with fake_cluster(prefill=first_token, decode=decode) as cluster:
        request = replace(make_request(num_prompt_tokens=70, max_tokens=30), call_ids=frozenset({call_id}))
        # Nothing is said of requests without tools, of blocks that are not full, and of answers that a client has
        # cancelled. Messages stay in order, so the one that is sent is the first.
        await collect(cluster, make_request(request_id="no tools"))
        short = replace(request, request_id="short", token_ids=[1], sampling=SamplingParams(max_tokens=3))
        await collect(cluster, short)
        stream = Pulled(cluster.flow.serve(replace(request, request_id="cancelled", token_ids=list(range(500, 570)))))
        await anext(stream)
        await stream.aclose()
        all_tokens = [*request.token_ids, *tokens(await collect(cluster, request))]
        root = root_digest(NAMESPACE, cache_salt=request.cache_scope)
        tail = block_digests(root, all_tokens[:-1], 16)[3:]  # the prompt's last full block is the fourth
        for worker in cluster.workers.values():
            await eventually(lambda worker=worker: worker.of_type(TurnEnd))
            assert worker.of_type(TurnEnd) == [TurnEnd(digests=tail, has_calls=has_calls)]


async def test_workers_are_told_of_an_answer_whose_client_is_done_with_it() -> None:
    async with fake_cluster(prefill=first_token, decode=remaining_tokens) as cluster:
        request = replace(make_request(num_prompt_tokens=70, max_tokens=30), is_demoted=True)
        await collect(cluster, request)
        for worker in cluster.workers.values():
            await eventually(lambda worker=worker: worker.of_type(TurnEnd))
            (end,) = worker.of_type(TurnEnd)
            assert (end.is_demoted, end.has_calls, len(end.digests)) == (True, False, 3)


async def test_a_request_without_an_answer_is_not_seen_by_the_cache_sizing() -> None:
    async with fake_cluster(prefill=fails, decode=fails) as cluster:
        with pytest.raises(PeerLost):
            await collect(cluster, make_request())
        assert cluster.sizing.num_tokens == 0


SCRIPTS: list[Script] = [silent, first_token, remaining_tokens, one_token, fails]
PLANS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["finish", "close", "cancel", "kill p", "kill d", "timeout"])),
    min_size=1,
    max_size=3,
)


@given(prefill=st.sampled_from(SCRIPTS), decode=st.sampled_from(SCRIPTS), plans=PLANS, local_prefill=st.booleans())
async def test_every_exit_is_clean(
    prefill: Script, decode: Script, plans: list[tuple[int, str]], local_prefill: bool
) -> None:
    async def run(cluster: FakeCluster, request_id: str, num_reads: int, end: str) -> None:
        stream = Pulled(cluster.flow.serve(make_request(request_id=request_id)))
        try:
            for _ in range(num_reads):
                await anext(stream)
            if end.startswith("kill"):
                cluster.client.mark_dead(end[-1], "test")
            if end == "cancel":
                reading = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            elif end != "close":
                async for _ in stream:
                    pass
        except (ServingError, StopAsyncIteration):
            pass
        finally:
            await stream.aclose()

    config = RouterConfig(request_timeout_s=0.05)
    async with fake_cluster(prefill=prefill, decode=decode, config=config, local_prefill=local_prefill) as cluster:
        await asyncio.gather(*(run(cluster, f"r{i}", *plan) for i, plan in enumerate(plans)))


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_tokens(lengths: list[int], order: random.Random) -> None:
    deltas: list[SequenceDelta] = []
    offset = 0
    for length in lengths:
        deltas.append(SequenceDelta("r0", offset, list(range(offset, offset + length))))
        offset += length
    order.shuffle(deltas)
    merged = DeltaOrder()
    out = [token_id for delta in deltas for due in merged.push(delta) for token_id in due.token_ids]
    assert out == list(range(offset))
    with pytest.raises(WorkerError, match="twice"):
        merged.push(deltas[0])


def test_an_empty_last_delta_is_passed_on() -> None:
    merged = DeltaOrder()
    last = SequenceDelta("r0", 1, [], FinishReason.LENGTH)
    assert merged.push(last) == []
    assert merged.push(SequenceDelta("r0", 0, [1]))[1:] == [last]


async def test_a_flipped_role_is_used_at_once() -> None:
    async with fake_cluster(prefill=remaining_tokens, decode=silent) as cluster:
        cluster.registry.set_role("p", Role.COLOCATED)
        cluster.registry.set_role("d", Role.PREFILL)
        assert tokens(await collect(cluster, make_request())) == [100, 101, 102, 103]


async def test_a_scored_prompt_is_computed_whole_and_its_scores_come_first() -> None:
    scores = PromptLogprobs(b"1234", b"", b"")

    def scored_token(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Prefill):
            is_scored = message.sampling.num_prompt_logprobs is not None
            worker.output(SequenceDelta(message.request_id, 0, [100], prompt_logprobs=scores if is_scored else None))

    async with fake_cluster(prefill=scored_token, decode=remaining_tokens) as cluster:
        plain = make_request(num_prompt_tokens=64)
        sampling = msgspec.structs.replace(plain.sampling, num_prompt_logprobs=0)
        found = []
        for number, request in enumerate((plain, plain, replace(plain, sampling=sampling))):
            first, *rest = await collect(cluster, replace(request, request_id=f"r{number}", explains=True))
            found.append(first.prompt_logprobs)
            assert all(delta.prompt_logprobs is None for delta in rest)
        assert found == [None, None, scores]
        sizing = (await cluster.flow.pools())["cache_sizing"]
        assert sizing["num_tokens"] == 2 * 64, "it says nothing about what a cache would have held"
