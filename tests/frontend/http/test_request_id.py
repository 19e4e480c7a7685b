"""Every answer names its request, and so does every line of the log about it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.authentication import Authenticator
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.middleware import EdgeMiddleware, MiddlewareSettings
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.errors import WorkerError
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.fake_backend import Client, FakeBackend, closing, make_app, make_client

OURS = re.compile(r"req-[0-9a-f]{32}")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PAGE = {"origin": "http://page.example"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_named_by_its_client(backend: FakeBackend, client: Client, is_stream: bool) -> None:
    for _ in range(2):  # a client may use its id again
        body = CHAT | {"stream": is_stream, "n": 2}
        response = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "order-7/a"})
        assert (response.status_code, response.headers.get_list("x-request-id")) == (200, ["order-7/a"])
        assert "order-7" not in response.text, "the answer's id must be unique, and the client's is not"
    names = [request.request_id for request in backend.requests]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"order-7/a\.[0-9a-f]{16}-[01]", name) for name in names)


async def test_an_answer_and_its_request_share_their_digits(backend: FakeBackend, client: Client) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    request_id = response.headers["x-request-id"]
    assert OURS.fullmatch(request_id)
    assert response.json()["id"] == request_id.replace("req-", "cmpl-")
    assert [request.request_id for request in backend.requests] == [f"{request_id}-0"]


@pytest.mark.parametrize(
    "values",
    [[""], ["x" * 129], ["a b"], ["a\tb"], ["{}"], ['a"b'], ["\u00e9"], ["a", "b"], ["a,b"]],
    ids=["empty", "long", "space", "tab", "braces", "quote", "not ASCII", "two", "a list"],
)
async def test_a_hostile_id_is_replaced(client: Client, values: list[str]) -> None:
    headers = [(b"x-request-id", value.encode("latin-1")) for value in values]
    response = await client.get("/health", headers=headers)
    assert response.status_code == 200
    assert OURS.fullmatch(response.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    [
        ("GET", "/health", {}, b"", 200),
        ("GET", "/metrics", {}, b"", 200),
        ("GET", "/none", {}, b"", 404),
        ("GET", "/v1/chat/completions", {}, b"", 405),
        ("POST", "/v1/chat/completions", {}, b"{", 400),
        ("POST", "/v1/messages", {}, b"{}", 400),
        ("POST", "/tokenize", {}, b"x" * 100, 413),
        ("POST", "/v1/completions", PAGE, b"{}", 403),
        ("OPTIONS", "/v1/completions", PAGE | {"access-control-request-method": "POST"}, b"", 400),
    ],
)
async def test_every_answer_has_an_id(
    tokenizer: Tokenizer, method: str, path: str, headers: dict[str, str], content: bytes, status: int
) -> None:
    headers = headers | {"content-type": "application/json"}
    async with closing(FakeBackend(tokenizer), max_body_bytes=50) as client:
        response = await client.request(method, path, headers=headers, content=content)
        assert response.status_code == status, response.text
        assert len(response.headers.get_list("x-request-id")) == 1
        assert OURS.fullmatch(response.headers["x-request-id"])
        headers["x-request-id"] = "mine"
        response = await client.request(method, path, headers=headers, content=content)
        assert response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize("error", [WorkerError("gone"), ValueError("a bug")], ids=["expected", "a bug"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_lines_name_the_request_and_not_its_prompt(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, error: Exception, is_stream: bool
) -> None:
    caplog.set_level(logging.DEBUG, "tandem")
    backend = FakeBackend(tokenizer)
    backend.script = lambda request: [*backend.reply_steps(request)[:1], error]
    body = CHAT | {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 9, "stream": is_stream}
    async with make_client(backend) as client:
        await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "find-me"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tandem.frontend")]
    assert "secret" not in caplog.text
    if is_stream or isinstance(error, ValueError):
        assert any("find-me" in line for line in lines), lines
    assert all("find-me" in line for line in lines), lines


async def test_two_requests_at_once_keep_their_ids(tokenizer: Tokenizer) -> None:
    transport = httpx.ASGITransport(make_app(FakeBackend(tokenizer)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(number: int) -> Any:
            return await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": f"r{number}"})

        answers = await asyncio.gather(*map(ask, range(20)))
    assert [answer.headers["x-request-id"] for answer in answers] == [f"r{number}" for number in range(20)]


async def test_a_path_forges_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    metrics = FrontendMetrics(CollectorRegistry())
    app = EdgeMiddleware(fail, MiddlewareSettings(metrics, Authenticator(ApiKeys(), metrics), 1000, ()))
    async with app_client(app) as client:
        assert (await client.get("/a%0aERROR%20forged")).status_code == 500
    (record,) = [one for one in caplog.records if one.name.startswith("tandem")]
    assert record.getMessage().endswith(r"to '/a\nERROR forged' failed")
