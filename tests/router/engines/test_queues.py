from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path

import httpx
import msgspec

from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import TierLoad, WorkerState
from tandem.router.engines.engine_placer import ModelWorkers
from tandem.scheduling.admission.tenants import load_tenants
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card
from tests.support.busy_engine import one_runs, order, prompt_of, small, start
from tests.support.engines_harness import CHAT, COMPLETIONS, Router, completion, routing
from tests.support.fake_backend import RawClient
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

EXPLAIN = "/v1/route/explain"


def num_waiting(router: Router) -> int:
    return sum(report["num_waiting"] for report in router.dispatcher.queues.report().values())


async def test_urgent_requests_and_other_tenants_overtake_in_the_routers_queue(fake_a: FakeServer) -> None:
    async with routing(small(fake_a, "a")) as router:
        tasks = [await one_runs(router, fake_a)]
        for number, (name, options) in enumerate(
            [("first", {}), ("second", {}), ("urgent", {"priority": -1}), ("other", {"x-tandem-tenant": "other"})]
        ):
            tasks.append(start(router, prompt_of(name), **options))
            await eventually(lambda number=number: num_waiting(router) == number + 1)  # type: ignore[misc]
        assert order(fake_a) == ["running"]
        pools = (await router.client.get("/v1/pools")).json()
        assert pools["admission"]["fake-model"]["num_waiting"] == 4
        assert 'tandem_router_queue_requests{tenant="default"} 3.0' in (await router.client.get("/metrics")).text
        fake_a.resume()
        assert [(await task).status_code for task in tasks] == [200] * 5
        assert order(fake_a) == ["running", "other", "urgent", "first", "second"]
        assert 'tandem_router_admitted_total{tenant="other"} 1.0' in (await router.client.get("/metrics")).text


async def test_what_waits_and_what_runs_is_in_the_metrics_until_it_ends(fake_a: FakeServer) -> None:
    async with routing(small(fake_a, "a")) as router:

        async def samples(*names: str) -> list[float]:
            """Of one scrape: each takes half a second."""
            lines = (await router.client.get("/metrics")).text.splitlines()
            found = [[line for line in lines if line.startswith(f"tandem_{name}")] for name in names]
            return [sum(float(line.rpartition(" ")[2]) for line in one) for one in found]

        queue = ("router_queue_requests{", "router_queue_tokens{", "router_queue_worker_seconds{")
        running_engine, running_router = 'engine_running_requests{engine="a"}', "router_running_requests "
        dropped = 'router_dropped_total{reason="client_gone",tenant="default"}'
        running = await one_runs(router, fake_a)
        plain = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(prompt_of("plain"), n=2)))
        gone = RawClient(router.app, COMPLETIONS, completion(prompt_of("gone"), stream=True))
        await eventually(lambda: num_waiting(router) == 2)
        num_queued, num_tokens, worker_s, *others = await samples(
            *queue, running_engine, running_router, "router_dropped_total{"
        )
        assert num_queued == 2
        assert num_tokens > 2000
        assert worker_s > 0
        assert others == [1, 4, 0]
        gone.leave()
        await gone.task
        assert await samples(dropped, running_router) == [1, 3]
        decisions = (await router.client.get("/v1/route/decisions")).json()["data"]
        assert "dropped" in [one["outcome"] for one in decisions]
        fake_a.resume()
        assert [(await task).status_code for task in (running, plain)] == [200, 200]
        assert order(fake_a) == ["running", "plain"]
        assert await samples(*queue, running_router, running_engine) == [0] * 5


async def test_a_first_token_that_would_come_too_late_is_refused_at_once(fake_a: FakeServer) -> None:
    async with routing(small(fake_a, "a")) as router:
        running = await one_runs(router, fake_a)
        late = await start(router, prompt_of("late"), **{"x-tandem-ttft-slo-ms": "1"})
        assert (late.status_code, late.json()["error"]["code"]) == (429, "ttft_slo_unmet")
        assert float(late.headers["retry-after-ms"]) > 1
        patient = start(router, prompt_of("patient"), **{"x-tandem-ttft-slo-ms": "600000"})
        await eventually(lambda: num_waiting(router) == 1)
        fake_a.resume()
        assert [(await task).status_code for task in (running, patient)] == [200, 200]


