"""Tenants: does one tenant slow down another one, or get more than its limits, by work that is refused or costly?

    python -m benchmarks.tenants [--base FOLDER]

A server with an API key for each of two tenants; `--base` is another checkout. Texts: 48 requests with a word
of 640 KB each, which is refused; the other tenant asks for the tokens of "hi" and for a completion meanwhile.
Grammars: 16 answers with an ambiguous grammar beside a stream of the other tenant, and the same with a plain grammar.
Limits: prompt tokens that a key of 500 tokens a minute has computed in 40 requests whose grammar fails in the worker.
Room: 64 streams of 8 long answers each, which take all seats; the other tenant asks for four tokens ten times.

Stands behind docs/admission.md: what a tenant asks slows down nobody else, and failed requests count for its limits.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import (
    ONE_PAIR,
    Server,
    Setup,
    arguments,
    checkouts,
    measure_each,
    print_rows,
    serving,
    write_result,
)
from tandem.frontend.keys.store import create_key
from tandem.loadtest.client import CUT, MeasuringClient, StreamTiming
from tandem.loadtest.stats import Distribution
from tandem.scheduling.admission.key_limits import KeyLimits

_AMBIGUOUS = 's: s s s | s s | "x" | "y"'
_PLAIN = 's: ("x" | "y"){2000}'
_FAILS_LATE = "[ab]{2}c{20000}"  # a text that is too long to be forced, but not at once
_LIMIT = 500
_MAX_WAIT_S = 60.0  # for four tokens; nothing is asked after such a wait


Figures = dict[str, float | str]


class Clients(NamedTuple):
    """Clients with a key each."""

    hostile: MeasuringClient
    limited: MeasuringClient  # of the hostile tenant, too
    other: MeasuringClient


def main() -> None:
    parser = arguments(__doc__, base=True)
    parser.option("--texts", 48, quick=4)
    parser.option("--grammars", 16, quick=2)
    parser.option("--seconds", 40.0, "of a stream beside grammars", quick=5.0)
    parser.option("--hoard", 64, "streams of 8 answers each", quick=4)
    parser.option("--only", "", "texts, grammars, limits or room")
    settings = parser.settings()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "keys.json"))
        limits = KeyLimits(tokens_per_minute=_LIMIT)
        keys = [
            create_key(path, tenant="hostile")[1],
            create_key(path, tenant="hostile", limits=limits)[1],
            create_key(path, tenant="other")[1],
        ]
        servers = [
            serving(Setup(name, (*ONE_PAIR.flags, f"--api-key-file={path}")), settings.model, checkout=checkout)
            for name, checkout in checkouts(settings).items()
        ]
        results: dict[str, Figures] = measure_each(servers, partial(measure, keys=keys, settings=settings))
    figures = next(iter(results.values()), {})
    rows = [{"": what, **{name: found[what] for name, found in results.items()}} for what in figures]
    print_rows("One tenant beside another one", rows)
    write_result("tenants", settings, results)


async def measure(server: Server, *, keys: Sequence[str], settings: argparse.Namespace) -> Figures:
    """All figures of one server."""
    clients = Clients(*(MeasuringClient(server.url, api_key=key) for key in keys))
    measured: Figures = {}
    parts = {"texts": measure_texts, "grammars": measure_grammars, "limits": measure_limits, "room": measure_room}
    for name, part in parts.items():
        if settings.only in ("", name):
            measured |= await part(server, clients, settings)
    return measured


async def measure_texts(server: Server, clients: Clients, settings: argparse.Namespace) -> Figures:
    """How long a tenant waits while another one sends texts that are refused."""
    rng = random.Random(settings.seed)
    words = ["".join(rng.choices(string.ascii_lowercase, k=640_000)) for _ in range(settings.texts)]
    measured: Figures = {}
    for name, sent in (("quiet", []), ("beside texts", words)):
        attack = asyncio.gather(*(_status(clients.hostile, "/tokenize", {"prompt": word}) for word in sent))
        await asyncio.sleep(0.3)  # their bodies arrive
        short_s = await _seconds(clients.other, "/tokenize", {"prompt": "hi"})
        prompt = " ".join(rng.choices(["river", "stone", "window", "paper"], k=1500))
        answer_s = await _seconds(clients.other, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        measured |= {f'"hi" {name}, s': short_s, f"completion {name}, s": answer_s}
        statuses = await attack
        if sent:
            measured["texts' answers"] = str(Counter(statuses))
    return measured


async def measure_grammars(server: Server, clients: Clients, settings: argparse.Namespace) -> Figures:
    """Gaps between the tokens of a stream beside another tenant's grammars."""
    measured: Figures = {}
    for name, grammar in (("plain", _PLAIN), ("ambiguous", _AMBIGUOUS)):
        gaps, errors = await _gaps_beside(server, clients, settings, f"start: s\n{grammar}")
        measured |= {f"ITL beside {name}, p50 ms": 1e3 * gaps.p50, f"the same, p99 ({name})": 1e3 * gaps.p99}
        measured[f"ended by an error ({name})"] = errors
    measured["ITL p50, ratio"] = float(measured["ITL beside ambiguous, p50 ms"]) / float(
        measured["ITL beside plain, p50 ms"]
    )
    return measured


