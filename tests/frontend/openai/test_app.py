from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.protocol.errors import NoWorker, Overloaded, TransferTimeout, WorkerError, WorkerTimeout
from tandem.protocol.messages import FinishReason
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.fake_backend import Client, FakeBackend, RawClient, closing, delta_of, events, make_app
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


async def test_small_routes(client: Client) -> None:
    models = (await client.get("/v1/models")).json()
    card = models["data"][0]
    assert models["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/toy", "model", 512)
    assert (await client.get("/v1/models/org/toy")).json() == card
    assert (await client.get("/v1/models/org%2Ftoy")).json() == card
    assert card["capabilities"] == {
        "completions": True, "chat": True, "embeddings": False, "tools": "hermes", "forced_tools": True,
        "reasoning": None, "max_logprobs": 20, "prompt_logprobs": True,
        "token_ids": True,
        "structured_output": ["json_object", "json_schema", "structural_tag", "regex", "choice", "grammar"],
    }  # fmt: skip
    assert (await client.get("/v1/models/nope")).json()["error"]["code"] == "model_not_found"
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/v1/pools")).json() == {"workers": []}
    assert (await client.get("/version")).json()["version"]


@pytest.mark.parametrize(
    ("held", "idle"), [({}, True), ({"p": "", "d": ""}, True), ({"p": "", "d": "2 blocks in use"}, False)]
)
async def test_the_pool_check_says_what_each_worker_holds(
    backend: FakeBackend, client: Client, held: dict[str, str], idle: bool
) -> None:
    backend.manager.held = held
    response = await client.post("/v1/pools/check")
    assert (response.status_code, response.json()) == (200, {"idle": idle, "workers": held})


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"worker": "p", "role": "decode"}, 200, '"to":"decode"'),
        ({"worker": "nobody", "role": "decode"}, 404, "worker_not_found"),
        ({"worker": "p", "role": "both"}, 400, 'Send {\\"worker\\": NAME'),
        ({"role": "decode"}, 400, "worker"),
        ([], 400, "expected an object, got []"),
    ],
)
async def test_a_worker_is_given_another_role(client: Client, body: Any, status: int, part: str) -> None:
    response = await client.post("/v1/pools/roles", json=body)
    assert response.status_code == status
    assert part in response.text


async def test_tokenize_agrees_with_usage_and_detokenize_round_trips(client: Client) -> None:
    messages = [{"role": "user", "content": "héllo"}]
    tokens = (await client.post("/tokenize", json={"model": "org/toy", "prompt": "héllo"})).json()
    usage = (await client.post(COMPLETIONS, json={"prompt": "héllo"})).json()["usage"]
    assert (tokens["count"], tokens["max_model_len"]) == (usage["prompt_tokens"], 512)
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "<s>héllo"}
    chat = (await client.post("/tokenize", json={"messages": messages, "return_token_strs": True})).json()
    usage = (await client.post(CHAT, json={"messages": messages})).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"] == len(chat["token_strs"])
    unknown = {"prompt": "a", "tool_choice": "AAA"}
    for path in ("/tokenize", "/v1/cache/pin"):
        assert "tool_choice" in (await client.post(path, json=unknown)).json()["error"]["message"]
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [10**6]}), ("/detokenize", {"tokens": [-1]})):
        assert (await client.post(path, json=body)).status_code == 400
    assert (await client.post("/tokenize", json={"model": "nope", "prompt": "a"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "\xed\xa0\x80"}', 400),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"prompt": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"prompt": "a", "model": "nope"}', 404),
    ],
)
async def test_bad_bodies_are_the_clients_fault(client: Client, body: bytes, status: int) -> None:
    response = await client.post(COMPLETIONS, content=body, headers=JSON)
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    assert (response.status_code, response.json()["error"].keys()) == (status, {"message", "type", "param", "code"})


