"""Cost of offloading a prompt's KV for the next token: the gap after the first token, by tiers.

The decode worker receives the whole prompt at once and offers its blocks to every tier it has; its core is the one that
computes the next token.

    python -m benchmarks.offload
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ONE_PAIR_ALWAYS,
    Server,
    Setup,
    arguments,
    measure_each,
    ms,
    print_table,
    serving,
    write_result,
)
from tandem.loadtest.client import StreamTiming
from tandem.loadtest.prompts import random_prompts
from tandem.loadtest.stats import Distribution

_OUTPUT_TOKENS = 12
_NUM_EARLY = 5  # gaps after the first token during which the prompt's blocks may still be offloading


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=16)
    settings = parser.parse_args()
    if settings.quick:
        settings.prompt_tokens, settings.prompts = 300, 4
    with tempfile.TemporaryDirectory() as folder:
        setups = (serving(setup, settings.model) for setup in _setups(Path(folder)))
        results = measure_each(setups, lambda server: measure(server, settings))
    print_table(
        f"Gaps behind the first token of a prompt of {settings.prompt_tokens} tokens, ms",
        ["tiers", "first gap p50", "p99", f"next {_NUM_EARLY - 1} p50", "later p50"],
        [
            [name, *(ms(result[key]) for key in ("first_p50_s", "first_p99_s", "early_p50_s", "later_p50_s"))]
            for name, result in results.items()
        ],
    )
    write_result("offload", settings, results)
    return 0


def _setups(folder: Path) -> list[Setup]:
    host, disk = "--host-cache-gb=2", f"--disk-cache-path={folder}"
    tiers = {"none": (), "host": (host,), "disk": (disk,), "host and disk": (host, disk)}
    return [Setup(name, (*ONE_PAIR_ALWAYS.flags, *flags)) for name, flags in tiers.items()]


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Gaps of prompts sent one after another; the first prompt is not counted."""
    prompts = await random_prompts(
        server.client,
        model=server.model,
        num_prompts=settings.prompts + 1,
        num_tokens=settings.prompt_tokens,
        seed=settings.seed,
    )
    timings = [await _stream(server, prompt) for prompt in prompts][1:]
    first = Distribution.of(timing.itl_s[0] for timing in timings)
    return {
        "first_p50_s": first.p50,
        "first_p99_s": first.p99,
        "early_p50_s": Distribution.of(gap for timing in timings for gap in timing.itl_s[1:_NUM_EARLY]).p50,
        "later_p50_s": Distribution.of(gap for timing in timings for gap in timing.itl_s[_NUM_EARLY:]).p50,
    }


async def _stream(server: Server, prompt: list[int]) -> StreamTiming:
    timing = await server.client.stream_completion(
        prompt, model=server.model, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
    )
    if timing.error:
        raise RuntimeError(timing.error)
    return timing


if __name__ == "__main__":
    sys.exit(main())
