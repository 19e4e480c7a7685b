"""A real server and clients that send raw bytes: streams past ASGI, and input that no client should send."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import resource
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem.frontend.http import connections as http_connections_module
from tandem.frontend.http import protocol as http_protocol_module
from tandem.frontend.http import server as http_server_module
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.listening import listening
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.protocol import HttpProtocol
from tandem.frontend.http.response_writer import DIRECT_WRITE, ResponseWriter
from tandem.frontend.http.server import HttpServer
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig
from tandem.runtime.signals import wait_for_any
from tests.support.certificates import Authority
from tests.support.quick_server import http_server
from tests.support.waiting import eventually

PART = b"data: %d\n\n"


class Writer(ResponseWriter):
    """It also has what the server offers for parts that can be written at once."""

    def __init__(self, scope: Any, send: Any) -> None:
        super().__init__(scope, send)
        self.write_now: Callable[[bytes], bool] = scope["extensions"][DIRECT_WRITE]["write"]


@asynccontextmanager
async def serving(answer: Callable[[Writer], Awaitable[None]]) -> AsyncIterator[int]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(Writer(scope, send))

    async with serving_app(app) as port:
        yield port


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.slow)], autouse=True)
def tls(request: pytest.FixtureRequest, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds over TLS too."""
    if request.param == "tls":
        certificate, key = authority.issue()
        monkeypatch.setattr(Way, "config", {"tls_cert": str(certificate), "tls_key": str(key)})
        monkeypatch.setattr(Way, "client", ssl.create_default_context(cafile=authority.ca_file))


class Way:
    config: ClassVar[dict[str, str]] = {}
    client: ClassVar[ssl.SSLContext | None] = None


async def connect(port: int) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port, ssl=Way.client)


class ServerClock:
    """The clock by which servers wait for their clients. It leaps when a test says so."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._leapt_s

    async def leap(self, port: int, seconds: float) -> None:
        """Return when the server has ended what is late by then. `seconds` are more than its `header_timeout_s`."""
        reader, writer = await connect(port)  # it sends nothing, so it is late too
        self._leapt_s += seconds
        with contextlib.suppress(ConnectionResetError):  # the server may not have read the end of the TLS handshake
            await reader.read()
        writer.close()


@pytest.fixture
def server_clock(monkeypatch: pytest.MonkeyPatch) -> ServerClock:
    clock, on_tick = ServerClock(), HttpServer.on_tick
    monkeypatch.setattr(HttpServer, "on_tick", lambda self, _: on_tick(self, 0))  # it looks at its clients each time
    monkeypatch.setattr(http_connections_module, "_MAX_TICK_S", 1e9)
    monkeypatch.setattr(http_connections_module, "time", clock)
    return clock


@asynccontextmanager
async def serving_app(app: Any, **config: Any) -> AsyncIterator[int]:
    config |= Way.config
    with listening("127.0.0.1", 0) as listener:
        async with http_server(app, RouterConfig(**config), listener, CollectorRegistry()) as server:
            await wait_for_any(server.serving, server.has_started)
            yield listener.getsockname()[1]


class Echo:
    """Answers with what it saw of a request, once the test lets it."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.reads = True
        self.num_asked = 0
        self.num_disconnects = 0
        self.num_read_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.num_asked += 1
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_disconnects += 1
                return
            body += message["body"]
            self.num_read_bytes += len(message["body"])
            more = message["more_body"]
        self.headers = list(scope["headers"])
        if scope["path"] != "/health":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


async def exchange(port: int, *parts: bytes) -> bytes:
    async with asyncio.timeout(30):
        reader, writer = await connect(port)
        try:
            with contextlib.suppress(ConnectionResetError):  # over TLS, a client cannot write after the server's end
                for part in parts:
                    writer.write(part)
                    await writer.drain()
            return await reader.read()
        finally:
            writer.close()


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["message"]


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    return reader, writer


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    head, chunks = await reader.readuntil(b"\r\n\r\n"), []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    assert await reader.readexactly(2) == b"\r\n"
    return head, chunks


