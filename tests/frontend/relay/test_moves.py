"""Streams of engines that die, hang or send errors in the middle go on on others, as if nothing had happened."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.protocol.config import RouterConfig
from tandem.router.engines.engine_status import vllm_gives_token_ids
from tandem.router.reservation import MAX_DEATHS
from tests.support.engines_harness import CHAT, COMPLETIONS, Router, routing, routing_by_decider, spec_of
from tests.support.fake_backend import RawClient
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.scripted_engine import Script, script_on
from tests.support.tracing import TRACEPARENT, KeptSpans
from tests.support.waiting import eventually

TEXT = "naïve 日本語 🙂 end"
SCRIPT = Script([TEXT.encode()[i : i + 2] for i in range(0, len(TEXT.encode()), 2)])
NUM_TOKENS = len(SCRIPT.pieces)
STREAMED = {"max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} | STREAMED
COMPLETION_BODY: dict[str, Any] = {"prompt": "hi"} | STREAMED
PATIENT = RouterConfig(request_timeout_s=20.0, drain_timeout_s=5.0, max_moves=100)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the pings of one that was silent for long."""
    parts = [part for part in response.text.split("\n\n")[:-1] if not part.startswith(":")]
    raws = [part.removeprefix("data: ") for part in parts]
    return [msgspec.json.decode(raw) for raw in raws if raw != "[DONE]"]


def text_of(response: httpx.Response) -> str:
    choices = [event["choices"][0] for event in events(response) if event.get("choices")]
    return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = events(response)[-1]["error"]
    return error


def assert_whole(response: httpx.Response) -> None:
    """It is the whole script, as one answer, with its usage and without token ids."""
    found = events(response)
    assert response.text.endswith("data: [DONE]\n\n")
    assert text_of(response) == TEXT
    usage = {"prompt_tokens": len(SCRIPT.prompt_ids), "completion_tokens": NUM_TOKENS}
    usage |= {"total_tokens": len(SCRIPT.prompt_ids) + NUM_TOKENS}
    assert [event["usage"] for event in found if event.get("usage")] == [usage]
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in found}) == 1
    assert 'token_ids":[' not in response.text


def scripts_on(*fakes: FakeServer, **behaviour: Any) -> list[int]:
    """Have the servers answer with the script. The next streams break after as many events as the list says."""
    breaks: list[int] = []
    for fake in fakes:
        script_on(fake, SCRIPT, breaks=breaks, **behaviour)
    return breaks


async def ask(router: Router, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await router.client.post(CHAT if "messages" in body else COMPLETIONS, json=body, headers=headers)


@pytest.mark.parametrize("how", ["reset", "end", "error"])
@pytest.mark.parametrize("body", [CHAT_BODY, COMPLETION_BODY], ids=["chat", "completion"])
async def test_a_stream_goes_on_after_each_event(
    fake_a: FakeServer, fake_b: FakeServer, how: str, body: dict[str, Any]
) -> None:
    breaks = scripts_on(fake_a, fake_b, how=how)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), breaker_failures=1000) as router:
        for after in range(1, NUM_TOKENS + 4):
            breaks.append(after)
            assert_whole(await ask(router, body))
        breaks.clear()
        num_moves = router.dispatcher.reservations.moves.num_moves
        assert set(num_moves) == {"engine_lost" if how == "reset" else "engine_failed"}
        assert sum(num_moves.values()) >= NUM_TOKENS - 1
        metrics = (await router.client.get("/metrics")).text
        assert f'tandem_request_moves_total{{cause="{next(iter(num_moves))}"}}' in metrics
        decisions = await router.dispatcher.decisions()
        assert {"dispatched", "moved"} == {decision["outcome"] for decision in decisions}


async def test_several_deaths_in_one_stream_and_many_streams_at_once(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b, tokens_per_event=2)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), breaker_failures=1000, config=PATIENT) as router:
        breaks += [3, 2, 1, 4, 2]
        assert_whole(await ask(router, CHAT_BODY))
        breaks += [2 + i % 7 for i in range(40)]  # behind a token, so that none is given up
        for answer in await asyncio.gather(*(ask(router, CHAT_BODY) for _ in range(16))):
            assert_whole(answer)


async def test_an_undisturbed_stream_is_the_engines_own(fake_a: FakeServer) -> None:
    scripts_on(fake_a)
    async with routing(spec_of(fake_a, "a")) as router, httpx.AsyncClient(base_url=fake_a.url) as engine:
        for body in (CHAT_BODY, COMPLETION_BODY):
            path = CHAT if "messages" in body else COMPLETIONS
            direct = await engine.post(path, json=body | {"model": fake_a.model})
            assert (await ask(router, body)).content == direct.content
            asked = body | {"return_token_ids": True}
            direct = await engine.post(path, json=asked | {"model": fake_a.model})
            assert (await ask(router, asked)).content == direct.content


