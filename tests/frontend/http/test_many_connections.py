"""A real server and clients without a key that hold its connections, or send it many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from tandem.frontend.http import protocol as http_protocol_module
from tandem.frontend.http.connections import ADMIT, NUM_RESERVED, Connections
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.protocol.config import RouterConfig
from tests.frontend.http.test_protocol import (
    ServerClock,
    Streams,
    authority,
    connect,
    connections,
    error_of,
    exchange,
    server_clock,
    serving_app,
    tls,
)
from tests.support.waiting import eventually

__all__ = ["authority", "connections", "server_clock", "tls"]  # fixtures

PAGE = b"GET /dashboard HTTP/1.1\r\nhost: h\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: h\r\n\r\n"
HEALTH = b"GET /health?x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
BYE = b"GET /small HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
PART = 65_536
MOST_AT_ONCE = 64  # requests that one iteration begins: 32 that are read at once, and some of those that have waited
NUM_PARTS = 400  # more than fits into the buffers on the way


class App:
    """`/dashboard` is large and for strangers, `/long` is not for strangers, `/stream` lasts, `/plain` is one write.

    `/upload` reads its body to the end.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.num_sent = 0  # parts of pages
        self.streams: list[ResponseWriter] = []
        self.num_ended = 0  # streams
        self.started_in = Counter[int]()  # requests by iteration of the event loop
        self.iteration = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.started_in[self.iteration] += 1
        if scope["path"] == "/dashboard":
            self.num_pages += 1
            await self._send_page(ResponseWriter(scope, send))
        elif scope["path"] == "/stream":
            scope["extensions"][ADMIT]["admit"](has_key=True)
            await self._stream(ResponseWriter(scope, send), receive)
        elif scope["path"] == "/long":
            scope["extensions"][ADMIT]["admit"](has_key=True)
            await self._send_page(ResponseWriter(scope, send))
        elif scope["path"] == "/plain":
            scope["extensions"][ADMIT]["admit"](has_key=True)
            await self._answer(send, b"y" * NUM_PARTS * PART)
        elif scope["path"] == "/upload":
            while (await receive()).get("more_body"):
                pass
            await self._answer(send, b"ok")
        else:
            await self._answer(send, b"ok")

    async def _answer(self, send: Any, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_page(self, writer: ResponseWriter) -> None:
        await writer.start([])
        for _ in range(NUM_PARTS):
            writer.write(b"x" * PART)
            await writer.drain()
            self.num_sent += 1
        await writer.end(b"last")

    async def _stream(self, writer: ResponseWriter, receive: Any) -> None:
        await writer.start([])
        self.streams.append(writer)
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_ended += 1

    def count_iterations(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self.count_iterations)


@asynccontextmanager
async def unread(port: int, request: bytes, count: int) -> AsyncIterator[list[Streams]]:
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                reader, writer = await connect(port)
                stack.callback(writer.transport.abort)
                writer.write(request)
                writer.transport.pause_reading()
                opened.append((reader, writer))
        yield opened


async def answer(port: int, request: bytes) -> bytes:
    async with asyncio.timeout(30):
        return await exchange(port, request)


@pytest.mark.parametrize(
    "request_bytes",
    [
        PAGE,
        PAGE * 20,
        PAGE.replace(b"host", b"connection: close\r\nhost"),
        PAGE.replace(b"/dashboard", b"/small") * 3000,
        b"no request\r\n\r\n",
        b"POST /small HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n",
        b"",
    ],
    ids=["once", "pipelined", "the last", "many small", "refused", "no body", "silent"],
)
async def test_connections_that_are_not_used_keep_nobody_out(request_bytes: bytes) -> None:
    app = App()
    async with serving_app(app, max_connections=8) as port, unread(port, request_bytes, 8 + NUM_RESERVED + 8):
        for request in (HEALTH, BYE, HEALTH, BYE):
            assert b" 200 " in await answer(port, request)


async def test_streams_that_are_read_do_not_end_for_a_newcomer() -> None:
    app = App()
    async with serving_app(app, max_connections=8) as port, AsyncExitStack() as stack:
        streams = []
        for number in range(8):
            reader, writer = await connect(port)
            stack.callback(writer.close)
            writer.write(STREAM)
            await eventually(lambda number=number: len(app.streams) > number)
            streams.append(reader)
        async with unread(port, PAGE, NUM_RESERVED + 8):
            for number, (writer, reader) in enumerate(zip(app.streams, streams, strict=True)):
                assert b" 200 " in await answer(port, HEALTH)
                refused = error_of(await answer(port, BYE))
                assert refused == (
                    503,
                    "All 8 connections of this server (--max-connections) are in use; try again later.",
                )
                writer.write(b"part %d" % number)
                await reader.readuntil(b"part %d" % number)
        assert app.num_ended == 0


async def test_a_stream_that_is_not_read_for_a_while_makes_room(
    server_clock: ServerClock, connections: list[http_protocol_module.HttpProtocol]
) -> None:
    request = PAGE.replace(b"/dashboard", b"/long")
    async with serving_app(App(), max_connections=1, header_timeout_s=1.0) as port, unread(port, request, 1):
        await eventually(lambda: bool(connections) and connections[0].flow.write_paused)
        assert error_of(await answer(port, BYE))[0] == 503
        for _ in range(4):  # the buffers on the way may still take something
            await server_clock.leap(port, 10.0)
        assert not connections[0].transport.is_closing()
        assert b" 200 " in await answer(port, BYE)
        assert connections[0].transport.is_closing()


@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n"])
async def test_an_answer_that_is_being_read_does_not_end_for_a_newcomer(
    connections: list[http_protocol_module.HttpProtocol], headers: bytes
) -> None:
    app, request = App(), b"GET /plain HTTP/1.1\r\nhost: h\r\n%b\r\n" % headers
    async with serving_app(app, max_connections=1) as port, unread(port, request, 1) as opened:
        await eventually(lambda: bool(connections) and bool(connections[0].server_state.total_requests))
        assert connections[0].flow.write_paused
        assert error_of(await answer(port, BYE))[0] == 503
        ((reader, writer),) = opened
        writer.transport.resume_reading()
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(NUM_PARTS * PART) == b"y" * NUM_PARTS * PART
        await eventually(lambda: not connections[0].flow.write_paused)
        assert b" 200 " in await answer(port, BYE), "now it is idle"


@pytest.mark.parametrize(("num_parts", "is_kept"), [(2, False), (8, True)], ids=["6 KB a second", "26 KB a second"])
async def test_a_client_that_reads_slowly_is_disconnected(
    server_clock: ServerClock, connections: list[http_protocol_module.HttpProtocol], num_parts: int, is_kept: bool
) -> None:
    app = App()
    async with serving_app(app, header_timeout_s=1.0) as port, asyncio.timeout(60):
        reader, writer = await connect(port)
        writer.write(PAGE)
        await eventually(lambda: bool(connections) and connections[0].flow.write_paused)
        for _ in range(10):
            if connections[0].transport.is_closing():
                break
            enough = app.num_sent + num_parts
            await reader.readexactly(num_parts * PART)
            while is_kept and app.num_sent < enough:
                await reader.readexactly(PART)
            await server_clock.leap(port, 20.0)
        assert connections[0].transport.is_closing() != is_kept
        writer.transport.abort()


async def test_a_client_that_reads_all_there_is_is_never_slow(server_clock: ServerClock) -> None:
    app = App()
    async with serving_app(app, header_timeout_s=1.0) as port, asyncio.timeout(60):
        reader, writer = await connect(port)
        writer.write(STREAM)
        await eventually(lambda: bool(app.streams))
        for number in range(5):
            assert app.streams[0].write(b"part %d" % number)
            await reader.readuntil(b"part %d" % number)
            await server_clock.leap(port, 100.0)
        assert app.num_ended == 0
        writer.close()


async def most_started_at_once(count: int, path: bytes, *, num_each: int = 1) -> int:
    """The most requests that one iteration of the event loop began, as this many clients send theirs at once."""
    app = App()
    async with serving_app(app) as port, asyncio.timeout(60), AsyncExitStack() as stack:
        opened = [await connect(port) for _ in range(count)]
        app.count_iterations()
        for _, writer in opened:  # all before the server reads any
            stack.callback(writer.close)
            writer.write(PAGE.replace(b"/dashboard", path) * num_each)
        for reader, _ in opened:
            for _ in range(num_each):
                await reader.readuntil(b"\r\n\r\nok")
    assert app.started_in.total() == num_each * count
    return max(app.started_in.values())


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])  # as in production
async def test_pipelined_requests_take_turns() -> None:
    assert await most_started_at_once(100, b"/small", num_each=20) <= MOST_AT_ONCE