async def test_parts_are_chunks_of_a_body_and_the_connection_stays_open() -> None:
    ways: list[bool] = []

    async def answer(writer: Writer) -> None:
        ways.append(writer.write_now(b"too early"))
        await writer.start([(b"content-type", b"text/event-stream")])
        for number in range(20):
            assert writer.write(PART % number)
            assert writer.write_now(b"")  # an empty write does not end the body
        ways.append(writer.write_now(PART % 20))
        await writer.end(b"last")
        ways.append(writer.write_now(b"too late"))

    async with serving(answer) as port:
        reader, writer = await ask(port)
        for _ in range(2):
            head, chunks = await read_chunked(reader)
            assert b"transfer-encoding: chunked" in head
            assert chunks == [*(PART % number for number in range(21)), b"last"]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.close()
    assert ways[:3] == [False, True, False]  # only between the start and the end


async def test_a_slow_reader_pauses_the_stream_and_gets_all_of_it() -> None:
    part, num_parts = b"x" * 65_536, 400
    num_waits = 0

    async def answer(writer: Writer) -> None:
        nonlocal num_waits
        await writer.start([])
        for number in range(num_parts):
            if not writer.write(b"%08d" % number + part):
                num_waits += 1
                waiting.set()
                await writer.drain()
        await writer.end(b"last")

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


async def test_nothing_is_written_to_a_client_that_left() -> None:
    left, shown = asyncio.Event(), asyncio.Event()
    ways: list[bool] = []

    async def answer(writer: Writer) -> None:
        await writer.start([])
        writer.write(b"one")
        await left.wait()
        await eventually(lambda: not writer.write_now(b"more"))  # until the server has noticed
        ways.append(writer.write(b"nobody reads this"))
        await writer.end(b"")
        shown.set()

    async with serving(answer) as port:
        reader, writer = await ask(port)
        await reader.readuntil(b"one")
        writer.transport.abort()
        left.set()
        async with asyncio.timeout(30):
            await shown.wait()
    assert ways == [True]


async def test_an_app_that_ignores_a_disconnect_delays_the_end_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server_module, "_CLOSE_TIMEOUT_S", 0.2)
    asked, never, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(_: ResponseWriter) -> None:
        asked.set()
        await never.wait()
        ended.set()

    async with asyncio.timeout(30):
        async with serving(answer) as port:
            _, writer = await ask(port)
            await asked.wait()
        assert not ended.is_set()
        writer.close()
        never.set()
        await ended.wait()


HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\n"
GET = b"GET /x HTTP/1.1\r\nhost: h\r\n"