async def test_a_client_that_asked_for_token_ids_gets_those_of_all_engines(
    fake_a: FakeServer, fake_b: FakeServer
) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(5)
        found = events(await ask(router, COMPLETION_BODY | {"return_token_ids": True}))
    ids = [i for event in found if event["choices"] for i in event["choices"][0]["token_ids"]]
    dropped = len(ids) - NUM_TOKENS  # a token that ended within a character came twice
    assert 0 <= dropped <= 1
    assert ids[-5:] == SCRIPT.ids[-5:]


async def test_stop_strings_across_the_joint_end_the_stream(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), breaker_failures=1000) as router:
        body = COMPLETION_BODY | {"stop": ["語 🙂", "zzzzzz"]}
        whole = events(await ask(router, body))
        for after in range(1, len(whole)):
            breaks.append(after)
            answer = await ask(router, body)
            assert text_of(answer) == "naïve 日本"
            ends = [e["choices"][0] for e in events(answer) if e["choices"] and e["choices"][0]["finish_reason"]]
            assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("stop", "語 🙂")]
            assert events(answer)[-1]["usage"] == whole[-1]["usage"]


async def test_running_usage_goes_on(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(4)
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = events(await ask(router, COMPLETION_BODY | {"stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in found if event.get("usage")]
    assert counts == [*range(counts[0], NUM_TOKENS + 1), NUM_TOKENS]


@pytest.mark.parametrize(
    ("fields", "version", "why"),
    [
        ({"seed": 5}, "0.32.0", "'seed' is set"),
        ({}, "0.9.2", "gives no token ids"),
    ],
)
async def test_a_stream_that_cannot_go_on_says_why_and_costs_nothing(
    fake_a: FakeServer, fake_b: FakeServer, fields: dict[str, Any], version: str, why: str
) -> None:
    breaks = scripts_on(fake_a, fake_b)
    fake_a.version = fake_b.version = version
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(3)
        answer = await ask(router, COMPLETION_BODY | fields)
        error = error_of(answer)
        assert error["code"] == "engine_failed"
        assert re.search(f"the stream cannot go on: .*{why}$", error["message"])
        assert len(fake_a.requests) + len(fake_b.requests) == 1
        assert "return_token_ids" not in (fake_a.requests + fake_b.requests)[0]
        assert not router.dispatcher.reservations.moves.num_moves


async def test_no_move_is_allowed(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=RouterConfig(max_moves=0)) as router:
        breaks.append(3)
        assert "cannot go on" not in error_of(await ask(router, COMPLETION_BODY))["message"]
        assert "return_token_ids" not in (fake_a.requests + fake_b.requests)[0]


async def test_moves_are_limited(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b)
    config = RouterConfig(max_moves=2)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=config, breaker_failures=1000) as router:
        breaks += [3, 3, 3, 3]
        assert "it has moved max_moves=2 times" in error_of(await ask(router, COMPLETION_BODY))["message"]
        assert breaks == [3]


async def test_a_stream_of_an_engine_that_hangs_goes_on(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b, how="hang")
    config = RouterConfig(request_timeout_s=0.5)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=config) as router:
        breaks.append(5)
        assert_whole(await ask(router, CHAT_BODY))


@pytest.mark.parametrize("seed", [None, 7], ids=["no other engine", "cannot go on"])
async def test_a_hanging_stream_ends_as_a_timeout(fake_a: FakeServer, fake_b: FakeServer, seed: int | None) -> None:
    breaks = scripts_on(fake_a, fake_b, how="hang")
    specs = [spec_of(fake_a, "a"), *([spec_of(fake_b, "b")] if seed else [])]
    async with routing(*specs, config=RouterConfig(request_timeout_s=0.3)) as router:
        breaks.append(5)
        error = error_of(await ask(router, CHAT_BODY | {"seed": seed}))
    assert error["code"] == "engine_timeout"
    assert "sent nothing within request_timeout_s=0.3; the stream cannot go on: " in error["message"]
    assert ("'seed' is set" if seed else "a (tried)") in error["message"]


async def test_a_stream_leaves_an_engine_that_is_removed(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b, how="hang")
    config = RouterConfig(drain_timeout_s=0.1)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), config=config) as router:
        breaks.append(5)
        answer = asyncio.create_task(ask(router, CHAT_BODY))
        running = router.fleet.engines
        await eventually(lambda: any(one.has_answer for engine in running for one in engine.running))
        (busy,) = [engine.name for engine in running if engine.running]
        await router.dispatcher.remove_engine(busy)
        assert_whole(await answer)
        await eventually(lambda: router.fleet.get(busy) is None)