@pytest.mark.parametrize("path", [b"/small", b"/metrics", b"/docs/x"])
async def test_an_iteration_of_the_event_loop_begins_only_some_of_many_requests(path: bytes) -> None:
    assert await most_started_at_once(300, path) <= (MOST_AT_ONCE if path == b"/small" else 2)


async def test_pipelined_requests_wait_as_bytes(connections: list[http_protocol_module.HttpProtocol]) -> None:
    app = App()
    async with serving_app(app) as port, unread(port, STREAM * 100, 1):
        await eventually(lambda: bool(connections) and bool(connections[0]._unparsed))
        assert not connections[0].pipeline
        assert len(connections[0]._unparsed) == 99 * len(STREAM)


async def test_a_body_of_ends_of_heads_is_read_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = list[int]()
    parse: Callable[[Any, bytes], None] = http_protocol_module.HttpProtocol._parse_piece
    monkeypatch.setattr(
        http_protocol_module.HttpProtocol,
        "_parse_piece",
        lambda self, piece: (pieces.append(len(piece)), parse(self, piece))[1],
    )
    async with serving_app(App()) as port:
        body = b"\r\n\r\n" * 10_000
        head = b"POST /small HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert b" 200 " in await answer(port, head + body)
    assert len(pieces) <= len(body) / http_protocol_module.MIN_BODY_PIECE_BYTES + 100


