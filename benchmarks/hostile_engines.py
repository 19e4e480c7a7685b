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
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import engine_attacks
from benchmarks.common import (
    arguments,
    checkouts,
    console,
    engines_toml,
    free_port,
    launched,
    mock_engines,
    print_rows,
    ratio,
    routing,
    write_result,
)
from benchmarks.engine_attacks import ATTACKS, PROBED_S, Attack
from benchmarks.watch import GAP, HEALTH, MAX_HEALTH_S, Watched, asked, chat, longest_s, taken, watching
from tandem.cluster.model_store import resolve_model
from tandem.loadtest.client import run_measured

_LONGEST_S = 15.0  # of an attack by an answer: its clients leave then
_SETTLE_S = 3.0
_FLAGS = ("--probe-interval-s=0.5", "--engine-stall-s=0")
Row = dict[str, Any]


def main() -> int:
    parser = arguments(__doc__, base=True)
    parser.option("--only", "", "attacks whose name contains this")
    settings = parser.settings()
    attacks = [attack for attack in ATTACKS if settings.only in attack.name][:: 5 if settings.quick else 1]
    found = {name: _measured(one, settings.model, attacks) for name, one in checkouts(settings).items()}
    caption = "gap: the longest pause of another engine's stream, 20 ms a token; calm: of a router without the attacker"
    for name, rows in found.items():
        print_rows(f"Hostile engines, {name}", rows, caption)
    write_result("hostile_engines", settings, found)
    is_held_up = any(row["/health s"] > max(MAX_HEALTH_S, 2 * row["calm /health s"]) for row in found["here"])
    return int(is_held_up and not settings.quick)


def _measured(checkout: Path, model: str, attacks: Sequence[Attack]) -> list[Row]:
    """What is seen of each attack. Each has a router of its own, as one may end it."""
    seen = []
    with (
        mock_engines(1) as engines,
        routing(good := engines_toml(engines), *_FLAGS, checkout=checkout) as (calm_url, _),
        watching(_watched(calm_url), HEALTH, GAP) as calm,
    ):
        for attack in attacks:
            with (
                _hostile_engine(model) as (bad_url, toml),
                routing(toml + good, *_FLAGS, checkout=checkout) as (url, _),
                watching(_watched(url), HEALTH, GAP) as watch,
            ):
                seen.append(run_measured(_attacked(url, bad_url, attack, watch, calm)))
    return seen


def _watched(url: str) -> Watched:
    return Watched(urlsplit(url).port or 0)


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


async def _attacked(url: str, engine_url: str, attack: Attack, watch: Connection, calm: Connection) -> Row:
    """The longest waits during an attack: for /health, and of the other engine's stream for its next token."""
    await asyncio.sleep(_SETTLE_S)  # until both engines are probed and the stream runs
    taken(watch), taken(calm)
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=engine_url, trust_env=False) as engine:
        await engine.post("/arm", content=attack.name)
        if attack.path.startswith("/v1/chat"):
            clients = (_attacked_client(_watched(url), attack) for _ in range(attack.num_clients))
            end, *_ = await asyncio.gather(*clients)
            console.print(f"{attack.name}: its client got {end!r} at the end", markup=False, soft_wrap=True)
        else:
            await asyncio.sleep(PROBED_S)
        duration_s = time.monotonic() - began_s
        await engine.post("/disarm")
    await asyncio.sleep(1.0)  # for work that it left behind
    (health_s, gap_s), (calm_health_s, calm_gap_s) = (
        (longest_s(waits[HEALTH]), longest_s(waits[GAP])) for waits in (taken(watch, is_end=True), taken(calm))
    )
    row = {"attack": attack.name, "/health s": health_s, "calm /health s": calm_health_s, "gap s": gap_s}
    return row | {"calm gap s": calm_gap_s, "x": ratio(gap_s, calm_gap_s), "lasts s": duration_s}


async def _attacked_client(router: Watched, attack: Attack) -> bytes:
    """Ask the hostile engine; returns the end of what comes."""
    # NOTE: without a seed, with which a stream cannot continue elsewhere: the router would not read its token ids.
    request = chat(router, model=engine_attacks.MODEL, max_tokens=100_000, stream=attack.is_stream)
    end = b""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LONGEST_S), asked(router, request) as reader:
            while data := await reader.read(1 << 20):
                end = (end + data)[-200:]
    return end


if __name__ == "__main__":
    sys.exit(main())
