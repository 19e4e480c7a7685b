"""The HTTP client against a server whose bytes the test writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tandem.router.engines import upstream as upstream_module
from tandem.router.engines.upstream import PIECE_BYTES, QUICK_BYTES, AnswerTooLarge, Reply, Unreachable, Upstream
from tandem.runtime.time_slicer import TimeSlicer
from tests.support.engines_harness import dead_url
from tests.support.event_loop import Turns
from tests.support.waiting import eventually

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Peer:
    """The engine's side of every connection, with the bytes that it received."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_hung_up = 0
        self.handle: Callable[[asyncio.StreamWriter], Awaitable[None]] = answer(plain(b"ok"))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.handle(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_hung_up += 1
        finally:
            writer.close()


def plain(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)


def answer(*parts: bytes, then_close: bool = False) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def write(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()
            raise ConnectionResetError

    return write


@asynccontextmanager
async def connected(path: str = "", slicer: TimeSlicer | None = None) -> AsyncIterator[tuple[Upstream, Peer]]:
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url, headers = f"http://127.0.0.1:{port}{path}", {"Authorization": "Bearer k"}
    upstream = Upstream(url, headers, connect_timeout_s=5.0, slicer=slicer)
    try:
        yield upstream, peer
    finally:
        upstream.close()
        await asyncio.sleep(0)  # the connections close in the next turn of the event loop
        server.close()
        await eventually(lambda: peer.num_hung_up == peer.num_connections)


async def test_a_request_is_written_whole_and_connections_are_kept() -> None:
    async with connected("/base") as (upstream, peer):
        for content in (b"", b"{}", b"x" * 100_000):
            reply = await upstream.post("/v1/completions", content, "req-1")
            assert (reply.status, await reply.read_all(), reply.is_complete) == (200, b"ok", True)
            reply.close()
        head, _, body = peer.requests[2].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
        assert {b"authorization: Bearer k", b"x-request-id: req-1", b"content-length: 100000"} <= set(
            head.split(b"\r\n")
        )
        assert (body, peer.num_connections) == (b"x" * 100_000, 1)


@pytest.mark.parametrize("seed", range(5))
async def test_an_answer_is_the_same_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [rng.randbytes(rng.randint(1, 300)) for _ in range(20)]
    wire = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    cuts = sorted(rng.sample(range(len(wire)), 30))
    async with connected() as (upstream, peer):
        peer.handle = answer(*(wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)))
        reply = await upstream.post("/", b"", "r")
        assert await reply.read_all() == b"".join(pieces)
        assert reply.headers["content-type"] == "text/event-stream"
        reply.close()


@pytest.mark.parametrize("seed", range(5))
async def test_what_is_pushed_is_the_same_wherever_the_reader_stops(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [rng.randbytes(rng.randint(1, 300)) for _ in range(40)]
    got: list[bytes] = []

    def take(parts: list[bytes]) -> bool:
        got.extend(parts)
        return rng.random() < 0.7

    async with connected() as (upstream, peer):
        peer.handle = answer(CHUNKED, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n")
        reply = await upstream.post("/", b"", "r")
        num_stops = 0
        while not await reply.read_into(take):
            num_stops += 1
            got.append(await reply.read() if rng.random() < 0.3 else b"")
        assert b"".join(got) == b"".join(pieces)
        assert num_stops > 0
        assert await reply.read() == b""
        reply.close()
        assert peer.num_connections == 1


@pytest.mark.parametrize("is_last", [True, False])
async def test_parts_that_arrive_before_the_reading_task_runs_are_pushed(is_last: bool) -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(CHUNKED + b"1\r\na\r\n")
        reply = await upstream.post("/x", b"{}", "id")
        (connection,) = upstream._open
        got: list[bytes] = []
        reading = asyncio.create_task(reply.read_into(lambda parts: got.extend(parts) or True))  # type: ignore[func-returns-value]
        await eventually(lambda: got == [b"a"])
        connection.data_received(b"4\r\n")  # the event loop may read twice before any task runs
        connection.data_received(b"DONE\r\n" + b"0\r\n\r\n" * is_last)
        await eventually(lambda: b"".join(got) == b"aDONE")
        if is_last:
            assert await reading
        else:
            assert not reading.done()
            reading.cancel()
        reply.close()


async def test_a_connection_whose_answer_nobody_read_serves_the_next_request() -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(plain(b"x" * 900_000))
        reply = await upstream.post("/x", b"{}", "id")
        (connection,) = upstream._open
        await eventually(lambda: connection._is_paused)
        reply.close()
        peer.handle = answer(plain(b"next"))
        async with asyncio.timeout(10):
            following = await upstream.post("/x", b"{}", "id")
            assert await following.read_all() == b"next"
        following.close()


async def test_errors_are_raised_to_the_reader() -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(CHUNKED + b"1\r\na\r\n", b"1\r\nb\r\n")

        def take(parts: list[bytes]) -> bool:
            if b"b" in parts:
                raise LookupError("of the one who takes it")
            return True

        reply = await upstream.post("/", b"", "r")
        with pytest.raises(LookupError, match="who takes it"):
            await reply.read_into(take)
        reading = asyncio.create_task(reply.read_into(take))
        await asyncio.sleep(0)
        reply.fail(TimeoutError("enough"))
        with pytest.raises(TimeoutError, match="enough"):
            await reading
        reply.close()


async def test_an_interim_answer_is_not_the_answer() -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", plain(b"late", b"X-A: 1\r\n"))
        reply = await upstream.post("/", b"", "r")
        assert (reply.status, reply.headers) == (200, {"x-a": "1", "content-length": "4"})
        assert await reply.read_all() == b"late"
        reply.close()


async def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(b"HTTP/1.1 200 OK\r\n\r\nsome", b"thing", then_close=True)
        reply = await upstream.post("/", b"", "r")
        assert await reply.read_all() == b"something"
        reply.close()


@pytest.mark.parametrize(
    ("wire", "got"),
    [
        (b"", b""),
        (b"HTTP/1.1 20", b""),
        (CHUNKED + b"5\r\nhel", b"hel"),
        (CHUNKED + b"5\r\nhello\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello", b"hello"),
        (b"this is not HTTP\r\n\r\n", b""),
    ],
)
async def test_an_answer_that_ends_too_soon_is_an_error(wire: bytes, got: bytes) -> None:
    async with connected() as (upstream, peer):
        peer.handle = answer(wire, then_close=True)
        received = bytearray()

        async def receive() -> None:
            reply = await upstream.post("/", b"", "r")
            while data := await reply.read():
                received.extend(data)

        with pytest.raises(ConnectionError):
            await receive()
        assert received == got


async def test_closing_early_drops_the_connection_unless_all_is_here() -> None:
    async with connected() as (upstream, peer):
        go_on = asyncio.Event()

        async def slowly(writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED + b"4\r\ndone\r\n")
            await writer.drain()
            await go_on.wait()
            writer.write(b"0\r\n\r\n")

        peer.handle = slowly
        reply = await upstream.post("/", b"", "r")
        assert await reply.read() == b"done"
        reply.close(is_ending=True)
        go_on.set()
        await eventually(lambda: reply.is_complete)
        go_on.clear()
        reply = await upstream.post("/", b"", "r")
        assert peer.num_connections == 1
        assert await reply.read() == b"done"
        reply.close()
        go_on.set()
        await eventually(lambda: peer.num_hung_up == 1)


async def test_nothing_listens_there() -> None:
    upstream = Upstream(dead_url(), {}, connect_timeout_s=5.0)
    with pytest.raises(Unreachable):
        await upstream.post("/", b"", "r")
    upstream.close()
    await asyncio.sleep(0)  # the connections close in the next turn of the event loop


def test_a_header_cannot_begin_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        Upstream("http://127.0.0.1:1", {"x": "a\r\nb: c"}, connect_timeout_s=1.0)


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 200 OK\r\na: " + b"b" * 600_000],
        [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000],
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 30_000],
        [CHUNKED, b"1;" + b"e" * 600_000],
        [CHUNKED, b"0\r\n" + b"a: b\r\n" * 100_000],
    ],
    ids=["header", "headers", "interim answers", "chunk extension", "trailers"],
)
async def test_a_header_without_end_ends_the_connection(parts: list[bytes]) -> None:
    async with connected() as (upstream, peer), asyncio.timeout(30):
        peer.handle = answer(*parts)
        with pytest.raises(ConnectionError, match="header is larger than 65536 bytes"):
            await (await upstream.post("/", b"", "r")).read_all()


