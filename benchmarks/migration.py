"""The pause that a client sees when its answer moves to another decode worker, for short and long contexts.

One stream on 1 + 2 workers moves back and forth between the two decode workers while it runs. After each move: the
longest gap between two events of the stream until the next one, in seconds and in steps (the median gap of the same
stream). At the end the text is compared with that of the same request sent again, undisturbed.

    python -m benchmarks.migration
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.common import Server, Setup, arguments, console, ms, print_table, serving, until_idle, write_result
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.stats import Distribution

_TOKEN_IDS = range(1000, 4000)  # valid in any model with a vocabulary of a few thousand
_ONE_AND_TWO = Setup("1P2D", ("--prefill=1", "--decode=2", "--pool-gb=0.5", "--no-autoscale"))
_IDLE_S = 60.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--input-tokens", type=int, nargs="+", default=[500, 4000])
    parser.add_argument("--moves", type=int, default=8, help="of each stream (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=3.0, help="between two moves (default: %(default)s)")
    settings = parser.parse_args()
    if settings.quick:
        settings.input_tokens, settings.moves, settings.every_s = [200], 2, 1.5
    results = {}
    with serving(_ONE_AND_TWO, settings.model) as server:
        for num_tokens in settings.input_tokens:
            results[num_tokens] = run_measured(measure(server, num_tokens, settings))
    _show(results)
    write_result("migration", settings, results)
    return 1 if any(one["num_wrong"] or one["error"] for one in results.values()) else 0


async def measure(server: Server, num_tokens: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Move one stream, then send the same request again."""
    prompt = random.Random(settings.seed).choices(_TOKEN_IDS, k=num_tokens)

    async def send(max_tokens: int) -> StreamTiming:
        return await server.client.stream_completion(
            prompt, model=server.model, max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=1
        )

    trial = await send(20)
    itl_s = statistics.median(trial.itl_s)
    max_tokens = int((settings.moves + 2) * settings.every_s / itl_s)
    stream = asyncio.create_task(send(max_tokens))
    moved_s: list[float] = []
    while len(moved_s) < settings.moves and not (await asyncio.wait({stream}, timeout=settings.every_s))[0]:
        moved_s += await _move(server)
    timing = await stream
    again = await send(timing.num_output_tokens)
    _, held = await until_idle(server, _IDLE_S)
    step_s = statistics.median(timing.itl_s)
    pauses_s = [_longest_gap_s(timing, begin, end) for begin, end in itertools.pairwise([*moved_s, timing.finished_s])]
    return {
        "num_moves": len(pauses_s),
        "step_s": step_s,
        "pause_s": Distribution.of(pauses_s),
        "pause_steps": Distribution.of(pause / step_s for pause in pauses_s),
        "undisturbed_longest_steps": max(again.itl_s) / statistics.median(again.itl_s),
        "num_wrong": int(timing.text != again.text),
        "error": timing.error or again.error or (str(held) if held else ""),
    }


async def _move(server: Server) -> list[float]:
    """Move the only answer there is to the other worker; when it was asked for, or nothing if it cannot move now."""
    pools = await server.client.request_json("GET", "/v1/pools")
    now = time.perf_counter()
    for worker in pools["roles"]["decode"]:
        body = {"worker": worker["worker_id"]}
        if (await server.client.request_json("POST", "/v1/pools/migrate", body))["moving"]:
            return [now]
    return []


def _longest_gap_s(timing: StreamTiming, begin_s: float, end_s: float) -> float:
    times_s = [one for one in timing.event_times_s if begin_s - 1.0 <= one <= end_s]
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s) if later > begin_s]
    return max(gaps_s, default=0.0)


def _show(results: dict[int, dict[str, Any]]) -> None:
    rows = [
        [
            num_tokens,
            one["num_moves"],
            ms(one["step_s"]),
            ms(one["pause_s"].p50),
            ms(one["pause_s"].max),
            one["pause_steps"].p50,
            one["pause_steps"].max,
            one["undisturbed_longest_steps"],
            one["num_wrong"],
        ]
        for num_tokens, one in results.items()
    ]
    headings = [
        "prompt tokens",
        "moves",
        "step, ms",
        "pause p50, ms",
        "max, ms",
        "pause p50, steps",
        "max, steps",
        "longest gap undisturbed, steps",
        "wrong",
    ]
    print_table("An answer that moves between two decode workers", headings, rows)
    for num_tokens, one in results.items():
        if one["error"]:
            console.print(f"[red]{num_tokens}[/]: {one['error']}")


if __name__ == "__main__":
    sys.exit(main())
