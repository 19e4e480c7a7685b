"""Throughput: output tokens/s at several concurrencies, prefill tokens/s at several lengths, and the time to ready.

Closed loop, prompts of 128 tokens that share nothing, 64 tokens out; without drafts, which random prompts flatter.
Chats are 8 at once of 4 turns each. Prefill speed is that of one prompt at a time with a single token out. All set-ups
run in one go; with --vllm-python vLLM is among them, and the ratios that the project holds itself to are printed: 0.8
of vLLM colocated, 1.0 of vLLM 1P1D. With --beside only these streams are measured, quiet and beside that work.

Stands behind README's table of output tokens/s beside vLLM.

    python -m benchmarks.throughput --vllm-python PATH
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from functools import partial

from benchmarks import vllm
from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    in_ms,
    measure_each,
    print_results,
    print_rows,
    ratio,
    serving,
    write_result,
)
from benchmarks.other_work import BESIDE
from tandem.loadtest.closed_loop import run_completions
from tandem.loadtest.prompts import random_text
from tandem.loadtest.stats import LoadSummary, summarize

_WARMUP_REQUESTS = 4
_CHATS, _CHAT_TURNS, _CHAT_WORDS = 8, 4, 60  # words of each question
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
]
POOL = "--pool-bytes=1000000000"  # taken at the start: the first use of memory would be measured as time of prefill
_SETUPS = {setup.name: setup for setup in (COLOCATED, ONE_PAIR, ONE_PAIR_ALWAYS)}
_FLOORS = {COLOCATED.name: ("vLLM colocated", 0.8), ONE_PAIR.name: ("vLLM 1P1D", 1.0)}


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--concurrency", [1, 8, 32], quick=[1, 8])
    parser.option("--requests-per-client", 4, "but at least 8 requests in all", quick=1)
    parser.option("--input-tokens", 128)
    parser.option("--output-tokens", 64)
    parser.option("--prefill-tokens", [512, 2048, 4000, 8000], quick=[512, 2048])
    parser.option("--prefill-requests", 8, quick=2)
    parser.option("--beside", "", "other work meanwhile", choices=BESIDE)
    parser.option("--setups", list(_SETUPS), "of ours", choices=_SETUPS)
    parser.option("--vllm-python", "", vllm.HELP)
    settings = parser.settings()
    setups = [_SETUPS[name] for name in settings.setups]
    ours = [serving(setup, settings.model, POOL, "--speculate=off") for setup in setups]
    servers = [*ours, *vllm.others(settings)]
    results = measure_each(servers, partial(measure, settings=settings))
    title = f"{settings.input_tokens} tokens in, {settings.output_tokens} out, closed loop"
    print_results(title, results, "for each concurrency: output tokens/s, and p50 of TTFT and ITL in ms")
    for name, (theirs, floor) in _FLOORS.items():
        if name in results and theirs in results:
            speeds = {what: speed for what, speed in results[name].items() if "tok/s" in what}
            ratios = {what: ratio(speed, results[theirs][what]) for what, speed in speeds.items()}
            print_rows(f"{name} / {theirs}, floor {floor}", [ratios])
    write_result("throughput", settings, results)
    return int(len(results) < len(servers))


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, float]:
    """All figures of one server."""
    loads, speeds = dict[str, float](), dict[str, float]()
    for concurrency in settings.concurrency:
        # Warm up at this concurrency: kernels and memory for this batch size.
        await load(server, settings, concurrency, max(_WARMUP_REQUESTS, concurrency), seed=2 * concurrency + 1)
        loads |= await decode_speed(server, settings, concurrency, seed=2 * concurrency)
        if settings.beside:
            with BESIDE[settings.beside]():
                beside = await decode_speed(server, settings, concurrency, seed=2 * concurrency + 1001)
            loads |= {f"{settings.beside}, {name}": figure for name, figure in beside.items()}
    if settings.beside:
        return loads
    await chat_speed(server, settings, seed=17)  # not counted
    loads["chat: tok/s"] = await chat_speed(server, settings, seed=18)
    for length in settings.prefill_tokens:
        speeds[f"prefill tok/s at {length}"] = await prefill_speed(server, settings, length, seed=9)
    return {"ready s": server.start_s, **speeds, **loads}


async def decode_speed(
    server: Server, settings: argparse.Namespace, concurrency: int, *, seed: int
) -> dict[str, float]:
    """Output tokens/s of a closed loop at this concurrency, with its TTFT and ITL."""
    num_requests = max(8, settings.requests_per_client * concurrency)
    found = await load(server, settings, concurrency, num_requests, seed=seed)
    latencies = in_ms(f"{concurrency}: TTFT", found.ttft_s, "p50")
    latencies |= in_ms(f"{concurrency}: ITL", found.itl_s, *(("p50", "p99") if settings.beside else ("p50",)))
    return {f"{concurrency}: tok/s": found.output_tokens_per_s} | latencies


async def load(
    server: Server, settings: argparse.Namespace, concurrency: int, num_requests: int, *, seed: int
) -> LoadSummary:
    """The summary of a closed loop. Raises `RuntimeError` if any request failed."""
    prompts = await server.prompts(num_requests, settings.input_tokens, 1_000_003 * settings.seed + seed)
    run = await run_completions(
        server.client,
        prompts,
        model=server.model,
        output_tokens=settings.output_tokens,
        concurrency=concurrency,
    )
    summary = summarize(run.timings, concurrency=concurrency, duration_s=run.duration_s)
    if summary.num_errors:
        raise RuntimeError(f"{server.name}: {summary.num_errors} errors, the first: {summary.first_error}")
    return summary


async def chat_speed(server: Server, settings: argparse.Namespace, *, seed: int) -> float:
    """Output tokens/s of conversations at once, each turn of which repeats all turns before it."""
    rng = random.Random(1_000_003 * settings.seed + seed)

    async def talk(texts: list[str]) -> int:
        messages, num_tokens = list[dict[str, str]](), 0
        for text in texts:
            messages.append({"role": "user", "content": text})
            body = {"model": server.model, "messages": messages, "max_tokens": settings.output_tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            answer = await server.client.request_json("POST", "/v1/chat/completions", body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            num_tokens += answer["usage"]["completion_tokens"]
        return num_tokens

    began_s = time.perf_counter()
    texts = [[random_text(rng, _CHAT_WORDS) for _ in range(_CHAT_TURNS)] for _ in range(_CHATS)]
    num_tokens = sum(await asyncio.gather(*map(talk, texts)))
    return num_tokens / (time.perf_counter() - began_s)


async def prefill_speed(server: Server, settings: argparse.Namespace, num_tokens: int, *, seed: int) -> float:
    """Prompt tokens per second of TTFT, the median of several prompts after one that does not count."""
    num_prompts = settings.prefill_requests + 1
    prompts = await server.prompts(num_prompts, num_tokens, 1_000_003 * settings.seed + seed)
    run = await run_completions(server.client, prompts, model=server.model, output_tokens=1, concurrency=1)
    errors = [timing.error for timing in run.timings if timing.error]
    if errors:
        raise RuntimeError(f"{server.name}: {errors[0]}")
    return statistics.median(timing.num_prompt_tokens / timing.ttft_s for timing in run.timings[1:])


if __name__ == "__main__":
    sys.exit(main())
