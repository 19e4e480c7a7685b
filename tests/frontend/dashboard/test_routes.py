"""The dashboard over HTTP: the page, who may read the stream, and how streams end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.dashboard.feed import MAX_VIEWERS
from tandem.frontend.dashboard.routes import add_dashboard
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.pages import PAGE_HEADERS
from tandem.frontend.http.server import HttpServer
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig
from tests.support.dashboard_world import DashboardWorld
from tests.support.keys import api_keys_of
from tests.support.quick_server import http_server

KEYS = {"operator": "*", "ours": "search"}
OPERATOR = {"authorization": "Bearer operator"}


@asynccontextmanager
async def served(
    api_keys: ApiKeys, world: DashboardWorld | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, HttpServer]]:
    """A real HTTP server with the dashboard of a world of two workers."""
    world = world or DashboardWorld()
    app = RouterApp(RouterConfig(), FrontendMetrics(CollectorRegistry()), api_keys)
    add_dashboard(app, overview=world.overview, traffic=world.metrics.traffic, api_keys=api_keys)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with (
            app.router.lifespan_context(app),
            http_server(app, RouterConfig(), listener, CollectorRegistry(), on_drain=app.drain) as server,
        ):
            await server.has_started.wait()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, limits=limits) as client:
                yield client, server


async def first_event(response: httpx.Response) -> tuple[str, dict[str, object]]:
    lines: list[str] = []
    async for line in response.aiter_lines():
        lines.append(line)
        if line == "":
            break
    name, data, _ = lines
    return name, json.loads(data.removeprefix("data: "))


async def test_the_page_and_its_files_need_no_key() -> None:
    async with served(api_keys_of(KEYS)) as (client, _):
        answer = await client.get("/")
        assert (answer.status_code, answer.headers["location"], answer.content) == (307, "dashboard", b"")
        page = await client.get("/", follow_redirects=True)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert PAGE_HEADERS.items() <= dict(page.headers).items()
        links = [part.split('"')[0] for part in page.text.split('="dashboard/')[1:]]
        assert links
        for link in links:
            assert (await client.get(f"/dashboard/{link}")).status_code == 200


async def test_a_snapshot_comes_at_once() -> None:
    async with served(api_keys_of(KEYS)) as (client, _), client.stream("GET", "/v1/dashboard", headers=OPERATOR) as one:
        assert one.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (one.headers["cache-control"], one.headers["x-accel-buffering"]) == ("no-store", "no")
        name, snapshot = await first_event(one)
        assert (name, snapshot["kind"], snapshot["models"]) == ("event: snapshot", "workers", ["org/toy"])


async def test_the_first_snapshot_has_what_happened_before_somebody_looked() -> None:
    world = DashboardWorld()
    async with served(api_keys_of(KEYS), world) as (client, _):
        history = "/v1/dashboard/history"
        await client.get(history, headers=OPERATOR)  # both have now looked at the counters
        world.tick()
        async with client.stream("GET", "/v1/dashboard", headers=OPERATOR) as one:
            traffic = (await first_event(one))[1]["traffic"]
        assert traffic["finished_per_s"] > 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"authorization": "Bearer ours"}, 403, "operator_key_required"),
        (OPERATOR | {"x-tandem-tenant": "search"}, 403, "operator_key_required"),
    ],
)
async def test_only_an_operator_may_watch(headers: dict[str, str], status: int, code: str) -> None:
    async with served(api_keys_of(KEYS)) as (client, _):
        response = await client.get("/v1/dashboard", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_revoked_key_ends_the_stream() -> None:
    api_keys = api_keys_of(KEYS)
    async with served(api_keys) as (client, _), client.stream("GET", "/v1/dashboard", headers=OPERATOR) as response:
        lines = response.aiter_lines()
        await anext(lines)
        revoked = datetime.now(UTC)
        api_keys.replace(msgspec.structs.replace(key, revoked=revoked) for key in api_keys.all)
        async with asyncio.timeout(10):
            _ = [line async for line in lines]
        assert (await client.get("/v1/dashboard", headers=OPERATOR)).status_code == 401


async def test_one_too_many_is_told_so() -> None:
    async with served(ApiKeys()) as (client, _):
        streams = [client.stream("GET", "/v1/dashboard") for _ in range(MAX_VIEWERS)]
        for stream in streams:
            await stream.__aenter__()
        response = await client.get("/v1/dashboard")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_viewers")
        assert int(response.headers["retry-after"]) > 0
        for stream in streams:
            await stream.__aexit__(None, None, None)
        async with asyncio.timeout(10):
            while True:  # the server has to notice that they left
                async with client.stream("GET", "/v1/dashboard") as response:
                    if response.status_code == 200:
                        break


async def test_a_request_for_the_head_takes_no_viewers_place() -> None:
    async with served(api_keys_of(KEYS)) as (client, _):
        for _ in range(MAX_VIEWERS + 1):
            response = await client.head("/v1/dashboard", headers=OPERATOR)
            assert (response.status_code, response.content) == (200, b"")
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (await client.head("/v1/dashboard")).status_code == 401
        async with client.stream("GET", "/v1/dashboard", headers=OPERATOR) as stream:
            assert stream.status_code == 200


async def test_open_streams_do_not_keep_a_server_from_stopping() -> None:
    async with served(ApiKeys()) as (client, server), client.stream("GET", "/v1/dashboard") as response:
        lines = response.aiter_lines()
        await anext(lines)
        server.drain()
        async with asyncio.timeout(10):
            rest = [line async for line in lines]
            await server.serving
    assert rest == [] or rest[-1] == "", "the stream ended with a whole event"


async def test_the_history_is_kept_while_nobody_looks_and_shown_to_operators() -> None:
    async with served(api_keys_of(KEYS)) as (client, _):
        answer = (await client.get("/v1/dashboard/history", headers=OPERATOR)).json()
        assert len(answer["rows"]) == 1, "the first point is made at the start"
        assert (len(answer["rows"][0]), answer["span_s"]) == (len(answer["columns"]), 3600)
        for headers, status in [({}, 401), ({"authorization": "Bearer ours"}, 403)]:
            assert (await client.get("/v1/dashboard/history", headers=headers)).status_code == status