NO_REQUESTS = [
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: h\r\n\r\n", 414, "URL is longer than 8192"),
    (GET + b"a: b\r\n" * 130 + b"\r\n", 431, "or 128 lines"),
    (GET + b"a: " + b"b" * 40_000 + b"\r\n\r\n", 431, "larger than 32768 bytes"),
    (GET + b"a: " + b"b" * 40_000, 431, "larger than 32768 bytes"),
    (b"\r\n" * 40_000, 431, "larger than 32768 bytes"),
    (b"GET /x HTTP/1.1\r\n\r\n", 400, "one Host header"),
    (GET + b"host: i\r\n\r\n", 400, "one Host header"),
    (GET + b"a: b\r\n c\r\n\r\n", 400, "not valid HTTP"),
    (GET + b"a: b\0c\r\n\r\n", 400, "not valid HTTP"),
    (b"GET /\0 HTTP/1.1\r\nhost: h\r\n\r\n", 400, "not valid HTTP"),
    (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
    (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "Content-Length"),
    (HEAD + b"content-length: -3\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n", 400, "Content-Length"),
    (HEAD + b"transfer-encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\nno chunk\r\n", 400, "chunk"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"e" * 400_000, 431, "larger than"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 90_000, 431, "larger than"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"b" * 400_000, 431, "larger than"),
    (b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400, "not valid HTTP"),
    (b"CONNECT example:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "example:443"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not valid HTTP"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not valid HTTP"),
]


@pytest.mark.parametrize("has_answered", [False, True], ids=["first", "second"])
async def test_invalid_http_gets_one_error_and_the_connection_ends(has_answered: bool) -> None:
    async with serving_app(Echo()) as port:
        for request_bytes, status, expected in NO_REQUESTS:
            async with asyncio.timeout(30):
                reader, writer = await connect(port)
                if has_answered:
                    writer.write(GET + b"\r\n")
                    assert b"content-length: 0" in await reader.readuntil(b"\r\n\r\n")
                writer.write(request_bytes)
                answer = await reader.read()
                told, message = error_of(answer)
                writer.close()
            assert told == status, request_bytes[:200]
            assert expected in message, request_bytes[:200]
            assert answer.count(b"\r\nx-request-id: req-") == 1, "an answer that the app has no part in has an id too"


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [(b"GET /", b"a" * 65_536, 414), (GET + b"a: ", b"b" * 65_536, 431), (GET, b"a: b\r\n" * 10_000, 431)],
    ids=["URL", "header", "headers"],
)
async def test_endless_input_is_cut_short_and_its_client_reads_why(start: bytes, piece: bytes, status: int) -> None:
    async with serving_app(Echo()) as port:
        answer = await exchange(port, start, *[piece] * 200)  # 13 MB, all of it sent before anything is read
    assert error_of(answer)[0] == status


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 4\r\n\r\nbody",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nb\r\n3;ext=1\r\nody\r\n0\r\nx-tandem-tenant: other\r\n\r\n",
        HEAD + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 4\r\n\r\nbody",
        HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n"
        b"4\r\nbody\r\n0\r\n\r\n",
        HEAD + b"a: " + b"b" * 20_000 + b"\r\ncontent-length: 4\r\n\r\nbody",
    ],
    ids=["plain", "chunked", "websocket", "h2c", "large header"],
)
async def test_a_body_arrives_in_any_framing(request_bytes: bytes) -> None:
    app = Echo()
    request_bytes = request_bytes.replace(b"/x HTTP/1.1\r\n", b"/x HTTP/1.1\r\nconnection: close\r\n")
    async with serving_app(app) as port:
        for cut in (0, 1, 7, len(request_bytes) - 1):
            answer = await exchange(port, request_bytes[:-cut] if cut else b"", request_bytes[-cut:])
            assert answer.endswith(b"\r\n\r\nbody"), cut
            assert b" 200 " in answer
            assert b"x-tandem-tenant" not in dict(
                app.headers
            )  # a trailer does not count as a header, because only headers were checked


async def test_expect_is_answered_and_a_refusal_ends_the_connection() -> None:
    app = Echo()
    async with serving_app(app) as port, asyncio.timeout(30):
        reader, writer = await connect(port)
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"body")
        assert await reader.readuntil(b"\r\n\r\nbody")
        app.reads = False  # as if it refused the request by its head
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")  # and the end: what follows could be the body
        writer.close()


PIPELINED = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\n%05d"


async def expect_answers(reader: asyncio.StreamReader, numbers: range) -> None:
    for number in numbers:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(5) == b"%05d" % number


async def test_any_number_of_pipelined_requests_is_answered_in_order() -> None:
    app = Echo()
    async with serving_app(app) as port, asyncio.timeout(60):
        reader, writer = await connect(port)
        for num_requests in (2, 101, 5000):
            app.may_answer.clear()
            writer.write(b"".join(PIPELINED % number for number in range(num_requests)))
            app.may_answer.set()
            await expect_answers(reader, range(num_requests))
        writer.write(GET.replace(b"host", b"connection: close\r\nhost") + b"\r\n" + GET + b"\r\n")
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1  # nothing after the response that says it is the last
        writer.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[http_protocol_module.HttpProtocol]:
    connections: list[http_protocol_module.HttpProtocol] = []
    made = http_protocol_module.HttpProtocol.connection_made
    monkeypatch.setattr(
        http_protocol_module.HttpProtocol,
        "connection_made",
        lambda self, transport: (connections.append(self), made(self, transport))[1],
    )
    return connections