async def test_a_full_queue_refuses_and_says_until_when(fake_a: FakeServer) -> None:
    config = RouterConfig(max_queued_prompt_tokens=3000)
    async with routing(small(fake_a, "a"), config=config) as router:
        running = await one_runs(router, fake_a)
        refused = await start(router, prompt_of("more"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert float(refused.headers["retry-after-ms"]) > 1
        fake_a.resume()
        assert (await running).status_code == 200


async def test_requests_that_wait_for_a_dying_engine_go_elsewhere_or_are_refused(fake_a: FakeServer) -> None:
    async with routing(small(fake_a, "a")) as router:
        running = await one_runs(router, fake_a)
        waiting = start(router, prompt_of("waiting"))
        await eventually(lambda: num_waiting(router) == 1)
        fake_a.health = 500
        assert (await waiting).status_code == 503
        assert (await running).status_code == 502
        fake_a.resume()


async def test_a_failed_attempt_goes_elsewhere_without_waiting_again(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.status = 500
    async with routing(small(fake_a, "a"), small(fake_b, "b")) as router:
        fake_b.headers_pause.clear()
        tasks = [start(router, prompt_of(str(number)), **{"x-tandem-explain": "1"}) for number in range(2)]
        await eventually(lambda: len(fake_b.requests) == 2)  # both are there, though one is enough to do
        fake_b.resume()
        for task in tasks:
            answer = await task
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        decisions = (await router.client.get("/v1/route/decisions")).json()["data"]
        assert {one["placement"]["candidates"][0]["decode_worker"] for one in decisions} == {"b"}


async def test_a_retry_stays_on_the_tenants_engines(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[tenants.search]\nworkers = ["a"]\n')
    fake_a.status = 500
    async with routing(small(fake_a, "a"), small(fake_b, "b"), tenants=load_tenants(str(path))) as router:
        answer = await start(router, prompt_of("search"), **{"x-tandem-tenant": "search"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        assert not fake_b.requests


async def test_a_group_leaves_what_it_cannot_take(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[tenants.search]\nworkers = ["b"]\n[tenants.nowhere]\nworkers = ["c"]\n')
    specs = [small(fake_a, "a", group="one", num_blocks=64), small(fake_b, "b", group="two")]
    async with routing(*specs, tenants=load_tenants(str(path))) as router:
        short = completion("a b", stream=True)
        answer = await router.client.post(COMPLETIONS, json=short, headers={"x-tandem-tenant": "search"})
        assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        answer = await start(router, prompt_of("longer than 64 blocks of 16 tokens"))
        assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        refused = await router.client.post(COMPLETIONS, json=short, headers={"x-tandem-tenant": "nowhere"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].count("of tenant 'nowhere': 1 not for this tenant") == 2
        assert not fake_a.requests


async def test_the_queue_of_one_model_does_not_hold_up_another(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_b.model = "other-model"
    async with routing(small(fake_a, "a"), small(fake_b, "b")) as router:
        fake_a.headers_pause.clear()
        tasks = [start(router, prompt_of(str(number)), model="fake-model") for number in range(3)]
        await eventually(lambda: num_waiting(router) == 2)
        assert (await start(router, prompt_of("free"), model="other-model")).headers["x-tandem-engine"] == "b"
        fake_a.resume()
        assert [(await task).status_code for task in tasks] == [200] * 3


def test_the_table_of_one_model_follows_the_load_and_the_registry() -> None:
    registry = Registry()
    for number in range(6):
        card = msgspec.structs.replace(make_card(f"w{number}"), model=f"model-{number % 2}")
        add_ready(registry, card)
    workers = ModelWorkers(registry, "model-1")
    table = workers.table
    assert [worker.worker_id for worker in workers] == ["w1", "w3", "w5"]
    booking = registry.reserve(RequestLoad("w3", "w3", 100, 0, 120))
    registry.reserve(RequestLoad("w2", "w2", 7, 0, 8))
    assert workers.table is table
    assert table.uncomputed_tokens.tolist() == [0, 100, 0]
    assert workers.queued_prompt_tokens == 100
    assert (workers.get("w2"), workers.get("w3")) == (None, table.workers[1])
    booking.release()
    assert workers.table.booked_kv_tokens.tolist() == [0, 0, 0]
    for names in (["host"], ["host", "disk"]):
        for block_s in (1e-3, 2e-3):
            registry.note_tiers("w3", [TierLoad(name=name, block_s=block_s) for name in names], None)
            tiers = workers.table.tiers
            assert {name: costs.block_s.tolist() for name, costs in tiers.items()} == {
                name: [inf, block_s, inf] for name in names
            }
            assert tiers[names[-1]].readers == {f"w3/{names[-1]}": [1]}
    registry.note_tiers("w2", [TierLoad(name="host", block_s=7.0)], None)  # of another model
    assert workers.table.tiers["host"].block_s.tolist() == [inf, 2e-3, inf]
    registry.note_tiers("w3", [], None)
    assert workers.table.tiers == {}
    registry.set_state("w1", WorkerState.DEAD, "test")
    assert [worker.worker_id for worker in workers.table.workers] == ["w3", "w5"]
    alone = ModelWorkers(Registry(), "model-1")
    assert (len(alone.table), list(alone), alone.queued_prompt_tokens) == (0, [], 0)


async def test_an_answer_says_why_it_comes_from_there_and_is_logged(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(small(fake_a, "a"), small(fake_b, "b")) as router:
        answer = await start(router, prompt_of("why"), **{"x-tandem-explain": "1", "x-tandem-tenant": "t"})
        told = httpx.Response(200, text=answer.headers["x-tandem-explain"]).json()
        assert (told["outcome"], told["tenant"]) == ("dispatched", "t")
        candidates = told["placement"]["candidates"]
        assert {one["decode_worker"] for one in candidates} == {"a", "b"}
        assert candidates[0]["decode_worker"] == answer.headers["x-tandem-engine"]
        [kept] = (await router.client.get("/v1/route/decisions")).json()["data"]
        assert kept["request_id"] == answer.headers["x-request-id"]
        assert kept["actual_ttft_s"] > 0
        assert "xxxx" not in str(kept)
        assert "x-tandem-explain" not in (await start(router, prompt_of("no"))).headers


async def test_explain_decides_and_sends_nothing(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(small(fake_a, "a"), small(fake_b, "b")) as router:
        for body in (completion(prompt_of("a")), {"messages": [{"role": "user", "content": "a b"}]}):
            answer = await router.client.post(EXPLAIN, json=body)
            [decision] = answer.json()["data"]
            assert (decision["outcome"], len(decision["placement"]["candidates"])) == ("admitted", 2)
        assert not fake_a.requests + fake_b.requests
        assert router.fleet.registry.num_bookings == 0
        assert (await router.client.post(EXPLAIN, json=completion(model="x"))).status_code == 404
        assert (await router.client.post(CHAT, json=completion(model="x"))).status_code == 404


async def test_max_worker_queue_s_lets_engines_queue_for_themselves(fake_a: FakeServer) -> None:
    async with routing(small(fake_a, "a"), config=RouterConfig(max_worker_queue_s=1e9)) as router:
        fake_a.headers_pause.clear()
        tasks = [start(router, prompt_of(str(number))) for number in range(5)]
        await eventually(lambda: len(fake_a.requests) == 5)
        fake_a.resume()
        assert [(await task).status_code for task in tasks] == [200] * 5
