"""Interference: how long prompts delay streams that are being decoded.

Four steady streams (128 tokens in) decode all the time. In the control phase they are alone; then a prompt of 2,048
tokens arrives every 3 s, whether or not the last one is answered. Reported are the gaps between the tokens of the
steady streams in both phases, and the TTFT of the long prompts. The set-ups run one after another: 1P1D with half of
the cores for each worker, colocated with all of them, and vLLM if asked for.

Stands behind README's table of ITL while long prompts arrive.

    python -m benchmarks.interference [--vllm-python PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import vllm
from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    Server,
    arguments,
    in_ms,
    measure_each,
    print_results,
    ratio,
    serving,
    write_result,
)
from tandem.loadtest.client import CUT, StreamTiming
from tandem.loadtest.stats import Distribution

_STREAMS, _STREAM_TOKENS = 4, 128  # steady streams, and their prompts
_LONG_TOKENS, _LONG_OUTPUT_TOKENS, _EVERY_S = 2048, 8, 3.0
_STEADY_MAX_TOKENS = 6000  # longer than any phase
_SETTLE_S = 1.5  # from the expected first token of the last steady stream to the first gap that counts
_MAX_START_S = 30.0  # until all steady streams have begun


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--control-s", 20.0, quick=4.0)
    parser.option("--loaded-s", 45.0, quick=9.0)
    parser.option("--vllm-python", "", vllm.HELP)
    settings = parser.settings()
    servers = [*(serving(setup, settings.model) for setup in (ONE_PAIR, COLOCATED)), *vllm.others(settings)]
    results = measure_each(servers, partial(measure, settings=settings))
    title = f"{_STREAMS} steady streams; a prompt of {_LONG_TOKENS} tokens every {_EVERY_S} s"
    print_results(title, results, "ms")
    write_result("interference", settings, results)
    return int(len(results) < len(servers))


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Both phases on one server; a long prompt before them warms it up and does not count."""
    num_long, seed = int(settings.loaded_s / _EVERY_S) + 1, 1_000_003 * settings.seed
    long_prompts = await server.prompts(num_long + 1, _LONG_TOKENS, seed)
    short_prompts = await server.prompts(2 * _STREAMS, _STREAM_TOKENS, seed + 1)
    await server.greedy(long_prompts[0], _LONG_OUTPUT_TOKENS)
    alone, _ = await _phase(server, short_prompts[:_STREAMS], [], settings.control_s)
    gaps, long_ttfts = await _phase(server, short_prompts[_STREAMS:], long_prompts[1:], settings.loaded_s)
    itl, loaded_itl = Distribution.of(alone), Distribution.of(gaps)
    return {
        **in_ms("alone: ITL", itl, "p50", "p99", "max"),
        **in_ms("loaded: ITL", loaded_itl, "p50", "p99", "max"),
        "p99 loaded / alone": ratio(loaded_itl.p99, itl.p99),
        **in_ms("long: TTFT", Distribution.of(long_ttfts), "p50", "max"),
    }


async def _phase(
    server: Server,
    short_prompts: Sequence[list[int]],
    long_prompts: Sequence[list[int]],
    duration_s: float,
) -> tuple[list[float], list[float]]:
    """The gaps of the steady streams within the phase, and the TTFT of the long prompts sent in it."""
    start_s = await _time_to_start(server, short_prompts)
    body = {"model": server.model, "max_tokens": _STEADY_MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
    async with asyncio.TaskGroup() as group:
        steady = [
            group.create_task(
                server.client.stream(
                    "/v1/completions",
                    body | {"prompt": prompt, "cache_salt": "steady"},
                    cut_after_s=start_s + _SETTLE_S + duration_s,
                )
            )
            for prompt in short_prompts
        ]
        await asyncio.sleep(start_s + _SETTLE_S)
        begun = time.perf_counter()
        long = []
        for idx, prompt in enumerate(long_prompts):
            await asyncio.sleep(begun + idx * _EVERY_S - time.perf_counter())
            if time.perf_counter() >= begun + duration_s - _EVERY_S / 2:
                break  # its effect would lie outside the phase
            long.append(group.create_task(server.greedy(prompt, _LONG_OUTPUT_TOKENS)))
    timings = [task.result() for task in steady]
    for timing in timings:
        if timing.error != CUT:
            raise RuntimeError(f"{server.name}: a steady stream ended early: {timing.error or timing.finish_reason}")
        if not timing.event_times_s or timing.event_times_s[0] > begun + duration_s / 4:
            raise RuntimeError(f"{server.name}: a steady stream began too late for a phase of {duration_s:.0f} s")
    return gaps_within(timings, begun, begun + duration_s), [task.result().ttft_s for task in long]


def gaps_within(timings: Sequence[StreamTiming], begin_s: float, end_s: float) -> list[float]:
    """Gaps between the events of each stream that end within [begin_s, end_s)."""
    return [
        gap
        for timing in timings
        for gap, ended_s in zip(timing.itl_s, timing.event_times_s[1:], strict=True)
        if begin_s <= ended_s < end_s
    ]


async def _time_to_start(server: Server, prompts: Sequence[list[int]]) -> float:
    """Seconds until this many prompts all have their first token, measured by a trial with other contents."""
    timings = await asyncio.gather(*(server.greedy(prompt, 4, cache_salt="trial") for prompt in prompts))
    return min(_MAX_START_S, 3 * max(timing.ttft_s for timing in timings))


if __name__ == "__main__":
    sys.exit(main())
