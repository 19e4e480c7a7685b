from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from zmq.asyncio import Context

from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.config import RouterConfig
from tandem.router.engines.config import EngineSpec, ranks_of
from tandem.router.engines.probe_client import ProbeFailed
from tandem.router.engines.server_metrics import ServerMetrics
from tests.support.engines_harness import COMPLETIONS, Router, completion, routing, routing_by_decider, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.kv_event_publisher import IDS, Publisher, stored
from tests.support.waiting import eventually

TOKEN = {"authorization": "Bearer secret"}
RANK = "x-data-parallel-rank"


def ranks(fake: FakeServer, name: str, size: int = 2, **values: Any) -> list[EngineSpec]:
    return ranks_of(spec_of(fake, name, data_parallel_size=size, **values))


async def ask(router: Router, prompt: Any = "a b c", **fields: Any) -> Any:
    response = await router.client.post(COMPLETIONS, json=completion(prompt, **fields))
    assert response.status_code == 200, response.text
    return response


async def test_a_request_names_its_rank_and_prompts_return_to_it(fake_a: FakeServer) -> None:
    async with routing(*ranks(fake_a, "a")) as router:
        prompts = ["x" * 400, "y" * 400]
        fake_a.pause.clear()
        running = [asyncio.create_task(ask(router, prompt, stream=True)) for prompt in prompts]
        await eventually(lambda: all(engine.running for engine in router.fleet.engines))  # load is spread over ranks
        fake_a.resume()
        first = [(await task).headers["x-tandem-engine"] for task in running]
        assert sorted(first) == ["a.dp0", "a.dp1"]
        assert [(await ask(router, prompt)).headers["x-tandem-engine"] for prompt in prompts] == first
        sent = {
            body["prompt"]: headers[RANK] for body, headers in zip(fake_a.requests, fake_a.request_headers, strict=True)
        }
        assert {f"a.dp{sent[prompt]}" for prompt in prompts} == set(first)
        forged = completion("z" * 400) | {"data_parallel_rank": 1}
        assert (await router.client.post(COMPLETIONS, json=forged)).status_code == 400
        ignored = await router.client.post(COMPLETIONS, json=completion("z" * 400), headers={RANK: "7"})
        assert fake_a.request_headers[-1][RANK] == ignored.headers["x-tandem-engine"][-1]


async def test_load_is_that_of_the_rank(fake_a: FakeServer) -> None:
    fake_a.metrics = (
        'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 0\n'
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="70"} 1\n'
        'vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="80"} 1\n'
    )
    async with routing(*ranks(fake_a, "a")) as router:
        await eventually(lambda: len(router.engine("a.dp0").foreign) == 3)
        assert len(router.engine("a.dp1").foreign) == 0
        assert [router.engine(name).card.num_blocks for name in ("a.dp0", "a.dp1")] == [70, 80]
        assert (await ask(router)).headers["x-tandem-engine"] == "a.dp1"


async def test_metrics_are_read_once_for_all_ranks(fake_a: FakeServer) -> None:
    now = [0.0]
    fake_a.metrics = "".join(f'vllm:num_requests_running{{engine="{rank}"}} {rank}\n' for rank in range(8))
    async with routing(*ranks(fake_a, "a", 8), clock=lambda: now[0]) as router:
        await eventually(lambda: [len(engine.foreign) for engine in router.fleet.engines] == list(range(8)))
        num_health = fake_a.num_probes["/health"]
        await eventually(lambda: fake_a.num_probes["/health"] >= num_health + 40)
        assert fake_a.num_probes["/metrics"] == 1  # no time has passed
        fake_a.metrics = 'vllm:num_requests_running{engine="3"} 5\n'
        now[0] += 1.0
        await eventually(lambda: len(router.engine("a.dp3").foreign) == 5)
        await router.fleet.remove("a.dp0")  # whichever rank has read for the others
        fake_a.metrics = 'vllm:num_requests_running{engine="3"} 6\n'
        now[0] += 1.0
        await eventually(lambda: len(router.engine("a.dp3").foreign) == 6)
        assert fake_a.num_probes["/metrics"] == 3


