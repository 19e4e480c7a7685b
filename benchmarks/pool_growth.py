"""Pools that grow and shrink: 1 + 1 workers, one more under load, and one less when the load has gone.

First each prompt is sent alone: its answer is what every later one must be. Then clients send the prompts one after
another until the autoscaler's worker has served for a while. Then a single client goes on, with one answer at a time,
until a worker has been removed. Every answer is compared with the first one, also those that moved when a worker left.

    python -m benchmarks.pool_growth
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.common import Server, Setup, arguments, console, ms, print_table, serving, until_idle, write_result
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.stats import Distribution

_TOKEN_IDS = range(1000, 4000)  # valid in any model with a vocabulary of a few thousand
_FLAGS = ("--prefill=1", "--decode=1", "--min-workers=2", "--max-workers=3", "--pool-gb=0.3")
_NUM_PROMPTS = 6
_POLL_S = 1.0
_IDLE_S = 60.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs=2, default=[600, 48], metavar=("IN", "OUT"))
    parser.add_argument("--grown-s", type=float, default=30.0, help="of load with the added worker")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of growing, and of shrinking")
    settings = parser.parse_args()
    if settings.quick:
        settings.grown_s = 5.0
    with serving(Setup("1P1D", _FLAGS), settings.model) as server:
        result = run_measured(measure(server, settings))
    _show(result)
    write_result("pool_growth", settings, result)
    return 0 if result["is_good"] else 1


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Grow and shrink once."""
    num_input, num_output = settings.tokens
    rng = random.Random(settings.seed)
    prompts = [rng.choices(_TOKEN_IDS, k=num_input) for _ in range(_NUM_PROMPTS)]
    sent: dict[str, list[tuple[int, StreamTiming]]] = {"alone": [], "grows": [], "grown": [], "shrinks": []}
    phase = "alone"

    async def send(idx: int) -> None:
        began_in = phase
        timing = await server.client.stream_completion(
            prompts[idx], model=server.model, max_tokens=num_output, ignore_eos=True, temperature=0.8, seed=idx
        )
        sent[began_in].append((idx, timing))

    async def client_loop(first: int) -> None:
        for number in itertools.count(first):
            await send(number % _NUM_PROMPTS)

    for idx in range(_NUM_PROMPTS):
        await send(idx)
    phase, begun_s = "grows", time.perf_counter()
    clients = [asyncio.create_task(client_loop(idx)) for idx in range(settings.clients)]
    grown = await _until(server, "arrivals", "serving_after_s", settings.deadline_s)
    grown_after_s = time.perf_counter() - begun_s
    phase = "grown"
    await asyncio.sleep(settings.grown_s)
    phase, begun_s = "shrinks", time.perf_counter()
    for client in clients[1:]:  # their clients hang up: that is no failure
        client.cancel()
    shrunk = await _until(server, "departures", "left_after_s", settings.deadline_s)
    shrunk_after_s = time.perf_counter() - begun_s
    clients[0].cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for idx in range(_NUM_PROMPTS):
        await send(idx)
    _, held = await until_idle(server, _IDLE_S)
    right = {idx: timing.text for idx, timing in sent["alone"]}
    every = [one for timings in sent.values() for one in timings]
    errors = [timing.error for _, timing in every if timing.error]
    num_wrong = sum(timing.text != right[idx] for idx, timing in every if not timing.error)
    pools = await server.client.request_json("GET", "/v1/pools")
    return {
        "arrivals": grown,
        "grown_after_s": grown_after_s,
        "departures": shrunk,
        "shrunk_after_s": shrunk_after_s,
        "phases": {name: _summary(timings) for name, timings in sent.items()},
        "num_answers": len(every),
        "num_wrong": num_wrong,
        "errors": errors[:3],
        "held": str(held) if held else "",
        "last_decision": pools["autoscaler"].get("reason", ""),
        "flips": pools["autoscaler"].get("flips", []),
        "is_good": bool(grown and shrunk and not errors and not num_wrong and not held),
    }


async def _until(server: Server, kind: str, field: str, deadline_s: float) -> list[dict[str, Any]]:
    """The moves of this kind once one has the field; none if that takes too long."""
    end_s = time.perf_counter() + deadline_s
    while time.perf_counter() < end_s:
        records = (await server.client.request_json("GET", "/v1/pools"))["autoscaler"][kind]
        if any(field in record for record in records):
            return list(records)
        await asyncio.sleep(_POLL_S)
    return []


def _summary(timings: list[tuple[int, StreamTiming]]) -> dict[str, Any]:
    good = [timing for _, timing in timings if not timing.error]
    return {
        "num_answers": len(good),
        "ttft_s": asdict(Distribution.of(timing.ttft_s for timing in good)),
        "itl_s": asdict(Distribution.of(gap for timing in good for gap in timing.itl_s)),
    }


def _show(result: dict[str, Any]) -> None:
    rows = [
        [name, one["num_answers"], *(ms(one[kind][key]) for kind in ("ttft_s", "itl_s") for key in ("p50", "p99"))]
        for name, one in result["phases"].items()
    ]
    print_table("1 + 1 workers that grow and shrink", ["phase", "answers", "TTFT p50", "p99", "ITL p50", "p99"], rows)
    for kind in ("arrivals", "flips", "departures"):
        for record in result[kind]:
            console.print(f"{kind}: {record}", markup=False)
    console.print(
        f"grown after {result['grown_after_s']:.1f} s, shrunk after {result['shrunk_after_s']:.1f} s of little load; "
        f"{result['num_answers']} answers, {result['num_wrong']} wrong, errors {result['errors']}, "
        f"held {result['held'] or 'nothing'}; {result['last_decision']}",
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