async def test_routes_methods_and_content_types(client: Client) -> None:
    answers = [
        await client.get("/nope"),
        await client.get(CHAT),
        await client.post(COMPLETIONS, content=b"prompt=a", headers={"content-type": "text/plain"}),
    ]
    charset = {"content-type": "application/json; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=charset)).status_code == 200
    assert [answer.status_code for answer in answers] == [404, 405, 415]
    assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in answers)
    # A path allows the methods of all its routes, and a literal one not those of a parameter.
    methods = {CHAT: "POST", "/v1/responses/input_tokens": "POST", "/v1/models/org/toy": "GET"}
    for path, allowed in (methods | {"/v1/responses/resp_1": "DELETE, GET"}).items():
        refused = await client.put(path)
        assert (refused.status_code, refused.headers.get_list("allow")) == (405, [allowed])


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_body_is_refused_before_it_is_read(tokenizer: Tokenizer, chunked: bool) -> None:
    num_read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield b" " * 100

    headers = JSON if chunked else JSON | {"content-length": "10000"}
    async with closing(FakeBackend(tokenizer), max_body_bytes=1000) as client:
        response = await client.post(COMPLETIONS, content=pieces(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert num_read == (11 if chunked else 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoWorker("No worker is ready."), 503, "no_worker"),
        (WorkerError("Worker w1 died."), 502, "worker_failed"),
        (TransferTimeout("Late."), 502, "kv_transfer_timeout"),
        (WorkerTimeout("No token."), 504, "worker_timeout"),
        (Overloaded("Busy.", retry_after_s=2.1), 429, "overloaded"),
        (ValueError("secret internals"), 500, "internal_error"),
    ],
)
async def test_errors_before_the_first_token_are_plain_responses(
    backend: FakeBackend,
    client: Client,
    error: Exception,
    status: int,
    code: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend.script = lambda _: [error]
    response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream, "n": 2})
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    assert "secret" not in response.text
    assert ("secret internals" in caplog.text) == (status == 500)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("error", [WorkerError("Worker w1 died."), ValueError("secret internals")])
