"""The second turn of a long conversation: its TTFT over the first turn's, and the share of its tokens that hit.

Each conversation starts with about 1,500 tokens that no other shares, gets an answer, and goes on with the whole
history and a short question. Conversations follow one another, so nothing waits for anything else.

    python -m benchmarks.second_turn
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from typing import Any

from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    ms,
    print_table,
    ratio,
    serving,
    write_result,
)
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.prompts import random_text

_WORDS_PER_TOKEN = 0.97  # of the words of loadtest.prompts, for the default model


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of the first turn, roughly")
    parser.add_argument("--output-tokens", type=int, default=64)
    settings = parser.parse_args()
    if settings.quick:
        settings.conversations, settings.output_tokens = 3, 16
    results = {}
    for setup in (ONE_PAIR, ONE_PAIR_ALWAYS, COLOCATED):
        with serving(setup, settings.model) as server:
            results[setup.name] = run_measured(measure(server, settings))
    print_table(
        f"Second turn of a conversation ({settings.conversations} of them, one after another)",
        ["set-up", "first: tokens", "TTFT ms", "second: tokens", "hit %", "TTFT ms", "TTFT second / first"],
        [
            [
                name,
                result["first_prompt_tokens"],
                ms(result["first_ttft_s"]),
                result["second_prompt_tokens"],
                f"{result['second_hit_share']:.1%}",
                ms(result["second_ttft_s"]),
                f"{result['ttft_ratio']:.3f}",
            ]
            for name, result in results.items()
        ],
        caption="medians; the ratio is the median of each conversation's own",
    )
    write_result("second_turn", settings, results)
    return 0


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Hold all conversations, and one before that does not count."""
    pairs = []
    for idx in range(settings.conversations + 1):
        pairs.append(await _converse(server, settings, random.Random(f"{settings.seed}/{idx}")))
    first, second = zip(*pairs[1:], strict=True)
    num_hits, num_tokens = sum(t.num_cached_tokens for t in second), sum(t.num_prompt_tokens for t in second)
    return {
        "first_prompt_tokens": round(statistics.median(t.num_prompt_tokens for t in first)),
        "second_prompt_tokens": round(statistics.median(t.num_prompt_tokens for t in second)),
        "first_ttft_s": statistics.median(t.ttft_s for t in first),
        "second_ttft_s": statistics.median(t.ttft_s for t in second),
        "ttft_ratio": statistics.median(ratio(b.ttft_s, a.ttft_s) for a, b in zip(first, second, strict=True)),
        "second_hit_share": num_hits / num_tokens,
        "first_ttfts_s": [t.ttft_s for t in first],
        "second_ttfts_s": [t.ttft_s for t in second],
    }


async def _converse(
    server: Server, settings: argparse.Namespace, rng: random.Random
) -> tuple[StreamTiming, StreamTiming]:
    num_words = round(settings.prompt_tokens * _WORDS_PER_TOKEN)
    messages = [{"role": "user", "content": f"{random_text(rng, num_words)}. Write a story with these words."}]
    first = await _turn(server, settings, messages)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And how does it end?"}]
    return first, await _turn(server, settings, messages)


async def _turn(server: Server, settings: argparse.Namespace, messages: list[dict[str, str]]) -> StreamTiming:
    timing = await server.client.stream_chat(
        messages, model=server.model, max_tokens=settings.output_tokens, ignore_eos=True, temperature=0.0
    )
    if timing.error:
        raise RuntimeError(timing.error)
    return timing


if __name__ == "__main__":
    sys.exit(main())
