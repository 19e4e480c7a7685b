"""Two checkouts of Tandem side by side: both servers run, and bursts of the same load go to one and to the other.

A shared machine's speed changes within seconds, so each burst is compared with the burst beside it; the table has the
medians of these ratios. Prompts share nothing. Both servers take their pool's memory at the start. Without --base this
checkout is compared with itself, which shows how far ratios are from 1 by chance.

    python -m benchmarks.versus --base ../tandem-before
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    Setup,
    arguments,
    console,
    free_port,
    launched,
    print_table,
    write_result,
)
from tandem.cluster.model_store import served_name
from tandem.loadtest.client import run_measured
from tandem.loadtest.closed_loop import run_completions
from tandem.loadtest.prompts import random_prompts
from tandem.loadtest.stats import summarize

_ROOT = Path(__file__).resolve().parent.parent
_PREFILL = "prefill tok/s"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--base", type=Path, default=_ROOT, help="folder of the other checkout (default: this one)")
    parser.add_argument("--base-module", default="tandem", help="module that is its command (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds, settings.concurrency = 2, [1, 8]
    results = {}
    for setup in (COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS):
        with (
            _serving(_ROOT, "tandem", setup, settings) as new,
            _serving(settings.base.resolve(), settings.base_module, setup, settings) as base,
        ):
            results[setup.name] = run_measured(_compare(new, base, settings))
        console.print(f"[dim]compared {setup.name}[/]")
    _show(results)
    write_result("versus", settings, results)
    return 0


@contextlib.contextmanager
def _serving(folder: Path, module: str, setup: Setup, settings: argparse.Namespace) -> Iterator[Server]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    flags = (f"--model={settings.model}", f"--port={port}", "--pool-gb=1", *setup.flags)
    command = [sys.executable, "-m", module, "serve", *flags]
    with launched(command, ready=f"{url}/ready", env={"PYTHONPATH": str(folder)}, folder=folder) as running:
        yield Server(str(folder), url, served_name(settings.model), running.start_s)


async def _compare(new: Server, base: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """For each figure: the medians of both, and the median of the rounds' ratios."""
    measures = {f"tok/s at {count}": partial(_output_speed, settings, count) for count in settings.concurrency}
    measures[_PREFILL] = partial(_prefill_speed, settings)
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
    for turn in range(-1, settings.rounds):  # the first turn warms up and does not count
        for name, measure in measures.items():
            order = (new, base) if turn % 2 else (base, new)
            of = {server.url: await measure(server, 1_000_003 * settings.seed + 100 * turn) for server in order}
            if turn >= 0:
                speeds[name].append((of[new.url], of[base.url]))
    return {
        name: {
            "new": statistics.median(value for value, _ in pairs),
            "base": statistics.median(value for _, value in pairs),
            "ratio": statistics.median(value / other for value, other in pairs),
            "ratios": [round(value / other, 3) for value, other in pairs],
        }
        for name, pairs in speeds.items()
    }


async def _output_speed(settings: argparse.Namespace, concurrency: int, server: Server, seed: int) -> float:
    prompts = await random_prompts(
        server.client,
        model=server.model,
        num_prompts=max(2, concurrency),
        num_tokens=settings.input_tokens,
        seed=seed + concurrency,
    )
    run = await run_completions(
        server.client, prompts, model=server.model, output_tokens=settings.output_tokens, concurrency=concurrency
    )
    summary = summarize(run.timings, concurrency=concurrency, duration_s=run.duration_s)
    if summary.num_errors:
        raise RuntimeError(f"{server.name}: {summary.num_errors} errors, the first: {summary.first_error}")
    return float(summary.as_dict()["output_tokens_per_s"])


async def _prefill_speed(settings: argparse.Namespace, server: Server, seed: int) -> float:
    """Prompt tokens per second of TTFT, of one prompt alone."""
    prompts = await random_prompts(
        server.client, model=server.model, num_prompts=1, num_tokens=settings.prefill_tokens, seed=seed
    )
    (timing,) = (
        await run_completions(server.client, prompts, model=server.model, output_tokens=1, concurrency=1)
    ).timings
    if timing.error:
        raise RuntimeError(f"{server.name}: {timing.error}")
    return timing.num_prompt_tokens / timing.ttft_s


def _show(results: dict[str, dict[str, Any]]) -> None:
    figures = next(iter(results.values()))
    rows = [
        [setup, *(f"{one['new']:.0f} / {one['base']:.0f} = {one['ratio']:.2f}" for one in result.values())]
        for setup, result in results.items()
    ]
    print_table("this checkout / the other", ["set-up", *figures], rows, caption="medians, and the median ratio")


if __name__ == "__main__":
    sys.exit(main())
