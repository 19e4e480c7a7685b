"""What clients see of a stream whose first token takes long: its head, pings, and then what they would have seen."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry

from tandem.frontend.http import heartbeat
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import LocalLimiter
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import NoWorker
from tandem.scheduling.admission.key_limits import KeyLimits
from tandem.text.tokenizer import Tokenizer
from tests.support.engines_harness import routing, spec_of
from tests.support.fake_backend import FakeBackend, RawClient, Step, make_app
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.keys import stored_key
from tests.support.quick_server import http_server
from tests.support.waiting import eventually

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 20},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 20},
    RESPONSES: {"input": "hello", "max_output_tokens": 20},
    MESSAGES: {"messages": SAID, "max_tokens": 20, "model": "org/toy"},
}
FAILURE = "no worker is left"


class Pings:
    def __init__(self) -> None:
        self.number = 0


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> Pings:
    counted, ping = Pings(), ResponseWriter.ping

    def ping_and_count(writer: ResponseWriter, events: bytes) -> None:
        counted.number += 1
        ping(writer, events)

    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.01)
    monkeypatch.setattr(heartbeat, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(ResponseWriter, "ping", ping_and_count)
    return counted


def waiting_backend(
    tokenizer: Tokenizer, *, fails: bool = False, num_computed_tokens: int = 0
) -> tuple[FakeBackend, asyncio.Event]:
    """A backend whose first token, or failure after some computing, waits for the event."""
    backend, may_go_on = FakeBackend(tokenizer), asyncio.Event()

    def script(request: Any) -> list[Step]:
        if not fails:
            return [may_go_on, *backend.reply_steps(request)]
        failure = NoWorker(FAILURE)
        failure.num_computed_tokens = num_computed_tokens
        return [may_go_on, failure]

    backend.script = script
    return backend, may_go_on


def stream_of(client: RawClient) -> tuple[int, dict[str, str], str]:
    start, *rest = client.sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(message["body"] for message in rest).decode()


def without_pings(path: str, text: str) -> tuple[int, str]:
    """Number of pings, and the stream without them."""
    ping = 'event: ping\ndata: {"type": "ping"}\n\n' if path == MESSAGES else ": ping\n\n"
    return text.count(ping), text.replace(ping, "")


@pytest.mark.parametrize("path", BODIES)
async def test_a_long_wait_changes_nothing_in_a_stream_but_its_pings(
    path: str, tokenizer: Tokenizer, pings: Pings, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, may_go_on = waiting_backend(tokenizer)
    client = RawClient(make_app(backend), path, BODIES[path] | {"stream": True})
    await eventually(lambda: pings.number >= 3)
    status, headers, text = stream_of(client)
    assert (status, without_pings(path, text)[1]) == (200, "")
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    may_go_on.set()
    await asyncio.wait_for(client.task, 20)
    num_pings, text = without_pings(path, stream_of(client)[2])
    assert num_pings >= 3

    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 600.0)
    prompt_one = RawClient(make_app(FakeBackend(tokenizer)), path, BODIES[path] | {"stream": True})
    await asyncio.wait_for(prompt_one.task, 20)
    assert kinds(text) == kinds(stream_of(prompt_one)[2])


def kinds(text: str) -> list[tuple[str, ...]]:
    """The events without ids and times: the names of their fields."""
    lines = [line for line in text.splitlines() if line]
    return [tuple(json.loads(line[6:])) if line.startswith("data: {") else (line,) for line in lines]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_a_long_wait_is_the_last_event(path: str, tokenizer: Tokenizer, pings: Pings) -> None:
    backend, may_go_on = waiting_backend(tokenizer, fails=True)
    client = RawClient(make_app(backend), path, BODIES[path] | {"stream": True})
    await eventually(lambda: pings.number >= 2)
    may_go_on.set()
    await asyncio.wait_for(client.task, 20)
    status, _, text = stream_of(client)
    assert status == 200
    (event,) = [part for part in without_pings(path, text)[1].split("\n\n") if part]
    assert FAILURE in event
    assert event.startswith("data: " if path in (CHAT, COMPLETIONS) else "event: error\n")
    assert not client.sent[-1]["more_body"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_that_comes_at_once_keeps_its_status(path: str, tokenizer: Tokenizer) -> None:
    backend, may_go_on = waiting_backend(tokenizer, fails=True)
    may_go_on.set()
    client = RawClient(make_app(backend), path, BODIES[path] | {"stream": True})
    await asyncio.wait_for(client.task, 20)
    status, headers, text = stream_of(client)
    assert (status, headers["content-type"], json.loads(text)["error"]["message"]) == (503, "application/json", FAILURE)


async def test_a_plain_answer_has_no_pings(tokenizer: Tokenizer, pings: Pings) -> None:
    backend, may_go_on = waiting_backend(tokenizer)
    client = RawClient(make_app(backend), CHAT, BODIES[CHAT])
    await eventually(lambda: backend.num_open == 1)
    assert not client.sent
    may_go_on.set()
    await asyncio.wait_for(client.task, 20)
    assert json.loads(stream_of(client)[2])["choices"]
    assert not pings.number


async def test_a_client_that_leaves_during_the_pings_ends_its_generation(tokenizer: Tokenizer, pings: Pings) -> None:
    backend, _ = waiting_backend(tokenizer)
    registry = CollectorRegistry()
    client = RawClient(make_app(backend, registry), CHAT, BODIES[CHAT] | {"stream": True})
    await eventually(lambda: pings.number >= 1)
    client.leave()
    await asyncio.wait_for(client.task, 20)
    assert (backend.num_open, registry.get_sample_value("tandem_router_client_disconnects_total")) == (0, 1)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_key_is_charged_for_an_answer_and_not_for_an_error(
    tokenizer: Tokenizer, server: FakeServer, pings: Pings, *, fails: bool
) -> None:
    limiter = LocalLimiter(lambda: 100.0)
    limits = KeyLimits(tokens_per_minute=10_000)
    keys = ApiKeys([stored_key("sk-a", "a", id="k-a", limits=limits)], is_required=True, limiter=limiter)
    backend, may_go_on = waiting_backend(tokenizer, fails=fails)
    app = create_app(backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=keys)
    server.status = 500 if fails else 200
    async with routing(spec_of(server, "a"), api_keys=keys) as router:
        for one in (app, router.app):
            level_before = limiter.limiter._states["k-a"].tokens.level if one is router.app else 10_000
            may_go_on.clear()
            server.headers_pause.clear()
            pings.number = 0
            client = RawClient(one, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True}, authorization="Bearer sk-a")
            await eventually(lambda: pings.number >= 1)
            may_go_on.set()
            server.headers_pause.set()
            await asyncio.wait_for(client.task, 20)
            assert ("error" in stream_of(client)[2]) == fails
            assert (limiter.limiter._states["k-a"].tokens.level == level_before) == fails


async def test_a_key_is_charged_for_what_was_computed_before_an_error(tokenizer: Tokenizer, pings: Pings) -> None:
    limiter = LocalLimiter(lambda: 100.0)
    key = stored_key("sk-a", "a", id="k-a", limits=KeyLimits(tokens_per_minute=10_000))
    keys = ApiKeys([key], is_required=True, limiter=limiter)
    backend, may_go_on = waiting_backend(tokenizer, fails=True, num_computed_tokens=700)
    app = create_app(backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=keys)
    client = RawClient(app, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True}, authorization="Bearer sk-a")
    await eventually(lambda: pings.number >= 1)
    may_go_on.set()
    await asyncio.wait_for(client.task, 20)
    assert (stream_of(client)[0], limiter.limiter._states["k-a"].tokens.level) == (200, 10_000 - 700)


@asynccontextmanager
async def served(backend: FakeBackend) -> AsyncIterator[str]:
    app, listener = make_app(backend), socket.create_server(("127.0.0.1", 0))
    async with (
        app.router.lifespan_context(app),
        http_server(app, RouterConfig(), listener, CollectorRegistry()),
        asyncio.timeout(60),
    ):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_openais_client_reads_past_the_pings(tokenizer: Tokenizer, pings: Pings) -> None:
    backend, may_go_on = waiting_backend(tokenizer)
    async with (
        served(backend) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="org/toy", messages=SAID, stream=True)  # type: ignore[call-overload]
        await eventually(lambda: pings.number >= 3)
        may_go_on.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == backend.reply

        may_go_on.clear()
        async with client.responses.stream(model="org/toy", input="hello") as events:
            await eventually(lambda: pings.number >= 6)
            may_go_on.set()
            assert (await events.get_final_response()).output_text == backend.reply


async def test_anthropics_client_reads_past_the_pings(tokenizer: Tokenizer, pings: Pings) -> None:
    backend, may_go_on = waiting_backend(tokenizer)
    async with (
        served(backend) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="org/toy", max_tokens=20, messages=SAID) as stream,  # type: ignore[arg-type]
    ):
        await eventually(lambda: pings.number >= 3)
        may_go_on.set()
        assert await stream.get_final_text() == backend.reply


async def test_sdks_raise_an_error_that_follows_pings(tokenizer: Tokenizer, pings: Pings) -> None:
    backend, may_go_on = waiting_backend(tokenizer, fails=True)
    async with (
        served(backend) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        stream = await client.chat.completions.create(model="org/toy", messages=SAID, stream=True)  # type: ignore[call-overload]
        messages = await other.messages.create(model="org/toy", max_tokens=9, messages=SAID, stream=True)  # type: ignore[call-overload]
        may_go_on.set()
        with pytest.raises(openai.APIError, match=FAILURE):
            async for _ in stream:
                pass
        with pytest.raises(anthropic.APIStatusError, match=FAILURE):
            async for _ in messages:
                pass


async def test_an_engine_that_does_not_begin_gets_pings_from_the_router(server: FakeServer, pings: Pings) -> None:
    async with routing(spec_of(server, "a")) as router:
        server.headers_pause.clear()
        client = RawClient(router.app, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})
        await eventually(lambda: pings.number >= 3)
        assert stream_of(client)[0] == 200
        server.headers_pause.set()
        await asyncio.wait_for(client.task, 20)
        text = without_pings(COMPLETIONS, stream_of(client)[2])[1]
        assert text.startswith("data: {")
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("status", [500, 400])
async def test_an_engine_that_fails_late_ends_the_stream(server: FakeServer, pings: Pings, status: int) -> None:
    async with routing(spec_of(server, "a")) as router:
        server.headers_pause.clear()
        server.status = status
        client = RawClient(router.app, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})
        await eventually(lambda: pings.number >= 2)
        server.headers_pause.set()
        await asyncio.wait_for(client.task, 20)
        (event,) = without_pings(COMPLETIONS, stream_of(client)[2])[1].strip().split("\n\n")
        assert "not today" in json.loads(event.removeprefix("data: "))["error"]["message"]


async def test_a_request_still_goes_elsewhere_after_pings(pings: Pings) -> None:
    with fake_openai() as bad, fake_openai() as good:
        async with routing(spec_of(bad, "a"), spec_of(good, "b")) as router:
            for fake in (bad, good):
                fake.headers_pause.clear()
            client = RawClient(router.app, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})
            await eventually(lambda: pings.number >= 2 and bad.requests + good.requests)
            first = bad if bad.requests else good
            first.status = 500
            for fake in (bad, good):
                fake.headers_pause.set()
            await asyncio.wait_for(client.task, 20)
            assert (len(bad.requests), len(good.requests)) == (1, 1)
            assert without_pings(COMPLETIONS, stream_of(client)[2])[1].endswith("data: [DONE]\n\n")


async def test_an_engine_that_answers_a_stream_plainly_is_reported(server: FakeServer, pings: Pings) -> None:
    answer = {"choices": [{"index": 0, "text": "word", "finish_reason": "stop"}]}
    server.replies[COMPLETIONS] = lambda *_: JSONResponse(answer)
    async with routing(spec_of(server, "a")) as router:
        server.headers_pause.clear()
        client = RawClient(router.app, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})
        await eventually(lambda: pings.number >= 1)
        server.headers_pause.set()
        await asyncio.wait_for(client.task, 20)
        assert "answered without a stream" in stream_of(client)[2]