async def test_a_plain_answer_that_is_too_large_is_given_up_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "MAX_ANSWER_BYTES", 1 << 20)
    num_sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 300000000\r\n\r\n")
        for _ in range(300):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
            num_sent += 1

    async with connected() as (upstream, peer), asyncio.timeout(30):
        peer.handle = flood
        reply = await upstream.post("/", b"", "r")
        with pytest.raises(AnswerTooLarge, match="larger than 1048576 bytes; ask for a stream"):
            await reply.read_all()
        reply.close()
    assert num_sent < 30


async def test_an_upgrade_is_not_an_answer() -> None:
    async with connected() as (upstream, peer), asyncio.timeout(30):
        peer.handle = answer(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello")
        with pytest.raises(ConnectionError):
            await upstream.post("/", b"", "r")


class _NoTime:
    """A clock by which each piece takes all of a time slice."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


async def test_a_flood_takes_a_piece_of_each_turn_and_is_overtaken() -> None:
    num_flooded, flood_bytes = 8, 20 * PIECE_BYTES  # a piece of each comes with its head
    async with connected(slicer=TimeSlicer(_NoTime())) as (upstream, peer), asyncio.timeout(30):
        peer.handle = answer(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * flood_bytes, then_close=True)
        flooded = [await upstream.post("/", b"", "r") for _ in range(num_flooded)]
        peer.handle = answer(plain(b"small"))
        turns = Turns()

        def take(parts: list[bytes]) -> bool:
            turns.add(sum(map(len, parts)))
            return True

        reading = [asyncio.create_task(reply.read_into(take)) for reply in flooded]
        try:
            while not all(task.done() for task in reading):
                small = await upstream.post("/", b"", "r")
                assert await small.read_all() == b"small"
                small.close()
                turns_of_small = turns.number
            assert all(task.result() for task in reading)
        finally:
            turns.close()
        assert turns.amounts.total() == num_flooded * flood_bytes
        first, *others = turns.amounts.values()  # when the readers come, a piece of each is there
        assert first <= (num_flooded + 1) * PIECE_BYTES
        assert max(others) <= PIECE_BYTES
        assert turns_of_small > 0
        for reply in flooded:
            reply.close()


async def test_what_nobody_reads_is_not_parsed_and_its_connection_is_not_read() -> None:
    async with connected() as (upstream, peer), asyncio.timeout(30):
        peer.handle = answer(plain(b"x" * 20_000_000))
        reply = await upstream.post("/", b"", "r")
        (connection,) = upstream._open
        await eventually(lambda: connection._is_paused)
        assert sum(map(len, reply._items)) <= PIECE_BYTES
        assert connection._num_unparsed_bytes < 2_000_000
        assert not connection._transport.is_reading()
        assert len(await reply.read_all()) == 20_000_000
        assert not connection._is_paused
        reply.close()
        assert upstream._idle == [connection]


class _Reading:
    """An answer that is being read: the bytes of each call of its reader."""

    def __init__(self, upstream: Upstream, reply: Reply) -> None:
        self.calls: list[bytes] = []
        self.reply = reply
        (self.connection,) = upstream._open
        self._task = asyncio.create_task(reply.read_into(self._take))

    def receive(self, body: bytes) -> None:
        self.connection.data_received(b"%x\r\n%b\r\n" % (len(body), body))

    def _take(self, parts: list[bytes]) -> bool:
        self.calls.append(b"".join(parts))
        return True

    def close(self) -> None:
        self._task.cancel()
        self.reply.close()


async def being_read(upstream: Upstream, peer: Peer) -> _Reading:
    """An answer whose first byte was read."""
    peer.handle = answer(CHUNKED + b"1\r\na\r\n")
    reading = _Reading(upstream, await upstream.post("/x", b"{}", "id"))
    await eventually(lambda: reading.calls == [b"a"])
    reading.calls.clear()
    return reading


@pytest.mark.parametrize("why", ["is_costly", "is_bulky", "large"])
async def test_an_answer_that_may_take_long_waits_for_its_turn(why: str) -> None:
    async with connected() as (upstream, peer):
        reading = await being_read(upstream, peer)
        reading.receive(b"b")
        assert reading.calls == [b"b"]
        part = b"c" * (QUICK_BYTES + 1 if why == "large" else 1)
        if why != "large":
            setattr(reading.reply, why, True)
        reading.receive(part)
        assert reading.calls == [b"b"]
        await eventually(lambda: reading.calls == [b"b", part])
        reading.close()


async def test_small_parts_that_wait_are_one_piece() -> None:
    async with connected() as (upstream, peer):
        reading = await being_read(upstream, peer)
        reading.reply.is_costly = True
        for _ in range(100):
            reading.receive(b"b")
        assert not reading.calls
        await eventually(lambda: reading.calls == [b"b" * 100])
        reading.close()


async def test_engines_take_turns_however_many_connections_they_have() -> None:
    slicer = TimeSlicer(_NoTime())
    async with connected(slicer=slicer) as (flooding, _), connected(slicer=slicer) as (other, peer):
        reading = await being_read(other, peer)
        reading.reply.is_costly = True
        for _ in range(100):
            slicer.add(lambda _: reading.calls.append(b"flooding"), flooding.netloc)
        reading.receive(b"b")
        await eventually(lambda: b"b" in reading.calls)
        assert reading.calls.index(b"b") <= 2
        reading.close()


async def test_an_answer_that_ends_before_it_is_parsed_is_whole() -> None:
    async with connected() as (upstream, peer), asyncio.timeout(30):
        body = random.Random(0).randbytes(300_000)
        peer.handle = answer(b"HTTP/1.1 200 OK\r\n\r\n" + body[:1], body[1:], then_close=True)
        reply = await upstream.post("/", b"", "r")
        (connection,) = upstream._open
        await eventually(lambda: connection._is_paused or connection._is_lost)
        assert await reply.read_all() == body
        reply.close()


async def test_what_follows_an_answer_is_not_taken_for_the_next_one() -> None:
    async with connected() as (upstream, peer), asyncio.timeout(30):
        peer.handle = answer(plain(b"x" * 10_000) + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged" * 1000)
        reply = await upstream.post("/", b"", "r")
        assert await reply.read_all() == b"x" * 10_000
        reply.close()
        peer.handle = answer(plain(b"right"))
        following = await upstream.post("/", b"", "r")
        assert await following.read_all() == b"right"
        following.close()
