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
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from benchmarks import edge, throughput
from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    console,
    mock_engines,
    print_results,
    ratio,
    serving,
    write_result,
)
from tandem.loadtest.client import run_measured

_EDGE_BURST_S = 4.0

Measure = Callable[[Any, int], Awaitable[float]]  # of a server or target; the number is a seed
Measures = Mapping[str, Measure]  # by figure
Pairs = dict[str, list[tuple[float, float]]]  # by figure, what both checkouts had in a round


def main() -> None:
    parser = arguments(__doc__, base=True)
    parser.option("--parts", ["serve", "route"], "what to compare")
    parser.option("--starts", 3, "of both servers", quick=1)
    parser.option("--rounds", 4, "of each start, after one that does not count", quick=2)
    parser.option("--concurrency", [1, 8, 32], quick=[1, 8])
    parser.option("--input-tokens", 128)
    parser.option("--output-tokens", 64, quick=16)
    parser.option("--prefill-tokens", 2048)
    parser.option("--prefill-requests", 1, "of a burst, after one that does not count")
    settings = parser.settings()
    results: dict[str, Any] = {}
    if "serve" in settings.parts:
        measures: dict[str, Measure] = {
            f"at {count}": partial(_output_speed, settings, count) for count in settings.concurrency
        }
        measures[f"prefill of {settings.prefill_tokens}"] = partial(_prefill_speed, settings)
        results["serve"] = {}
        for setup in (COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS):
            start = partial(serving, setup, settings.model, throughput.POOL)
            results["serve"][setup.name] = _compare(start, measures, settings)
        _show("tokens a second", results["serve"])
    if "route" in settings.parts:
        with mock_engines() as engines:
            speeds = {shape.name: partial(_edge_speed, shape) for shape in edge.SHAPES}
            results["route"] = {"tandem route": _compare(partial(edge.route, engines, 1), speeds, settings)}
        _show("requests a CPU second", results["route"])
    write_result("versus", settings, results)


def _compare(
    start: Callable[..., AbstractContextManager[Any]], measures: Measures, settings: argparse.Namespace
) -> Pairs:
    """Start the same thing from both checkouts, and measure them in turn."""
    pairs: Pairs = defaultdict(list)
    for _ in range(settings.starts):
        with start(checkout=HERE) as new, start(checkout=settings.base or HERE) as other:
            run_measured(_measure_in_turn((new, other), measures, settings.rounds, pairs))
        console.print(f"[dim]compared {new.name}[/]")
    return pairs


async def _measure_in_turn(both: tuple[Any, Any], measures: Measures, num_rounds: int, pairs: Pairs) -> None:
    for turn in range(num_rounds + 1):
        for name, measure in measures.items():
            first = turn % 2  # which of the two goes first alternates
            found = {idx: await measure(both[idx], turn) for idx in (first, 1 - first)}
            if turn:  # the first round warms up
                pairs[name].append((found[0], found[1]))


async def _output_speed(settings: argparse.Namespace, count: int, server: Server, seed: int) -> float:
    """Output tokens per second of this many streams."""
    summary = await throughput.load(server, settings, count, max(2, count), seed=1000 * seed + count)
    return summary.output_tokens_per_s


async def _prefill_speed(settings: argparse.Namespace, server: Server, seed: int) -> float:
    return await throughput.prefill_speed(server, settings, settings.prefill_tokens, seed=1000 * seed)


async def _edge_speed(shape: edge.Shape, target: edge.Target, _: int) -> float:
    measured = await target.measure(shape, _EDGE_BURST_S, edge.CONCURRENCY)
    if measured.num_wrong:
        raise RuntimeError(f"{target.name}: {measured.num_wrong} wrong answers, the first: {measured.first_wrong}")
    return ratio(measured.num_answers, measured.cpu_s)


def _show(unit: str, results: dict[str, Pairs]) -> None:
    rows = {name: {figure: _compared(found) for figure, found in pairs.items()} for name, pairs in results.items()}
    print_results(f"{unit}: this checkout / the other", rows, "medians, and the median of the ratios")


def _compared(found: list[tuple[float, float]]) -> str:
    new, base = map(statistics.median, zip(*found, strict=True))
    return f"{new:.4g} / {base:.4g} = {statistics.median(ratio(*pair) for pair in found):.2f}"


if __name__ == "__main__":
    main()
