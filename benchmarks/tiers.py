"""TTFT of a long prompt out of each tier, over computing it again.

Several prompts in a circle, more than the pool holds: in the first round each is computed, and asked for once more at
once (out of the pool); in the second each has been evicted meanwhile and comes from the one tier that this server has.

For "peer" the server is a pair whose prefill worker is killed after the first round: its successor reads what the
decode worker still has of each prompt, over the KV transport.

Stands behind README's "out of host memory takes 1/48 of computing it again".

    python -m benchmarks.tiers
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ONE_PAIR_ALWAYS, Server, Setup, arguments, ms, print_table, ratio, serving, write_result
from tandem.loadtest.client import run_measured

_TOKEN_BYTES = 23_040  # KV of the default model
_RESTART_TIMEOUT_S = 120.0
_Timed = tuple[float, int]  # TTFT in seconds, tokens that were not computed
_AIMS = {"host": 1 / 15, "disk": 1 / 10}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=5)
    settings = parser.parse_args()
    if settings.quick:
        settings.prompt_tokens, settings.prompts = 500, 3
    results: dict[str, Any] = {}
    pool_bytes = 3 * settings.prompt_tokens * _TOKEN_BYTES // 2
    with tempfile.TemporaryDirectory() as folder:
        for setup in _setups(Path(folder), pool_bytes, settings.prompts):
            with serving(setup, settings.model) as server:
                results[setup.name] = run_measured(measure(server, settings))
    _show(results, settings)
    write_result("tiers", settings, results)
    return 0


def _setups(folder: Path, pool_bytes: int, num_prompts: int) -> list[Setup]:
    common = ("--colocated", f"--pool-bytes={pool_bytes}")
    return [
        Setup("host", (*common, "--host-cache-gb=2")),
        Setup("disk", (*common, f"--disk-cache-path={folder / 'disk'}")),
        Setup("object", (*common, f"--object-cache-url={(folder / 'object').as_uri()}", "--object-cache-codec=raw")),
        Setup("peer", (*ONE_PAIR_ALWAYS.flags, f"--pool-bytes={pool_bytes * (num_prompts + 2)}")),
    ]


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """Medians of TTFT: computed, out of the pool, and out of the tier or the pool of the other worker."""
    prompts = await server.prompts(settings.prompts + 1, settings.prompt_tokens, 1_000_003 * settings.seed + 1)
    await _ttft(server, prompts.pop())  # not counted: kernels and memory of this size
    computed, pool = [], []
    for prompt in prompts:
        computed.append(await _ttft(server, prompt))
        pool.append(await _ttft(server, prompt))
    if server.name == "peer":
        await replace_prefill_worker(server)
    else:  # loads teach the tier's speed, and later loads may be split differently: a third round
        prompts = [*prompts, *prompts]
    tier = [await _ttft(server, prompt) for prompt in prompts]
    return {
        "computed_s": statistics.median(ttft for ttft, _ in computed),
        "pool_s": statistics.median(ttft for ttft, _ in pool),
        "tier_s": statistics.median(ttft for ttft, _ in tier),
        "tier_max_s": max(ttft for ttft, _ in tier),
        "tier_hit_share": sum(hit for _, hit in tier) / (len(tier) * settings.prompt_tokens),
        "ttfts_s": {"computed": computed, "pool": pool, "tier": tier},
    }


async def replace_prefill_worker(server: Server) -> None:
    """Kill the prefill worker's process and wait for its successor."""
    pools = await server.client.request_json("GET", "/v1/pools")
    [former] = pools["roles"]["prefill"]
    os.kill(former["pid"], signal.SIGKILL)
    await server.until_replaced([former], _RESTART_TIMEOUT_S)


async def _ttft(server: Server, prompt: list[int]) -> _Timed:
    timing = await server.greedy(prompt, 2)
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


if __name__ == "__main__":
    sys.exit(main())
