"""Two checkouts of Tandem side by side: both servers run, and bursts of the same load go to one and to the other.

A shared machine's speed changes within seconds, so each burst is compared with the burst beside it, and starts of one
checkout may differ by a fifth, so both are started several times. The tables have the medians of the ratios. Without
--base this checkout is compared with itself, which shows how far ratios are from 1 by chance.

serve: prompts share nothing; both servers take their pool's memory at the start. route: the load of `benchmarks.edge`;
for one process, requests per second of the router's CPU time.

Stands behind every change that says that it costs nothing.

    python -m benchmarks.versus --base ../tandem-before
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import edge, throughput
from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Checkout,
    Server,
    arguments,
    console,
    mock_engines,
    print_table,
    ratio,
    serving,
    write_result,
)
from tandem.loadtest.client import run_measured

_EDGE_BURST_S = 4.0

Speed = Callable[[Any, int], Awaitable[float]]  # of a server or target; the number is a seed
Comparison = dict[str, dict[str, Any]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--base", type=Path, default=HERE.folder, help="folder of the other checkout (default: this)")
    parser.add_argument("--parts", default="serve,route", help="what to compare (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="of both servers")
    parser.add_argument("--rounds", type=int, default=4, help="of each start, after one that does not count")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--prefill-requests", type=int, default=1, help="of a burst, after one that does not count")
    settings = parser.parse_args()
    if settings.quick:
        settings.starts, settings.rounds, settings.concurrency = 1, 2, [1, 8]
    base = Checkout(settings.base.resolve())
    results: dict[str, Comparison] = {}
    if "serve" in settings.parts:
        for setup in (COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS):
            start = partial(serving, setup, settings.model, throughput.POOL)
            results[setup.name] = _compare(start, base, _serve_speeds(settings), settings)
        _show("tokens a second", results)
    if "route" in settings.parts:
        speeds = {shape.name: partial(_edge_speed, shape) for shape in edge.SHAPES}
        with mock_engines() as engines:
            results["tandem route"] = _compare(partial(edge.route, engines, 1), base, speeds, settings)
        _show("requests a CPU second", {"tandem route": results["tandem route"]})
    write_result("versus", settings, results)


def _compare(
    start: Callable[..., AbstractContextManager[Any]],
    base: Checkout,
    speeds: Mapping[str, Speed],
    settings: argparse.Namespace,
) -> Comparison:
    """Start the same thing from both checkouts. For each speed: the medians of both, and of the rounds' ratios."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in speeds}
    for _ in range(settings.starts):
        with start(checkout=HERE) as new, start(checkout=base) as other:
            for name, found in run_measured(_measure_in_turn((new, other), speeds, settings.rounds)).items():
                pairs[name] += found
        console.print(f"[dim]compared {new.name}[/]")
    return {
        name: {
            "new": statistics.median(value for value, _ in found),
            "base": statistics.median(value for _, value in found),
            "ratio": statistics.median(ratio(value, beside) for value, beside in found),
            "pairs": found,
        }
        for name, found in pairs.items()
    }


async def _measure_in_turn(
    both: tuple[Any, Any], speeds: Mapping[str, Speed], num_rounds: int
) -> dict[str, list[tuple[float, float]]]:
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in speeds}
    for turn in range(num_rounds + 1):
        for name, speed in speeds.items():
            first = turn % 2  # which of the two goes first alternates
            found = {idx: await speed(both[idx], turn) for idx in (first, 1 - first)}
            if turn:  # the first round warms up
                pairs[name].append((found[0], found[1]))
    return pairs


def _serve_speeds(settings: argparse.Namespace) -> Mapping[str, Speed]:
    output: dict[str, Speed] = {
        f"at {count}": partial(_output_speed, settings, count) for count in settings.concurrency
    }
    output[f"prefill of {settings.prefill_tokens}"] = partial(_prefill_speed, settings)
    return output


async def _output_speed(settings: argparse.Namespace, concurrency: int, server: Server, seed: int) -> float:
    """Output tokens per second of this many streams."""
    num_requests = max(2, concurrency)
    summary = await throughput.load(server, settings, concurrency, num_requests, seed=1000 * seed + concurrency)
    return float(summary["output_tokens_per_s"])


async def _prefill_speed(settings: argparse.Namespace, server: Server, seed: int) -> float:
    return await throughput.prefill_speed(server, settings, settings.prefill_tokens, seed=1000 * seed)


async def _edge_speed(shape: edge.Shape, target: edge.Target, _: int) -> float:
    measured = await target.measure(shape, _EDGE_BURST_S, edge.CONCURRENCY)
    if measured.num_wrong:
        raise RuntimeError(f"{target.name}: {measured.num_wrong} wrong answers, the first: {measured.first_wrong}")
    return ratio(measured.num_answers, measured.cpu_s)


def _show(unit: str, results: dict[str, Comparison]) -> None:
    headings = next(iter(results.values()))
    rows = [
        [name, *(f"{one['new']:.0f} / {one['base']:.0f} = {one['ratio']:.2f}" for one in comparison.values())]
        for name, comparison in results.items()
    ]
    print_table(f"{unit}: this checkout / the other", ["", *headings], rows, "medians, and the median of the ratios")


if __name__ == "__main__":
    main()
