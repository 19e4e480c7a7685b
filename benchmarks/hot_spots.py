"""Streams on one decode worker while a second one joins: their pace before and after, with and without relief.

Streams run on 1 + 1 workers; after a quarter of their tokens a decode worker is added. The servers with
--rebalance and without run one after the other, and give the same texts. Shown is the median time between two
tokens of a stream, before the worker has joined and in the last quarter of the answer.

    python -m benchmarks.hot_spots
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.common import Server, Setup, arguments, ms, print_table, serving, until_idle, write_result
from tandem.loadtest.client import StreamTiming, run_measured

_TOKEN_IDS = range(1000, 4000)  # valid in any model with a vocabulary of a few thousand
_FLAGS = ("--prefill=1", "--decode=1", "--pool-gb=0.5", "--no-autoscale", "--num-cpus-per-worker=0.6")
_SETUPS = (Setup("relief", _FLAGS), Setup("none", (*_FLAGS, "--no-rebalance")))
_JOIN_TIMEOUT_S = 120.0
_IDLE_S = 60.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=8, help="at the same time (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=1000, help="of each (default: %(default)s)")
    settings = parser.parse_args()
    if settings.quick:
        settings.streams, settings.output_tokens = 4, 300
    results: dict[str, dict[str, Any]] = {}
    for setup in _SETUPS:
        with serving(setup, settings.model) as server:
            results[setup.name] = run_measured(measure(server, settings))
    texts = [one.pop("texts") for one in results.values()]
    num_wrong = sum(first != second for first, second in zip(*texts, strict=True))
    _show(results, num_wrong)
    write_result("hot-spots", settings, results | {"num_wrong": num_wrong})
    return 1 if num_wrong or any(one["errors"] for one in results.values()) else 0


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Run the streams and add a worker meanwhile."""
    rng = random.Random(settings.seed)

    async def send() -> StreamTiming:
        prompt = rng.choices(_TOKEN_IDS, k=200)
        return await server.client.stream_completion(
            prompt, model=server.model, max_tokens=settings.output_tokens, ignore_eos=True, temperature=0
        )

    streams = [asyncio.create_task(send()) for _ in range(settings.streams)]
    await _until_generated(server, settings.output_tokens // 4, streams)
    await server.client.request_json("POST", "/v1/pools/add", {"role": "decode"})
    joined_s = await _until_joined(server)
    timings = [await stream for stream in streams]
    _, held = await until_idle(server, _IDLE_S)
    return {
        "texts": [timing.text for timing in timings],
        "before_s": statistics.median(_gaps(timings, 0.0, joined_s)),
        "after_s": statistics.median(gap for timing in timings for gap in timing.itl_s[-len(timing.itl_s) // 4 :]),
        "longest_s": max(max(timing.itl_s) for timing in timings),
        "duration_s": max(timing.finished_s for timing in timings) - joined_s,
        "errors": [timing.error for timing in timings if timing.error] + ([str(held)] if held else []),
    }


async def _until_generated(server: Server, num_tokens: int, streams: list[asyncio.Task[StreamTiming]]) -> None:
    """Wait until a stream has about this many tokens, or has ended."""
    while not any(stream.done() for stream in streams):
        pools = await server.client.request_json("GET", "/v1/pools")
        loads = [worker for worker in pools["roles"]["decode"] if worker["num_running"]]
        if loads and loads[0]["num_kv_tokens"] >= len(streams) * (200 + num_tokens):
            return
        await asyncio.sleep(0.2)


async def _until_joined(server: Server) -> float:
    deadline_s = time.perf_counter() + _JOIN_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        pools = await server.client.request_json("GET", "/v1/pools")
        if len(pools["roles"]["decode"]) == 2:
            return time.perf_counter()
        await asyncio.sleep(0.1)
    raise TimeoutError(f"no worker joined in {_JOIN_TIMEOUT_S:g} s")


def _gaps(timings: list[StreamTiming], begin_s: float, end_s: float) -> list[float]:
    return [
        later - earlier
        for timing in timings
        for earlier, later in zip(timing.event_times_s, timing.event_times_s[1:], strict=False)
        if begin_s <= later <= end_s
    ]


def _show(results: dict[str, dict[str, Any]], num_wrong: int) -> None:
    rows = [
        [name, ms(one["before_s"]), ms(one["after_s"]), one["duration_s"], ms(one["longest_s"]), len(one["errors"])]
        for name, one in results.items()
    ]
    headings = ["", "ITL before, ms", "ITL in the last quarter, ms", "join to end, s", "longest gap, ms", "errors"]
    print_table(f"A decode worker joins under load; texts that differ: {num_wrong}", headings, rows)


if __name__ == "__main__":
    sys.exit(main())