async def test_waiting_requests_take_bounded_memory(connections: list[http_protocol_module.HttpProtocol]) -> None:
    app = Echo()
    app.may_answer.clear()
    num_requests = 200_000  # 11 MB, more than the sockets of both sides take
    async with serving_app(app) as port, asyncio.timeout(60):
        reader, writer = await connect(port)
        writer.write(b"".join(PIPELINED % (number % 100_000) for number in range(num_requests)))
        await eventually(lambda: bool(connections) and connections[0].flow.read_paused, 60.0)
        (connection,) = connections
        assert len(connection.pipeline) < http_protocol_module.PIECE_BYTES / len(GET)
        assert len(connection._unparsed) < 6 * http_protocol_module.MAX_UNPARSED_BYTES  # one read is 256 KB
        app.may_answer.set()
        await expect_answers(reader, range(1000))
        writer.close()


async def test_a_client_that_leaves_pipelines_is_noticed(connections: list[http_protocol_module.HttpProtocol]) -> None:
    left, num_asked = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_asked
        if scope["type"] == "http":
            num_asked += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

    async with serving_app(app) as port, asyncio.timeout(30):
        _, writer = await connect(port)
        writer.write((GET + b"\r\n") * 3)
        await eventually(lambda: bool(connections) and len(connections[0]._unparsed) == 2 * len(GET + b"\r\n"))
        writer.close()
        await left.wait()
        assert num_asked == 1


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (b"no request\r\n\r\n", 400),
        (GET + b"host: i\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nno chunk\r\n", 400),
        (GET + b"a: " + b"b" * 40_000 + b"\r\n\r\n", 431),
        (HEAD + b"content-length: 9\r\n\r\nshort", 408),
        (GET, 408),
    ],
    ids=["no request", "two hosts", "no chunk", "large header", "slow body", "slow header"],
)
async def test_a_refusal_follows_the_responses_to_earlier_requests(last: bytes, status: int) -> None:
    app = Echo()
    for num_before in (1, 200):
        async with serving_app(app, header_timeout_s=0.3, body_timeout_s=0.3) as port, asyncio.timeout(30):
            app.may_answer.clear()
            app.num_asked = 0
            reader, writer = await connect(port)
            writer.write(b"".join(PIPELINED % number for number in range(num_before)) + last)
            await eventually(lambda: app.num_asked == 1)
            app.may_answer.set()
            await expect_answers(reader, range(num_before))
            assert error_of(await reader.read())[0] == status
            writer.close()


async def test_a_complete_request_that_waits_in_the_pipeline_does_not_time_out(server_clock: ServerClock) -> None:
    app = Echo()
    async with serving_app(app, header_timeout_s=0.2, body_timeout_s=0.2) as port, asyncio.timeout(30):
        app.may_answer.clear()
        connections = {size: await connect(port) for size in (100, 6_000, 20_000, 60_000, 200_000)}
        for size, (_, writer) in connections.items():
            head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size
            writer.write(PIPELINED % 0 + head + b"q" * size)
        await eventually(lambda: app.num_asked == len(connections))
        await server_clock.leap(port, 30.0)
        app.may_answer.set()
        for size, (reader, writer) in connections.items():
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1 200") == 2, (size, answers[:2000])
            writer.close()


@pytest.mark.parametrize("headers", [b"", b"host: h\r\n", b"connection: keep-alive\r\n"])
async def test_an_http_1_0_client_gets_a_stream_without_chunks(headers: bytes) -> None:
    async def answer(writer: Writer) -> None:
        await writer.start([(b"content-type", b"text/event-stream")])
        for number in range(3):
            writer.write(PART % number)
            await writer.drain()
        await writer.end(b"last")

    async with serving(answer) as port:
        head, _, body = (await exchange(port, b"GET / HTTP/1.0\r\n" + headers + b"\r\n")).partition(b"\r\n\r\n")
    assert body == b"".join(PART % number for number in range(3)) + b"last"
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head


