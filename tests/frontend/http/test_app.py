"""An app enforces its rules on FastAPI's routes and on raw routes alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.request_options import tenant_of
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import NoWorker
from tests.support.apps import app_client
from tests.support.fake_backend import Client
from tests.support.keys import api_keys_of

PATHS = ["/raw", "/fast"]
KEY = {"authorization": "Bearer ours"}
PAGE = {"origin": "http://page.example"}


def app_of(answer: Any, registry: CollectorRegistry | None = None, max_body_bytes: int = 100) -> RouterApp:
    """An app that answers POSTs to both paths with `answer`, and accepts one key."""
    config = RouterConfig(max_body_bytes=max_body_bytes, cors_allow_origins=("http://page.example",))
    app = RouterApp(config, FrontendMetrics(registry or CollectorRegistry()), api_keys_of({"ours": "search"}))

    async def raw(scope: Scope, receive: Receive, send: Send) -> None:
        await (await answer(Request(scope, receive)))(scope, receive, send)

    app.add_raw_route("/raw", raw)

    @app.post("/fast")
    async def fast(request: Request) -> Response:
        response: Response = await answer(request)
        return response

    return app


async def tell(request: Request) -> Response:
    await request.body()
    return Response(tenant_of(request))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({}, {"vary": "Origin"}),
        (
            PAGE,
            {
                "vary": "Origin",
                "access-control-allow-origin": "http://page.example",
                "access-control-expose-headers": "x-request-id, x-tandem-ignored",
            },
        ),
        (
            {"origin": "http://other.example"},
            {"vary": "Origin", "access-control-expose-headers": "x-request-id, x-tandem-ignored"},
        ),
    ],
    ids=["no page", "our page", "another page"],
)
async def test_every_answer_has_its_cors_headers(path: str, origin: dict[str, str], expected: dict[str, str]) -> None:
    async with app_client(app_of(tell)) as client:
        for headers, content, status in [(KEY, b"x", 200), ({}, b"x", 401), (KEY, b"x" * 101, 413)]:
            response = await client.post(path, headers=headers | origin, content=content)
            assert response.status_code == (403 if "other" in origin.get("origin", "") else status)
            about = {name: value for name, value in response.headers.items() if "access-" in name or name == "vary"}
            assert about == expected
            assert response.text == "search" or response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status"), [(NoWorker("none"), 503), (ValueError("secret"), 500), (ClientDisconnect(), 499)], ids=str
)
async def test_exceptions_become_responses_and_are_counted(
    path: str, error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Request) -> Response:
        raise error

    registry = CollectorRegistry()
    async with app_client(app_of(fail, registry)) as client:
        response = await client.post(path, headers=KEY)
    assert response.status_code == status
    assert "secret" not in response.text
    assert ("secret" in caplog.text, num_counted(registry, path, status)) == (status == 500, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [NoWorker("none"), ValueError("secret")], ids=str)
async def test_an_exception_after_the_response_started_ends_the_connection(path: str, error: Exception) -> None:
    class Broken(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise error

    async def answer(_: Request) -> Response:
        return Broken()

    registry = CollectorRegistry()
    async with app_client(app_of(answer, registry)) as client:
        with pytest.raises(Exception, match=r"none|secret|already started"):
            await client.post(path, headers=KEY)
    assert num_counted(registry, path, 200) == 1


async def test_head_is_answered_as_get_is(client: Client) -> None:
    paths = ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/none", "/v1/pools", "/version", "/docs"]
    for path in [*paths, "/v1/models/", "/v1/completions", "/none"]:
        head, get = await client.head(path), await client.get(path)
        assert head.status_code == get.status_code, path
        # Two requests have two ids, and /metrics counts the requests in between.
        drop = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        assert {n: v for n, v in head.headers.items() if n not in drop} == {
            n: v for n, v in get.headers.items() if n not in drop
        }
    async with app_client(app_of(tell)) as client:
        assert (await client.head("/fast")).status_code == 401
        assert (await client.head("/fast", headers=KEY)).status_code == 405


async def test_a_raw_route_takes_only_posts() -> None:
    registry = CollectorRegistry()
    async with app_client(app_of(tell, registry)) as client:
        response = await client.get("/raw", headers=KEY)
        assert (response.status_code, response.headers["allow"], num_counted(registry, "/raw", 405)) == (405, "POST", 1)
        response = await client.post("/raw/", headers=KEY, follow_redirects=True)
        assert (response.status_code, response.text) == (200, "search")


@pytest.mark.parametrize("path", PATHS)
async def test_a_server_that_will_end_asks_its_clients_to_reconnect(path: str) -> None:
    app = app_of(tell)
    async with app_client(app) as client:
        assert "connection" not in (await client.post(path, headers=KEY)).headers
        app.leave()
        assert (await client.post(path, headers=KEY)).headers["connection"] == "close"


def num_counted(registry: CollectorRegistry, path: str, status: int) -> float | None:
    return registry.get_sample_value("tandem_router_requests_total", {"endpoint": path, "status": str(status)})


@pytest.mark.parametrize("path", PATHS)
async def test_one_large_body_is_handed_out_in_an_iteration(path: str) -> None:
    got_in, iteration = list[int](), 0

    def count_iterations() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(count_iterations)

    async def note(request: Request) -> Response:
        await request.body()
        got_in.append(iteration)
        return Response()

    count_iterations()
    async with app_client(app_of(note, max_body_bytes=1 << 20)) as client:
        sending = [client.post(path, headers=KEY, content=b"x" * 200_000) for _ in range(10)]
        assert {response.status_code for response in await asyncio.gather(*sending)} == {200}
    assert len(set(got_in)) == len(got_in) == 10
