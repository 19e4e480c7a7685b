from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import Cancel, Decode, FinishReason, Generate, Message, Prefill, Role, SequenceDelta
from tandem.protocol.timeline import Ages, Timeline
from tandem.router.backend import GenerateRequest
from tandem.runtime.tracing.itl import ItlSummary
from tests.support.fake_worker import (
    FakeWorker,
    fails,
    fake_cluster,
    first_token,
    make_request,
    one_token,
    remaining_tokens,
    silent,
)
from tests.support.streams import Pulled
from tests.support.tracing import CLIENT_TRACE, TRACEPARENT, KeptSpans
from tests.support.waiting import eventually

PAIR = (
    "generate",
    ("admission", ("placement",)),
    ("prefill", ("prefill.queue",), ("prefill.compute",)),
    ("lease_wait",),
    ("kv_transfer",),
    ("decode", ("decode.queue",)),
)


def traced(**fields: Any) -> GenerateRequest:
    request = make_request(**fields)
    return GenerateRequest(
        request.request_id, request.token_ids, request.sampling, request.cache_scope, traceparent=TRACEPARENT
    )


def prefill_part(worker: FakeWorker, message: Message) -> None:
    """As a worker that took a while over each part, all of it before the message is sent."""
    if isinstance(message, Prefill):
        assert message.is_traced
        marks = ("received", "computing", "first_chunk", "lease_requested", "lease_granted", "sampled")
        ages = Ages(dict(zip(marks, (6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4), strict=True)), {"steps": 2})
        worker.output(SequenceDelta(message.request_id, 0, [100], num_cached_tokens=16, timeline=ages))


def decode_part(worker: FakeWorker, message: Message) -> None:
    if isinstance(message, Decode):
        ages = Ages({"received": 5e-4, "lease_granted": 2e-4, "all_blocks": 1e-4, "computing": 5e-5}, {"blocks": 4})
        worker.output(SequenceDelta(message.request_id, 1, [101], timeline=ages))
        worker.output(SequenceDelta(message.request_id, 2, [102, 103], FinishReason.LENGTH))


async def collect(stream: Any) -> None:
    async with asyncio.timeout(10):
        async for _ in Pulled(stream):
            pass


async def test_a_pair_makes_one_tree_of_spans() -> None:
    kept = KeptSpans()
    async with fake_cluster(prefill=prefill_part, decode=decode_part, tracing=kept.tracing) as cluster:
        await collect(cluster.flow.serve(traced()))
    (tree,) = kept.tree()
    assert tree[0] == "generate"
    assert set(tree[1:]) == set(PAIR[1:])
    assert {f"{span.context.trace_id:032x}" for span in kept.all if span.context} == {CLIENT_TRACE}
    attributes = kept.attributes("generate")
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (64, 4)
    assert (attributes["gen_ai.usage.cache_read.input_tokens"], attributes["tandem.request_id"]) == (16, "r0")
    assert attributes["tandem.finish_reason"] == "length"
    placement = kept.attributes("placement")
    terms = ("queue_s", "fetch_s", "prefill_s", "delay_s", "transfer_s", "memory_s", "decode_s")
    assert sum(placement[f"tandem.placement.{term}"] for term in terms) == pytest.approx(
        placement["tandem.placement.total_s"]
    )
    assert (placement["tandem.placement.prefill_worker"], placement["tandem.placement.decode_worker"]) == ("p", "d")
    assert kept.attributes("prefill.compute")["tandem.steps"] == 2
    assert kept.attributes("kv_transfer")["tandem.blocks"] == 4
    decode = kept.attributes("decode")
    assert (decode["tandem.worker"], decode["tandem.output_tokens"]) == ("d", 3)
    assert [event.name for event in kept.named("generate").events] == ["first_token"]