async def test_bodies_that_take_long_to_read_leave_time_for_others(
    connections: list[http_protocol_module.HttpProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, count, num_chunks, pieces_in, piece_s = App(), 20, 10_000, Counter[int](), 0.0005
    parse: Callable[[Any, bytes], None] = http_protocol_module.HttpProtocol._parse_piece

    def parse_slowly(self: http_protocol_module.HttpProtocol, piece: bytes) -> None:
        pieces_in[app.iteration] += 1
        parse(self, piece)

    monkeypatch.setattr(http_protocol_module.HttpProtocol, "_parse_piece", parse_slowly)
    head = b"POST /upload HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving_app(app) as port, asyncio.timeout(60), AsyncExitStack() as stack:
        opened = [await connect(port) for _ in range(count)]
        await eventually(lambda: len(connections) == count)
        monkeypatch.setattr(connections[0]._shared.reads, "clock", lambda: pieces_in.total() * piece_s)
        app.count_iterations()
        for _, writer in opened:
            stack.callback(writer.close)
            writer.write(head + b"1\r\nx\r\n" * num_chunks + b"0\r\n\r\n")
        for reader, _ in opened:
            await reader.readuntil(b"\r\n\r\nok")
    assert pieces_in.total() > count * num_chunks * 6 / http_protocol_module.PIECE_BYTES
    assert max(pieces_in.values()) <= 16, "5 ms of what is read at once, and 1 ms of what waits"


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])  # as in production
@pytest.mark.parametrize(("method", "most"), [(b"POST", 1), (b"GET", 40)])
async def test_no_work_is_done_for_clients_that_gave_up_before(method: bytes, most: int) -> None:
    app, count = App(), 400
    request = method + b" /small HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
    async with serving_app(app) as port:
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port)) as client:  # the server has no time meanwhile
                client.sendall(request)
        assert b" 200 " in await answer(port, BYE)  # it was last in the queue
    assert app.started_in.total() <= most


@pytest.mark.parametrize("tls", ["plain"], indirect=True)  # TLS has no such half
async def test_a_client_that_ends_its_side_and_reads_on_is_answered(tls: None) -> None:
    async with serving_app(App()) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(BYE)
            writer.write_eof()
            assert b" 200 " in await reader.read()
            writer.close()


class Transport:
    """A connection whose client reads what the test says."""

    def __init__(self) -> None:
        self.num_unsent = 0
        self.is_aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("10.0.0.1", 80) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("num_unsent", "lives_s"),
    [
        (lambda second: 0, 400),
        (lambda second: 30_000, 60),
        (lambda second: max(0, 60_000 - 100 * second), 60 + 60 * 100 / http_protocol_module.MIN_BYTES_PER_S),
        (lambda second: 30_000 if second % 50 else 0, 400),
    ],
    ids=["all is read", "nothing is read", "little is read", "all is read now and then"],
)
async def test_how_long_a_client_may_read_slowly(num_unsent: Callable[[int], int], lives_s: float, tls: None) -> None:
    shared = Connections(RouterConfig(keep_alive_timeout_s=1000, header_timeout_s=1000), 10)
    shared.now_s = 5000.0  # the server has been there for a while
    config = uvicorn.Config(App())
    connection = http_protocol_module.HttpProtocol(shared, config=config, server_state=ServerState(), app_state={})
    transport = Transport()
    connection.connection_made(cast(Any, transport))
    second = 0
    while second < 400 and not transport.is_aborted:
        second += 1
        shared.now_s += 1.0
        transport.num_unsent = num_unsent(second)
        connection.check_deadlines(shared.now_s)
    assert second == pytest.approx(lives_s, abs=2.5)
