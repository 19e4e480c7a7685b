"""Hostile engines: does one engine behind `tandem route` hold up the router for the streams of another?

One router has two engines with a model each. One answers as it should, an event every 20 ms; the other makes one attack
after another (`benchmarks/engine_attacks.py`). Meanwhile a process of its own asks for `/health` every 20 ms, reads a
stream of the first engine, and notes the longest wait of both. It does the same with a second router, which has only
the first engine: its waits are the machine's own noise at that time.

    python -m benchmarks.hostile_engines [--before PATH] [--only NAME]

`--before` names another checkout, which is measured in the same run. All traffic stays on the loopback interface.

Stands behind docs/engines.md: one engine's answers hold up nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from benchmarks import engine_attacks
from benchmarks.common import (
    HERE,
    Checkout,
    arguments,
    beside,
    console,
    engines_toml,
    free_port,
    launched,
    mock_engines,
    print_table,
    routing,
    write_result,
)
from benchmarks.engine_attacks import ATTACKS, PROBED_S, Attack
from benchmarks.mock_engine import MODEL
from tandem.cluster.model_store import resolve_model
from tandem.loadtest.client import run_measured

MAX_HEALTH_S = 0.5
STEP_MS = 20
_LONGEST_S = 15.0  # of an attack by an answer: its clients leave then
_INTERVAL_S = 0.02
_SETTLE_S = 3.0
_CHAT = "/v1/chat/completions"
_HEAD = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_FLAGS = ("--probe-interval-s=0.5", "--engine-stall-s=0")


class Waits(NamedTuple):
    """The longest waits in seconds: for /health, and of the other engine's stream for its next token."""

    health_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen while one attack was made."""

    attack: str
    waits: Waits
    undisturbed: Waits  # of the router without the hostile engine, at the same time
    duration_s: float
    end: str  # of what a client of the attacking engine got


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--only", default="", metavar="NAME", help="attacks whose name contains this")
    settings = parser.parse_args()
    attacks = [attack for attack in ATTACKS if settings.only in attack.name][:: 5 if settings.quick else 1]
    found = {}
    if settings.before is not None:
        found["before"] = _measured(Checkout(settings.before.resolve()), settings.model, attacks)
    found["after"] = _measured(HERE, settings.model, attacks)
    _print(found)
    write_result("hostile_engines", settings, {name: [asdict(one) for one in seen] for name, seen in found.items()})
    is_held_up = any(one.waits.health_s > max(MAX_HEALTH_S, 2 * one.undisturbed.health_s) for one in found["after"])
    return int(is_held_up and not settings.quick)


def _measured(checkout: Checkout, model: str, attacks: Sequence[Attack]) -> list[Seen]:
    """What is seen of each attack. Each has a router of its own, as one may end it."""
    seen = []
    with (
        mock_engines(1) as engines,
        routing(good := engines_toml(engines), *_FLAGS, checkout=checkout) as (calm_url, _),
        beside(_watch, calm_url) as calm,
    ):
        for attack in attacks:
            with (
                _hostile_engine(model) as (bad_url, toml),
                routing(toml + good, *_FLAGS, checkout=checkout) as (url, _),
                beside(_watch, url) as watch,
            ):
                seen.append(run_measured(_attacked(url, bad_url, attack, watch, calm)))
            console.print(f"[dim]{seen[-1]}[/]", soft_wrap=True)
    return seen


@contextlib.contextmanager
def _hostile_engine(model: str) -> Iterator[tuple[str, str]]:
    """Its URL, and its part of the file of engines, with a tokenizer."""
    port, events, replay = (free_port() for _ in range(3))
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.engine_attacks", *map(str, (port, events, replay))]
    with launched(command, ready=f"{url}/health"):
        yield (
            url,
            f'[tokenizers]\n{engine_attacks.MODEL} = "{resolve_model(model)}"\n'
            f'[[engines]]\nname = "bad"\nurl = "{url}"\nkind = "vllm"\nmodel = "{engine_attacks.MODEL}"\n'
            f'kv_events = "tcp://127.0.0.1:{events}"\nkv_replay = "tcp://127.0.0.1:{replay}"\n',
        )


async def _attacked(url: str, engine_url: str, attack: Attack, watch: Connection, calm: Connection) -> Seen:
    await asyncio.sleep(_SETTLE_S)  # until both engines are probed and the stream runs
    _take(watch), _take(calm)
    began_s, end = time.monotonic(), ""
    async with httpx.AsyncClient(base_url=engine_url, trust_env=False) as engine:
        await engine.post("/arm", content=attack.name)
        if attack.path == _CHAT:
            end, *_ = await asyncio.gather(*(_attacked_client(url, attack) for _ in range(attack.num_clients)))
        else:
            await asyncio.sleep(PROBED_S)
        duration_s = time.monotonic() - began_s
        await engine.post("/disarm")
    await asyncio.sleep(1.0)  # for work that it left behind
    return Seen(attack.name, _take(watch), _take(calm), duration_s, end)


async def _attacked_client(url: str, attack: Attack) -> str:
    """Ask the hostile engine; returns the end of what comes."""
    body = {
        "model": engine_attacks.MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 100_000,
        "stream": attack.is_stream,
    }
    end = b""
    try:
        async with asyncio.timeout(_LONGEST_S):
            parts, content = urlsplit(url), json.dumps(body).encode()
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"{_HEAD}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
            try:
                while data := await reader.read(1 << 20):
                    end = (end + data)[-400:]
                return end.decode(errors="replace")
            finally:
                writer.transport.abort()
    except (TimeoutError, ConnectionError) as exc:
        return f"{type(exc).__name__} after {end[-200:]!r}"


def _take(watch: Connection) -> Waits:
    """The longest waits since the last call; those that have not ended count."""
    watch.send(None)
    return Waits(*watch.recv())


class _Longest:
    """The longest time between two ticks."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._is_waiting = False
        self._longest_s = 0.0

    def begin(self) -> None:
        self._since_s, self._is_waiting = time.monotonic(), True

    def end(self) -> None:
        self._longest_s = max(self._longest_s, time.monotonic() - self._since_s)
        self._is_waiting = False

    def take(self) -> float:
        waits_s = time.monotonic() - self._since_s if self._is_waiting else 0.0
        found, self._longest_s = max(self._longest_s, waits_s), 0.0
        return found