async def test_head_gets_the_headers_of_get_and_no_body() -> None:
    with listening("127.0.0.1", 0) as listener:
        config, metrics = RouterConfig(**Way.config), FrontendMetrics(CollectorRegistry())
        app = RouterApp(config, metrics, ApiKeys())

        @app.get("/page")
        async def page() -> Response:
            return Response(b"page")

        async with http_server(app, config, listener, CollectorRegistry()) as server:
            await wait_for_any(server.serving, server.has_started)
            port = listener.getsockname()[1]
            get = b"GET /page HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            expected = (await exchange(port, get)).removesuffix(b"page")
            keep = get.replace(b"connection: close\r\n", b"").replace(b"GET", b"HEAD")
            answers = await exchange(port, keep + get.replace(b"GET", b"HEAD"))
    without_date = re.sub(rb"(date: .*|connection: close|x-request-id: .*)\r\n", b"", expected)
    assert b"content-length: 4" in without_date
    assert re.sub(rb"(date: .*|connection: close|x-request-id: .*)\r\n", b"", answers) == without_date * 2


async def test_an_http_1_0_client_notices_a_body_that_was_cut() -> None:
    async with serving_app(Echo()) as port:
        request = b"POST /x HTTP/1.0\r\ncontent-length: 4\r\n\r\nbody"
        head, _, body = (await exchange(port, request + request)).partition(b"\r\n\r\n")
        assert body == b"body"
        assert b"content-length: 4" in head
        assert b"connection: close" in head


async def test_slow_clients_are_disconnected_and_quick_ones_are_not() -> None:
    app = Echo()
    body = HEAD + b"content-length: 3000\r\n\r\n"
    async with serving_app(app, header_timeout_s=0.3, body_timeout_s=0.3) as port, asyncio.timeout(30):
        silent, head, part, later, running = [await connect(port) for _ in range(5)]
        running[1].write(GET + b"\r\n")
        assert await running[0].readuntil(b"\r\n\r\n")
        app.may_answer.clear()
        running[1].write(GET + b"\r\n")
        later[1].write(GET + b"\r\n")
        head[1].write(GET)
        part[1].write(body)
        assert await silent[0].read() == b""
        assert error_of(await head[0].read())[0] == 408
        assert error_of(await part[0].read())[0] == 408
        assert app.num_disconnects == 1
        app.may_answer.set()  # these waited for us, not for their client
        for reader, writer in (later, running):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(GET)  # the next request has its own deadline
        for reader, writer in (later, running, silent, head, part):
            if reader in (later[0], running[0]):
                assert error_of(await reader.read())[0] == 408
            writer.close()


async def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(server_clock: ServerClock) -> None:
    async with serving_app(Echo(), header_timeout_s=1.0) as port, asyncio.timeout(30):
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await server_clock.leap(port, 100.0)  # longer than nginx (60 s), Envoy and AWS's balancers keep theirs
        await server_clock.leap(port, 25.0)
        assert await reader.read() == b""
        writer.close()


async def send_for_ever(writer: asyncio.StreamWriter, part: bytes) -> None:
    while True:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)  # it never ends, and keeps no core busy until it is cut


async def test_a_large_body_gets_more_time_and_an_endless_unread_one_does_not(server_clock: ServerClock) -> None:
    app = Echo()
    async with serving_app(app, header_timeout_s=0.5, body_timeout_s=0.5) as port, asyncio.timeout(60):
        reader, writer = await connect(port)
        writer.write(HEAD + b"content-length: 65536\r\n\r\n" + b"b" * 60_000)
        await eventually(lambda: app.num_read_bytes == 60_000)
        await server_clock.leap(port, 2.5)  # longer than the body timeout, without the extension for received bytes
        writer.write(b"b" * 5_536)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(65_536)
        app.reads = False
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            await send_for_ever(writer, b"400\r\n" + b"b" * 1024 + b"\r\n")
        writer.close()


