from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import WorkerState
from tests.support.engines_harness import COMPLETIONS, Router, completion, routing, spec_of
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.waiting import eventually

TOKEN = {"authorization": "Bearer secret"}


async def post(router: Router, **body: Any) -> httpx.Response:
    return await router.client.post("/v1/engines", json=body, headers=TOKEN)


async def test_without_a_token_it_is_off_and_says_so(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        for response in (
            await router.client.get("/v1/engines", headers=TOKEN),
            await post(router, url=fake_a.url),
            await router.client.delete("/v1/engines/a", headers=TOKEN),
        ):
            assert response.status_code == 403
            assert "--admin-token-file" in response.json()["error"]["message"]


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic secret", "secret", "Bearer secret2"])
async def test_a_wrong_token_is_refused(given: str | None) -> None:
    async with routing(admin_token="secret") as router:
        response = await router.client.get("/v1/engines", headers={"authorization": given} if given else {})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_admin_token")


async def test_an_engine_that_refuses_our_key_is_reported_with_the_remedy(fake_a: FakeServer) -> None:
    fake_a.health = 401
    async with routing(admin_token="secret") as router:
        await post(router, name="a", url=fake_a.url, kind="vllm")
        await eventually(lambda: "key" in router.engine("a").reason)
        ready = await router.client.get("/ready")
        assert "refused our key (401); give api_key_env or headers" in ready.json()["error"]["message"]


async def test_a_router_that_stops_while_it_removes_an_engine_stops_cleanly(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), admin_token="secret") as router:
        assert (await router.client.delete("/v1/engines/a", headers=TOKEN)).status_code == 202


async def test_engines_come_and_go_at_run_time(fake_a: FakeServer) -> None:
    async with routing(admin_token="secret") as router:
        assert (await router.client.get("/ready")).status_code == 503
        added = await post(router, name="a", url=fake_a.url)
        assert (added.status_code, added.json()["state"]) == (201, "starting")
        await router.all_ready("a")
        assert (await router.client.post(COMPLETIONS, json=completion())).status_code == 200
        fake_a.pause.clear()
        running = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True)))
        await eventually(lambda: any(request.has_answer for request in router.engine("a").running))
        removed = await router.client.delete("/v1/engines/a", headers=TOKEN)
        assert (removed.status_code, removed.json()["state"]) == (202, "draining")
        refused = await router.client.post(COMPLETIONS, json=completion())
        assert refused.status_code == 503
        assert "a (draining" in refused.json()["error"]["message"]
        fake_a.resume()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await eventually(lambda: router.fleet.get("a") is None)
        assert (await router.client.get("/v1/engines", headers=TOKEN)).json()["data"] == []
        nobody = await router.client.post(COMPLETIONS, json=completion())
        assert (nobody.status_code, nobody.json()["error"]["message"]) == (503, "there is no engine")
        assert (len(router.fleet.index), len(router.fleet.registry)) == (0, 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "engine: url is missing"),
        ({"url": "http://h:1", "bogus": 1}, "unknown key 'bogus'"),
        ({"url": "http://h:1", "name": "a"}, "name='a' appears twice"),
        ({"url": "http://h:1", "model": "m", "kv_events": "tcp://h:1"}, "its tokenizer in the engines file"),
        ({"url": "http://h:1", "headers": {"Upgrade": "x"}}, "headers: 'Upgrade' is set by the router"),
        ({"url": "https://h:1", "tls_ca": "/etc/ca.pem"}, "tls_ca cannot be given over HTTP"),
        ({"url": "http://h:1", "api_key_env": "HOME"}, "begins with TANDEM_ENGINE_"),
        ({"url": "http://h:1", "api_key_env": "TANDEM_ENGINE_NONE"}, "is not set; export"),
    ],
)
async def test_a_bad_engine_is_refused_and_not_added(fake_a: FakeServer, body: dict[str, Any], expected: str) -> None:
    async with routing(spec_of(fake_a, "a"), admin_token="secret") as router:
        response = await post(router, **body)
        assert response.status_code == 400
        assert expected in response.json()["error"]["message"]
        assert [engine.name for engine in router.fleet.engines] == ["a"]


async def test_an_unknown_engine_cannot_be_removed(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), admin_token="secret") as router:
        response = await router.client.delete("/v1/engines/b", headers=TOKEN)
        assert response.status_code == 404
        assert "there are: a" in response.json()["error"]["message"]


