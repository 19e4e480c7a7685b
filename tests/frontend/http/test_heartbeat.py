"""When a stream without tokens sends its head and pings, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.frontend.http.heartbeat import Heartbeat
from tandem.frontend.http.response_writer import DIRECT_WRITE, ResponseWriter

COMMENT = b": ping\n\n"


@dataclass(eq=False)
class Timer:
    at_s: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Connection:
    """A stream, its client, and the clock of its timers."""

    path: str = "/v1/chat/completions"
    is_direct: bool = True
    now_s: float = 0.0
    is_full: bool = False  # the client reads nothing
    sent: list[tuple[float, bytes]] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = asyncio.Event()
        extensions = {DIRECT_WRITE: {"write": self._write}} if self.is_direct else {}
        self.writer = ResponseWriter({"type": "http", "extensions": extensions}, self._send)
        self.heartbeat = Heartbeat(self.writer, [], self.path, self._call_later)

    def pass_time(self, until_s: float) -> None:
        while due := [one for one in self.timers if not one.is_cancelled and one.at_s <= until_s]:
            first = min(due, key=lambda one: one.at_s)
            self.timers.remove(first)
            self.now_s = first.at_s
            first.callback()
        self.now_s = until_s

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, callback))
        return self.timers[-1]

    def _write(self, data: bytes) -> bool:
        if not self.is_full:
            self.sent.append((self.now_s, data))
        return not self.is_full

    async def _send(self, message: Any) -> None:
        if self.is_full:
            await self.room.wait()
        self.sent.append((self.now_s, message.get("body", b"head")))


@pytest.mark.parametrize("is_direct", [True, False], ids=["HTTP/1.1", "through ASGI alone, as for HTTP/1.0"])
async def test_a_silent_stream_sends_its_head_and_pings(is_direct: bool) -> None:
    connection = Connection(is_direct=is_direct)
    with connection.heartbeat:
        connection.pass_time(1.9)
        assert connection.sent == []
        connection.pass_time(35)
    pings = [(at_s, COMMENT) for at_s in (2.0, 12.0, 22.0, 32.0)]
    assert connection.sent == [(2.0, b"head"), *pings]
    connection.pass_time(100)
    assert len(connection.sent) == 5, "it pinged after its end"


async def test_a_stream_that_begins_in_time_gets_no_ping_while_it_flows() -> None:
    connection = Connection()
    with connection.heartbeat:
        connection.pass_time(1)
        await connection.writer.start([])
        for at_s in range(1, 60, 5):
            connection.pass_time(at_s)
            connection.writer.write(b"token")
    assert {data for _, data in connection.sent} == {b"head", b"token"}


async def test_a_stream_that_falls_silent_later_gets_pings() -> None:
    connection = Connection()
    with connection.heartbeat:
        await connection.writer.start([])
        connection.pass_time(13)
        connection.writer.write(b"token")
        connection.pass_time(45)
        connection.writer.write(b"token")
        connection.pass_time(52)
    pings = [at_s for at_s, data in connection.sent if data == COMMENT]
    assert pings == [2, 12, 32, 42]


@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_client_that_reads_nothing_gets_events_and_no_pings(is_direct: bool) -> None:
    connection = Connection(is_direct=is_direct)
    with connection.heartbeat:
        connection.is_full = True
        connection.pass_time(25)  # the head waits too
        assert connection.sent == []
        connection.is_full = False
        connection.room.set()
        await connection.writer.drain()
        connection.writer.write(b"token")
        connection.is_full = True
        connection.room.clear()
        connection.pass_time(55)
        connection.is_full = False
        connection.room.set()
    await connection.writer.end(b"last")
    assert [data for _, data in connection.sent] == [b"head", b"token", b"last"]


async def test_the_ping_of_anthropics_api_is_an_event() -> None:
    connection = Connection("/v1/messages")
    with connection.heartbeat:
        connection.pass_time(2)
    assert connection.sent[-1][1] == b'event: ping\ndata: {"type": "ping"}\n\n'


async def test_a_client_that_is_gone_is_left_to_its_task() -> None:
    """The task learns of it by itself. A timer that raised would only write to the log."""
    connection = Connection(is_direct=False)

    async def broken(_: Any) -> None:
        raise ConnectionResetError

    connection.writer = ResponseWriter({"type": "http"}, broken)
    connection.heartbeat = Heartbeat(connection.writer, [], connection.path, connection._call_later)
    with connection.heartbeat:
        connection.pass_time(30)
