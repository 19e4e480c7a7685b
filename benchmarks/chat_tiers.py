"""Chats whose KV is three times the pool: token hit ratio and TTFT without tiers, with host memory, with disk as well.

Every session takes its turns in a circle, so that by its next turn the others have pushed it out of the pool. At the
end the server with a disk is started again on the same folder, and every session takes one more turn.

    python -m benchmarks.chat_tiers
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Server, Setup, arguments, ms, print_table, ratio, serving, write_result
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.prompts import random_messages
from tandem.loadtest.stats import Distribution

_TOKEN_BYTES = 23_040  # KV of the default model
_KV_OVER_POOL = 3
_Chat = list[dict[str, str]]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=300, help="of each turn's question")
    parser.add_argument("--output-tokens", type=int, default=32)
    settings = parser.parse_args()
    if settings.quick:
        settings.sessions, settings.turns, settings.words = 4, 3, 100
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in _setups(Path(folder), settings):
            with serving(setup, settings.model) as server:
                chats: list[_Chat] = [[] for _ in range(settings.sessions)]
                results[setup.name] = run_measured(converse(server, chats, settings))
        # `setup` and `chats` are those of the last round: same folder, new processes.
        with serving(setup, settings.model) as server:
            results[f"{setup.name}, restarted"] = run_measured(one_more_turn(server, chats, settings))
    _show(results)
    write_result("chat_tiers", settings, results)
    return 0


def _setups(folder: Path, settings: argparse.Namespace) -> list[Setup]:
    num_tokens = settings.sessions * settings.turns * (settings.words * 1.1 + settings.output_tokens + 15)
    pool_gb = num_tokens * _TOKEN_BYTES / _KV_OVER_POOL / 1e9
    common = ("--colocated", f"--pool-gb={pool_gb:.4f}")
    host = f"--host-cache-gb={2 * pool_gb:.4f}"  # too little for all chats
    return [
        Setup("no tiers", common),
        Setup("host", (*common, f"--host-cache-gb={4 * pool_gb:.4f}")),
        Setup("small host and disk", (*common, host, f"--disk-cache-path={folder}")),
    ]


async def converse(server: Server, chats: list[_Chat], settings: argparse.Namespace) -> dict[str, Any]:
    """Run all turns of all chats, round robin."""
    rng = random.Random(settings.seed)
    timings = []
    for _ in range(settings.turns):
        for chat in chats:
            timings.append(await _turn(server, chat, rng, settings))
    return _summary(timings[len(chats) :])  # first turns cannot hit


async def one_more_turn(server: Server, chats: list[_Chat], settings: argparse.Namespace) -> dict[str, Any]:
    """One turn of each chat."""
    rng = random.Random(settings.seed + 1)
    return _summary([await _turn(server, chat, rng, settings) for chat in chats])


async def _turn(server: Server, chat: _Chat, rng: random.Random, settings: argparse.Namespace) -> StreamTiming:
    chat[:] = random_messages(rng, chat, settings.words)
    timing = await server.client.stream_chat(
        chat, model=server.model, max_tokens=settings.output_tokens, ignore_eos=True, temperature=0.0
    )
    if timing.error:
        raise RuntimeError(timing.error)
    chat.append({"role": "assistant", "content": timing.text})
    return timing


def _summary(timings: list[StreamTiming]) -> dict[str, Any]:
    ttft = Distribution.of(timing.ttft_s for timing in timings)
    num_tokens = sum(timing.num_prompt_tokens for timing in timings)
    return {
        "num_turns": len(timings),
        "mean_prompt_tokens": num_tokens / len(timings),
        "token_hit_ratio": sum(timing.num_cached_tokens for timing in timings) / num_tokens,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
    }


def _show(results: dict[str, Any]) -> None:
    base = next(iter(results.values()))["ttft_p50_s"]
    print_table(
        f"Chats whose KV is {_KV_OVER_POOL} times the pool, from the second turn on",
        ["tiers", "turns", "prompt tokens", "tokens hit", "TTFT p50 ms", "p99", "p50 over no tiers"],
        [
            [
                name,
                result["num_turns"],
                f"{result['mean_prompt_tokens']:.0f}",
                f"{result['token_hit_ratio']:.1%}",
                ms(result["ttft_p50_s"]),
                ms(result["ttft_p99_s"]),
                f"{ratio(result['ttft_p50_s'], base):.3f}",
            ]
            for name, result in results.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