async def test_unfinished_bodies_take_bounded_memory_the_oldest_go_first() -> None:
    app = Echo()
    part = b"b" * 60_000
    head = HEAD + b"content-length: 65536\r\n\r\n"
    async with serving_app(app, max_body_bytes=65_536) as port, asyncio.timeout(60):
        slow = []
        for number in range(100):  # 69 of them fit into 64 times 64 KB
            slow.append(await connect(port))
            slow[-1][1].write(head + part)
            await eventually(lambda number=number: app.num_asked > number)
            if number % 10 == 9:  # meanwhile others are served
                assert b" 200 " in await exchange(
                    port, head.replace(b"/x HTTP/1.1", b"/x HTTP/1.1\r\nconnection: close") + b"c" * 65_536
                )
                app.num_asked -= 1
        for reader, _ in slow[:30]:
            assert error_of(await reader.read())[0] == 503
        assert app.num_disconnects in (30, 31, 32)
        for reader, writer in slow[40:]:
            writer.write(b"b" * 5_536)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(65_536)
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "possible", "new_soft"),
    [
        (1024, 4096, 2048, 2048, 2368),
        (65_536, 65_536, 2048, 2048, 65_536),
        (1024, 1024, 2048, 704, 1024),
        (256, 256, 2048, 1, 256),
        (1024, -1, 100_000, 100_000, 100_320),
        (-1, -1, 100_000, 100_000, -1),
    ],
)
def test_connections_are_bounded_by_the_open_file_limit(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, possible: int, new_soft: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert (http_server_module._possible_connections(wanted), limits[-1]) == (possible, (new_soft, hard))


VALID = [
    GET + b"\r\n",
    HEAD + b"content-length: 4\r\n\r\nbody",
    HEAD + b"transfer-encoding: chunked\r\n\r\n4;e=1\r\nbody\r\n0\r\na: b\r\n\r\n",
    HEAD + b"expect: 100-continue\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 4\r\n\r\nbody",
]
PIECES = [
    *(b"\r\n", b"\n", b"\0", b": ", b" ", b"\xff" * 9, b"a" * 9000, b"0\r\n\r\n", b"HTTP/1.0", b"CONNECT "),
    *(b"host: x\r\n", b"host: x\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"upgrade: x\r\n"),
    b"expect: 100-continue\r\n",
]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])  # as in production
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_input_causes_an_internal_error(seed: int) -> None:
    if Way.client is not None:
        pytest.skip("a client of asyncio cannot close only its own side of TLS")
    rng = random.Random(seed)
    app, faults = Echo(), list[Exception]()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        try:
            for _ in range(rng.randint(0, 9)):
                await asyncio.sleep(0)
            await app(scope, receive, send)
        except Exception as exc:  # such as a write to a client that hung up after a pipelined request
            faults.append(exc)

    async with serving_app(watched) as port, asyncio.timeout(60):
        for _ in range(300):
            sent = bytearray(b"".join(rng.choices(VALID, k=rng.randint(1, 3))))
            for _ in range(rng.randint(0, 4)):
                at = rng.randrange(len(sent) + 1)
                sent[at : at + rng.randint(0, 9)] = rng.choice([rng.choice(PIECES), rng.randbytes(2), b""])
            reader, writer = await connect(port)
            cut = rng.randrange(len(sent) + 1)
            writer.write(sent[:cut])
            await asyncio.sleep(0)
            writer.write(sent[cut:])
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert b"HTTP/1.1 5" not in answer, (bytes(sent), answer)
            writer.close()
        assert b" 200 " in await exchange(port, b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert faults == []


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])  # as in production
async def test_connections_that_ended_leave_nothing_to_the_garbage_collector() -> None:
    """A collection after thousands of connections would hold up everything for more than a second."""
    echo, kinds = Echo(), (HttpProtocol, RequestResponseCycle)

    def left() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) in kinds]

    async with serving_app(echo) as port:
        gc.collect()
        gc.disable()
        try:
            for request in (
                b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
                b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n",
            ):
                for is_answered in (True, False):
                    echo.may_answer.set() if is_answered else echo.may_answer.clear()
                    reader, writer = await connect(port)
                    num_asked = echo.num_asked
                    writer.write(request * 3)
                    await eventually(lambda before=num_asked: echo.num_asked > before)
                    if is_answered and request.startswith(b"GET"):
                        await reader.readuntil(b"\r\n\r\n")
                    writer.transport.abort()
                    echo.may_answer.set()
                    await eventually(lambda: not left())
        finally:
            gc.enable()
