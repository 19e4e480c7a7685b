from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import cache_scope
from tandem.router.engines.engine import MAX_HELD_BACK
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tests.support.engines_harness import CHAT, COMPLETIONS, Router, completion, routing, routing_by_decider, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.kv_event_publisher import IDS, publishing, stored
from tests.support.waiting import eventually

KEYS = {"sk-a": "a", "sk-b": "b", "sk-c": "c", "sk-d": "d", "sk-ops": "*"}
TENANTS = Tenants(named={name: TenantPolicy(shared_cache=name in "cd") for name in "abcd"})
KEYED: dict[str, Any] = {"api_keys": KEYS, "tenants": TENANTS}
PROMPT = [*IDS, 1, 2, 3]
HUGE = "s" * 257


async def send(
    router: Router, key: str, *, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = completion(PROMPT, **fields)
    if path == CHAT:
        del body["prompt"]
    sent = (headers or {}) | ({"authorization": f"Bearer {key}"} if key else {})
    return await router.client.post(path, json=body, headers=sent)


async def expected_tokens(router: Router, key: str, **fields: Any) -> int:
    response = await send(router, key, **fields)
    assert response.status_code == 200, response.text
    return int(response.headers["x-tandem-expected-cached-tokens"])


async def test_engines_that_refuse_one_tenant_serve_the_others(fake_a: FakeServer, fake_b: FakeServer) -> None:
    for fake in (fake_a, fake_b):
        fake.status, fake.headers = 429, {"retry-after": "3600"}
    async with routing(spec_of(fake_a, "x"), spec_of(fake_b, "y"), **KEYED) as router:
        assert (await send(router, "sk-a")).status_code == 429
        for fake in (fake_a, fake_b):
            fake.status, fake.headers = 200, {}
        refused = await send(router, "sk-a")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert (await send(router, "sk-b")).status_code == 200


async def test_the_tenants_that_an_engine_holds_back_are_bounded(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "x"), **KEYED) as router:
        engine, now = router.engine("x"), router.fleet.clock()
        for number in range(MAX_HELD_BACK + 1):
            engine.hold_back(10.0 + number / 1000, now, f"t{number}")
        waits = [engine.busy_s(now, f"t{number}") for number in range(MAX_HELD_BACK + 1)]
        assert [wait > 0 for wait in waits] == [False, *[True] * MAX_HELD_BACK]
        engine.hold_back(1.0, now + 60, "other")
        assert engine.busy_s(now, "t5") == 0  # what is over is forgotten


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "openai"])
async def test_an_engine_gets_the_tenants_salt(fake_a: FakeServer, kind: str, path: str, stream: bool) -> None:
    messages = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {}
    async with routing(spec_of(fake_a, "x", kind=kind), **KEYED) as router:
        for key, salt, scope in [
            ("sk-a", None, cache_scope("", "a")),
            ("sk-a", "", cache_scope("", "a")),
            ("sk-a", "s", cache_scope("s", "a")),
            ("sk-b", cache_scope("", "a"), cache_scope(cache_scope("", "a"), "b")),
            ("sk-c", None, cache_scope("", "")),
            ("sk-d", None, cache_scope("", "")),
            ("sk-d", "s", cache_scope("s", "")),
        ]:
            response = await send(router, key, path=path, stream=stream, cache_salt=salt, **messages)
            assert response.status_code == 200, response.text
            assert fake_a.requests[-1]["cache_salt"] == scope
    assert len({request["cache_salt"] for request in fake_a.requests}) == 5


async def test_both_engines_of_a_pair_get_it(fake_a: FakeServer, fake_b: FakeServer) -> None:
    pair = [spec_of(fake_a, "p", role="prefill"), spec_of(fake_b, "d", role="decode")]
    async with routing(*pair, config=RouterConfig(routing="cost,pairs"), **KEYED) as router:
        assert (await send(router, "sk-a", cache_salt="s")).status_code == 200
    salts = [request["cache_salt"] for fake in (fake_a, fake_b) for request in fake.requests]
    assert salts == [cache_scope("s", "a")] * 2


async def test_an_engine_that_refuses_the_field_gets_none(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "x", cache_salt=False), **KEYED) as router:
        for salt in (None, "s"):
            assert (await send(router, "sk-a", cache_salt=salt)).status_code == 200
    assert not any("cache_salt" in request for request in fake_a.requests)


