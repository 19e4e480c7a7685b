"""Many connections of somebody without a key: does anybody else wait?

    python -m benchmarks.lockout [--tls] [--router-processes 2] [--base CHECKOUT]

A `tandem route` with API keys is in front of engines that compute nothing and send a token every 20 ms. Each attack
opens connections that read slowly or not at all, pipeline requests for open paths, or stop in the middle of a request
or a TLS handshake; connections that the server ends are opened again. Meanwhile a process of its own asks for `/health`
on a new connection every 50 ms, sends short requests with a key, and reads a stream with a key. With `--base` the
same attacks are made on the server of another checkout first. All traffic stays on loopback.

Stands behind the aim that `/health` answers within 0.5 s, whatever clients without a key do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks.common import (
    arguments,
    beside,
    checkouts,
    console,
    engines_toml,
    in_ms,
    mock_engines,
    print_rows,
    routing,
    write_result,
)
from benchmarks.watch import ANSWER, GAP, HEALTH, MAX_HEALTH_S, STREAM, Watched, longest_s, taken, watching
from tandem.loadtest.stats import Distribution
from tests.support.certificates import Authority
from tests.support.keys import make_key_file

_KEY = "sk-lockout-0123456789"
_HEALTH_EVERY_S = 0.05
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


# -- the attack


async def _attack(target: Watched, attack: _Attack, seconds: float) -> int:
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


def _attack_process(pipe: Connection, target: Watched, attack: _Attack, seconds: float) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_attack(target, attack, seconds)))


# -- the benchmark


def _run(pids: list[int], target: Watched, attack: _Attack, seconds: float) -> dict[str, Any]:
    """One attack, and what others saw. Attackers and watchers have a process of their own each."""
    with watching(target, HEALTH, ANSWER, GAP) as watch:
        taken(watch)
        time.sleep(1.0)
        before_mb = _memory_mb(pids, "VmRSS")
        with beside(_attack_process, target, attack, seconds) as attackers:
            num_opened = attackers.recv()
            time.sleep(3.0)
            waits = taken(watch, is_end=True)
    console.print(f"[dim]measured {attack.name}, {num_opened} connections opened[/]")
    gap, row = Distribution.of(wait.waited_s for wait in waits[GAP]), dict[str, Any]({"": attack.name})
    lost = {kind: sum(wait.is_lost for wait in waits[kind]) for kind in (HEALTH, ANSWER, STREAM)}
    for kind in (HEALTH, ANSWER):
        row |= {f"{kind} s": longest_s(waits[kind]), f"{kind}: lost": lost[kind]}
    row |= {**in_ms("gap ms", gap, "p99", "max"), "streams lost": lost[STREAM]}
    return row | {"memory MB": f"{before_mb:.0f} -> {_memory_mb(pids, 'VmHWM'):.0f}"}


def _memory_mb(pids: list[int], kind: str) -> float:
    """Resident memory as Linux counts it: now (VmRSS), or the most so far (VmHWM). Of an ended process it is 0."""
    num_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            num_kb += sum(map(int, re.findall(rf"{kind}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())))
    return num_kb / 1024


@contextlib.contextmanager
def _server(
    engines: list[str], settings: argparse.Namespace, flags: tuple[str, ...], checkout: Path
) -> Iterator[tuple[list[int], Watched]]:
    """The ids of the processes that serve HTTP, and what their clients need."""
    with tempfile.TemporaryDirectory() as name:
        folder, ca_file, scheme = Path(name), "", "http"
        flags += (f"--api-key-file={make_key_file(folder / 'keys.toml', {_KEY: 'honest'})}",)
        flags += (f"--router-processes={settings.router_processes}",)
        if settings.tls:
            authority = Authority(folder)
            certificate, key = authority.issue()
            ca_file, scheme = str(authority.ca_file), "https"
            flags += (f"--tls-cert={certificate}", f"--tls-key={key}")
        with routing(engines_toml(engines, "openai"), *flags, checkout=checkout, scheme=scheme) as (url, pid):
            children = psutil.Process(pid).children()
            edges = [one.pid for one in children if "tandem.frontend.processes.child" in one.cmdline()]
            yield [pid, *edges], Watched(int(url.rpartition(":")[2]), ca_file, _KEY, _HEALTH_EVERY_S)


def _measure(settings: argparse.Namespace, checkout: Path, engines: list[str]) -> list[dict[str, Any]]:
    rows = []
    for attack in _ATTACKS:
        if settings.only not in attack.name or (settings.quick and attack.num_connections > _MAX_QUICK):
            continue
        # A server each, so that no attack meets what the one before has left.
        with _server(engines, settings, attack.flags, checkout) as (pids, target):
            rows.append(_run(pids, target, attack, settings.seconds))
    return rows


def main() -> int:
    parser = arguments(__doc__, model=False, base=True)
    parser.option("--only", "", "attacks with this in their name")
    parser.option("--seconds", 45.0, "of each attack", quick=3.0)
    parser.add_argument("--tls", action="store_true", help="the server speaks HTTPS")
    parser.option("--router-processes", 1, "as of `tandem serve`")
    settings = parser.settings()
    with mock_engines() as engines:
        results = {name: _measure(settings, one, engines) for name, one in checkouts(settings).items()}
    for name, rows in results.items():
        print_rows(f"Longest waits of others, {name}", rows)
    write_result("lockout", settings, results)
    return int(not settings.quick and any(row[f"{HEALTH} s"] > MAX_HEALTH_S for row in results["here"]))


if __name__ == "__main__":
    sys.exit(main())
