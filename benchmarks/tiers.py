"""TTFT of a long prompt out of each tier, over computing it again; and what the cost formula says of a large GPU.

Several prompts in a circle, more than the pool holds: in the first round each is computed, and asked for once more at
once (out of the pool); in the second each has been evicted meanwhile and comes from the one tier that this server has.

For "peer" the server is a pair whose prefill worker is killed after the first round: its successor reads what the
decode worker still has of each prompt, over the KV transport.

    python -m benchmarks.tiers
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import ONE_PAIR_ALWAYS, Server, Setup, arguments, ms, print_table, ratio, serving, write_result
from tandem.kv_transfer.fetch_planner import FetchSource, plan_fetch
from tandem.loadtest.client import run_measured
from tandem.loadtest.prompts import random_prompts

_TOKEN_BYTES = 23_040  # KV of the default model
_RESTART_TIMEOUT_S = 120.0
_Timed = tuple[float, int]  # TTFT in seconds, tokens that were not computed
_AIMS = {"host": 1 / 15, "disk": 1 / 10}

# A 70B model with grouped queries (80 layers, 8 KV heads of 128) in bfloat16, on eight GPUs that compute 12,000 prompt
# tokens/s at no context; attention adds its part. From the model's FLOPs at half of the GPUs' peak.
_BIG_TOKEN_BYTES = 2 * 80 * 8 * 128 * 2
_BIG_TOKEN_S = 2 * 70e9 / (8 * 0.5e15)
_BIG_ATTENTION_S = 4 * 80 * 64 * 128 / (8 * 0.5e15)  # per new token and token of context
_BIG_TIERS = {"HBM to HBM, 1 TB/s": 1e12, "host, 112 GB/s": 112e9, "NVMe, 10 GB/s": 10e9}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=5)
    settings = parser.parse_args()
    if settings.quick:
        settings.prompt_tokens, settings.prompts = 500, 3
    results: dict[str, Any] = {}
    pool_gb = 1.5 * settings.prompt_tokens * _TOKEN_BYTES / 1e9
    with tempfile.TemporaryDirectory() as folder:
        for setup in _setups(Path(folder), pool_gb):
            with serving(setup, settings.model) as server:
                results[setup.name] = run_measured(measure(server, settings))
        room_gb = pool_gb * (settings.prompts + 2)
        with serving(_peer_setup(room_gb), settings.model) as server:
            results["peer"] = run_measured(measure_peer(server, settings))
    _show(results, settings)
    formula = _formula()
    write_result("tiers", settings, {"measured": results, "formula": formula})
    return 0


def _setups(folder: Path, pool_gb: float) -> list[Setup]:
    common = ("--colocated", f"--pool-gb={pool_gb:.4f}")
    return [
        Setup("host", (*common, "--host-cache-gb=2")),
        Setup("disk", (*common, f"--disk-cache-path={folder / 'disk'}")),
        Setup("object", (*common, f"--object-cache-url={(folder / 'object').as_uri()}", "--object-cache-codec=raw")),
    ]


def _peer_setup(pool_gb: float) -> Setup:
    return Setup("peer", (*ONE_PAIR_ALWAYS.flags, f"--pool-gb={pool_gb:.4f}"))


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Medians of TTFT: computed, out of the pool, out of the tier."""
    prompts = await _prompts(server, settings)
    computed, pool = await _first_round(server, prompts)
    tier = [await _ttft(server, prompt) for prompt in prompts]
    # The first loads teach the tier's speed and later loads may be split differently: use a third round.
    tier += [await _ttft(server, prompt) for prompt in prompts]
    return _medians(computed, pool, tier, settings)


