"""Output tokens/s against how much KV the clients ask the pool to hold, from 0.3 to 2 of it, colocated and 1P1D.

Closed loop: each client always has one request, prompts share nothing, answers are of mixed lengths. At a load of 1
there are as many clients as the decoding worker's pool holds on average, or as it has seats. Beyond that requests wait:
throughput should stay at its top, no request should fail, and no stream should stand still for long.

    python -m benchmarks.memory_pressure
    python -m benchmarks.memory_pressure --pool-mb 512 --max-num-seqs 8   # seats are short, not blocks
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from functools import partial
from typing import Any

from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    measure_each,
    print_table,
    serving,
    write_result,
)
from tandem.loadtest.client import StreamTiming
from tandem.loadtest.prompts import random_prompts
from tandem.loadtest.stats import Distribution

_LOADS = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0)
_BLOCK_SIZE = 16


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS, help="shares of the pool")
    parser.add_argument("--pool-mb", type=float, default=64.0, help="KV pool of each worker (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="seats of each worker (default: %(default)s)")
    parser.add_argument("--input-tokens", type=int, default=96)
    parser.add_argument(
        "--output-tokens", type=int, nargs="+", default=[24, 48, 96, 192], help="drawn for each request"
    )
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of each load (default: %(default)s)")
    settings = parser.parse_args()
    if settings.quick:
        settings.loads, settings.duration, settings.pool_mb = [0.6, 1.6], 6.0, 16.0
        settings.output_tokens = [16, 64]
    setups = (COLOCATED, ONE_PAIR_ALWAYS) if settings.quick else (COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS)
    pool = f"--pool-bytes={round(settings.pool_mb * 1e6)}"
    seats = f"--max-num-seqs={settings.max_num_seqs}"
    servers = [serving(setup, settings.model, pool, seats) for setup in setups]
    results = measure_each(servers, partial(measure, settings=settings))
    _show(results, settings)
    write_result("memory_pressure", settings, results)
    return int(len(results) < len(servers) or any(row["num_failed"] for rows in results.values() for row in rows))


async def measure(server: Server, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each load."""
    num_blocks = min(worker["num_blocks"] for worker in await _workers(server))
    mean_tokens = settings.input_tokens + sum(settings.output_tokens) / len(settings.output_tokens) / 2
    num_held = min(num_blocks * _BLOCK_SIZE / mean_tokens, settings.max_num_seqs)
    rows = []
    await _run(
        server, settings, max(2, round(num_held / 2)), 3.0, seed=-1
    )  # warms up kernels and memory for such batches
    for load in settings.loads:
        num_clients = max(1, round(load * num_held))
        num_before = await _num_preemptions(server)
        timings, duration_s = await _run(server, settings, num_clients, settings.duration, seed=round(100 * load))
        row = _row(load, num_clients, timings, duration_s)
        rows.append(row | {"num_blocks": num_blocks, "num_preemptions": await _num_preemptions(server) - num_before})
    return rows


async def _run(
    server: Server, settings: argparse.Namespace, num_clients: int, duration_s: float, *, seed: int
) -> tuple[list[StreamTiming], float]:
    """Let the clients send for this long, then wait for the requests under way."""
    rng = random.Random(f"{settings.seed}/{seed}")
    timings: list[StreamTiming] = []
    prompts = await random_prompts(
        server.client,
        model=server.model,
        num_prompts=16,
        num_tokens=settings.input_tokens - 8,
        seed=rng.getrandbits(32),
    )
    started = time.perf_counter()

    async def send_on() -> None:
        while time.perf_counter() < started + duration_s:
            prompt = [*rng.choices(range(1000, 4000), k=8), *rng.choice(prompts)]
            timing = await server.client.stream_completion(
                prompt,
                model=server.model,
                max_tokens=rng.choice(settings.output_tokens),
                ignore_eos=True,
                temperature=0.0,
            )
            timings.append(timing)
            if timing.error:
                await asyncio.sleep(0.5)  # as a client that was told to retry

    await asyncio.gather(*(send_on() for _ in range(num_clients)))
    return timings, duration_s


def _row(load: float, num_clients: int, timings: list[StreamTiming], duration_s: float) -> dict[str, Any]:
    good = [timing for timing in timings if not timing.error]
    refused = [timing for timing in timings if timing.error.startswith("HTTP 429")]
    failed = [timing for timing in timings if timing.error and timing not in refused]
    gaps = Distribution.of(gap for timing in good for gap in timing.itl_s)
    until = min(timing.started_s for timing in timings) + duration_s
    # Count only requests sent while all clients were sending: at the end the load falls.
    num_tokens = sum(
        tokens
        for timing in good
        for came_s, tokens in zip(timing.event_times_s, timing.event_tokens, strict=True)
        if came_s <= until
    )
    return {
        "load": load,
        "num_clients": num_clients,
        "num_answered": len(good),
        "num_refused": len(refused),
        "num_failed": len(failed),
        "first_error": failed[0].error if failed else "",
        "tokens_per_s": num_tokens / duration_s,
        "ttft_p50_s": Distribution.of(timing.ttft_s for timing in good).p50,
        "gap_p99_s": gaps.p99,
        "gap_max_s": gaps.max,
    }


async def _workers(server: Server) -> list[dict[str, Any]]:
    pools = await server.client.request_json("GET", "/v1/pools")
    return [worker for workers in pools["roles"].values() for worker in workers]


async def _num_preemptions(server: Server) -> int:
    return sum(worker["num_preemptions"] for worker in await _workers(server))


def _show(results: dict[str, list[dict[str, Any]]], settings: argparse.Namespace) -> None:
    columns = {
        "load": "load",
        "num_clients": "clients",
        "num_answered": "answered",
        "num_refused": "429",
        "num_failed": "failed",
        "tokens_per_s": "tokens/s",
        "ttft_p50_s": "TTFT p50 s",
        "gap_p99_s": "gap p99 s",
        "gap_max_s": "gap max s",
        "num_preemptions": "preemptions",
    }
    for name, rows in results.items():
        best = max(row["tokens_per_s"] for row in rows)
        last = rows[-1]["tokens_per_s"]
        caption = f"at load {rows[-1]['load']:g} {100 * last / max(best, 1e-9):.0f} % of the best"
        print_table(
            f"{name}: {settings.input_tokens} tokens in, {settings.output_tokens} out, {rows[0]['num_blocks']} blocks",
            list(columns.values()),
            [[row[column] for column in columns] for row in rows],
            caption=caption,
        )
        for error in {row["first_error"] for row in rows if row["first_error"]}:
            print(f"  {error}")


if __name__ == "__main__":
    sys.exit(main())