async def test_a_server_that_stops_moves_nothing(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b, how="hang")
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(5)
        answer = asyncio.create_task(ask(router, CHAT_BODY))
        await eventually(lambda: any(one.has_answer for engine in router.fleet.engines for one in engine.running))
        router.dispatcher.shut_down()
        assert "the server is shutting down; send the request again" in error_of(await answer)["message"]
        assert len(fake_a.requests) + len(fake_b.requests) == 1


async def test_a_client_that_leaves_moves_nothing(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b, how="hang")
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(5)
        client = RawClient(router.app, CHAT, CHAT_BODY)
        await asyncio.wait_for(client.got_body.wait(), 5)
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert not router.dispatcher.reservations.moves.num_moves


async def test_a_stream_that_ends_one_engine_after_the_other_is_given_up() -> None:
    with fake_openai() as one, fake_openai() as two, fake_openai() as three, fake_openai() as four:
        fakes = [one, two, three, four]
        breaks = scripts_on(*fakes)
        async with routing(*(spec_of(fake, name) for fake, name in zip(fakes, "abcd", strict=True))) as router:
            breaks += [1] * MAX_DEATHS  # each dies after the role, which is not a token
            error = error_of(await ask(router, CHAT_BODY))
            assert error["code"] == "poisoned_request"
            assert "3 engines ended" in error["message"]
            refused = await ask(router, CHAT_BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "poisoned_request")
            other = await ask(router, CHAT_BODY | {"messages": [{"role": "user", "content": "other words"}]})
            assert_whole(other)
            assert "tandem_poisoned_requests_total 1.0" in (await router.client.get("/metrics")).text


async def test_a_request_that_ends_engines_at_once_is_refused_later() -> None:
    with fake_openai() as one, fake_openai() as two, fake_openai() as three:
        fakes = [one, two, three]
        breaks = scripts_on(*fakes)
        async with routing(*(spec_of(fake, name) for fake, name in zip(fakes, "abc", strict=True))) as router:
            breaks += [0] * MAX_DEATHS
            assert (await ask(router, CHAT_BODY)).status_code == 502
            assert (await ask(router, CHAT_BODY)).status_code == 422


async def test_a_moved_stream_counts_once(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        breaks.append(3)  # behind a whole character: otherwise a token is computed twice, and counted so
        assert_whole(await ask(router, COMPLETION_BODY))
        lines = (await router.client.get("/metrics")).text.splitlines()
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    assert values["tandem_router_prompt_tokens_total"] == len(SCRIPT.prompt_ids)
    assert values["tandem_router_generation_tokens_total"] == NUM_TOKENS
    assert (values["tandem_router_ttft_seconds_count"], values["tandem_router_stream_errors_total"]) == (1, 0)


async def test_a_move_is_a_span(fake_a: FakeServer, fake_b: FakeServer) -> None:
    breaks, kept = scripts_on(fake_a, fake_b), KeptSpans()
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), tracing=kept.tracing) as router:
        breaks.append(6)
        assert_whole(await ask(router, COMPLETION_BODY, traceparent=TRACEPARENT))
    move = kept.attributes("move")
    assert 0 < move["tandem.output_tokens"] < NUM_TOKENS
    assert move["tandem.move.reason"] == "engine_lost"


async def test_streams_of_two_frontend_processes_go_on(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    breaks = scripts_on(fake_a, fake_b)
    async with routing_by_decider(
        tmp_path, spec_of(fake_a, "a"), spec_of(fake_b, "b"), breaker_failures=1000
    ) as decider:
        frontends = [await decider.frontend("one"), await decider.frontend("two")]
        for after in range(1, NUM_TOKENS):
            breaks.append(after)
            assert_whole(await ask(frontends[after % 2], CHAT_BODY))
        assert sum(decider.dispatcher.reservations.moves.num_moves.values()) >= NUM_TOKENS - 2


@pytest.mark.parametrize(
    ("version", "gives"),
    [
        (b'{"version":"0.32.0"}', True),
        (b'{"version":"0.10.2"}', True),
        (b'{"version":"0.10.1.1"}', False),
        (b'{"version":"0.9.0.dev3"}', False),
        (b'{"version":"0.1.dev1+gabc"}', True),
        (b'{"version":"1.0"}', True),
        (b'{"version":"99999999999999999999.1"}', False),
        (b'{"version":7}', False),
        (b"[]", False),
        (b"no JSON", False),
    ],
)
def test_versions_of_vllm_that_give_token_ids(version: bytes, gives: bool) -> None:
    assert vllm_gives_token_ids(version) is gives


@pytest.mark.parametrize("has_ids", [True, False])
async def test_an_engine_with_capabilities_is_not_asked_for_its_version(fake_a: FakeServer, has_ids: bool) -> None:
    fake_a.version, fake_a.capabilities = "0.32.0", {"token_ids": has_ids}
    async with routing(spec_of(fake_a, "a", kind="openai")) as router:
        assert router.engine("a").gives_token_ids is has_ids