async def test_an_engine_that_died_comes_back_with_an_empty_cache() -> None:
    with fake_openai() as fake:
        port = int(fake.url.rpartition(":")[2])
        spec = spec_of(fake, "a")
        async with routing(spec) as router:
            await router.client.post(COMPLETIONS, json=completion("x" * 400))
            assert len(router.fleet.index) > 0
            await asyncio.to_thread(fake.stop)
            await eventually(lambda: router.engine("a").state.value == "dead")
            assert len(router.fleet.index) == 0
            refused = await router.client.post(COMPLETIONS, json=completion(model="fake-model"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
            assert "a (dead:" in refused.json()["error"]["message"]
            with fake_openai(port):
                await router.all_ready("a")
                assert (await router.client.post(COMPLETIONS, json=completion())).status_code == 200


async def unready(router: Router, fake: FakeServer, name: str) -> None:
    fake.health = 503
    await eventually(lambda: router.engine(name).state is WorkerState.DEAD)


async def test_a_removed_engine_serves_while_the_others_are_gone(fake_a: FakeServer, fake_b: FakeServer) -> None:
    config = RouterConfig(drain_timeout_s=3600.0)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), admin_token="secret", config=config) as router:
        await unready(router, fake_b, "b")
        fake_a.pause.clear()
        running = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True)))
        await eventually(lambda: any(request.has_answer for request in router.engine("a").running))
        fake_b.health = 200
        await router.all_ready("b")
        assert (await router.client.delete("/v1/engines/a", headers=TOKEN)).json()["state"] == "draining"
        for _ in range(3):
            answer = await router.client.post(COMPLETIONS, json=completion())
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        await unready(router, fake_b, "b")
        fake_a.resume()
        assert (await running).text.endswith("data: [DONE]\n\n")
        for _ in range(3):
            answer = await router.client.post(COMPLETIONS, json=completion())
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "a")
        assert (await router.client.get("/ready")).status_code == 200
        fake_b.health = 200
        await eventually(lambda: router.fleet.get("a") is None)
        assert (await router.client.post(COMPLETIONS, json=completion())).headers["x-tandem-engine"] == "b"


async def test_a_removed_engine_leaves_at_its_deadline_even_as_the_last(fake_a: FakeServer, fake_b: FakeServer) -> None:
    config = RouterConfig(drain_timeout_s=0.3)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), admin_token="secret", config=config) as router:
        assert (await router.client.delete("/v1/engines/a", headers=TOKEN)).status_code == 202
        fake_b.health = 503
        await eventually(lambda: router.fleet.get("a") is None)


async def test_an_engine_that_drains_is_asked_before_an_open_circuit(fake_a: FakeServer, fake_b: FakeServer) -> None:
    config = RouterConfig(drain_timeout_s=3600.0)
    specs = spec_of(fake_a, "a"), spec_of(fake_b, "b")
    breaker = {"breaker_failures": 1, "breaker_open_s": 3600.0, "breaker_max_open_s": 3600.0}
    async with routing(*specs, admin_token="secret", config=config, **breaker) as router:
        fake_a.pause.clear()  # its first stream keeps it from leaving
        held = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True)))
        await eventually(lambda: bool(fake_a.requests or fake_b.requests))
        if fake_b.requests:  # either may be the first
            held = asyncio.create_task(router.client.post(COMPLETIONS, json=completion("x y z", stream=True)))
            await eventually(lambda: bool(fake_a.requests))
        assert (await router.client.delete("/v1/engines/a", headers=TOKEN)).status_code == 202
        fake_b.status, fake_b.error = 500, {"message": "not today"}
        fake_b.requests.clear()
        for _ in range(3):
            answer = await router.client.post(COMPLETIONS, json=completion())
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "a")
        assert len(fake_b.requests) == 1
        fake_a.pause.set()
        assert (await held).status_code == 200


async def test_two_engines_that_are_removed_do_not_wait_for_each_other(fake_a: FakeServer, fake_b: FakeServer) -> None:
    config = RouterConfig(drain_timeout_s=3600.0)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), admin_token="secret", config=config) as router:
        for name in "ab":
            assert (await router.client.delete(f"/v1/engines/{name}", headers=TOKEN)).status_code == 202
        await eventually(lambda: not router.fleet.engines)