@pytest.mark.parametrize("salt", [5, ["s"], {"s": 1}, True, HUGE])
@pytest.mark.parametrize("keyed", [KEYED, {}])
async def test_an_invalid_salt_is_refused(fake_a: FakeServer, keyed: dict[str, Any], salt: object) -> None:
    async with routing(spec_of(fake_a, "x"), **keyed) as router:
        response = await send(router, "sk-a", cache_salt=salt)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
    assert fake_a.requests == []


async def test_without_keys_a_body_without_a_salt_is_passed_on_unchanged(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "x"), tenants=TENANTS) as router:
        assert (await send(router, "", headers={"x-tandem-tenant": "a"})).status_code == 200
        assert fake_a.requests[-1] == completion(PROMPT) | {"model": "fake-model"}
        assert (await send(router, "", cache_salt="s")).status_code == 200
        assert fake_a.requests[-1]["cache_salt"] == cache_scope("s")
        assert await expected_tokens(router, "", headers={"x-tandem-tenant": "b"}) == 64


async def test_a_prompt_is_expected_where_its_own_tenants_prompt_was(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "x"), **KEYED) as router:
        assert [await expected_tokens(router, key) for key in ("sk-a", "sk-b", "sk-a")] == [0, 0, 64]
        assert await expected_tokens(router, "sk-b", headers={"x-tandem-tenant": "a"}) == 64  # b's own, of just now
        assert [await expected_tokens(router, "sk-b", cache_salt=cache_scope("", "a")) for _ in range(2)] == [0, 64]
        assert [await expected_tokens(router, key) for key in ("sk-c", "sk-d")] == [0, 64]
        found = []
        for key in ("sk-ops", "sk-a"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await router.client.post("/v1/route/explain", json=completion(PROMPT), headers=headers)
            placement = answer.json()["data"][0]["placement"]
            found.append(placement["num_prompt_tokens"] - placement["num_new_tokens"])
        assert found == [0, 64]


async def test_events_of_a_tenants_blocks_count_for_this_tenant_only(fake_a: FakeServer) -> None:
    async with publishing(fake_a, "x") as (publisher, spec):
        salted = stored(0, 4, extra_keys=[[cache_scope("", "a")], None, None, None])
        await publisher.publish(salted, is_lost=True)
        async with routing(spec, readers={"fake-model": PromptReader()}, **KEYED) as router:
            await eventually(lambda: router.fleet.index.num_blocks("x") == 4)
            assert [await expected_tokens(router, key) for key in ("sk-b", "sk-c", "sk-a")] == [0, 0, 64]


async def test_every_process_shows_a_tenant_only_its_own_requests(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, spec_of(fake_a, "x"), **KEYED) as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        for router, key in ((one, "sk-a"), (two, "sk-b"), (two, "sk-a")):
            assert (await send(router, key)).status_code == 200

        async def get(router: Router, path: str, key: str) -> httpx.Response:
            return await router.client.get(path, headers={"authorization": f"Bearer {key}"})

        async def tenants(router: Router, key: str) -> list[str]:
            decisions = (await get(router, "/v1/route/decisions", key)).json()["data"]
            return sorted(decision["tenant"] for decision in decisions)

        for router in (one, two):
            assert await tenants(router, "sk-a") == ["a", "a"]
            assert await tenants(router, "sk-b") == ["b"]
            assert await tenants(router, "sk-ops") == ["a", "a", "b"]
            shown = (await get(router, "/v1/pools", "sk-b")).json()
            assert shown == {"engines": [{"name": "x", "model": "fake-model", "state": "ready"}]}
            assert "admission" in (await get(router, "/v1/pools", "sk-ops")).json()
            assert 'tenant="' not in (await get(router, "/metrics", "sk-a")).text
            assert 'tenant="a"' in (await get(router, "/metrics", "sk-ops")).text


async def test_a_lone_surrogate_is_not_a_salt(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "x"), **KEYED) as router:
        headers = {"authorization": "Bearer sk-a", "content-type": "application/json"}
        response = await router.client.post(
            COMPLETIONS, content=b'{"prompt": "a", "cache_salt": "\\ud800"}', headers=headers
        )
        assert response.status_code == 400, response.text
    assert fake_a.requests == []
