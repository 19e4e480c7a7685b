"""Routing strategies in front of other engines: by header, by session, over groups, and what they would cost."""

from __future__ import annotations

from typing import Any

from tandem.protocol.config import RouterConfig
from tests.support.engines_harness import CHAT, COMPLETIONS, Router, completion, routing, spec_of
from tests.support.fake_openai import FakeServer

CHOSEN = RouterConfig(routing="session,header")


async def engine_of(router: Router, strategy: str = "", **fields: Any) -> str:
    headers = {"x-tandem-routing": strategy} if strategy else {}
    response = await router.client.post(COMPLETIONS, json=completion(**fields), headers=headers)
    assert response.status_code == 200, response.text
    return response.headers["x-tandem-engine"]


async def test_a_session_stays_and_a_header_asks_for_turns(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=CHOSEN) as router:
        homes = {}
        for session in map(str, range(12)):
            found = {await engine_of(router, user=session, prompt=f"{session} {turn}") for turn in range(3)}
            assert len(found) == 1
            homes[session] = found.pop()
        assert set(homes.values()) == {"a", "b"}
        turns = [await engine_of(router, "round-robin", user="0") for _ in range(6)]
        assert turns in (["a", "b"] * 3, ["b", "a"] * 3)
        assert await engine_of(router, user="0", prompt_cache_key="3") == homes["3"], "a named conversation goes first"


async def test_a_strategy_compares_the_choices_of_all_groups(fake_a: FakeServer, fake_b: FakeServer) -> None:
    specs = spec_of(fake_a, "a", group="x"), spec_of(fake_b, "b", group="y")
    async with routing(*specs, config=CHOSEN) as router:
        homes = {session: await engine_of(router, user=session) for session in map(str, range(12))}
        assert set(homes.values()) == {"a", "b"}
        assert {session: await engine_of(router, user=session) for session in homes} == homes
        turns = [await engine_of(router, "round-robin") for _ in range(6)]
        assert turns in (["a", "b"] * 3, ["b", "a"] * 3)


async def test_a_decision_explains_its_strategy_and_what_the_others_cost(
    fake_a: FakeServer, fake_b: FakeServer
) -> None:
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=CHOSEN) as router:
        asked = await router.client.post("/v1/route/explain", json=completion(user="0"))
        placement = asked.json()["data"][0]["placement"]
        assert placement["strategy"] == "session"
        assert placement["shadow"].keys() == {"cost", "kv", "prefix", "round-robin", "least-loaded"}
        assert (await router.client.get("/v1/pools")).json()["shadow"] == {}, "a question is no request"
        explained = {"x-tandem-explain": "1"}
        for number in range(3):
            response = await router.client.post(
                CHAT, json={"messages": [{"role": "user", "content": f"{number}"}]}, headers=explained
            )
            assert response.status_code == 200, response.text
        shadow = (await router.client.get("/v1/pools")).json()["shadow"]
        assert {name: one["num_decisions"] for name, one in shadow.items()} == dict.fromkeys(placement["shadow"], 3)
        metrics = (await router.client.get("/metrics")).text
        assert 'tandem_router_shadow_decisions_total{strategy="kv"} 3.0' in metrics
        assert 'tandem_router_shadow_lost_seconds{strategy="cost"}' in metrics
