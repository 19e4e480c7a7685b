"""Eviction policies on recorded traces: token hit ratio by capacity, beside plain LRU.

Semantics are those of the reference numbers that LRU must reproduce: a lookup finds the longest resident prefix, a
partial last block counts with its tokens, then all blocks of the request are resident and the excess is evicted.

    python -m benchmarks.eviction
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, print_table, write_result
from kv_transfer.eviction import POLICIES, EvictionPolicy, create_policy
from loadtest.traces import TraceRequest, read_trace

DATA = Path(__file__).resolve().parent / "data"
TRACES = ("mooncake_conversation_a", "mooncake_synthetic_a", "weka_replay512_a")
CAPACITIES = (500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--capacities", type=int, nargs="+", default=list(CAPACITIES), help="blocks of 512 tokens")
    settings = parser.parse_args()
    traces: Sequence[str] = TRACES
    if settings.quick:
        traces, settings.capacities = TRACES[1:2], [500, 4000]
    results: dict[str, dict[str, dict[int, float]]] = {}
    for trace in traces:
        requests = load(trace)
        results[trace] = {
            name: {
                capacity: token_hit_ratio(create_policy(name, capacity), requests) for capacity in settings.capacities
            }
            for name in sorted(POLICIES)
        }
        _show(trace, results[trace], settings.capacities)
    if len(results) == len(TRACES):
        _show("mean over the traces", _mean(results, settings.capacities), settings.capacities)
    write_result("eviction", settings, results)
    return 0


def load(trace: str) -> list[TraceRequest]:
    """The requests of one of `TRACES`."""
    return list(read_trace(DATA / f"{trace}.jsonl.gz"))


def token_hit_ratio(policy: EvictionPolicy, requests: Iterable[TraceRequest]) -> float:
    """Share of prompt tokens found in a cache that starts cold and keeps what `policy` does not evict."""
    num_hits = num_tokens = 0
    for request in requests:
        ids = request.block_ids
        depth = next((idx for idx, block in enumerate(ids) if block not in policy), len(ids))
        num_hits += request.num_tokens_in(depth)
        num_tokens += request.num_prompt_tokens
        if depth:
            policy.touch(ids[depth - 1])
        for idx in range(depth, len(ids)):
            if ids[idx] not in policy:
                policy.add(ids[idx], ids[idx - 1] if idx else None)
            if len(policy) > policy.capacity:
                victim = policy.victim()
                policy.remove(victim)
                if victim == ids[idx]:
                    break  # what hangs from it could not be found
    return num_hits / num_tokens


def _mean(results: dict[str, dict[str, dict[int, float]]], capacities: Sequence[int]) -> dict[str, dict[int, float]]:
    return {
        name: {size: sum(by_policy[name][size] for by_policy in results.values()) / len(results) for size in capacities}
        for name in POLICIES
    }


def _show(title: str, ratios: dict[str, dict[int, float]], capacities: Sequence[int]) -> None:
    best = {size: max(by_size[size] for by_size in ratios.values()) for size in capacities}
    rows: list[list[Any]] = [
        [name, *(f"{100 * by_size[size]:.2f}{'*' if by_size[size] == best[size] else ' '}" for size in capacities)]
        for name, by_size in sorted(ratios.items(), key=lambda item: item[0] != "lru")
    ]
    print_table(
        f"Token hit ratio, %: {title}", ["policy", *(f"C={size}" for size in capacities)], rows, caption="* best"
    )


if __name__ == "__main__":
    sys.exit(main())
