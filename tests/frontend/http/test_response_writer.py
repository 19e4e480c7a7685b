from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.http.errors import ClientDisconnected
from tandem.frontend.http.response_writer import DIRECT_WRITE, EagerAwaitable, ResponseWriter
from tests.support.waiting import eventually


class Server:
    """An ASGI server's side: what was sent, and whether its client reads."""

    def __init__(self, write: Callable[[bytes], bool] | None = None) -> None:
        self.sent: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self.error: OSError | None = None
        scope: dict[str, Any] = {"type": "http"}
        if write is not None:
            scope["extensions"] = {DIRECT_WRITE: {"write": write}}
        self.writer = ResponseWriter(scope, self._send)

    async def _send(self, message: Any) -> None:
        await self.room.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message.get("body", b"start"))


async def test_without_the_extension_parts_go_by_send() -> None:
    server = Server()
    await server.writer.start([])
    assert server.writer.write(b"one")
    server.room.clear()
    assert not server.writer.write(b"two")
    draining = asyncio.create_task(server.writer.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    server.room.set()
    await draining
    await server.writer.end(b"last")
    assert server.sent == [b"start", b"one", b"two", b"last"]


async def test_what_cannot_be_written_at_once_goes_by_send_and_in_order() -> None:
    written: list[bytes] = []
    can_write = True

    def write(data: bytes) -> bool:
        if can_write:
            written.append(data)
        return can_write

    server = Server(write)
    assert server.writer.write(b"one")
    can_write = False
    server.room.clear()
    assert not server.writer.write(b"two")
    server.room.set()
    await server.writer.drain()
    await server.writer.drain()  # again
    assert (written, server.sent) == ([b"one"], [b"two"])


@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_broken_connection_is_a_client_that_left(is_slow: bool) -> None:
    server = Server()
    server.error = ConnectionResetError("gone")
    if is_slow:
        server.room.clear()
        server.writer.write(b"one")
        server.room.set()
        with pytest.raises(ClientDisconnected):
            await server.writer.drain()
    else:
        with pytest.raises(ClientDisconnected):
            server.writer.write(b"one")
    with pytest.raises(ClientDisconnected):
        await server.writer.end(b"last")


async def test_closing_ends_what_waits_for_the_client() -> None:
    server = Server()
    server.room.clear()
    server.writer.write(b"one")
    server.writer.close()
    server.room.set()
    await server.writer.drain()
    assert server.sent == []


async def test_the_end_comes_after_what_waits() -> None:
    server = Server()
    server.room.clear()
    assert not server.writer.write(b"one")
    ending = asyncio.create_task(server.writer.end(b"last"))
    await asyncio.sleep(0)
    server.room.set()
    await ending
    assert server.sent == [b"one", b"last"]


@pytest.mark.parametrize("error", [OSError("gone"), None], ids=["an error", "a cancellation"])
async def test_what_is_awaited_twice_ends_where_it_waits(error: OSError | None) -> None:
    loop, seen = asyncio.get_running_loop(), list[str]()
    first, second = loop.create_future(), loop.create_future()

    async def work() -> None:
        try:
            seen.append(await first)
            seen.append(await second)
        except BaseException as exc:
            seen.append(type(exc).__name__)
            raise

    started = EagerAwaitable(work())
    rest = asyncio.ensure_future(started)
    first.set_result("a")
    await eventually(lambda: seen == ["a"])
    rest.cancel() if error is None else second.set_exception(error)
    [ended] = await asyncio.gather(rest, return_exceptions=True)
    assert (seen, ended is error) == (["a", type(ended).__name__], error is not None)
    assert started.is_done
