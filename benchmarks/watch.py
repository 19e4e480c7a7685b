"""How long honest clients of a server wait while it is attacked. They have a process of their own.

Each asks on a new connection: for `/health`, for a short answer, and for streams, the gaps of which are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.common import beside
from benchmarks.mock_engine import MODEL

HEALTH, ANSWER, GAP, STREAM = "/health", "answer", "gap", "stream"  # kinds of waits; streams are kept if they are lost
MAX_HEALTH_S = 0.5
STEP_MS = 20  # of the streams, if the engine is `mock_engine`
_GIVE_UP_S = 15.0  # an answer, or a token, that has not come by then counts as lost
_ANSWER_EVERY_S = 0.25
_NUM_STREAMED = 2000
_GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


class Watched(NamedTuple):
    """A server on loopback, for processes that attack or watch it."""

    port: int
    ca_file: str = ""  # "" = plain HTTP
    key: str = ""
    health_every_s: float = 0.02

    def tls(self) -> ssl.SSLContext | None:
        """What its clients speak."""
        return ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None


class Wait(NamedTuple):
    """For an answer, or for a stream's next token."""

    began_s: float  # by `time.monotonic`, which is the same in all processes
    waited_s: float
    is_lost: bool = False  # no answer, or another one


Waits = dict[str, list[Wait]]  # by kind


def watching(server: Watched, *kinds: str) -> contextlib.AbstractContextManager[Connection]:
    """Clients that wait for these kinds of things while the block runs."""
    return beside(_watch, server, kinds)


def taken(watch: Connection, *, is_end: bool = False) -> Waits:
    """The waits that have ended since the last call; at the end, those that go on now are awaited too."""
    watch.send(is_end)
    waits: Waits = watch.recv()
    return waits


def longest_s(waits: Sequence[Wait]) -> float:
    """The longest wait."""
    return max((wait.waited_s for wait in waits), default=0.0)


def chat(server: Watched, *, model: str = MODEL, **fields: object) -> bytes:
    """A request for a chat answer, as bytes."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}], **fields})
    key = f"authorization: Bearer {server.key}\r\n" if server.key else ""
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"{key}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


@contextlib.asynccontextmanager
async def asked(
    server: Watched, request: bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a request on a new connection, which ends with the block. Raises `OSError` if nobody listens."""
    async with asyncio.timeout(_GIVE_UP_S):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=tls, server_hostname="localhost" if tls else None
        )
    try:
        writer.write(request)
        yield reader
    finally:
        writer.transport.abort()


def _watch(pipe: Connection, server: Watched, kinds: Sequence[str]) -> None:
    asyncio.run(_Watch(server).run(pipe, kinds))


class _Watch:
    """The clients."""

    def __init__(self, server: Watched) -> None:
        self._server = server
        self._tls = server.tls()
        self._waits: Waits = defaultdict(list)
        self._is_ending = False

    async def run(self, pipe: Connection, kinds: Sequence[str]) -> None:
        """Watch, and send what was seen when asked for it, until the last time."""
        starts = {
            HEALTH: lambda: self._repeat(HEALTH, _GET_HEALTH, self._server.health_every_s),
            ANSWER: lambda: self._repeat(ANSWER, chat(self._server, max_tokens=4, seed=STEP_MS), _ANSWER_EVERY_S),
            GAP: self._streams,
        }
        clients = [asyncio.ensure_future(starts[kind]()) for kind in kinds]
        while not self._is_ending:
            self._is_ending = await asyncio.to_thread(pipe.recv)
            if self._is_ending:
                await asyncio.gather(*clients)
            pipe.send({kind: self._waits[kind] for kind in (HEALTH, ANSWER, GAP, STREAM)})
            self._waits.clear()

    async def _repeat(self, kind: str, request: bytes, every_s: float) -> None:
        while not self._is_ending:
            began_s, status = time.monotonic(), b""
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_GIVE_UP_S), asked(self._server, request, self._tls) as reader:
                    status = (await reader.read(2**20))[9:12]
            self._waits[kind].append(Wait(began_s, time.monotonic() - began_s, status != b"200"))
            await asyncio.sleep(every_s)

    async def _streams(self) -> None:
        request = chat(self._server, max_tokens=_NUM_STREAMED, seed=STEP_MS, stream=True)
        while not self._is_ending:
            began_s, is_whole = time.monotonic(), False
            with contextlib.suppress(OSError):
                async with asked(self._server, request, self._tls) as reader:
                    is_whole = await self._read_stream(reader)
            if not is_whole:
                self._waits[STREAM].append(Wait(began_s, time.monotonic() - began_s, is_lost=True))
            await asyncio.sleep(0.1)

    async def _read_stream(self, reader: asyncio.StreamReader) -> bool:
        """Note the gaps; returns whether it was whole as far as it was read."""
        last_s = 0.0
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), _GIVE_UP_S)
            except TimeoutError:
                self._waits[GAP].append(Wait(last_s, _GIVE_UP_S, is_lost=True))
                return False
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                if last_s:
                    self._waits[GAP].append(Wait(last_s, now_s - last_s))
                last_s = now_s
            if not line or line.startswith(b"data: [DONE]") or self._is_ending:
                return bool(line)
