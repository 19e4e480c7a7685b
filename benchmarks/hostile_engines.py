"""Hostile engines: does one engine behind `tandem route` hold up the router for the streams of another?

One router has two engines with a model each. One answers as it should, an event every 20 ms; the other makes one attack
after another (`benchmarks/engine_attacks.py`). Meanwhile a process of its own asks for `/health` every 20 ms, reads a
stream of the first engine, and notes the longest wait of both. It does the same with a second router, which has only
the first engine: its waits are the machine's own noise at that time.

    python -m benchmarks.hostile_engines [--base PATH] [--only NAME]

`--base` names another checkout, which is measured in the same run. All traffic stays on the loopback interface.

Stands behind docs/engines.md: one engine's answers hold up nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from benchmarks import engine_attacks
from benchmarks.common import (
    Checkout,
    arguments,
    checkouts,
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
from benchmarks.watch import GAP, HEALTH, MAX_HEALTH_S, Waits, Watched, longest_s, taken, watching
from tandem.cluster.model_store import resolve_model
from tandem.loadtest.client import run_measured

_LONGEST_S = 15.0  # of an attack by an answer: its clients leave then
_SETTLE_S = 3.0
_CHAT = "/v1/chat/completions"
_HEAD = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_FLAGS = ("--probe-interval-s=0.5", "--engine-stall-s=0")


class Longest(NamedTuple):
    """The longest waits in seconds: for /health, and of the other engine's stream for its next token."""

    health_s: float
    gap_s: float

    @classmethod
    def of(cls, waits: Waits) -> Longest:
        """The longest of these."""
        return cls(longest_s(waits[HEALTH]), longest_s(waits[GAP]))


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen while one attack was made."""

    attack: str
    waits: Longest
    undisturbed: Longest  # of the router without the hostile engine, at the same time
    duration_s: float
    end: str  # of what a client of the attacking engine got


def main() -> int:
    parser = arguments(__doc__, base=True)
    parser.option("--only", "", "attacks whose name contains this")
    settings = parser.settings()
    attacks = [attack for attack in ATTACKS if settings.only in attack.name][:: 5 if settings.quick else 1]
    found = {name: _measured(one, settings.model, attacks) for name, one in checkouts(settings).items()}
    _print(found)
    write_result("hostile_engines", settings, {name: [asdict(one) for one in seen] for name, seen in found.items()})
    is_held_up = any(one.waits.health_s > max(MAX_HEALTH_S, 2 * one.undisturbed.health_s) for one in found["here"])
    return int(is_held_up and not settings.quick)


def _measured(checkout: Checkout, model: str, attacks: Sequence[Attack]) -> list[Seen]:
    """What is seen of each attack. Each has a router of its own, as one may end it."""
    seen = []
    with (
        mock_engines(1) as engines,
        routing(good := engines_toml(engines), *_FLAGS, checkout=checkout) as (calm_url, _),
        _watching(calm_url) as calm,
    ):
        for attack in attacks:
            with (
                _hostile_engine(model) as (bad_url, toml),
                routing(toml + good, *_FLAGS, checkout=checkout) as (url, _),
                _watching(url) as watch,
            ):
                seen.append(run_measured(_attacked(url, bad_url, attack, watch, calm)))
            console.print(f"[dim]{seen[-1]}[/]", soft_wrap=True)
    return seen


def _watching(url: str) -> contextlib.AbstractContextManager[Connection]:
    return watching(Watched(urlsplit(url).port or 0), HEALTH, GAP)


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
    taken(watch), taken(calm)
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
    waits = taken(watch, is_end=True)
    return Seen(attack.name, Longest.of(waits), Longest.of(taken(calm)), duration_s, end)


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
