"""Two checkouts of Tandem side by side: both servers run, and bursts of the same load go to one and to the other.

A shared machine's speed changes within seconds, so each burst is compared with the burst beside it, and starts of one
checkout may differ by a fifth, so both are started several times. The tables have the medians of the ratios. Without
--base this checkout is compared with itself, which shows how far ratios are from 1 by chance.

serve: prompts share nothing; both servers take their pool's memory at the start. route: the load of `benchmarks.edge`;
for one process, requests per second of the router's CPU time. answers: one request for several answers to a new prompt,
the times of their first tokens and the blocks that they take; and, on this checkout alone, the share of the slots of
used blocks that hold KV while sequences of 500 tokens on average decode.

Stands behind every change that says that it costs nothing, `n` in docs/api_table.md, and the pool's gauges.

    python -m benchmarks.versus --base ../tandem-before
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import httpx

from benchmarks import edge, throughput
from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    Setup,
    arguments,
    console,
    mock_engines,
    print_table,
    ratio,
    serving,
    until_idle,
    write_result,
)
from tandem.loadtest.client import run_measured

_EDGE_BURST_S = 4.0
_POLL_S = 0.02
_MEAN_TOKENS, _OUTPUT_TOKENS = 500, 100  # of sequences, for the share of used slots
_IDLE_TIMEOUT_S = 60.0

Measure = Callable[[Any, int], Awaitable[dict[str, float]]]  # figures of a server or target; the number is a seed
Comparison = dict[str, dict[str, Any]]


def main() -> None:
    parser = arguments(__doc__, base=True)
    parser.option("--parts", ["serve", "route", "answers"], "what to compare")
    parser.option("--starts", 3, "of both servers", quick=1)
    parser.option("--rounds", 4, "of each start, after one that does not count", quick=2)
    parser.option("--concurrency", [1, 8, 32], quick=[1, 8])
    parser.option("--input-tokens", 128)
    parser.option("--output-tokens", 64, quick=16)
    parser.option("--prefill-tokens", 2048)
    parser.option("--prefill-requests", 1, "of a burst, after one that does not count")
    parser.option("--answers", 16, "to one prompt")
    parser.option("--answered-tokens", 1000, "of a prompt with several answers")
    settings = parser.settings()
    results: dict[str, Any] = {}
    if "serve" in settings.parts:
        measures: list[Any] = [partial(_output_speed, count) for count in settings.concurrency]
        results["serve"] = _compare_servers((COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS), settings, *measures, _prefill_speed)
        _show("tokens a second", results["serve"])
    if "route" in settings.parts:
        with mock_engines() as engines:
            start, measures = partial(edge.route, engines, 1), [partial(_edge_speed, shape) for shape in edge.SHAPES]
            results["route"] = {"tandem route": _compare(start, measures, settings)}
        _show("requests a CPU second", results["route"])
    if "answers" in settings.parts:
        results["answers"] = _compare_servers((COLOCATED, ONE_PAIR_ALWAYS), settings, _several_answers)
        _show(f"{settings.answers} answers to a prompt", results["answers"])
        with serving(COLOCATED, settings.model, throughput.POOL) as server:
            results["used"] = run_measured(_used_share(settings, server))
        console.print(f"slots of used blocks that hold KV, at a mean of 500 tokens: {results['used']:.3f}")
    write_result("versus", settings, results)


def _compare_servers(
    setups: Sequence[Setup], settings: argparse.Namespace, *measures: Callable[..., Awaitable[dict[str, float]]]
) -> dict[str, Comparison]:
    """Compare `tandem serve` in these set-ups."""
    return {
        setup.name: _compare(
            partial(serving, setup, settings.model, throughput.POOL),
            [partial(one, settings) for one in measures],
            settings,
        )
        for setup in setups
    }


def _compare(
    start: Callable[..., AbstractContextManager[Any]], measures: Sequence[Measure], settings: argparse.Namespace
) -> Comparison:
    """Start the same thing from both checkouts. For each figure: the medians of both, and of the rounds' ratios."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(settings.starts):
        with start(checkout=HERE) as new, start(checkout=settings.base or HERE) as other:
            run_measured(_measure_in_turn((new, other), measures, settings.rounds, pairs))
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
    both: tuple[Any, Any], measures: Sequence[Measure], num_rounds: int, pairs: dict[str, list[tuple[float, float]]]
) -> None:
    for turn in range(num_rounds + 1):
        for measure in measures:
            first = turn % 2  # which of the two goes first alternates
            found = {idx: await measure(both[idx], turn) for idx in (first, 1 - first)}
            for name in found[0] if turn else ():  # the first round warms up
                pairs[name].append((found[0][name], found[1][name]))