async def _gaps_beside(
    server: Server, clients: Clients, settings: argparse.Namespace, grammar: str
) -> tuple[Distribution, int]:
    fields = {"model": server.model, "max_tokens": 4000, "ignore_eos": True}
    costly = {**fields, "prompt": "x y", "temperature": 1.0, "structured_outputs": {"grammar": grammar}}
    costly["logit_bias"] = {"0": -100, "2": -100}
    cut_s = settings.seconds + 5.0
    attack = [
        asyncio.create_task(clients.hostile.stream("/v1/completions", {**costly, "seed": number}, cut_after_s=cut_s))
        for number in range(settings.grammars)
    ]
    await asyncio.sleep(5.0)  # they decode
    stream = await clients.other.stream("/v1/completions", {**fields, "prompt": "Once"}, cut_after_s=settings.seconds)
    ends: list[StreamTiming] = await asyncio.gather(*attack)
    errors = sum(end.error not in ("", CUT) for end in ends)
    return Distribution.of(stream.itl_s), errors


async def measure_limits(server: Server, clients: Clients, settings: argparse.Namespace) -> Figures:
    """What a limited key gets computed of prompts whose requests fail."""
    rng = random.Random(settings.seed)
    statuses: list[str] = []
    for _ in range(40):
        body = {"prompt": rng.choices(range(1000, 4000), k=400), "structured_outputs": {"regex": _FAILS_LATE}}
        statuses.append(await _status(clients.limited, "/v1/completions", {**body, "max_tokens": 200}))
    computed = sum(status == "400" for status in statuses)
    return {f"prompt tokens computed at {_LIMIT}/min": 400.0 * computed, "answers": str(Counter(statuses))}


async def measure_room(server: Server, clients: Clients, settings: argparse.Namespace) -> Figures:
    """How long a tenant waits for a short answer while another one could fill all seats for minutes."""
    long = {"model": server.model, "n": 8, "max_tokens": 2000, "ignore_eos": True, "temperature": 1.0, "logprobs": 5}
    quiet = await _short_waits(server, clients.other, 5)
    hoard = [
        asyncio.create_task(
            clients.hostile.stream("/v1/completions", {**long, "prompt": f"{number}: once", "seed": number})
        )
        for number in range(settings.hoard)
    ]
    await asyncio.sleep(20.0)  # as many as there are seats decode
    beside = await _short_waits(server, clients.other, 10)
    for one in hoard:
        one.cancel()
    ends = await asyncio.gather(*hoard, return_exceptions=True)
    return {
        "4 tokens quiet, p50 s": quiet.p50,
        "4 tokens beside a hoard, p50 s": beside.p50,
        "the longest, s": beside.max,
        "long answers lost": sum(not isinstance(end, asyncio.CancelledError) for end in ends),
    }


async def _short_waits(server: Server, client: MeasuringClient, num: int) -> Distribution:
    """Seconds of short answers, one after the other. A wait that is given up is the last one."""
    waits_s: list[float] = []
    for number in range(num):
        body = {"model": server.model, "prompt": f"{number}. Hello", "max_tokens": 4}
        try:
            waits_s.append(await asyncio.wait_for(_seconds(client, "/v1/completions", body), _MAX_WAIT_S))
        except TimeoutError:
            waits_s.append(_MAX_WAIT_S)
            break
    return Distribution.of(waits_s)


async def _status(client: MeasuringClient, path: str, body: dict[str, Any]) -> str:
    """200, or the status of the error."""
    try:
        await client.request_json("POST", path, body)
    except OSError as exc:
        return next((word for word in str(exc).replace(":", " ").split() if word.isdigit()), str(exc)[:60])
    return "200"


async def _seconds(client: MeasuringClient, path: str, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    await client.request_json("POST", path, body)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