async def test_errors_after_the_first_token_are_the_last_event(
    tokenizer: Tokenizer,
    backend: FakeBackend,
    client: Client,
    error: Exception,
    n: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend.script = lambda _: [delta_of(tokenizer.encode("a")), error]
    response = await client.post(CHAT, json=hello(stream=True, n=n))
    plain = await client.post(CHAT, json=hello(n=n))
    parts = events(response)
    assert (parts[0]["choices"][0]["delta"]["role"], parts[-1]["error"]["type"]) == ("assistant", "server_error")
    assert "[DONE]" not in parts
    assert "secret" not in response.text + plain.text
    assert plain.status_code in (500, 502)


@pytest.mark.parametrize("last", [[], [delta_of([], FinishReason.ABORT)]])
async def test_an_aborted_answer_fails(tokenizer: Tokenizer, backend: FakeBackend, client: Client, last: Any) -> None:
    backend.script = lambda _: [delta_of(tokenizer.encode("a")), *last]
    assert (await client.post(CHAT, json=hello())).status_code == 502


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("has_token", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_all(tokenizer: Tokenizer, stream: bool, has_token: bool, n: int) -> None:
    backend = FakeBackend(tokenizer)
    first = [delta_of(tokenizer.encode("ab"))] if has_token else []
    backend.script = lambda _: [*first, asyncio.Event()]
    registry = CollectorRegistry()
    app = make_app(backend, registry)
    client = RawClient(app, CHAT, hello(stream=stream, n=n))
    await eventually(lambda: backend.num_open == n)
    assert registry.get_sample_value("tandem_router_running_requests") == backend.num_open
    client.leave()
    await asyncio.wait_for(client.task, 5)
    assert (backend.num_open, registry.get_sample_value("tandem_router_running_requests")) == (0, 0)
    assert registry.get_sample_value("tandem_router_client_disconnects_total") == 1


async def test_a_server_that_stops_closes_its_streams(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    backend.script = lambda _: [delta_of(tokenizer.encode("ab")), asyncio.Event()]
    client = RawClient(make_app(backend), CHAT, hello(stream=True))
    await asyncio.wait_for(client.got_body.wait(), 5)
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    assert backend.num_open == 0


async def test_each_token_is_written_at_once(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, "abc", run=2)
    client = RawClient(make_app(backend), CHAT, hello(stream=True))
    await asyncio.wait_for(client.task, 5)
    bodies = [message["body"] for message in client.sent if message["type"] == "http.response.body"]
    assert len(bodies) == 3  # two deltas, and [DONE] with the end
    assert json.loads(bodies[0].split(b"\n\n")[1][6:])["choices"][0]["delta"] == {"content": "ab"}


class WatchedBackend(FakeBackend):
    num_looks = 0
    _ready = False

    @property
    def ready(self) -> bool:
        self.num_looks += 1
        return self._ready

    @ready.setter
    def ready(self, value: bool) -> None:
        self._ready = value


async def test_ready_needs_a_generation_that_succeeded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.router.readiness.POLL_INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO)
    backend = WatchedBackend(tokenizer)
    backend.ready = False
    backend.script = lambda _: [NoWorker("Nobody home.")]
    app = make_app(backend)
    async with app_client(app) as client, app.router.lifespan_context(app):

        async def ready_becomes(status: int, text: str) -> None:
            async def is_ready() -> bool:
                response = await client.get("/ready")
                return response.status_code == status and text in response.text

            await eventually(is_ready)

        await ready_becomes(503, "No workers are ready yet: the first ones have been loading for ")
        backend.ready = True
        await ready_becomes(503, "Nobody home")
        backend.script = backend.reply_steps
        await ready_becomes(200, "ready")
        num_probes = len(backend.requests)
        backend.ready = False
        await ready_becomes(503, "No workers are ready: the last one was lost ")
        num_looks = backend.num_looks
        await eventually(lambda: backend.num_looks > num_looks)  # only the probe looks meanwhile
        backend.ready = True
        await ready_becomes(200, "ready")
        assert len(backend.requests) > num_probes
    assert (backend.num_open, backend.requests[-1].sampling.max_tokens) == (0, 1)


async def test_metrics_count_requests_and_tokens(tokenizer: Tokenizer) -> None:
    registry = CollectorRegistry()
    app = make_app(FakeBackend(tokenizer, "abc", run=2), registry)
    async with app_client(app) as client:
        await client.post(COMPLETIONS, json={"prompt": "hi"})
        await client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
        await client.post(COMPLETIONS, json={})
        await client.get("/nope/" + "x" * 50)
        text = (await client.get("/metrics")).text

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tandem_router_{name}", labels)

    assert value("requests_total", endpoint=COMPLETIONS, status="200") == 2
    assert value("requests_total", endpoint=COMPLETIONS, status="400") == 1
    assert (value("requests_total", endpoint="unmatched", status="404"), value("prompt_tokens_total")) == (1, 6)
    assert (value("cached_prompt_tokens_total"), value("generation_tokens_total")) == (6, 8)
    assert (value("ttft_seconds_count"), value("itl_seconds_count")) == (2, 2)
    assert value("request_duration_seconds_count") == 2
    assert "tandem_router_ttft_seconds_bucket" in text


async def test_cors_preflight_and_refusals_carry_the_origin(tokenizer: Tokenizer) -> None:
    origin = {"origin": "http://page.example"}
    preflight = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with closing(FakeBackend(tokenizer), cors_allow_origins=("http://page.example",)) as client:
        allowed = await client.options(CHAT, headers=preflight)
        refused = await client.post(CHAT, content=b"{", headers=JSON | origin)
        foreign = await client.options(CHAT, headers=preflight | {"origin": "http://other.example"})
    assert (allowed.status_code, refused.status_code) == (200, 400)
    for response in (allowed, refused):
        assert response.headers["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-origin" not in foreign.headers


def hello(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def test_a_generative_model_makes_no_embeddings(client: Client) -> None:
    response = await client.post("/v1/embeddings", json={"model": "org/toy", "input": "hi"})
    assert response.status_code == 501
    assert response.json()["error"] == {
        "message": "The model 'org/toy' generates text and makes no embeddings. `tandem route` forwards this route to "
        "engines that do.",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_served",
    }


async def test_a_card_names_the_formats_that_flags_choose(tokenizer: Tokenizer) -> None:
    config = {"tool_parser": "none", "reasoning_parser": "kimi"}
    async with closing(FakeBackend(tokenizer), **config) as client:
        found = (await client.get("/v1/models/org/toy")).json()["capabilities"]
    assert (found["tools"], found["forced_tools"], found["reasoning"]) == (None, False, "kimi")


async def test_a_tenants_name_is_checked_whatever_is_tokenized(client: Client) -> None:
    for body in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}):
        for tenant in ("", "a b", "x" * 65):
            response = await client.post("/tokenize", json=body, headers={"x-tandem-tenant": tenant})
            assert (response.status_code, "x-tandem-tenant" in response.text) == (400, True), (body, tenant)