async def _output_speed(count: int, settings: argparse.Namespace, server: Server, seed: int) -> dict[str, float]:
    """Output tokens per second of this many streams."""
    summary = await throughput.load(server, settings, count, max(2, count), seed=1000 * seed + count)
    return {f"at {count}": float(summary["output_tokens_per_s"])}


async def _prefill_speed(settings: argparse.Namespace, server: Server, seed: int) -> dict[str, float]:
    num_tokens = settings.prefill_tokens
    speed = await throughput.prefill_speed(server, settings, num_tokens, seed=1000 * seed)
    return {f"prefill of {num_tokens}": speed}


async def _edge_speed(shape: edge.Shape, target: edge.Target, _: int) -> dict[str, float]:
    measured = await target.measure(shape, _EDGE_BURST_S, edge.CONCURRENCY)
    if measured.num_wrong:
        raise RuntimeError(f"{target.name}: {measured.num_wrong} wrong answers, the first: {measured.first_wrong}")
    return {shape.name: ratio(measured.num_answers, measured.cpu_s)}


async def _several_answers(settings: argparse.Namespace, server: Server, seed: int) -> dict[str, float]:
    """One request for several answers, as its client and an operator see it."""
    (prompt,) = await server.prompts(1, settings.answered_tokens, seed=settings.seed + 1000 * seed)
    await until_idle(server, _IDLE_TIMEOUT_S)
    num_used = [await _used_blocks(server)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            num_used.append(await _used_blocks(server))

    watcher = asyncio.create_task(watch())
    began = time.perf_counter()
    first_s = await _first_tokens(settings, server, prompt)
    end_s = time.perf_counter() - began
    watcher.cancel()
    if len(first_s) != settings.answers:
        raise RuntimeError(f"{server.name}: {len(first_s)} of {settings.answers} answers came")
    first, *_, last = (at_s - began for at_s in first_s.values())
    figures = {"first token ms": 1e3 * first, "token of the last answer ms": 1e3 * last, "ratio": last / first}
    return {**figures, "all ms": 1e3 * end_s, "most blocks": max(num_used)}


async def _first_tokens(settings: argparse.Namespace, server: Server, prompt: list[int]) -> dict[int, float]:
    """When the first token of each answer came, by its index, in order."""
    body = {"model": server.model, "prompt": prompt, "n": settings.answers, "max_tokens": settings.output_tokens}
    body |= {"ignore_eos": True, "temperature": 1.0, "seed": 1, "stream": True}
    body |= {"return_token_ids": True}  # so that a token shows whose text is not complete yet
    first_s: dict[int, float] = {}
    async with (
        httpx.AsyncClient(timeout=300.0, trust_env=False) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            for choice in json.loads(line[6:]).get("choices", ()) if line.startswith("data: {") else ():
                if choice.get("token_ids"):
                    first_s.setdefault(choice["index"], time.perf_counter())
    return first_s


async def _used_blocks(server: Server) -> int:
    """Blocks in use on all workers together."""
    return sum(one["num_blocks"] - one["num_free_blocks"] for one in await server.workers())


async def _used_share(settings: argparse.Namespace, server: Server) -> float:
    """Share of the slots of used blocks that hold KV, on average while all sequences decode."""
    num_prompt_tokens = _MEAN_TOKENS - _OUTPUT_TOKENS // 2
    prompts = await server.prompts(settings.answers, num_prompt_tokens, seed=settings.seed + 1)
    streams = [asyncio.create_task(server.greedy(prompt, _OUTPUT_TOKENS)) for prompt in prompts]
    shares: list[float] = []
    while not any(stream.done() for stream in streams):
        (worker,) = await server.workers()
        slots = worker["pool_slots"]
        if worker["num_running"] == settings.answers and not worker["num_waiting_tokens"]:
            shares.append(slots["written"] / (slots["written"] + slots["reserved"] + slots["waste"]))
        await asyncio.sleep(_POLL_S)
    await asyncio.gather(*streams)
    return statistics.fmean(shares)


def _show(unit: str, results: dict[str, Comparison]) -> None:
    headings = next(iter(results.values()))
    rows = [
        [name, *(f"{one['new']:.4g} / {one['base']:.4g} = {one['ratio']:.2f}" for one in comparison.values())]
        for name, comparison in results.items()
    ]
    print_table(f"{unit}: this checkout / the other", ["", *headings], rows, "medians, and the median of the ratios")


if __name__ == "__main__":
    main()
