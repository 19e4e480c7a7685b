"""Several routers in front of the same engines, joined by real sockets: what one does, the others know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.router.engines.config import EngineSpec
from tests.support.engines_harness import COMPLETIONS, Router, completion, routing, spec_of, until
from tests.support.fake_openai import FakeServer

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer secret"}


@asynccontextmanager
async def together(tmp_path: Path, count: int, *specs: EngineSpec, **options: Any) -> AsyncIterator[list[Router]]:
    """Routers that know each other and have reached their engines."""
    bus = [f"ipc://{tmp_path}/{number}" for number in range(count)]
    async with AsyncExitStack() as stack:
        joining = [
            routing(*specs, number=number, bus=bus, admin_token="secret", wait=False, **options)
            for number in range(count)
        ]
        tasks = [asyncio.create_task(one.__aenter__()) for one in joining]  # each waits for the others
        routers = list(await asyncio.gather(*tasks))
        for one in joining:
            stack.push_async_exit(one)
        for router in routers:
            await router.all_ready(*(spec.name for spec in specs))
        yield routers


def running(router: Router, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True, **fields)))


async def totals(router: Router) -> dict[str, float]:
    text = (await router.client.get("/metrics")).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_load_of_one_is_load_for_all_and_not_foreign(
    fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path
) -> None:
    fake_a.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    fake_b.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    async with together(tmp_path, 2, spec_of(fake_a, "a"), spec_of(fake_b, "b")) as (one, two):
        await until(lambda: len(two.engine("a").foreign) == 1)  # which somebody else sent there
        fake_b.headers_pause.clear()
        tasks = [running(one)]
        await until(lambda: two.fleet.siblings.num_on("b") == 1)
        worker = two.fleet.registry.get("b")
        assert worker is not None
        assert worker.num_booked_seqs == 1
        fake_b.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        await until(lambda: worker.load.num_running == 1)
        assert len(two.engine("b").foreign) == 0
        fake_b.resume()
        assert [(await task).status_code for task in tasks] == [200]
        await until(lambda: two.fleet.siblings.num_on("b") == 0)


async def test_a_prompt_sent_through_one_is_expected_in_the_cache_by_all(fake_a: FakeServer, tmp_path: Path) -> None:
    async with together(tmp_path, 3, spec_of(fake_a, "a")) as routers:
        await running(routers[0], prompt="x" * 4000)
        for router in routers:
            await until(lambda router=router: len(router.fleet.index) == 62)  # type: ignore[misc]
            answer = await router.client.post(COMPLETIONS, json=completion("x" * 4000))
            assert int(answer.headers["x-tandem-expected-cached-tokens"]) == 992


async def test_first_tokens_and_lengths_teach_all(fake_a: FakeServer, tmp_path: Path) -> None:
    async with together(tmp_path, 2, spec_of(fake_a, "a")) as (one, two):
        before = two.fleet.lengths.mean_output_tokens
        for number in range(12):
            await running(one, prompt=f"{number}" + "x" * 4000, max_tokens=8)
        model = two.fleet.costs.steps("vllm fake-model")
        await until(lambda: model.num_measurements >= 1)
        assert one.fleet.lengths.mean_output_tokens < before
        await until(lambda: two.fleet.lengths.mean_output_tokens == pytest.approx(one.fleet.lengths.mean_output_tokens))


async def test_metrics_pools_and_decisions_are_of_all(fake_a: FakeServer, tmp_path: Path) -> None:
    async with together(tmp_path, 3, spec_of(fake_a, "a")) as routers:
        for router, count in zip(routers, (1, 2, 3), strict=True):
            for _ in range(count):
                assert (await running(router)).status_code == 200
        for router in routers:
            shown = await totals(router)
            assert (shown["tandem_engine_requests_total"], shown["tandem_router_processes"]) == (6, 3)
            pools = (await router.client.get("/v1/pools")).json()
            assert pools["engines"][0]["num_requests"] == 6
            assert pools["processes"].keys() == {"0", "1", "2"}
            assert len((await router.client.get("/v1/route/decisions")).json()["data"]) == 6


async def test_engines_come_and_go_for_all(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    async with together(tmp_path, 2, spec_of(fake_a, "a")) as (one, two):
        body = {"name": "b", "url": fake_b.url, "kind": "vllm"}
        assert (await one.client.post("/v1/engines", json=body, headers=ADMIN)).status_code == 201
        await until(lambda: two.fleet.get("b") is not None)
        again = await two.client.post("/v1/engines", json=body, headers=ADMIN)
        assert "name='b' is there twice" in again.json()["error"]["message"]
        await two.all_ready("b")
        fake_b.pause.clear()
        fake_a.health = 500
        await until(lambda: all(router.engine("a").state.value == "dead" for router in (one, two)))
        stream = running(two)
        await until(lambda: one.fleet.siblings.num_on("b") == 1)
        assert (await one.client.delete("/v1/engines/b", headers=ADMIN)).status_code == 202
        await until(lambda: one.fleet.get("b") is None)  # it had nothing to drain here
        assert two.engine("b").state.value == "draining"
        assert (await one.client.post("/v1/engines", json=body, headers=ADMIN)).status_code == 201
        fake_b.resume()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await until(lambda: two.fleet.get("b") is not None and not two.engine("b").is_removed)
        await one.all_ready("b")
        await two.all_ready("b")


async def test_one_that_joins_later_knows_the_load_and_the_engines(
    fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path
) -> None:
    bus = [f"ipc://{tmp_path}/{number}" for number in range(2)]
    spec = spec_of(fake_a, "a")
    async with routing(spec, number=0, bus=bus, admin_token="secret") as one:
        await one.client.post("/v1/engines", json={"name": "b", "url": fake_b.url}, headers=ADMIN)
        await one.all_ready("b")
        await one.client.delete("/v1/engines/a", headers=ADMIN)
        await until(lambda: one.fleet.get("a") is None)
        fake_b.headers_pause.clear()
        stream = running(one)
        await until(lambda: len(fake_b.requests) == 1)
        async with routing(spec, number=1, bus=bus, wait=False) as two:
            assert two.fleet.siblings.num_on("b") == 1
            await two.all_ready("b")
            assert [engine.name for engine in two.fleet.engines] == ["b"]
            worker = two.fleet.registry.get("b")
            assert worker is not None
            assert worker.num_booked_seqs == 1
            fake_b.resume()
            assert (await stream).status_code == 200
        await until(lambda: one.fleet.siblings.living == [])


async def test_counts_of_one_that_left_stay_in_the_total(fake_a: FakeServer, tmp_path: Path) -> None:
    bus = [f"ipc://{tmp_path}/{number}" for number in range(2)]
    async with routing(spec_of(fake_a, "a"), number=0, bus=bus) as one:
        for _ in range(2):
            async with routing(spec_of(fake_a, "a"), number=1, bus=bus) as two:
                assert (await running(two)).status_code == 200
            await until(lambda: one.fleet.siblings.living == [])
        shown = await totals(one)
        assert (shown["tandem_engine_requests_total"], shown["tandem_router_processes"]) == (2, 1)


async def test_a_forecast_counts_what_waits_at_the_siblings(fake_a: FakeServer, tmp_path: Path) -> None:
    spec = spec_of(fake_a, "a", max_num_batched_tokens=64)
    async with together(tmp_path, 2, spec) as (one, two):
        fake_a.headers_pause.clear()
        tasks = [running(one, prompt="running" + "x" * 8000)]
        await until(lambda: two.fleet.siblings.num_on("a") == 1)

        async def predicted_start_s() -> float:
            body = completion("new" + "x" * 8000)
            [decision] = (await two.client.post("/v1/route/explain", json=body)).json()["data"]
            return float(decision["predicted_start_s"])

        tasks.append(running(two, prompt="ours" + "x" * 8000))
        await until(lambda: bool(two.app.state.queues.waiting()))
        alone_s = await predicted_start_s()
        tasks += [running(one, prompt=f"{number}" + "x" * 8000) for number in range(4)]
        await until(lambda: [one.num_requests for one in two.fleet.siblings.waiting_in("fake-model")] == [4])
        shared_s = await predicted_start_s()
        [queue] = two.app.state.queues.waiting().values()
        # Of their four as many go meanwhile as of ours.
        assert shared_s == pytest.approx(alone_s + queue.alone_s, rel=0.05)
        fake_a.resume()
        assert [(await task).status_code for task in tasks] == [200] * 6
