"""Streams over a real uvicorn, written past ASGI where that can be done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster import http_server as http_server_module
from cluster.http_server import http_server
from cluster.listening import listening
from protocol.config import RouterConfig
from router.openai.outlet import Outlet

pytestmark = pytest.mark.anyio
PART = b"data: %d\n\n"


@asynccontextmanager
async def serving(answer: Callable[[Outlet], Awaitable[None]]) -> AsyncIterator[int]:
    """The port of a server whose requests are answered so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(Outlet(scope, send))

    with listening("127.0.0.1", 0) as listener:
        async with http_server(app, RouterConfig(), listener) as server:
            await server.started_serving()
            yield listener.getsockname()[1]


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    return reader, writer


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """Head and chunks of one answer."""
    head, chunks = await reader.readuntil(b"\r\n\r\n"), []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    assert await reader.readexactly(2) == b"\r\n"
    return head, chunks


async def test_parts_are_chunks_of_a_body_and_the_connection_goes_on() -> None:
    ways: list[bool] = []

    async def answer(outlet: Outlet) -> None:
        ways.append(outlet._write(b"too early"))
        await outlet.start([(b"content-type", b"text/event-stream")])
        for number in range(20):
            assert outlet.show(PART % number)
            assert outlet._write(b"")  # is not the end
        ways.append(outlet._write(PART % 20))
        await outlet.end(b"last")
        ways.append(outlet._write(b"too late"))

    async with serving(answer) as port:
        reader, writer = await ask(port)
        for _ in range(2):
            head, chunks = await read_chunked(reader)
            assert b"transfer-encoding: chunked" in head
            assert chunks == [*(PART % number for number in range(21)), b"last"]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.close()
    assert ways[:3] == [False, True, False]  # only between the start and the end


async def test_a_client_that_does_not_read_holds_the_stream_back_and_gets_all_of_it() -> None:
    part, num_parts = b"x" * 65_536, 400
    num_waits = 0

    async def answer(outlet: Outlet) -> None:
        nonlocal num_waits
        await outlet.start([])
        for number in range(num_parts):
            if not outlet.show(b"%08d" % number + part):
                num_waits += 1
                waiting.set()
                await outlet.drained()
        await outlet.end(b"last")

    waiting = asyncio.Event()
    async with serving(answer) as port:
        reader, writer = await ask(port)
        async with asyncio.timeout(30):
            await waiting.wait()
            _, chunks = await read_chunked(reader)
        writer.close()
    assert [chunk[:8] for chunk in chunks[:-1]] == [b"%08d" % number for number in range(num_parts)]
    assert chunks[-1] == b"last"
    assert num_waits > 0


async def test_a_client_that_left_is_written_to_no_more() -> None:
    left, shown = asyncio.Event(), asyncio.Event()
    ways: list[bool] = []

    async def answer(outlet: Outlet) -> None:
        await outlet.start([])
        outlet.show(b"one")
        await left.wait()
        async with asyncio.timeout(30):
            while outlet._write(b"more"):  # noqa: ASYNC110 - until the server has noticed
                await asyncio.sleep(0.01)
        ways.append(outlet.show(b"nobody reads this"))
        await outlet.end(b"")
        shown.set()

    async with serving(answer) as port:
        reader, writer = await ask(port)
        await reader.readuntil(b"one")
        writer.transport.abort()
        left.set()
        async with asyncio.timeout(30):
            await shown.wait()
    assert ways == [True]


async def test_an_app_that_does_not_notice_holds_up_the_end_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server_module, "_CLOSE_TIMEOUT_S", 0.2)
    asked, never = asyncio.Event(), asyncio.Event()

    async def answer(_: Outlet) -> None:
        asked.set()
        await never.wait()

    async with asyncio.timeout(30):
        async with serving(answer) as port:
            _, writer = await ask(port)
            await asked.wait()
        writer.close()
    never.set()