async def test_one_worker_has_no_handoff() -> None:
    def whole(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            ages = Ages({"received": 3e-4, "computing": 2e-4, "sampled": 1e-4}, {})
            worker.output(SequenceDelta(message.request_id, 0, [100], timeline=ages))
            worker.output(SequenceDelta(message.request_id, 1, [101, 102, 103], FinishReason.LENGTH))

    kept = KeptSpans()
    async with fake_cluster(prefill=silent, decode=whole, local_prefill=True, tracing=kept.tracing) as cluster:
        await collect(cluster.flow.serve(traced(num_prompt_tokens=4)))
    (tree,) = kept.tree()
    assert set(tree[1:]) == {PAIR[1], PAIR[2], ("decode",)}


async def test_a_request_that_is_not_traced_tells_workers_nothing() -> None:
    def untraced(worker: FakeWorker, message: Message) -> None:
        assert not getattr(message, "is_traced", False)
        if isinstance(message, Prefill):
            worker.output(SequenceDelta(message.request_id, 0, [1], FinishReason.STOP))

    kept = KeptSpans()
    async with fake_cluster(prefill=untraced, decode=silent, tracing=kept.tracing) as cluster:
        await collect(cluster.flow.serve(make_request()))
    assert kept.all == []


async def test_a_failed_sub_request_is_an_error_of_its_spans() -> None:
    kept = KeptSpans()
    config = RouterConfig(max_moves=0)
    async with fake_cluster(prefill=fails, decode=silent, config=config, tracing=kept.tracing) as cluster:
        with pytest.raises(ServingError):
            await collect(cluster.flow.serve(traced()))
    assert kept.tree() == [("generate", ("admission", ("placement",)), ("prefill",))]
    for name in ("generate", "prefill"):
        assert kept.named(name).status.status_code is StatusCode.ERROR
        assert kept.attributes(name)["error.type"] == "kv_peer_lost"
    assert kept.attributes("generate")["tandem.finish_reason"] == "error"


async def test_a_move_is_a_span_from_the_loss_to_the_next_token() -> None:
    kept = KeptSpans()
    async with fake_cluster(prefill=first_token, decode=one_token, tracing=kept.tracing) as cluster:
        stream = Pulled(cluster.flow.serve(traced(max_tokens=6)))
        taken = (await anext(stream)).token_ids
        await cluster.add(FakeWorker("d2", Role.DECODE, remaining_tokens))
        cluster.client.mark_dead("d", "exit code -9")
        async with asyncio.timeout(10):
            taken += [token_id async for delta in stream for token_id in delta.token_ids]
    assert taken == [100, 101, 102, 103, 104, 105]
    move = kept.attributes("move")
    assert move["tandem.move.reason"] == "worker d is gone: exit code -9"
    assert move["tandem.output_tokens"] in (1, 2)
    assert kept.attributes("generate")["gen_ai.usage.output_tokens"] == 6


async def test_a_refused_request_has_an_admission_that_says_why() -> None:
    kept = KeptSpans()
    config = RouterConfig(max_queued_prompt_tokens=5000)
    async with fake_cluster(decode=silent, config=config, tracing=kept.tracing) as cluster:
        # The first runs; the second waits, and has the room of the third.
        tasks = []
        for name in ("runs", "waits"):
            request = make_request(request_id=name, num_prompt_tokens=2000, scope=name)
            tasks.append(asyncio.create_task(collect(cluster.flow.serve(request))))
            await eventually(lambda: cluster.registry.num_bookings == 1)
        await eventually(lambda: len(cluster.flow.admission) == 1)
        with pytest.raises(ServingError) as refusal:
            await collect(cluster.flow.serve(traced(num_prompt_tokens=2000)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert kept.tree() == [("generate", ("admission",))]
    attributes = kept.attributes("admission")
    assert (attributes["tandem.outcome"], attributes["error.type"]) == ("refused", refusal.value.code)
    assert attributes["tandem.retry_after_s"] > 0


async def test_no_worker_is_a_refusal_too() -> None:
    kept = KeptSpans()
    async with fake_cluster(tracing=kept.tracing) as cluster:
        with pytest.raises(ServingError):
            await collect(cluster.flow.serve(traced()))
    assert kept.attributes("admission")["error.type"] == "no_worker"


async def test_an_abort_ends_the_spans_without_an_error() -> None:
    kept = KeptSpans()
    async with fake_cluster(prefill=prefill_part, decode=silent, tracing=kept.tracing) as cluster:
        stream = Pulled(cluster.flow.serve(traced()))
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: bool(cluster.workers["d"].of_type(Cancel)))
    assert kept.attributes("generate")["tandem.finish_reason"] == "closed"
    assert kept.named("generate").status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("age_s", [0.0, 1e8])
async def test_ages_that_cannot_be_are_moved_into_their_parents(age_s: float) -> None:
    def lying(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Prefill):
            names = ("received", "computing", "first_chunk", "sampled", "lease_requested", "lease_granted")
            ages = Ages(dict.fromkeys(names, age_s), {})
            worker.output(SequenceDelta(message.request_id, 0, [1], FinishReason.STOP, timeline=ages))

    kept = KeptSpans()
    async with fake_cluster(prefill=lying, decode=silent, tracing=kept.tracing) as cluster:
        await collect(cluster.flow.serve(traced()))
    assert kept.tree()[0][0] == "generate", "`tree` asserts that spans lie within their parents"


def test_a_timeline_is_told_as_ages() -> None:
    timeline = Timeline(10.0)
    timeline.step(11.0, 12.0, 512, samples=False)
    timeline.step(12.0, 13.0, 100, samples=True)
    timeline.mark("computing", 99.0)  # only the first time counts
    ages = timeline.ages(15.0)
    assert ages.ages_s == {"received": 5.0, "computing": 4.0, "first_chunk": 3.0, "sampled": 2.0}
    assert ages.counts == {"steps": 2, "computed_tokens": 612}


def test_itl_summary() -> None:
    summary = ItlSummary()
    assert summary.attributes() == {}
    for gap_ms in range(1, 101):
        summary.add(gap_ms / 1e3)
    assert summary.attributes() == pytest.approx(
        {"tandem.itl.mean_s": 0.0505, "tandem.itl.p50_s": 0.051, "tandem.itl.p99_s": 0.099, "tandem.itl.max_s": 0.1}
    )
