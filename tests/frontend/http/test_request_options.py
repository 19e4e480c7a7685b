"""Tenant, priority, TTFT SLO and explanation, from a request's headers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tandem.protocol.errors import DeadlineUnmet
from tandem.protocol.routing import STRATEGIES
from tandem.scheduling.request import ServiceClass
from tests.support.fake_backend import Client, FakeBackend, events, make_client

CHAT, COMPLETIONS, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/route/explain"
MESSAGES = [{"role": "user", "content": "hello"}]
DECISION = {"outcome": "dispatched", "tenant": "default"}


async def test_headers_and_body_reach_the_backend(backend: FakeBackend, client: Client) -> None:
    headers = {"x-tandem-tenant": "search", "x-tandem-ttft-slo-ms": "250.5", "x-tandem-explain": "1"}
    await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "priority": -3}, headers=headers)
    await client.post(CHAT, json={"messages": MESSAGES})
    await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
    sibling, first, plain, *_ = backend.requests
    assert (first.service_class, first.explains) == (ServiceClass("search", -3, 0.2505), True)
    assert (sibling.service_class, sibling.explains) == (ServiceClass("search", -3, math.inf), False)
    assert [(one.is_later_choice, one.fork_of) for one in backend.requests] == [
        *((True, first.request_id), (False, ""), (False, "")),
        *((False, ""), (True, "")),  # of several prompts, which wait for workers, and are not siblings
    ]
    assert (plain.service_class, plain.explains) == (ServiceClass("default", 0, None), False)


async def test_a_client_names_its_routing_strategy_where_the_operator_lets_it(backend: FakeBackend) -> None:
    bodies = [{"prompt": "a", "user": "u"}, {"prompt": "a", "prompt_cache_key": "k", "user": "u"}]
    for routing, expected in (("cost,header", "kv"), ("cost", "")):
        async with make_client(backend, routing=routing) as client:
            for body in bodies:
                response = await client.post(COMPLETIONS, json=body, headers={"x-tandem-routing": "kv"})
                assert response.status_code == 200, response.text
                ignored = response.headers.get("x-tandem-ignored", "")
                assert ("x-tandem-routing" in ignored) == (not expected), ignored
        found = [(one.service_class.routing, one.service_class.session) for one in backend.requests[-2:]]
        assert found == [(expected, "u"), (expected, "k")]


@pytest.mark.parametrize("user", [None, 5, ["u"], {"name": "u"}, "", "ü", "u" * 100_000])
async def test_no_user_refuses_a_request(backend: FakeBackend, client: Client, user: Any) -> None:
    response = await client.post(CHAT, json={"messages": MESSAGES, "user": user, "n": 2})
    assert response.status_code == 200, response.text
    expected = user[:256] if isinstance(user, str) else ""
    assert [one.service_class.session for one in backend.requests] == [expected] * 2


@pytest.mark.parametrize("strategy", ["fast", "Cost", "kv,pairs", "x" * 5000])
async def test_an_unknown_routing_strategy_is_refused_or_ignored_with_all_others(
    backend: FakeBackend, strategy: str
) -> None:
    sent = {"json": {"messages": MESSAGES}, "headers": {"x-tandem-routing": strategy}}
    async with make_client(backend, routing="kv,header") as client:
        response = await client.post(CHAT, **sent)
    assert response.status_code == 400
    message = f"x-tandem-routing must be one of {', '.join(STRATEGIES)}, not '{strategy[:50]}'."
    assert message in response.json()["error"]["message"]
    async with make_client(backend, routing="kv") as client:
        assert (await client.post(CHAT, **sent)).status_code == 200


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})])
async def test_a_cache_salt_has_at_most_256_characters(client: Client, path: str, prompt: dict[str, object]) -> None:
    assert (await client.post(path, json=prompt | {"cache_salt": "s" * 256})).status_code == 200
    refused = await client.post(path, json=prompt | {"cache_salt": "s" * 1_000_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert "has 1000000 characters; at most 256 are allowed" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        *({"x-tandem-tenant": "a b"}, {"x-tandem-tenant": "a" * 65}, {"x-tandem-tenant": ""}),
        *({"x-tandem-ttft-slo-ms": "soon"}, {"x-tandem-ttft-slo-ms": "0"}, {"x-tandem-ttft-slo-ms": "inf"}),
        {"x-tandem-explain": "yes"},
    ],
)
async def test_bad_headers_are_refused_by_name(client: Client, headers: dict[str, str]) -> None:
    response = await client.post(CHAT, json={"messages": MESSAGES}, headers=headers)
    assert response.status_code == 400
    assert next(iter(headers)) in response.json()["error"]["message"]


async def test_a_deadline_that_cannot_be_met_is_a_429(backend: FakeBackend, client: Client) -> None:
    backend.script = lambda _: [DeadlineUnmet("The first token is predicted in 900 ms.", retry_after_s=1.2345)]
    for stream in (False, True):
        response = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream})
        assert response.status_code == 429
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1235")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "ttft_slo_unmet")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_the_explanation_is_a_header_and_in_the_last_chunk(client: Client, path: str, num_choices: int) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    body["n"] = num_choices
    for headers, expected in (({"x-tandem-explain": "1"}, DECISION), ({}, None)):
        plain = await client.post(path, json=body, headers=headers)
        assert json.loads(plain.headers.get("x-tandem-explain", "null")) == expected
        stream = await client.post(path, json={**body, "stream": True}, headers=headers)
        chunks = events(stream)
        assert chunks.pop() == "[DONE]"
        shown = [chunk.get("tandem_explain") for chunk in chunks]
        assert shown == [None] * (len(chunks) - 1) + [expected]
        assert chunks[-1]["choices"][0]["finish_reason"] is not None


async def test_routes_explain_and_show_decisions(backend: FakeBackend, client: Client) -> None:
    chat = await client.post(EXPLAIN, json={"messages": MESSAGES}, headers={"x-tandem-tenant": "a"})
    assert chat.json() == {"object": "list", "data": [{"outcome": "admitted", "tenant": "a"}]}
    two = await client.post(EXPLAIN, json={"prompt": ["a", "b"], "n": 2})
    assert len(two.json()["data"]) == 2
    decisions = (await client.get("/v1/route/decisions")).json()["data"]
    assert [one["request_id"] for one in decisions] == [one.request_id for one in reversed(backend.requests)]
    assert backend.max_open == 0, "nothing was generated"
    for bad in ({}, {"messages": []}, {"prompt": 3}, []):
        assert (await client.post(EXPLAIN, json=bad)).status_code == 400
