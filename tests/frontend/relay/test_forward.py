"""Requests through the router to fake engines, and every way an engine can fail them."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from email.utils import formatdate
from typing import Any

import pytest

from tandem.frontend.relay.attempt import EngineAttempt
from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import WorkerState
from tandem.router.engines import upstream as upstream_module
from tandem.router.engines.breaker import BreakerState
from tandem.router.engines.config import spec_from
from tests.support.engines_harness import (
    CHAT,
    COMPLETIONS,
    PAIRED,
    Router,
    completion,
    dead_url,
    pair,
    routing,
    spec_of,
)
from tests.support.fake_backend import RawClient, SlowClient, events
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

MESSAGES = [{"role": "user", "content": "a b c"}]


def busy(fake: FakeServer, retry_after: str | None, status: int = 429) -> None:
    fake.status = status
    fake.headers = {} if retry_after is None else {"retry-after": retry_after}


async def answered_by(router: Router, **fields: Any) -> str:
    response = await router.client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 200, response.text
    return response.headers["x-tandem-engine"]


# -- what goes through -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"x-tandem-conversation": "c"}, {}, "c"),
        ({"session-id": "s"}, {"prompt_cache_key": "k"}, "s"),
        ({"x-claude-code-session-id": "s" * 257}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"prompt_cache_key": ["k"]}, None),
    ],
)
async def test_an_engine_is_told_the_conversation(
    fake_a: FakeServer, headers: dict[str, str], fields: dict[str, Any], expected: str | None
) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        body = completion(model="fake-model", **fields)
        response = await router.client.post(COMPLETIONS, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert (fake_a.request_headers[-1].get("x-tandem-conversation"), fake_a.requests) == (expected, [body])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [["many"], {"prompt_tokens": "4", "prompt_tokens_details": [{"cached_tokens": 1}]}])
async def test_usage_of_another_shape_is_passed_on_and_not_read(
    fake_a: FakeServer, fake_b: FakeServer, usage: Any, stream: bool
) -> None:
    fake_a.whole = {"usage": usage}
    body = completion(stream=stream, stream_options={"include_usage": True})
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(COMPLETIONS, json=body)
        assert response.status_code == 200
        told = events(response)[-2] if stream else response.json()
        assert (told["usage"], router.engine("a").num_failures) == (usage, 0)
    fake_a.requests.clear()
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        assert await answered_by(router, stream=stream) == "d"
        assert len(fake_a.requests) == 1


async def test_tool_calls_and_unknown_fields_are_passed_on_unchanged(fake_a: FakeServer) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    fake_a.extra = {"tool_calls": calls, "reasoning": "because"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 2}
    async with routing(spec_of(fake_a, "a")) as router:
        plain = await router.client.post(CHAT, json=body | {"stream": False})
        message = plain.json()["choices"][0]["message"]
        assert (message["tool_calls"], message["reasoning"]) == (calls, "because")
        streamed = events(await router.client.post(CHAT, json=body | {"stream": True}))
        assert [e["choices"][0]["delta"].get("tool_calls") for e in streamed[1:-1]] == [calls, calls]
        assert fake_a.requests[0]["tools"] == tools


async def test_a_stream_is_passed_on_and_its_usage_only_on_request(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        plain = events(await router.client.post(COMPLETIONS, json=completion(stream=True)))
        assert ([e["choices"][0]["text"] for e in plain[:-1]], plain[-1]) == (["word "] * 4, "[DONE]")
        assert fake_a.requests[0]["stream_options"] == {"include_usage": True}
        body = completion(stream=True, stream_options={"include_usage": True})
        asked = events(await router.client.post(COMPLETIONS, json=body))
        assert asked[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        metrics = (await router.client.get("/metrics")).text
        assert "tandem_router_cached_prompt_tokens_total 6.0" in metrics
        assert "tandem_router_generation_tokens_total 8.0" in metrics


async def test_an_engine_of_unknown_kind_gets_the_body_unchanged(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a", kind="openai")) as router:
        await router.client.post(COMPLETIONS, json=completion(stream=True))
        assert fake_a.requests == [completion(stream=True, model="fake-model")]


async def test_an_engine_gets_its_own_key_not_the_clients(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "inner")
    async with routing(spec_of(fake_a, "a", api_key_env="ENGINE_KEY")) as router:
        await router.client.post(COMPLETIONS, json=completion(), headers={"authorization": "Bearer outer"})
    assert fake_a.authorization == ["Bearer inner"]


async def test_a_models_card_has_what_all_can_do(fake_a: FakeServer, fake_b: FakeServer, server: FakeServer) -> None:
    fake_a.capabilities = {"chat": True, "tools": "hermes"}
    fake_b.capabilities = {"chat": True, "tools": None}
    server.model = "other"
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), spec_of(server, "c")) as router:
        cards = (await router.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["capabilities"] for card in cards} == {"fake-model": {"chat": True}, "other": None}


async def test_models_and_readiness(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_b.model = "other"
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        models = (await router.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in models] == [("fake-model", 4096), ("other", 4096)]
        assert await answered_by(router, model="other") == "b"
        assert (await router.client.get("/ready")).status_code == 200
        missing = await router.client.post(COMPLETIONS, json=completion())
        assert (missing.status_code, missing.json()["error"]["message"]) == (
            400,
            "Name the model: one of fake-model, other.",
        )
        wrong = await router.client.post(COMPLETIONS, json=completion(model="x"))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_unknown_model_may_be_one_that_no_engine_has_reported_yet(fake_a: FakeServer) -> None:
    unknown = spec_from({"name": "mute", "url": dead_url()}, "test")
    async with routing(unknown, spec_of(fake_a, "a"), wait=False) as router:
        await router.all_ready("a")
        response = await router.client.post(COMPLETIONS, json=completion(model="other"))
        assert response.status_code == 503
        assert "not reached so far: mute" in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"model": 3}'])
async def test_a_body_that_is_not_a_request_is_refused(fake_a: FakeServer, content: bytes) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert not fake_a.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_error_is_the_engines_and_final(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    for fake in (fake_a, fake_b):
        fake.status, fake.error = 400, {"message": "temperature is too high", "code": 400}
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=stream))
        assert (response.status_code, response.json()) == (400, {"error": fake_a.error})
        assert len(fake_a.requests) + len(fake_b.requests) == 1
        assert all(e.breaker.state(router.fleet.clock()) is BreakerState.CLOSED for e in router.fleet.engines)


# -- failures before the first byte: elsewhere -----------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "stream"),
    [
        ({"status": 500}, False),
        ({"status": 500}, True),
        ({"status": 502, "error": "<html>bad gateway</html>"}, False),
        ({"status": 500, "error": '{"detail": ' + "[" * 1000 + "]" * 1000 + "}"}, False),
        ({"status": 401}, True),
        ({"whole": {"choices": ["word"]}}, False),
        ({"whole": {"choices": {"text": "word"}}}, False),
        ({"break_after": 0}, True),
        ({"break_after": 0, "is_reset": True}, True),
        ({"first_event_error": {"message": "engine core died", "code": 500}}, True),
        ({"first_event_error": {"message": "no such key", "code": 401}}, True),
        (
            {
                "first_event_error": json.loads(
                    '{"code": 400, "message": "too deep", "x": ' + "[" * 400 + "]" * 400 + "}"
                )
            },
            True,
        ),
    ],
    ids=lambda value: str(value)[:80],
)
async def test_a_failure_before_the_first_byte_goes_elsewhere(
    fake_a: FakeServer, fake_b: FakeServer, trouble: dict[str, Any], stream: bool
) -> None:
    for key, value in trouble.items():
        setattr(fake_a, key, value)
    breaker = {"breaker_open_s": 1000.0, "breaker_max_open_s": 1000.0}  # no trial while this runs, however slowly
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), **breaker) as router:
        for _ in range(4):
            assert await answered_by(router, stream=stream) == "b"
        assert fake_a.requests, "it was never tried, which shows nothing"
        assert router.engine("a").num_failures == len(fake_a.requests) <= 3  # then its circuit opens


async def test_an_engine_where_nothing_listens_is_not_waited_for(fake_a: FakeServer) -> None:
    dead = spec_from({"name": "dead", "url": dead_url(), "model": "fake-model", "kind": "vllm"}, "test")
    async with routing(dead, spec_of(fake_a, "a", model="fake-model"), wait=False) as router:
        await router.all_ready("a")
        assert await answered_by(router) == "a"
        await eventually(lambda: "connection" in router.engine("dead").reason)
        listed = {e["name"]: e["state"] for e in (await router.client.get("/v1/pools")).json()["engines"]}
        assert listed == {"dead": "starting", "a": "ready"}


async def test_a_hanging_engine_loses_requests_without_a_first_byte(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.headers_pause.clear()
    config = RouterConfig(
        worker_timeout_s=1000.0
    )  # for running streams: a request without a first byte need not wait so long
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=config, probe_timeout_s=0.5) as router:
        fake_b.health_pause.clear()  # b is out of the way, so the request goes to a
        await eventually(lambda: router.engine("b").state is WorkerState.DEAD)
        request = asyncio.create_task(answered_by(router, stream=True))
        await eventually(lambda: bool(fake_a.requests))
        fake_b.resume()
        await router.all_ready("b")
        assert not request.done()
        fake_a.health_pause.clear()
        assert await request == "b"
        assert router.fleet.engines[0].num_failures == 1


@pytest.mark.parametrize("num_events", [0, 2])
async def test_an_engine_that_sends_only_comments_is_silent(fake_a: FakeServer, num_events: int) -> None:
    fake_a.comments_after = num_events
    async with routing(spec_of(fake_a, "a"), config=RouterConfig(request_timeout_s=0.2)) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=True))
        told = response.json() if num_events == 0 else events(response)[-1]
        assert response.status_code == (200 if num_events else 504)
        assert "request_timeout_s=0.2" in told["error"]["message"]
        await eventually(lambda: fake_a.num_running == 0)


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_busy_engine_rests_as_long_as_it_says(fake_a: FakeServer, fake_b: FakeServer, in_stream: bool) -> None:
    if in_stream:
        fake_a.first_event_error = {"message": "too many", "code": 429}
    else:
        busy(fake_a, "30")
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        assert [await answered_by(router, stream=in_stream) for _ in range(4)] == ["b"] * 4
        assert (len(fake_a.requests), router.engine("a").num_failures) == (1, 0)
        busy(fake_b, None)
        refused = await router.client.post(COMPLETIONS, json=completion())
        if not in_stream:
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) <= 2  # b's, which comes first
            message = refused.json()["error"]["message"]
            assert "a (busy for" in message or "engine b" in message


@pytest.mark.parametrize(
    ("header", "at_least", "at_most"),
    [
        ("0", -10, 0),
        ("-5", -10, 0),
        ("0.5", 0.1, 0.5),
        ("1e9", 50, 60),
        ("soon", 0.5, 1.0),
        ("date", 15, 20),
        ("nan", 0.5, 1.0),
        ("inf", 0.5, 1.0),
    ],
)
async def test_retry_after_is_seconds_or_date(fake_a: FakeServer, header: str, at_least: float, at_most: float) -> None:
    busy(fake_a, formatdate(time.time() + 20, usegmt=True) if header == "date" else header, 503)
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(COMPLETIONS, json=completion())
        assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (429, True)
        assert at_least <= router.engine("a").busy_s(router.fleet.clock()) <= at_most


async def test_the_circuit_opens_and_closes_again(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.status = 500
    async with routing(spec_of(fake_a, "a"), breaker_open_s=60, breaker_max_open_s=60) as router:
        codes = [(await router.client.post(COMPLETIONS, json=completion())).status_code for _ in range(3)]
        assert codes == [502] * 3
        told = await router.client.get("/v1/pools")
        assert told.json()["engines"][0]["num_circuit_openings"] == 1
        fake_a.status = 200
        router.fleet.add(spec_of(fake_b, "b"))
        await router.all_ready("b")
        assert [await answered_by(router) for _ in range(3)] == ["b"] * 3
        await router.fleet.remove("b")
        assert await answered_by(router) == "a"  # as the last one
        assert router.engine("a").breaker.state(router.fleet.clock()) is BreakerState.CLOSED


async def test_requests_that_fail_everywhere_do_not_shut_out_others(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fakes = fake_a, fake_b
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), breaker_open_s=60, breaker_max_open_s=60) as router:
        for fake in fakes:
            fake.status = 500  # as to a request that they have a fault with
        codes = [(await router.client.post(COMPLETIONS, json=completion())).status_code for _ in range(4)]
        assert codes == [502] * 4
        now = router.fleet.clock()
        assert {router.engine(name).breaker.state(now) for name in "ab"} == {BreakerState.OPEN}
        for fake in fakes:
            fake.status = 200
        assert await answered_by(router) in "ab"
        router.assert_nothing_left()


# -- failures in the middle, and clients that leave ------------------------------------------------------


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_broken_stream_is_not_retried(fake_a: FakeServer, fake_b: FakeServer, is_reset: bool) -> None:
    for fake in (fake_a, fake_b):
        fake.break_after, fake.is_reset = 2, is_reset
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=True))
        *texts, last = events(response)
        assert [e["choices"][0]["text"] for e in texts] == ["word ", "word "]
        assert last["error"]["code"] == "engine_failed"
        assert f"engine {response.headers['x-tandem-engine']}" in last["error"]["message"]
        assert len(fake_a.requests) + len(fake_b.requests) == 1


async def test_a_running_stream_of_a_hanging_engine_ends_in_an_error(fake_a: FakeServer) -> None:
    fake_a.pause.clear()
    config = RouterConfig(worker_timeout_s=0.2)
    async with routing(spec_of(fake_a, "a"), config=config, probe_timeout_s=0.5) as router:
        request = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True)))
        await eventually(lambda: any(request.has_answer for request in router.engine("a").running))
        fake_a.health_pause.clear()
        last = events(await request)[-1]
        assert "engine a: it stopped answering" in last["error"]["message"]
        fake_a.resume()
        await router.all_ready("a")


@pytest.mark.parametrize("when", ["before", "within"])
async def test_a_client_that_disconnects_ends_the_request_at_the_engine(fake_a: FakeServer, when: str) -> None:
    (fake_a.headers_pause if when == "before" else fake_a.pause).clear()
    async with routing(spec_of(fake_a, "a")) as router:
        client = RawClient(router.app, COMPLETIONS, completion(stream=True))
        if when == "within":
            await asyncio.wait_for(client.got_body.wait(), 5)
        await eventually(lambda: bool(fake_a.requests))
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert not router.engine("a").running
        assert router.engine("a").num_failures == 0
        fake_a.resume()
        if when == "within":
            await eventually(lambda: fake_a.num_hung_up == 1)


@pytest.mark.parametrize("num_parts", [1, 2])  # the second comes in the network's callback
async def test_a_slow_client_gets_all_of_a_stream_in_order(fake_a: FakeServer, num_parts: int) -> None:
    body = completion(stream=True, max_tokens=300)
    async with routing(spec_of(fake_a, "a")) as router:
        direct = await router.client.post(COMPLETIONS, json=body)
        fake_a.pause.clear()
        client = SlowClient(router.app, COMPLETIONS, body, num_parts)
        await asyncio.wait_for(client.got_body.wait(), 5)
        fake_a.resume()
        await eventually(lambda: client.is_full and fake_a.num_running == 0)  # the engine has sent it all
        assert len(client.sent) == num_parts + 1
        client.may_go_on.set()
        await asyncio.wait_for(client.task, 5)
        text = b"".join(message.get("body", b"") for message in client.sent).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"text":') == direct.text.count('"text":') == 300


@pytest.mark.parametrize("num_parts", [1, 2])
async def test_a_slow_client_that_leaves_ends_its_request_at_the_engine(fake_a: FakeServer, num_parts: int) -> None:
    fake_a.pause.clear()
    async with routing(spec_of(fake_a, "a")) as router:
        client = SlowClient(router.app, COMPLETIONS, completion(stream=True, max_tokens=300), num_parts)
        await asyncio.wait_for(client.got_body.wait(), 5)
        if num_parts > 1:
            fake_a.resume()
        await eventually(lambda: client.is_full)
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert not router.engine("a").running
        fake_a.resume()
        await eventually(lambda: fake_a.num_running == 0)
        assert await num_left(router) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_pipe_is_a_disconnect(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async def broken(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(RawClient, "_send", broken)
    async with routing(spec_of(fake_a, "a")) as router:
        await RawClient(router.app, COMPLETIONS, completion(stream=stream)).task
        assert await num_left(router) == 1
        assert router.engine("a").num_failures == 0


@pytest.mark.parametrize("name", ["open", "relay"])
async def test_our_errors_are_not_disconnects(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*_: Any) -> None:
        raise TimeoutError("ours")

    monkeypatch.setattr(EngineAttempt, name, broken)
    async with routing(spec_of(fake_a, "a")) as router:
        client = RawClient(router.app, COMPLETIONS, completion(stream=True))
        await asyncio.wait({client.task}, timeout=5)
        assert client.sent[0]["status"] == (500 if name == "open" else 200)
        assert isinstance(client.task.exception(), TimeoutError) is (name == "relay"), "the head had been sent"
        assert await num_left(router) == 0


async def num_left(router: Router) -> float:
    text = (await router.client.get("/metrics")).text
    [count] = re.findall(r"^tandem_router_client_disconnects_total (\S+)", text, re.MULTILINE)
    return float(count)


# -- load, prefixes, pairs -------------------------------------------------------------------------------


async def test_load_of_other_clients_on_an_engine_counts(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.metrics = "vllm:num_requests_running 30\nvllm:num_requests_waiting 20\nvllm:kv_cache_usage_perc 0.5\n"
    fake_b.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        await eventually(lambda: len(router.engine("a").foreign) == 50)
        worker = router.fleet.registry.get("a")
        assert worker is not None
        assert (worker.num_booked_seqs, worker.queued_prompt_tokens, worker.load.num_waiting) == (50, 20 * 256, 20)
        assert [await answered_by(router) for _ in range(5)] == ["b"] * 5
        fake_a.metrics = fake_b.metrics
        await eventually(lambda: not router.engine("a").foreign)
        assert worker.num_booked_seqs == 0


async def test_our_own_load_on_an_engine_is_not_counted_twice(fake_a: FakeServer) -> None:
    fake_a.metrics = "vllm:num_requests_running 0\n"
    fake_a.headers_pause.clear()
    async with routing(spec_of(fake_a, "a")) as router:
        worker = router.fleet.registry.get("a")
        assert worker is not None
        request = asyncio.create_task(answered_by(router))
        await eventually(lambda: bool(fake_a.requests))
        fake_a.metrics = "vllm:num_requests_running 1\n"
        await eventually(lambda: worker.load.num_running == 1)
        assert (worker.num_booked_seqs, len(router.engine("a").foreign)) == (1, 0)
        fake_a.metrics = "vllm:num_requests_running 0\n"
        fake_a.resume()
        assert await request == "a"


async def test_a_prompt_goes_where_its_prefix_is_cached(fake_a: FakeServer, fake_b: FakeServer) -> None:
    specs = [spec_of(fake_a, "a", hardware="cpu"), spec_of(fake_b, "b", hardware="cpu")]
    prompts = {i: f"{i} " * 2000 for i in range(4)}
    async with routing(*specs) as router:
        first = {i: await answered_by(router, prompt=prompt) for i, prompt in prompts.items()}
        assert set(first.values()) == {"a", "b"}
        again = {i: await answered_by(router, prompt=prompts[i] + "and more") for i in reversed(prompts)}
        assert again == first
        other = await answered_by(router, prompt=prompts[0], cache_salt="tenant")
        assert router.fleet.index.num_blocks(other) > 0


async def test_simulated_blocks_expire(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a", cache_ttl_s=0.1)) as router:
        await answered_by(router, prompt="x" * 400)
        assert router.fleet.index.num_blocks("a") > 0
        await eventually(lambda: router.fleet.index.num_blocks("a") == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pair_computes_on_one_and_decodes_on_one(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    fake_a.num_cached, fake_b.num_cached = 1, 4
    body = completion(stream=stream, max_completion_tokens=4, min_tokens=2)
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        response = await router.client.post(COMPLETIONS, json=body)
        first, rest = fake_a.requests[0], fake_b.requests[0]
        assert (first["stream"], first["max_tokens"], first["max_completion_tokens"]) == (False, 1, 1)
        assert "min_tokens" not in first
        assert "stream_options" not in first
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert rest["kv_transfer_params"] == {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "h"}
        assert {key: rest[key] for key in body} == body
        usage = events(response)[-2]["usage"] if stream else response.json()["usage"]
        assert (usage["prompt_tokens_details"], usage["completion_tokens"]) == ({"cached_tokens": 1}, 4)
        costs = router.fleet.costs.export()["transfers"]
        assert list(costs) == ["vllm fake-model -> vllm fake-model"]


async def test_a_hanging_prefill_engine_is_blamed_not_its_decode_engine(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(*pair(fake_a, fake_b), config=PAIRED, probe_timeout_s=0.5) as router:
        fake_b.headers_pause.clear()
        request = asyncio.create_task(router.client.post(COMPLETIONS, json=completion()))
        await eventually(lambda: bool(fake_b.requests))
        fake_a.health_pause.clear()
        await eventually(lambda: len(fake_b.requests) == 2)  # the decode engine is asked again, without the other one
        fake_a.resume()
        fake_b.resume()
        assert (await request).status_code == 200
        assert (router.engine("p").num_failures, router.engine("d").num_failures) == (1, 0)


async def test_a_stream_that_has_begun_survives_its_prefill_engine(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        fake_b.pause.clear()  # after the first event
        answering = asyncio.create_task(router.client.post(COMPLETIONS, json=completion(stream=True, max_tokens=3)))
        await eventually(lambda: fake_b.num_running == 1 and not router.engine("p").running)
        assert router.engine("d").running
        await router.fleet.lose("p", "it died")
        fake_b.resume()
        response = await answering
        assert "error" not in response.text
        text = "".join(event["choices"][0]["text"] for event in events(response)[:-1] if event["choices"])
        assert text == "word " * 3


async def test_a_prefill_engine_without_a_connector_is_replaced(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.has_kv_params = False
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        # The decode engine alone takes it in the end: the pair is gone with its prefill engine.
        assert await answered_by(router) == "d"
        assert router.engine("p").num_failures == 1
        fake_b.status = 500
        error = (await router.client.post(COMPLETIONS, json=completion())).json()["error"]
        assert "engine" in error["message"]


async def test_pairs_are_of_one_group(fake_a: FakeServer, fake_b: FakeServer) -> None:
    prefill = spec_of(fake_a, "p", role="prefill", group="one", model="fake-model")
    lone = spec_from({"name": "gone", "url": dead_url(), "model": "fake-model", "group": "one"}, "test")
    other = spec_of(fake_b, "other", role="decode", group="two", model="fake-model")
    async with routing(prefill, lone, other, config=PAIRED, wait=False) as router:
        await router.all_ready("p", "other")
        assert [await answered_by(router) for _ in range(3)] == ["other"] * 3
        assert not fake_a.requests


async def test_costs_are_learned_from_streams(fake_a: FakeServer) -> None:
    ticks = itertools.count()
    async with routing(spec_of(fake_a, "a"), clock=lambda: next(ticks) * 0.02) as router:
        model = router.fleet.costs.steps("vllm fake-model")
        assert await answered_by(router) == "a"
        assert model.num_measurements == 0  # a plain answer shows nothing
        for _ in range(3):
            await answered_by(router, stream=True)
        assert model.num_measurements >= 3  # two first tokens, and gaps


async def test_the_prompt_of_a_plain_answer_waits_no_longer_than_predicted(fake_a: FakeServer) -> None:
    fake_a.headers_pause.clear()
    async with routing(spec_of(fake_a, "a")) as router:
        worker = router.fleet.registry.get("a")
        assert worker is not None
        request = asyncio.create_task(answered_by(router, prompt="x" * 16_000))
        await eventually(lambda: worker.queued_prompt_tokens > 0)
        await eventually(lambda: worker.queued_prompt_tokens == 0)
        assert (worker.num_booked_seqs, request.done()) == (1, False)
        fake_a.resume()
        assert await request == "a"


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}},
        {"kv_transfer_params": "text"},
        {"ec_transfer_params": {"remote_host": "h"}},
        {"vllm_xargs": {"kv_transfer_params": "text"}},
        {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 1},
        *({"bootstrap_pair_key": "k"}, {"data_parallel_rank": 1}, {"routed_dp_rank": 1}),
        *({"disagg_prefill_dp_rank": 1}, {"session_params": {"id": "other"}}, {"extra_key": "other"}),
        *({"custom_logit_processor": "code"}, {"id_slot": 0}),
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_client_cannot_tell_engines_where_kv_is(fake_a: FakeServer, fields: dict[str, Any]) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        for path in (COMPLETIONS, "/v1/route/explain"):
            response = await router.client.post(path, json=completion(**fields))
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
            assert error["param"].partition(".")[0] in fields
        empty = completion(**dict.fromkeys(fields)) | {"vllm_xargs": {"other": 1}}  # null asks for nothing
        assert (await router.client.post(COMPLETIONS, json=empty)).status_code == 200
        assert [request.keys() & fields.keys() - {"vllm_xargs"} for request in fake_a.requests] == [set()]
        assert fake_a.requests[0]["vllm_xargs"] == {"other": 1}


async def test_a_request_has_a_unique_id_and_no_header_of_the_client(fake_a: FakeServer) -> None:
    sent = {"x-data-parallel-rank": "1", "x-request-id": "mine", "authorization": "Bearer client", "connection": "x-y"}
    async with routing(spec_of(fake_a, "a")) as router:
        body = completion(request_id="___decode_addr_h:1", rid="other")
        response = await router.client.post(COMPLETIONS, json=body, headers=sent)
        assert (response.status_code, response.headers["x-request-id"]) == (200, "mine")
        assert not fake_a.requests[0].keys() & {"request_id", "rid"}
        got = fake_a.request_headers[0]
        assert got.keys() <= {"host", "user-agent", "accept-encoding", "content-type", "x-request-id", "content-length"}
        assert re.fullmatch(r"mine\.[0-9a-f]{16}", got["x-request-id"])
        del sent["x-request-id"]
        response = await router.client.post(COMPLETIONS, json=body, headers=sent)
        assert fake_a.request_headers[1]["x-request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("depth", [240, 260, 1000, 1030, 100_000])
@pytest.mark.parametrize("field", ["prompt", "messages", "tools", "unknown"])
async def test_deep_nesting_is_the_clients_fault(fake_a: FakeServer, field: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    content = json.dumps({"prompt": "a", "max_tokens": 1, "stream": False} | {field: "DEEP"}).replace('"DEEP"', deep)
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    async with routing(spec_of(fake_a, "a"), admin_token="secret") as router:
        for path in (COMPLETIONS, CHAT, "/v1/route/explain", "/v1/engines"):
            response = await router.client.post(path, content=content, headers=headers)
            is_engines = depth < 250 and path in (COMPLETIONS, CHAT)  # the fake cannot read all of them
            assert response.status_code in ((200, 400, 502) if is_engines else (200, 400)), response.text
            if depth > 250:
                assert "nested too deeply" in response.text or "not valid JSON" in response.text


@pytest.mark.parametrize(
    ("deep_at", "stream", "status"), [("p", False, 200), ("d", False, 502), ("d", True, 200)], ids=str
)
async def test_an_unusable_answer_fails(
    fake_a: FakeServer, fake_b: FakeServer, deep_at: str, stream: bool, status: int
) -> None:
    deep = json.loads("[" * 400 + "]" * 400)
    if deep_at == "p":
        fake_a.whole = {"kv_transfer_params": {"deep": deep}}
    else:
        fake_b.whole = {"deep": deep}
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        response = await router.client.post(COMPLETIONS, json=completion(stream=stream))
        assert response.status_code == status  # what the first cannot hand over, the second computes
        assert (router.engine(deep_at).num_failures, "cannot be sent on" in response.text) == (1, deep_at == "d")


async def test_a_plain_answer_that_is_too_large_is_not_the_engines_failure(
    fake_a: FakeServer, fake_b: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "MAX_ANSWER_BYTES", 100_000)
    fake_a.whole = fake_b.whole = {"more": "x" * 200_000}
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        for _ in range(5):
            response = await router.client.post(COMPLETIONS, json=completion())
            assert (response.status_code, response.json()["error"]["code"]) == (502, "answer_too_large")
            assert "ask for a stream" in response.text
        assert len(fake_a.requests) + len(fake_b.requests) == 5  # no other would do better
        assert [router.engine(name).num_failures for name in "ab"] == [0, 0]
