"""Many connections of somebody without a key: does anybody else wait?

    python -m benchmarks.lockout [--tls] [--router-processes 2] [--before CHECKOUT]

A `tandem route` with API keys is in front of engines that compute nothing and send a token every 20 ms. Each attack
opens connections that read slowly or not at all, pipeline requests for open paths, or stop in the middle of a request
or a TLS handshake; connections that the server ends are opened again. Meanwhile a process of its own asks for `/health`
on a new connection every 50 ms, sends short requests with a key, and reads a stream with a key. With `--before` the
same attacks are made on the server of another checkout first. All traffic stays on loopback.

Stands behind the aim that `/health` answers within 0.5 s, whatever clients without a key do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks.common import (
    HERE,
    Checkout,
    arguments,
    beside,
    console,
    engines_toml,
    mock_engines,
    print_table,
    routing,
    write_result,
)
from benchmarks.mock_engine import MODEL
from tandem.loadtest.stats import Distribution
from tests.support.certificates import Authority
from tests.support.keys import make_key_file

MAX_HEALTH_S = 0.5
_KEY = "sk-lockout-0123456789"
_GIVE_UP_S = 15.0  # an answer that has not come by then counts as refused
_HEALTH_EVERY_S, _ANSWER_EVERY_S, _MEMORY_EVERY_S = 0.05, 0.25, 0.1
_STEP_MS, _NUM_STREAMED = 20, 2000  # of the stream
_RECEIVE_BUFFER_BYTES = 4096  # of connections that read slowly: the less the client's kernel takes, the more waits
_MAX_QUICK = 200  # connections of the attacks that --quick makes
_SMALL, _DEFAULT = ("--max-connections=100",), ()  # flags of servers


@dataclass(frozen=True, slots=True)
class _Attack:
    """Connections that all do the same."""

    name: str
    flags: tuple[str, ...]  # of the server
    num_connections: int
    target: str = ""  # of the requests
    num_requests: int = 0  # pipelined; the last one ends the connection
    read_bytes: int = 65_536
    every_s: float = 0.0  # pause between two reads
    opening: bytes = b""  # sent instead of requests, a byte each second
    leaves: bool = False  # without reading anything
    shakes_hands: bool = True  # with TLS; False = the opening comes instead of the handshake

    @property
    def content(self) -> bytes:
        """The requests of one connection."""
        head = b"GET %b HTTP/1.1\r\nhost: localhost\r\n" % self.target.encode()
        last = head + b"connection: close\r\n\r\n" if self.num_requests else b""
        return (head + b"\r\n") * (self.num_requests - 1) + last


_ATTACKS = (
    _Attack("quiet", _SMALL, 0),
    _Attack("slow readers of /metrics", _SMALL, 164, "/metrics", 20, 8192, 20.0),
    _Attack("readers of a byte", _SMALL, 164, "/metrics", 20, 1, 1.0),
    _Attack("silence", _SMALL, 500),
    _Attack("slow heads", _SMALL, 500, opening=b"GET /health HTTP/1.1\r\nhost: localhost\r\n"),
    _Attack("half a handshake", _SMALL, 500, opening=b"\x16\x03\x01\x02\x00", shakes_hands=False),
    _Attack("40 pipelines of /metrics", _DEFAULT, 40, "/metrics", 20),
    _Attack("100 pipelines of /metrics", _DEFAULT, 100, "/metrics", 20),
    _Attack("200 pipelines of /metrics", _DEFAULT, 200, "/metrics", 20),
    _Attack("300 that ask and leave", _DEFAULT, 300, "/v1/models", 1, leaves=True),
    _Attack("2300 pipelines of /metrics", _DEFAULT, 2300, "/metrics", 20),
    _Attack("2300 pipelines of a page", _DEFAULT, 2300, "/dashboard/style.css", 100),
    _Attack("2300 pipelines without a key", _DEFAULT, 2300, "/v1/models", 100),
    _Attack("2300 slow readers of a page", _DEFAULT, 2300, "/dashboard/style.css", 100, 1024, 5.0),
)


@dataclass(slots=True)
class _Seen:
    """What others saw during one attack."""

    attack: str
    health_s: list[float] = field(default_factory=list)  # how long each answer took
    answer_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)  # between two tokens of the stream
    num_refused: dict[str, int] = field(default_factory=lambda: {"/health": 0, "answer": 0, "stream": 0})
    num_opened: int = 0  # connections of the attack
    memory_mb: tuple[float, float] = (math.nan, math.nan)  # of the router's processes: before, and the most

    def row(self) -> list[object]:
        """A row of the table."""
        gap = Distribution.of(self.gap_s)
        return [
            self.attack,
            max(self.health_s, default=math.nan),
            self.num_refused["/health"],
            max(self.answer_s, default=math.nan),
            self.num_refused["answer"],
            1e3 * gap.p99,
            1e3 * gap.max,
            self.num_refused["stream"],
            f"{self.memory_mb[0]:.0f} -> {self.memory_mb[1]:.0f}",
        ]


class _Target(NamedTuple):
    """Where the server is, for processes that attack or watch it."""

    port: int
    ca_file: str  # "" = plain HTTP

    def tls(self) -> ssl.SSLContext | None:
        """What its clients speak."""
        return ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None


# -- the attack


async def _attack(target: _Target, attack: _Attack, seconds: float) -> int:
    """Attack for a while; returns the number of connections that were opened."""
    end_s, tls, num_opened = time.monotonic() + seconds, target.tls(), 0

    async def keep_one_open() -> None:
        nonlocal num_opened
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, EOFError), socket.socket() as client:
                client.setblocking(False)
                if attack.every_s:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", target.port))
                num_opened += 1
                await _use(client, attack, tls)
            await asyncio.sleep(0.1)  # a bound on how often it comes back

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(keep_one_open() for _ in range(attack.num_connections)))
    return num_opened


async def _use(client: socket.socket, attack: _Attack, tls: ssl.SSLContext | None) -> None:
    """Send what the attack sends, and read until the server ends the connection."""
    loop = asyncio.get_running_loop()
    session = await _shake_hands(client, tls) if tls and attack.shakes_hands else None
    for at in range(len(attack.opening)):
        await loop.sock_sendall(client, _sealed(session, attack.opening[at : at + 1]))
        await asyncio.sleep(1.0)  # part of the attack
    if attack.leaves:
        await loop.sock_sendall(client, _sealed(session, attack.content))
        return
    sending = asyncio.ensure_future(loop.sock_sendall(client, _sealed(session, attack.content)))
    try:
        while await loop.sock_recv(client, attack.read_bytes):  # noqa: ASYNC110  (the pause is part of the attack)
            await asyncio.sleep(attack.every_s)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


class _Session(NamedTuple):
    """TLS of one connection. Its answers are read, not decrypted."""

    tls: ssl.SSLObject
    outgoing: ssl.MemoryBIO


async def _shake_hands(client: socket.socket, context: ssl.SSLContext) -> _Session:
    loop, incoming, outgoing = asyncio.get_running_loop(), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(client, outgoing.read())
            if not (data := await loop.sock_recv(client, 65_536)):
                raise EOFError from None
            incoming.write(data)
        else:
            return _Session(tls, outgoing)


def _sealed(session: _Session | None, content: bytes) -> bytes:
    if session is None or not content:
        return content
    session.tls.write(content)
    return session.outgoing.read()


def _attack_process(pipe: Connection, target: _Target, attack: _Attack, seconds: float) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_attack(target, attack, seconds)))


# -- everybody else


class _Watch:
    """Honest clients, each on a new connection."""

    def __init__(self, target: _Target, seen: _Seen, seconds: float) -> None:
        self._target = target
        self._tls = target.tls()
        self._seen = seen
        self._end_s = time.monotonic() + seconds

    async def run(self) -> None:
        """Watch until the time is over."""
        await asyncio.gather(self._health(), self._answers(), self._streams())

    async def _health(self) -> None:
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        await self._repeat("/health", head, self._seen.health_s, _HEALTH_EVERY_S)

    async def _answers(self) -> None:
        await self._repeat("answer", self._post(4, "false"), self._seen.answer_s, _ANSWER_EVERY_S)

    async def _repeat(self, what: str, request: bytes, times_s: list[float], every_s: float) -> None:
        while time.monotonic() < self._end_s:
            began = time.monotonic()
            if await self._get(request) != b"200":
                self._seen.num_refused[what] += 1
            times_s.append(time.monotonic() - began)
            await asyncio.sleep(every_s)

    async def _get(self, request: bytes) -> bytes:
        """The status of an answer; b"" without one."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S), self._connected() as (reader, writer):
                writer.write(request)
                return bytes((await reader.read(2**20))[9:12])
        return b""

    async def _streams(self) -> None:
        while time.monotonic() < self._end_s:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_GIVE_UP_S + self._end_s - time.monotonic()), self._connected() as streams:
                    await self._read_stream(*streams)
            await asyncio.sleep(0.1)

    async def _read_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._post(_NUM_STREAMED, "true"))
        if b" 200 " not in await reader.readline():
            self._seen.num_refused["stream"] += 1
            return
        last_s: float | None = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                if last_s is not None:
                    self._seen.gap_s.append(now_s - last_s)
                last_s = now_s
            if line.startswith(b"data: [DONE]") or time.monotonic() > self._end_s:
                return
        self._seen.num_refused["stream"] += 1  # cut

    def _post(self, max_tokens: int, stream: str) -> bytes:
        body = (
            f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "max_tokens": {max_tokens}, '
            f'"stream": {stream}, "seed": {_STEP_MS}}}'
        )
        return (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"authorization: Bearer {_KEY}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    @contextlib.asynccontextmanager
    async def _connected(self) -> Any:
        name = "localhost" if self._tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._target.port, ssl=self._tls, server_hostname=name
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _watch_process(pipe: Connection, target: _Target, seen: _Seen, seconds: float) -> None:
    asyncio.run(_Watch(target, seen, seconds).run())
    pipe.send(seen)


# -- the benchmark


def _run(process: psutil.Process, target: _Target, attack: _Attack, seconds: float) -> _Seen:
    """One attack, and what others saw. Attackers and watchers have a process of their own each."""
    watching_s = seconds + 4.0  # a second before the attack, and some after it
    with (
        _memory_of(process) as sizes_mb,
        beside(_watch_process, target, _Seen(attack.name), watching_s) as watch,
    ):
        time.sleep(1.0)
        with beside(_attack_process, target, attack, seconds) as attackers:
            seen: _Seen = watch.recv()
            seen.num_opened = attackers.recv()
    seen.memory_mb = (sizes_mb[0], max(sizes_mb))
    return seen


@contextlib.contextmanager
def _memory_of(process: psutil.Process) -> Iterator[list[float]]:
    """Resident memory of the processes that serve HTTP, in MB, taken again and again while the block runs."""
    edges = [child for child in process.children() if "tandem.frontend.processes.child" in child.cmdline()]
    sizes_mb, done = list[float](), threading.Event()

    def measure() -> None:
        while not done.wait(_MEMORY_EVERY_S if sizes_mb else 0.0):
            sizes_mb.append(sum(one.memory_info().rss for one in (process, *edges)) / 2**20)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield sizes_mb
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _server(
    engines: list[str], settings: argparse.Namespace, flags: tuple[str, ...], checkout: Checkout
) -> Iterator[tuple[psutil.Process, _Target]]:
    with tempfile.TemporaryDirectory() as name:
        folder, ca_file, tls = Path(name), "", None
        flags += (f"--api-key-file={make_key_file(folder / 'keys.toml', {_KEY: 'honest'})}",)
        flags += (f"--router-processes={settings.router_processes}",)
        if settings.tls:
            authority = Authority(folder)
            certificate, key = authority.issue()
            ca_file, flags = str(authority.ca_file), (*flags, f"--tls-cert={certificate}", f"--tls-key={key}")
            tls = ssl.create_default_context(cafile=ca_file)
        with routing(engines_toml(engines, "openai"), *flags, checkout=checkout, tls=tls) as (url, pid):
            yield psutil.Process(pid), _Target(int(url.rpartition(":")[2]), ca_file)


def _measure(name: str, settings: argparse.Namespace, checkout: Checkout, engines: list[str]) -> list[_Seen]:
    found = []
    for attack in _ATTACKS:
        if settings.only not in attack.name or (settings.quick and attack.num_connections > _MAX_QUICK):
            continue
        # A server each, so that no attack meets what the one before has left.
        with _server(engines, settings, attack.flags, checkout) as (process, target):
            found.append(_run(process, target, attack, 3.0 if settings.quick else settings.seconds))
        console.print(f"[dim]measured {name}: {attack.name}, {found[-1].num_opened} connections opened[/]")
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", metavar="PART", help="attacks with this in their name")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="the server speaks HTTPS")
    parser.add_argument("--router-processes", type=int, default=1, metavar="N", help="as of `tandem serve`")
    parser.add_argument("--before", metavar="CHECKOUT", help="a checkout to compare with")
    settings = parser.parse_args()
    checkouts = {"before": Checkout(Path(settings.before).resolve())} if settings.before else {}
    checkouts["now"] = HERE
    with mock_engines() as engines:
        results = {name: _measure(name, settings, checkout, engines) for name, checkout in checkouts.items()}
    headings = ["", "/health s", "lost", "answer s", "lost", "p99 gap ms", "longest", "streams lost", "memory MB"]
    for name, found in results.items():
        print_table(f"Longest waits of others, {name}", headings, [seen.row() for seen in found])
    write_result("lockout", settings, {name: [asdict(seen) for seen in found] for name, found in results.items()})
    return int(not settings.quick and any(max(seen.health_s) > MAX_HEALTH_S for seen in results["now"]))


if __name__ == "__main__":
    sys.exit(main())
