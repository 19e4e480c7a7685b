"""The queue as requests meet it: through the request flow, with fake workers behind real sockets."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import DeadlineUnmet, NoWorker, Overloaded, ServingError, ShuttingDown
from tandem.protocol.messages import FinishReason, Generate, Message, Role, SequenceDelta, StepStats
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.backend import GenerateRequest
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tandem.scheduling.request import ServiceClass
from tests.support.fake_worker import (
    FakeCluster,
    FakeWorker,
    collect,
    fake_cluster,
    first_token,
    make_request,
    remaining_tokens,
    silent,
)
from tests.support.streams import Pulled
from tests.support.waiting import eventually

NUM_TOKENS = 2000  # more than a worker may have before another prompt is held back


def long_request(request_id: str = "r0") -> GenerateRequest:
    """A request with no cached prefix in common with the others."""
    return make_request(request_id=request_id, num_prompt_tokens=NUM_TOKENS, scope=request_id)


def start(cluster: FakeCluster, request_id: str, **fields: object) -> asyncio.Task[list[SequenceDelta]]:
    return asyncio.create_task(collect(cluster, of_class(long_request(request_id), **fields)))


def of_class(request: GenerateRequest, **fields: object) -> GenerateRequest:
    return replace(request, service_class=ServiceClass(**fields))  # type: ignore[arg-type]


async def one_runs_one_waits(
    cluster: FakeCluster, **fields: object
) -> tuple[asyncio.Task[list[SequenceDelta]], asyncio.Task[list[SequenceDelta]]]:
    running = start(cluster, "running")
    await eventually(lambda: cluster.registry.num_bookings == 1)
    waiting = start(cluster, "waiting", **fields)
    await eventually(lambda: len(cluster.flow.admission) == 1)
    return running, waiting


async def end(cluster: FakeCluster, *tasks: asyncio.Task[list[SequenceDelta]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert_idle(cluster)


def assert_idle(cluster: FakeCluster) -> None:
    cluster.flow.admission.check_integrity()
    assert len(cluster.flow.admission) == 0


def computed(worker: FakeWorker) -> None:
    """The worker reports that it has computed the prompt of the running request."""
    worker.output(stats=StepStats(duration_s=1.0, num_prefill_tokens=NUM_TOKENS))


async def test_the_more_urgent_and_the_other_tenant_go_first() -> None:
    async with fake_cluster(decode=silent) as cluster:
        running, waiting = await one_runs_one_waits(cluster)
        tasks = [start(cluster, "urgent", priority=-1), start(cluster, "other", tenant="other")]
        await eventually(lambda: len(cluster.flow.admission) == 3)
        worker = cluster.workers["d"]
        for number in (2, 3, 4):
            computed(worker)
            await eventually(lambda number=number: len(worker.of_type(Generate)) == number)  # type: ignore[misc]
        order = [message.request_id for message in worker.of_type(Generate) if isinstance(message, Generate)]
        assert order == ["running", "other", "urgent", "waiting"]
        report = (await cluster.flow.pools())["admission"]
        assert (report["num_waiting"], report["tenants"]["default"]["num_admitted"]) == (0, 3)
        await end(cluster, running, waiting, *tasks)


async def test_a_worker_that_dies_ends_those_who_wait_for_it() -> None:
    async with fake_cluster(decode=silent) as cluster:
        running, waiting = await one_runs_one_waits(cluster)
        cluster.client.mark_dead("d", "test")
        with pytest.raises(NoWorker):
            await waiting
        await end(cluster, running)


async def test_those_who_wait_when_the_server_stops_are_told() -> None:
    async with fake_cluster(decode=silent) as cluster:
        running, waiting = await one_runs_one_waits(cluster)
        cluster.flow.shut_down()
        for task in (running, waiting):
            with pytest.raises(ShuttingDown, match="shutting down"):
                await task
        assert_idle(cluster)


async def test_nobody_waits_longer_than_the_timeout() -> None:
    async with fake_cluster(decode=silent, config=RouterConfig(request_timeout_s=1.0)) as cluster:
        _, waiting = await one_runs_one_waits(cluster)
        # The running request is given up first, so the other one gets its turn, and no token either.
        with pytest.raises(ServingError, match="request_timeout_s"):
            await waiting
        await eventually(lambda: cluster.registry.num_bookings == 0)
        assert_idle(cluster)


async def test_a_deadline_is_refused_at_once_or_when_it_is_sure_to_be_missed() -> None:
    async with fake_cluster(decode=silent) as cluster:
        # Three prompts of 1.7 s: the second would have its first token after 3.4 s.
        running, waiting = await one_runs_one_waits(cluster, ttft_slo_s=3.6)
        with pytest.raises(DeadlineUnmet, match="TTFT SLO is 3600 ms"):
            await collect(cluster, of_class(long_request(), ttft_slo_s=3.6))
        with pytest.raises(DeadlineUnmet, match="in the queue"):
            await waiting
        decisions = {one["request_id"]: one for one in await cluster.flow.decisions()}
        assert [decisions[name]["outcome"] for name in ("r0", "waiting", "running")] == [
            "rejected",
            "dropped",
            "dispatched",
        ]
        assert decisions["r0"]["error"]["retry_after_s"] > 0
        await end(cluster, running)


async def test_the_decision_comes_with_the_first_token_and_is_kept() -> None:
    async with fake_cluster(prefill=silent, decode=silent, local_prefill=True) as cluster:
        worker, request = cluster.workers["d"], replace(make_request(num_prompt_tokens=4), explains=True)
        deltas = Pulled(cluster.flow.serve(request))
        begun = asyncio.ensure_future(anext(deltas))
        await eventually(lambda: worker.of_type(Generate))
        worker.output(SequenceDelta(request.request_id, 0, [100]))
        decision = (await begun).decision
        worker.output(SequenceDelta(request.request_id, 1, [101, 102, 103], FinishReason.LENGTH))
        assert [delta.decision async for delta in deltas] == [None]
        assert decision is not None
        assert (decision["outcome"], decision["tenant"], decision["queue"]["place"]) == ("dispatched", "default", 0)
        assert decision["actual_ttft_s"] > 0
        first, *others = decision["placement"]["candidates"]
        assert (first["prefill_worker"], first["decode_worker"]) == ("d", "d")
        assert [(one["prefill_worker"], one["decode_worker"]) for one in others] == [("p", "d")]
        assert first["total_s"] <= others[0]["total_s"]
        assert decision["predicted_ttft_s"] == pytest.approx(first["queue_s"] + first["prefill_s"] + first["fetch_s"])
        (kept,) = await cluster.flow.decisions()
        assert kept["actual_ttft_s"] == decision["actual_ttft_s"]


async def test_explaining_sends_and_books_nothing() -> None:
    async with fake_cluster(decode=silent) as cluster:
        running, waiting = await one_runs_one_waits(cluster)
        request = of_class(long_request(), ttft_slo_s=3.6)
        refused = await cluster.flow.explain(request)
        assert (refused["outcome"], refused["error"]["code"]) == ("rejected", "ttft_slo_unmet")
        assert refused["queue"] == {
            "place": 1,
            "ahead_prompt_tokens": NUM_TOKENS,
            "ahead_worker_s": pytest.approx(refused["queue"]["ahead_worker_s"]),
        }
        admitted = await cluster.flow.explain(of_class(request, ttft_slo_s=math.inf))
        assert (admitted["outcome"], admitted["ttft_slo_s"]) == ("admitted", None)
        assert (cluster.registry.num_bookings, len(cluster.flow.admission)) == (1, 1)
        assert len(await cluster.flow.decisions()) == 2
        await end(cluster, running, waiting)


async def test_a_tenants_workers_and_adapters_are_kept_to_and_explained() -> None:
    named = {"small": TenantPolicy(workers=("d",)), "gone": TenantPolicy(workers=("x-*",))}
    async with fake_cluster(
        prefill=first_token,
        decode=remaining_tokens,
        config=RouterConfig(routing="cost,pairs"),
        tenants=Tenants(named=named),
    ) as cluster:
        request = make_request(num_prompt_tokens=64)
        anyone = (await cluster.flow.explain(request))["placement"]
        assert (anyone["candidates"][0]["prefill_worker"], anyone["skipped"]) == ("p", {})
        small = (await cluster.flow.explain(of_class(request, tenant="small")))["placement"]
        assert small["candidates"][0]["prefill_worker"] == "d"
        assert small["skipped"] == {"not for this tenant": 1}
        with pytest.raises(NoWorker, match="of tenant 'gone': 2 not for this tenant"):
            await collect(cluster, of_class(request, tenant="gone"))
        with pytest.raises(NoWorker, match="for adapter 'sql': 2 without the adapter"):
            await collect(cluster, replace(request, adapter="sql"))
        assert_idle(cluster)


async def test_metrics_tell_the_queue_and_the_reasons() -> None:
    config = RouterConfig(max_queued_prompt_tokens=3 * NUM_TOKENS - 1)
    async with fake_cluster(decode=silent, config=config) as cluster:
        running, waiting = await one_runs_one_waits(cluster)
        with pytest.raises(Overloaded):
            await collect(cluster, long_request())
        registry = CollectorRegistry()
        registry.register(AdmissionCollector(cluster.flow.admission))
        text = generate_latest(registry).decode()
        for line in (
            'tandem_router_queue_requests{tenant="default"} 1.0',
            f'tandem_router_queue_tokens{{tenant="default"}} {NUM_TOKENS:.1f}',
            'tandem_router_admitted_total{tenant="default"} 1.0',
            'tandem_router_rejected_total{reason="queue_full",tenant="default"} 1.0',
            'tandem_router_queue_wait_seconds_bucket{le="+Inf",tenant="default"} 1.0',
        ):
            assert line in text
        await end(cluster, running, waiting)


def slow(worker: FakeWorker, message: Message) -> None:
    """Answer one request in two at once, and do not compute the other."""
    if isinstance(message, Generate) and int(message.request_id[1:]) % 2:
        worker.output(
            SequenceDelta(message.request_id, 0, [1], num_cached_tokens=0),
            stats=StepStats(duration_s=0.1, num_prefill_tokens=500),
        )


PLANS = st.lists(
    st.tuples(
        st.sampled_from(["stay", "leave", "kill", "stop"]),
        st.integers(0, 6),
        st.sampled_from([0.05, 1.0, math.inf]),
        st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=6,
)


@given(plans=PLANS)
async def test_every_way_out_of_the_queue_gives_everything_back(plans: list[tuple[str, int, float, str]]) -> None:
    async def run(cluster: FakeCluster, number: int, how: str, num_turns: int, slo_s: float, tenant: str) -> None:
        request = make_request(request_id=f"r{number}", num_prompt_tokens=600)
        task = asyncio.create_task(collect(cluster, of_class(request, ttft_slo_s=slo_s, tenant=tenant)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if how == "leave":
            task.cancel()
        elif how == "kill":
            cluster.client.mark_dead("d", "test")
        elif how == "stop":
            cluster.flow.shut_down()
        await asyncio.gather(task, return_exceptions=True)

    config = RouterConfig(request_timeout_s=0.05)
    async with fake_cluster(config=config) as cluster:
        await cluster.add(FakeWorker("d", Role.COLOCATED, slow))
        await asyncio.gather(*(run(cluster, number, *plan) for number, plan in enumerate(plans)))
        assert_idle(cluster)