def _watch(pipe: Connection, url: str) -> None:
    """Runs in a process of its own, which the benchmark's own work cannot delay."""
    health, gap = _Longest(), _Longest()
    parts = urlsplit(url)
    for target, longest in ((_ask_health, health), (_read_stream, gap)):
        threading.Thread(target=target, args=(parts.hostname, parts.port, longest), daemon=True).start()
    while True:
        pipe.recv()
        pipe.send((health.take(), gap.take()))


def _ask_health(host: str, port: int, longest: _Longest) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=120.0)
    while True:
        longest.begin()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest.end()
        time.sleep(_INTERVAL_S)


def _read_stream(host: str, port: int, longest: _Longest) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True}
    body |= {"max_tokens": 100_000, "seed": STEP_MS}
    content = json.dumps(body).encode()
    while True:
        with socket.create_connection((host, port), timeout=120.0) as connection:
            connection.sendall(f"{_HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
            connection.recv(1 << 16)
            longest.begin()
            while (data := connection.recv(1 << 16)) and not data.endswith(b"0\r\n\r\n"):
                longest.end()
                longest.begin()
            longest.end()


def _print(found: dict[str, list[Seen]]) -> None:
    headings = ["attack"]
    for name in found:
        headings += [f"{name}: /health s", "calm", "gap s", "calm", "x", "lasts s"]
    rows = []
    for both in zip(*found.values(), strict=True):
        row: list[object] = [both[0].attack]
        for one in both:
            waits, calm = one.waits, one.undisturbed
            row += [waits.health_s, calm.health_s, waits.gap_s, calm.gap_s, waits.gap_s / calm.gap_s, one.duration_s]
        rows.append(row)
    caption = "gap: the longest pause of another engine's stream, 20 ms a token; calm: of a router without the attacker"
    print_table("Hostile engines", headings, rows, caption)


if __name__ == "__main__":
    sys.exit(main())