async def measure_peer(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Medians of TTFT: computed, out of the pool, out of that of the other worker."""
    prompts = await _prompts(server, settings)
    computed, pool = await _first_round(server, prompts)
    await _replace_prefill_worker(server)
    tier = [await _ttft(server, prompt) for prompt in prompts]
    return _medians(computed, pool, tier, settings)


async def _prompts(server: Server, settings: argparse.Namespace) -> list[list[int]]:
    prompts = await random_prompts(
        server.client,
        model=server.model,
        num_prompts=settings.prompts + 1,
        num_tokens=settings.prompt_tokens,
        seed=1_000_003 * settings.seed + 1,
    )
    await _ttft(server, prompts.pop())  # not counted: kernels and memory of this size
    return prompts


async def _first_round(server: Server, prompts: list[list[int]]) -> tuple[list[_Timed], list[_Timed]]:
    computed, pool = [], []
    for prompt in prompts:
        computed.append(await _ttft(server, prompt))
        pool.append(await _ttft(server, prompt))
    return computed, pool


async def _replace_prefill_worker(server: Server) -> None:
    """Kill the prefill worker's process and wait for its successor."""

    async def worker(client: httpx.AsyncClient) -> dict[str, Any] | None:
        roles = (await client.get(f"{server.url}/v1/pools")).json()["roles"]
        return next((w for w in roles["prefill"] if w["state"] == "ready"), None)

    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        former = await worker(client)
        assert former is not None
        os.kill(former["pid"], signal.SIGKILL)
        deadline = time.monotonic() + _RESTART_TIMEOUT_S
        while (present := await worker(client)) is None or present["pid"] == former["pid"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the prefill worker was not replaced within {_RESTART_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.2)


def _medians(
    computed: list[_Timed], pool: list[_Timed], tier: list[_Timed], settings: argparse.Namespace
) -> dict[str, Any]:
    return {
        "computed_s": statistics.median(ttft for ttft, _ in computed),
        "pool_s": statistics.median(ttft for ttft, _ in pool),
        "tier_s": statistics.median(ttft for ttft, _ in tier),
        "tier_max_s": max(ttft for ttft, _ in tier),
        "tier_hit_share": sum(hit for _, hit in tier) / (len(tier) * settings.prompt_tokens),
        "ttfts_s": {"computed": computed, "pool": pool, "tier": tier},
    }


async def _ttft(server: Server, prompt: list[int]) -> _Timed:
    timing = await server.client.stream_completion(
        prompt, model=server.model, max_tokens=2, ignore_eos=True, temperature=0.0
    )
    if timing.error:
        raise RuntimeError(timing.error)
    return timing.ttft_s, timing.num_cached_tokens


def _show(results: dict[str, Any], settings: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    computed_s = statistics.median(result["computed_s"] for result in results.values())
    pool_s = statistics.median(result["pool_s"] for result in results.values())
    rows.append(["recomputed", ms(computed_s), "-", "0.0%", "1", "-"])
    rows.append(["pool (L1)", ms(pool_s), "-", "-", f"{ratio(pool_s, computed_s):.4f}", "-"])
    for name, result in results.items():
        share = ratio(result["tier_s"], result["computed_s"])
        aim = _AIMS.get(name)
        rows.append(
            [
                name,
                ms(result["tier_s"]),
                ms(result["tier_max_s"]),
                f"{result['tier_hit_share']:.1%}",
                f"{share:.4f}",
                "-" if aim is None else f"{aim:.4f}: {'hit' if share <= aim else 'missed'}",
            ]
        )
    print_table(
        f"A prompt of {settings.prompt_tokens} tokens; colocated, for the peer a pair",
        ["from", "TTFT p50 ms", "max", "tokens loaded", "over recomputing", "aim"],
        rows,
    )


def _formula() -> list[dict[str, Any]]:
    """The planner's own decision for a 70B model, by source and length."""
    rows: list[dict[str, Any]] = []
    for num_tokens in (10_000, 100_000, 1_000_000):
        for name, bytes_per_s in _BIG_TIERS.items():
            source = FetchSource(name, num_tokens // 16, 1e-4, 16 * _BIG_TOKEN_BYTES / bytes_per_s)
            plan = plan_fetch(
                [source], first_block=0, num_tokens=num_tokens + 1, block_size=16, compute_s=_big_compute_s
            )
            rows.append(
                {
                    "tokens": num_tokens,
                    "source": name,
                    "computed_first": plan.loads[0].first_block * 16 if plan.loads else num_tokens,
                    "predicted_s": plan.predicted_s,
                    "recompute_s": plan.recompute_s,
                }
            )
    print_table(
        "By the cost formula: a 70B model on eight GPUs",
        ["source", "tokens", "recomputed s", "with the tier s", "over recomputing", "computed meanwhile"],
        [
            [
                row["source"],
                f"{row['tokens']:,}",
                f"{row['recompute_s']:.2f}",
                f"{row['predicted_s']:.4f}",
                f"{ratio(row['predicted_s'], row['recompute_s']):.4f}",
                f"{row['computed_first']:,}",
            ]
            for row in rows
        ],
        caption="the last column: tokens computed from the front while the rest is loaded",
    )
    return rows


def _big_compute_s(start: int, end: int) -> float:
    count = end - start
    return _BIG_TOKEN_S * count + _BIG_ATTENTION_S * count * (start + end) / 2


if __name__ == "__main__":
    sys.exit(main())