async def test_each_ranks_events_are_its_own(fake_a: FakeServer) -> None:
    context = Context()
    publishers = [Publisher(context) for _ in range(2)]
    specs = ranks(fake_a, "a", model="fake-model", block_size=16)
    specs = [
        # Ports that are free cannot be chosen to follow each other, so each rank's is set here.
        replace(spec, kv_events=endpoint(publisher.port), kv_replay=endpoint(publisher.replay_port))
        for spec, publisher in zip(specs, publishers, strict=True)
    ]
    try:
        await publishers[1].publish(stored(0, 3), is_lost=True)
        async with routing(*specs, readers={"fake-model": PromptReader()}) as router:
            await eventually(lambda: router.fleet.index.num_blocks("a.dp1") == 3)
            assert router.fleet.index.num_blocks("a.dp0") == 0
            response = await ask(router, [*IDS, 1, 2, 3])
            assert response.headers["x-tandem-engine"] == "a.dp1"
            assert response.headers["x-tandem-expected-cached-tokens"] == "48"
    finally:
        for publisher in publishers:
            await publisher.close()
        context.term()


def endpoint(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


async def test_both_sub_requests_of_a_pair_go_to_their_ranks(fake_a: FakeServer, fake_b: FakeServer) -> None:
    specs = [*ranks(fake_a, "p", 3, role="prefill"), *ranks(fake_b, "d", 2, role="decode")]
    async with routing(*specs, config=RouterConfig(routing="cost,pairs")) as router:
        response = await ask(router)
        [prefill], [decode] = fake_a.request_headers, fake_b.request_headers
        assert response.headers["x-tandem-engine"] == f"d.dp{decode[RANK]}"
        assert router.engine(f"p.dp{prefill[RANK]}").num_requests == 1
        # The prefill rank names itself in what it returns: its own NIXL engine id, host and port.
        assert fake_b.requests[0]["kv_transfer_params"]["do_remote_prefill"] is True


async def test_a_server_is_added_and_removed_with_all_its_ranks(fake_a: FakeServer) -> None:
    async with routing(admin_token="secret") as router:
        body = {"name": "a", "url": fake_a.url, "kind": "vllm", "data_parallel_size": 2}
        added = await router.client.post("/v1/engines", json=body, headers=TOKEN)
        assert (added.status_code, added.json()["name"]) == (201, "a")
        assert [rank["data_parallel_rank"] for rank in added.json()["ranks"]] == [0, 1]
        await router.all_ready("a.dp0", "a.dp1")
        again = await router.client.post("/v1/engines", json=body, headers=TOKEN)
        assert "engine name='a.dp0' appears twice" in again.json()["error"]["message"]
        one = await router.client.delete("/v1/engines/a.dp1", headers=TOKEN)
        assert (one.status_code, one.json()["state"]) == (202, "draining")
        await eventually(lambda: router.fleet.get("a.dp1") is None)
        removed = await router.client.delete("/v1/engines/a", headers=TOKEN)
        assert [rank["state"] for rank in removed.json()["ranks"]] == ["draining"]
        await eventually(lambda: not router.fleet.engines)


async def test_a_frontend_process_names_the_rank(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, *ranks(fake_a, "a")) as decider:
        frontend = await decider.frontend("1")
        for number in range(4):
            where = (await ask(frontend, f"{number}" * 99)).headers["x-tandem-engine"]
            assert where == f"a.dp{fake_a.request_headers[-1][RANK]}"


async def test_ranks_that_wait_for_a_reading_share_its_failure() -> None:
    now, is_late, num_reads = [0.0], asyncio.Event(), 0

    async def get(*_: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        await is_late.wait()
        now[0] += 5.0
        raise ProbeFailed("no whole answer within 5 s")

    metrics = ServerMetrics(0.9, lambda: now[0])
    engines: list[Any] = [
        SimpleNamespace(name=name, running=set(), probe_client=SimpleNamespace(get=get)) for name in ("a.dp0", "a.dp1")
    ]
    metrics.engines += engines
    reading = [asyncio.create_task(metrics.read(engine, 5.0)) for engine in engines]
    await eventually(lambda: num_reads == 1)
    is_late.set()
    assert [type(found) for found in await asyncio.gather(*reading, return_exceptions=True)] == [ProbeFailed] * 2
    assert num_reads == 1
    with pytest.raises(ProbeFailed):  # asked for afterwards, so it is read again
        await metrics.read(engines[1], 5.0)
    assert num_reads == 2
