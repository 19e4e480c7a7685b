"""What clients see that compress their requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.http import content_encoding
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.json_body import read_json
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig
from tandem.text.tokenizer import Tokenizer
from tests.support.engines_harness import completion, routing, spec_of
from tests.support.fake_backend import FakeBackend, make_client
from tests.support.fake_openai import fake_openai

MAX_BYTES = 1 << 20
JSON = {"content-type": "application/json"}
BODY = json.dumps({"text": "hello"}).encode()


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


def client_of(max_bytes: int = MAX_BYTES) -> httpx.AsyncClient:
    app = RouterApp(RouterConfig(max_body_bytes=max_bytes), FrontendMetrics(CollectorRegistry()), ApiKeys())

    async def raw(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(await read_json(Request(scope, receive)))(scope, receive, send)

    app.add_raw_route("/raw", raw)

    @app.post("/fast")
    async def fast(request: Request) -> Response:
        return Response(await read_json(request))

    @app.get("/empty")
    async def empty() -> Response:
        return Response(b"nothing was read")

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=JSON)


async def send(content: bytes, encoding: str, path: str = "/raw", max_bytes: int = MAX_BYTES) -> httpx.Response:
    async with client_of(max_bytes) as client:
        return await client.post(path, content=content, headers={"content-encoding": encoding})


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


GZIPPED = gzip.compress(BODY, mtime=0)  # the ids of tests have it, and must not change with the time


@pytest.mark.parametrize("path", ["/raw", "/fast"])
@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", GZIPPED),
        ("x-gzip", GZIPPED),
        ("GZIP", GZIPPED),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("identity, gzip", GZIPPED),
        *(("", BODY), ("gzip", b"")),
    ],
)
async def test_a_compressed_body_is_read(path: str, encoding: str, content: bytes) -> None:
    response = await send(content, encoding, path)
    assert (response.status_code, response.content) == (200, content and BODY)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, br", "gzip, gzip", "nonsense"])
async def test_another_encoding_is_refused_with_those_that_are_read(encoding: str) -> None:
    response = await send(BODY, encoding)
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert response.json()["error"]["code"] == "unsupported_content_encoding"
    assert f"Content-Encoding '{encoding}'" in message_of(response)


@pytest.mark.parametrize(
    ("encoding", "content", "why"),
    [
        ("gzip", GZIPPED[:-9], "it is cut off"),
        ("gzip", GZIPPED[:5], "it is cut off"),
        ("gzip", GZIPPED + b"x", "more follows after its end"),
        ("gzip", GZIPPED * 2, "more follows after its end"),
        ("gzip", BODY, "incorrect header check"),
        ("gzip", GZIPPED[:-8] + bytes(8), "incorrect data check"),
        ("deflate", zlib.compress(BODY)[:-5], "it is cut off"),
        ("deflate", b"\xff" * 20, "invalid"),
    ],
)
async def test_a_broken_body_is_refused_with_what_is_wrong(encoding: str, content: bytes, why: str) -> None:
    response = await send(content, encoding)
    assert response.status_code == 400
    assert f"not valid {encoding}, which its Content-Encoding names: " in message_of(response)
    assert why in message_of(response)


async def test_a_get_is_answered_whatever_it_says_of_a_body() -> None:
    async with client_of() as client:
        assert (await client.get("/empty", headers={"content-encoding": "br"})).status_code == 200


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("max_bytes", [100, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, MAX_BYTES])
async def test_the_inflated_body_is_limited(max_bytes: int, over: int) -> None:
    size = max_bytes + over
    content = gzip.compress(random.Random(3).randbytes(size).hex()[:size].encode() if size > 1000 else b" " * size)
    response = await send(content, "gzip", max_bytes=max_bytes)
    assert response.status_code == (413 if over > 0 else 200)
    if over <= 0:
        assert len(response.content) == max_bytes + over
    else:
        assert message_of(response).startswith(f"The request body is larger than {max_bytes} bytes once it is inflated")


async def test_a_large_body_inflates_no_more_than_a_hundredfold() -> None:
    """A request that runs keeps its body: a client that sends little must not take much memory."""
    assert (await send(gzip.compress(bytes(256 * 1024)), "gzip")).status_code == 200
    content = gzip.compress(bytes(256 * 1024 + 1))
    refused = await send(content, "gzip")
    assert refused.status_code == 413
    assert f"which is the limit for one of {len(content)} bytes" in message_of(refused)
    words = " ".join(f"word {number % 5000}" for number in range(60_000)).encode()
    assert (await send(gzip.compress(words), "gzip")).content == words


async def test_a_bomb_is_inflated_in_a_thread_and_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KB that would be 4 MB. The limit is what any body may inflate to."""
    sizes: list[int] = []

    async def to_thread(work: Any, *args: Any) -> Any:
        part = await asyncio.get_running_loop().run_in_executor(None, work, *args)
        sizes.append(len(part))
        return part

    monkeypatch.setattr(content_encoding.asyncio, "to_thread", to_thread)
    response = await send(gzip.compress(bytes(4 << 20)), "gzip", max_bytes=200_000)
    assert (response.status_code, sizes) == (413, [200_001 - 64 * 1024])
    assert (await send(gzip.compress(bytes(64 * 1024)), "gzip")).status_code == 200
    assert len(sizes) == 1, "a small body needs no thread"


async def test_nothing_is_inflated_before_the_whole_body_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the server counts its compressed bytes, and keeps no others."""
    begun: list[str] = []
    inflate = content_encoding._inflated

    async def note(*args: Any) -> bytes:
        begun.append("inflating")
        return await inflate(*args)

    monkeypatch.setattr(content_encoding, "_inflated", note)
    content = GZIPPED

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 5):
            assert not begun
            yield content[at : at + 5]

    async with client_of() as client:
        response = await client.post("/raw", content=parts(), headers={"content-encoding": "gzip"})
    assert (response.content, begun) == (BODY, ["inflating"])


async def test_a_gzipped_chat_is_answered_by_serve_and_by_route(tokenizer: Tokenizer) -> None:
    headers = JSON | {"content-encoding": "gzip"}
    async with make_client(FakeBackend(tokenizer)) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
        content = gzip.compress(json.dumps(body).encode())
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert response.json()["choices"][0]["message"]["content"] == "hello world"
    with fake_openai() as fake:
        async with routing(spec_of(fake, "a")) as router:
            content = gzip.compress(json.dumps(completion("a b")).encode())
            response = await router.client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 200, response.text
            assert fake.requests[-1]["prompt"] == "a b"
            headers["content-encoding"] = "br"
            refused = await router.client.post("/v1/completions", content=content, headers=headers)
            assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
