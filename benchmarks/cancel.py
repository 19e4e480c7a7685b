"""Clients that leave: half of 64 simultaneous streams are cut; the others must be right and nothing may leak.

Each round sends 64 requests at once and cuts 32 of them, each at a moment drawn between sending and the time such a
round takes without cuts. The other 32 have to give the text they gave when asked one at a time before. After each
round both workers have to become idle within a bound: no block in use, no lease open, all books in order
(`POST /v1/pools/check`). All requests go over a pair of workers.

    python -m benchmarks.cancel
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.common import (
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    console,
    print_table,
    serving,
    until_idle,
    write_result,
)
from tandem.loadtest.client import CUT, StreamTiming, run_measured
from tandem.loadtest.prompts import random_prompts

_LENGTHS = (1, 15, 16, 17, 64, 128, 200, 513)  # of the prompts, in turn
_IDLE_TIMEOUT_S = 30.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    if settings.quick:
        settings.streams, settings.output_tokens, settings.rounds = 16, 24, 2
    with serving(ONE_PAIR_ALWAYS, settings.model, "--max-num-seqs=128") as server:
        results = run_measured(measure(server, settings))
    rounds = results["rounds"]
    print_table(
        f"{settings.streams} streams at once, half of them cut (seed {settings.seed})",
        ["round", "cut in wait", "cut in answer", "done before", "others right", "wrong", "failed", "idle after s"],
        [
            [
                idx,
                *(result[key] for key in ("cut_before_first_token", "cut_in_answer", "done_before_cut")),
                *(result[key] for key in ("right", "wrong", "failed", "idle_after_s")),
            ]
            for idx, result in enumerate(rounds)
        ],
        caption=f"round 0 is without cuts; {results['num_handoffs']} handoffs in all",
    )
    for idx, result in enumerate(rounds):
        if result["held"]:
            console.print(f"[red]round {idx}: not idle after {_IDLE_TIMEOUT_S:.0f} s: {result['held']}[/]")
        for complaint in result["complaints"][:3]:
            console.print(f"round {idx}: {complaint}", markup=False)
    write_result("cancel", settings, results)
    return int(any(result["wrong"] or result["failed"] or result["held"] for result in rounds))


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """References one at a time, a round without cuts, then the rounds with them."""
    prompts = await _prompts(server, settings)
    references = [await _send(server, settings, prompt, "references") for prompt in prompts]
    failed = [timing.error for timing in references if timing.error]
    if failed:
        raise RuntimeError(f"a reference failed: {failed[0]}")
    rng = random.Random(f"cuts/{settings.seed}")
    began = time.perf_counter()
    rounds = [await _round(server, settings, prompts, references, [None] * len(prompts), "no cuts")]
    duration_s = time.perf_counter() - began - rounds[0]["idle_after_s"]
    for number in range(settings.rounds):
        cuts: list[float | None] = [None] * len(prompts)
        for idx in rng.sample(range(len(prompts)), len(prompts) // 2):
            cuts[idx] = rng.uniform(0.0, duration_s)
        rounds.append(await _round(server, settings, prompts, references, cuts, f"round {number}"))
    pools = await server.client.request_json("GET", "/v1/pools")
    return {"rounds": rounds, "num_handoffs": pools["num_handoffs"], "pools": pools["roles"]}


async def _round(
    server: Server,
    settings: argparse.Namespace,
    prompts: Sequence[list[int]],
    references: Sequence[StreamTiming],
    cuts: Sequence[float | None],
    salt: str,
) -> dict[str, Any]:
    """Send all prompts at once and abandon those with a cut after its seconds. The salt keeps the cache cold."""
    sends = (_send(server, settings, prompt, salt, cut) for prompt, cut in zip(prompts, cuts, strict=True))
    timings = await asyncio.gather(*sends)
    counts: Counter[str] = Counter()
    complaints = []
    for timing, cut, reference in zip(timings, cuts, references, strict=True):
        outcome = _outcome(timing, reference, is_to_be_cut=cut is not None)
        counts[outcome] += 1
        if outcome in ("wrong", "failed"):
            complaints.append(f"{timing.error or timing.text!r} instead of {reference.text!r}")
    idle_after_s, held = await until_idle(server, _IDLE_TIMEOUT_S)
    outcomes = ("cut_before_first_token", "cut_in_answer", "done_before_cut", "right", "wrong", "failed")
    return {
        **{name: counts[name] for name in outcomes},
        "idle_after_s": idle_after_s,
        "held": held,
        "complaints": complaints,
    }


def _outcome(timing: StreamTiming, reference: StreamTiming, *, is_to_be_cut: bool) -> str:
    """The outcome of one stream. Tokens received before a cut must be right, too."""
    if timing.error == CUT:
        if not reference.text.startswith(timing.text):
            return "wrong"
        return "cut_in_answer" if timing.event_times_s else "cut_before_first_token"
    if timing.error:
        return "failed"
    if timing.text != reference.text or timing.num_output_tokens != reference.num_output_tokens:
        return "wrong"
    return "done_before_cut" if is_to_be_cut else "right"


async def _send(
    server: Server, settings: argparse.Namespace, prompt: list[int], salt: str, cut_after_s: float | None = None
) -> StreamTiming:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": settings.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_salt": salt,
    }
    return await server.client.stream("/v1/completions", body, cut_after_s=cut_after_s)


async def _prompts(server: Server, settings: argparse.Namespace) -> list[list[int]]:
    longest = await random_prompts(
        server.client,
        model=server.model,
        num_prompts=settings.streams,
        num_tokens=max(_LENGTHS),
        seed=settings.seed,
    )
    return [prompt[: _LENGTHS[idx % len(_LENGTHS)]] for idx, prompt in enumerate(longest)]


if __name__ == "__main__":
    sys.exit(main())
