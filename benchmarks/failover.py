"""What clients see when workers are killed: 16 streams on 1 + 2 workers, and the longest silence of each.

- a decode worker: the prefill worker has the KV of the prompts, and the answers so far are computed again;
- a decode worker and the prefill worker at once: nothing is left of the KV, and the other decode worker goes on alone;
- the prefill worker, while it computes the prompts: the decode workers go on alone.

Each stream's text is compared with that of the same request sent again later, undisturbed.

Stands behind README's "answers survive their workers": no failed and no wrong answer, and silences of about a second.

    python -m benchmarks.failover
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.common import Server, Setup, arguments, print_rows, serving, until_idle, write_result
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.stats import Distribution

_TOKEN_IDS = range(1000, 4000)  # valid in any model with a vocabulary of a few thousand
_PROMPT_TOKENS = 200
_POOL = "--pool-bytes=500000000"
_READY_S = 120.0  # for the victim's successor
_ONE_AND_TWO = Setup("1P2D", ("--prefill=1", "--decode=2", "--routing=cost,pairs"))


@dataclass(frozen=True, slots=True)
class Case:
    """Which workers die, and when."""

    name: str
    roles: tuple[str, ...]
    is_early: bool = False  # while prompts are computed, and not once all streams have tokens


_CASES = (
    Case("decode worker", ("decode",)),
    Case("decode and prefill worker", ("decode", "prefill")),
    Case("prefill worker, computing", ("prefill",), is_early=True),
)


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--streams", 16, quick=4)
    parser.option("--output-tokens", 200, quick=60)
    parser.option("--copy-kv-tokens", 0, "as of `tandem serve`")
    parser.option("--cases", [case.name for case in _CASES], "of the three above")
    parser.option("--kill-after-s", 8.0, "from the first request", quick=2.0)
    settings = parser.settings()
    rows = []
    for case in (one for one in _CASES if one.name in settings.cases):
        with serving(_ONE_AND_TWO, settings.model, _POOL, f"--copy-kv-tokens={settings.copy_kv_tokens}") as server:
            rows.append({"killed": case.name, **run_measured(measure(server, case, settings))})
    print_rows("kill -9 of a worker under its streams", rows)
    write_result("failover", settings, rows)
    return int(any(row["failed"] or row["wrong"] for row in rows))


async def measure(server: Server, case: Case, settings: argparse.Namespace) -> dict[str, Any]:
    """Kill the worker under the streams, then send the same requests again."""
    rng = random.Random(settings.seed)
    prompts = [rng.choices(_TOKEN_IDS, k=_PROMPT_TOKENS) for _ in range(settings.streams)]

    async def send(number: int) -> StreamTiming:
        return await server.client.stream_completion(
            prompts[number],
            model=server.model,
            max_tokens=settings.output_tokens,
            ignore_eos=True,
            temperature=0.8 if number % 2 else 0.0,
            seed=number,
        )

    streams = [asyncio.create_task(send(number)) for number in range(settings.streams)]
    await asyncio.sleep(settings.kill_after_s / 8 if case.is_early else settings.kill_after_s)
    victims = [(await server.workers(role))[0] for role in case.roles]
    for victim in victims:
        psutil.Process(victim["pid"]).kill()
    killed_s = time.perf_counter()
    timings = await asyncio.gather(*streams)
    decisions = await server.client.request_json("GET", "/v1/route/decisions")
    num_moved = sum(decision["outcome"] == "moved" for decision in decisions["data"])
    await server.until_replaced(victims, _READY_S)
    again = [await send(number) for number in range(settings.streams)]
    _, held = await until_idle(server, _READY_S)
    pauses_s = sorted((pause for timing in timings if (pause := _pause_s(timing, killed_s)) is not None), reverse=True)
    silence = Distribution.of(pauses_s[:num_moved])  # those that moved paused longest
    errors = [timing.error for timing in (*timings, *again) if timing.error]
    return {
        "streams moved": num_moved,
        "silence p50, s": silence.p50,
        "max, s": silence.max,
        "failed": len(errors),
        "wrong": sum(one.text != other.text for one, other in zip(timings, again, strict=True)),
        "first error, and what is held": " ".join([*errors[:1], *map(str, held.items())]),
    }


def _pause_s(timing: StreamTiming, killed_s: float) -> float | None:
    """The longest silence that ended after the kill; None if the answer had ended. Tokens on their way still come."""
    times_s = [timing.started_s, *timing.event_times_s]
    gaps_s = [later - max(earlier, killed_s) for earlier, later in itertools.pairwise(times_s) if later > killed_s]
    return max(gaps_s, default=None)


if __name__ == "__main__":
    sys.exit(main())
