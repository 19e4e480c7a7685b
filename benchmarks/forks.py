"""Several answers to one prompt: when the first tokens come, blocks that they take, and how full the used blocks are.

A request for `--answers` answers goes to this checkout and to `--base`, in turn, each time with a new prompt. Then as
many requests of 500 tokens on average run at once on this checkout alone: of the slots in used blocks, the share with
KV is sampled while all of them decode.

Stands behind `n` in docs/api_table.md, and the pool's gauges.

    python -m benchmarks.forks --base ../tandem-before
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import throughput
from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR_ALWAYS,
    Checkout,
    Server,
    arguments,
    console,
    ms,
    print_table,
    ratio,
    serving,
    until_idle,
    write_result,
)
from tandem.loadtest.client import run_measured

_POLL_S = 0.02
_MEAN_TOKENS = 500
_OUTPUT_TOKENS = 100  # of the sequences of 500 tokens on average
_IDLE_TIMEOUT_S = 60.0


@dataclass
class Answers:
    """One request for several answers, as its client and an operator see it. Times are from its start, in seconds."""

    first_token_s: list[float] = field(default_factory=list)  # of each answer, in order
    end_s: float = 0.0
    most_blocks: int = 0  # used at once, on all workers together

    @property
    def spread(self) -> float:
        """The last first token over the first one."""
        return ratio(self.first_token_s[-1], self.first_token_s[0])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--base", type=Path, default=HERE.folder, help="folder of the other checkout (default: this)")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count")
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds, settings.output_tokens = 1, 8
    base = Checkout(settings.base.resolve())
    results: dict[str, Any] = {}
    for setup in (COLOCATED, ONE_PAIR_ALWAYS):
        flags = (setup, settings.model, throughput.POOL)
        with serving(*flags) as new, serving(*flags, checkout=base) as other:
            results[setup.name] = run_measured(_compare(new, other, settings))
        console.print(f"[dim]compared {setup.name}[/]")
    with serving(COLOCATED, settings.model, throughput.POOL) as server:
        results["utilisation"] = run_measured(_utilisation(server, settings))
    _show(settings, results)
    write_result("forks", settings, results)


async def _compare(new: Server, base: Server, settings: argparse.Namespace) -> dict[str, list[Answers]]:
    found: dict[str, list[Answers]] = {"new": [], "base": []}
    for turn in range(settings.rounds + 1):
        both = [("new", new), ("base", base)]
        for name, server in both if turn % 2 else reversed(both):
            (prompt,) = await server.prompts(1, settings.input_tokens, seed=settings.seed + 1000 * turn)
            answers = await _measure(server, prompt, settings)
            if turn:  # the first round warms up
                found[name].append(answers)
    return found


async def _measure(server: Server, prompt: list[int], settings: argparse.Namespace) -> Answers:
    """One request for several answers, while the pools are watched."""
    await until_idle(server, _IDLE_TIMEOUT_S)
    answers, watching = Answers(), asyncio.Event()
    watcher = asyncio.create_task(_watch_blocks(server, answers, watching))
    await watching.wait()
    body = {
        "model": server.model,
        "prompt": prompt,
        "n": settings.answers,
        "max_tokens": settings.output_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 1,
        "stream": True,
        "return_token_ids": True,  # so that a token shows whose text is not complete yet
    }
    seen: set[int] = set()
    began = time.perf_counter()
    async with (
        httpx.AsyncClient(timeout=300.0, trust_env=False) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", ()):
                if choice["index"] not in seen and choice.get("token_ids"):
                    seen.add(choice["index"])
                    answers.first_token_s.append(time.perf_counter() - began)
    answers.end_s = time.perf_counter() - began
    watcher.cancel()
    if len(seen) != settings.answers:
        raise RuntimeError(f"{server.name}: {len(seen)} of {settings.answers} answers came")
    return answers


async def _watch_blocks(server: Server, answers: Answers, watching: asyncio.Event) -> None:
    while True:
        used = sum(one["num_blocks"] - one["num_free_blocks"] for one in await _workers(server))
        answers.most_blocks = max(answers.most_blocks, used)
        watching.set()
        await asyncio.sleep(_POLL_S)


async def _workers(server: Server) -> list[dict[str, Any]]:
    pools = await server.client.request_json("GET", "/v1/pools")
    return [one for workers in pools["roles"].values() for one in workers]


async def _utilisation(server: Server, settings: argparse.Namespace) -> float:
    """Share of the slots of used blocks that hold KV, on average while all sequences decode."""
    num_prompt_tokens = _MEAN_TOKENS - _OUTPUT_TOKENS // 2
    prompts = await server.prompts(settings.answers, num_prompt_tokens, seed=settings.seed + 1)
    streams = [asyncio.create_task(server.greedy(prompt, _OUTPUT_TOKENS)) for prompt in prompts]
    shares: list[float] = []
    while not any(stream.done() for stream in streams):
        (worker,) = await _workers(server)
        slots = worker["pool_slots"]
        if worker["num_running"] == settings.answers and not worker["num_waiting_tokens"]:
            shares.append(slots["written"] / (slots["written"] + slots["reserved"] + slots["waste"]))
        await asyncio.sleep(_POLL_S)
    await asyncio.gather(*streams)
    return statistics.fmean(shares)


def _show(settings: argparse.Namespace, results: dict[str, Any]) -> None:
    def median(found: list[Answers], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found))

    rows = []
    for setup in (COLOCATED, ONE_PAIR_ALWAYS):
        for side, found in results[setup.name].items():
            first, last = (statistics.median(one.first_token_s[idx] for one in found) for idx in (0, -1))
            name = f"{setup.name}, {'this checkout' if side == 'new' else 'the other'}"
            times = [ms(first), ms(last), f"{median(found, 'spread'):.3f}", ms(median(found, "end_s"))]
            rows.append([name, *times, f"{median(found, 'most_blocks'):.0f}"])
    number = settings.answers
    headings = ["", "first token ms", f"token of answer {number} ms", "ratio", "all ms", "most blocks used"]
    print_table(f"{number} answers to a prompt of {settings.input_tokens} tokens", headings, rows, "medians")
    console.print(f"slots of used blocks that hold KV, at a mean of 500 tokens: {results['utilisation']:.3f}")


if __name__ == "__main__":
    main()
