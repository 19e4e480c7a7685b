"""An object store that answers as it should not, on a free port of the loopback: for tests of tiers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

__all__ = ["Answer", "answers_nothing", "hostile_s3", "lists_without_end", "one_byte_at_a_time"]

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]

_HEAD = b'HTTP/1.1 200 OK\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\netag: "x"\r\ncontent-length: %d\r\n\r\n'
_ENTRY = (
    b"<Contents><Key>folder/%032x-</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
)
_LISTING = (
    b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>%b"
    b"</ListBucketResult>"
)


async def answers_nothing(_: asyncio.StreamWriter) -> None:
    """Accept a request and say no word."""
    await asyncio.sleep(3600.0)


async def one_byte_at_a_time(writer: asyncio.StreamWriter) -> None:
    """Send a block as long as it can be waited for."""
    writer.write(_HEAD % 1_000_000)
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


def lists_without_end() -> Answer:
    """A listing whose every page names another one."""
    numbers = itertools.count()

    async def answer(writer: asyncio.StreamWriter) -> None:
        page = _LISTING % b"".join(_ENTRY % next(numbers) for _ in range(1000))
        writer.write(_HEAD % len(page) + page)

    return answer


@contextmanager
def hostile_s3(answer: Answer) -> Iterator[dict[str, str]]:
    """Options for a store there. Each request gets `answer`."""
    started = threading.Event()
    ports: list[int] = []
    stops: list[Callable[[], object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.transport.abort()

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(10)
        yield {
            "endpoint": f"http://127.0.0.1:{ports[0]}",
            "access_key_id": "tandem",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }
    finally:
        for stop in stops:
            stop()
        thread.join(10)
