"""A closed loop of agents beside users who chat: how long jobs of agents take, by the host tier's eviction policy.

An agent calls a tool at the end of each turn but the last, and comes back with its result after some seconds. A user
asks one question of the same length, and few ask another. Both fill a host tier that holds half of the agents' KV; the
pool holds less. The policy `hit-density` is told how answers ended, `lru` knows nothing of it.

    python -m benchmarks.agents
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from benchmarks.common import (
    COLOCATED,
    Server,
    Setup,
    arguments,
    console,
    measure_each,
    print_results,
    ratio,
    serving,
    verdict,
    write_result,
)

_AIM = 0.9
_TOKEN_BYTES = 23_040  # KV of the default model
_TURN_TOKENS = 330  # about: a turn's words, its answer and what the template adds
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"id": {"enum": [1, 2, 3]}}, "required": ["id"]},
        },
    }
]


class Totals(NamedTuple):
    """What one kind of client saw."""

    job_s: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--agents", 16, quick=2)
    parser.option("--turns", 6, "of each agent", quick=2)
    parser.option("--users", 8, "who chat meanwhile, each again and again", quick=1)
    parser.option("--words", 230, "of a turn", quick=30)
    parser.option("--policies", ["lru", "hit-density"], "policies of the tier")
    settings = parser.settings()
    tier_gb = settings.agents * settings.turns * _TURN_TOKENS * _TOKEN_BYTES / 2 / 1e9

    def server(policy: str) -> contextlib.AbstractContextManager[Server]:
        tier = f"--tier=host:{tier_gb:.3f}GB?eviction={policy}"
        setup = Setup(policy, (*COLOCATED.flags, tier, f"--pool-bytes={tier_gb * 0.5e9:.0f}", "--speculate=off"))
        return serving(setup, settings.model)

    results = measure_each(map(server, settings.policies), partial(_measure, settings=settings))
    print_results(f"{settings.agents} agents, a host tier of {tier_gb:.2f} GB", results)
    if {"lru", "hit-density"} <= results.keys():
        share = ratio(results["hit-density"]["job s, mean"], results["lru"]["job s, mean"])
        console.print(f"jobs of agents, hit-density over lru: {share:.2f}, {verdict(str(_AIM), share <= _AIM)}")
    write_result("agents", settings, results)
    return 0


async def _measure(server: Server, settings: argparse.Namespace) -> dict[str, float]:
    began, is_over = time.perf_counter(), asyncio.Event()
    users = [asyncio.create_task(_user(server, settings, idx, is_over)) for idx in range(settings.users)]
    agents = await asyncio.gather(*(_agent(server, settings, idx) for idx in range(settings.agents)))
    is_over.set()
    chats = await asyncio.gather(*users)
    return {
        "job s, mean": statistics.mean(total.job_s[0] for total in agents),
        "job s, max": max(total.job_s[0] for total in agents),
        "agents' tokens cached": sum(one.num_cached_tokens for one in agents)
        / sum(one.num_prompt_tokens for one in agents),
        "users' tokens cached": sum(one.num_cached_tokens for one in chats)
        / max(sum(one.num_prompt_tokens for one in chats), 1),
        "users' questions": sum(len(one.job_s) for one in chats),
        "all s": time.perf_counter() - began,
    }


async def _agent(server: Server, settings: argparse.Namespace, idx: int) -> Totals:
    """One job: turns that each end with a call, but the last."""
    rng = random.Random(f"{settings.seed}/agent {idx}")
    await asyncio.sleep(rng.uniform(0, 10))
    began, num_prompt, num_cached = time.perf_counter(), 0, 0
    messages: list[dict[str, Any]] = [{"role": "user", "content": _words(rng, settings.words)}]
    for turn in range(settings.turns):
        is_last = turn == settings.turns - 1
        body = {"tools": _TOOLS, "tool_choice": "none" if is_last else "required"}
        answer = await _ask(server, messages, body)
        num_prompt += answer["usage"]["prompt_tokens"]
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if not is_last:
            message = answer["choices"][0]["message"]
            calls = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": _words(rng, settings.words)}
            messages += [{"role": "assistant", "content": None, "tool_calls": calls}, result]
            await asyncio.sleep(rng.uniform(1, 5))
    return Totals([time.perf_counter() - began], num_prompt, num_cached)


async def _user(server: Server, settings: argparse.Namespace, idx: int, is_over: asyncio.Event) -> Totals:
    """Questions, one after the other, of which one in five goes on."""
    rng = random.Random(f"{settings.seed}/user {idx}")
    job_s, num_prompt, num_cached = list[float](), 0, 0
    messages: list[dict[str, Any]] = []
    while not is_over.is_set():
        if rng.random() > 0.2:
            messages = []
        messages.append({"role": "user", "content": _words(rng, settings.words)})
        began = time.perf_counter()
        answer = await _ask(server, messages, {})
        job_s.append(time.perf_counter() - began)
        num_prompt += answer["usage"]["prompt_tokens"]
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        await asyncio.sleep(rng.uniform(1, 5))
    return Totals(job_s, num_prompt, num_cached)


async def _ask(server: Server, messages: list[dict[str, Any]], more: dict[str, Any]) -> Any:
    body = {"model": server.model, "messages": messages, "max_tokens": 64, "temperature": 0.0, **more}
    return await server.client.request_json("POST", "/v1/chat/completions", body)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(
        rng.choice(["red", "sea", "map", "oak", "ink", "sun", "ivy", "owl", "jar", "fig"]) for _ in range(count)
    )


if __name__ == "__main__":
    sys.exit(main())
