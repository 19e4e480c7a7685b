"""Eviction policies on recorded traffic: the share of prompt tokens found in a cache of C blocks of 512 tokens.

A request finds the leading blocks that are in the cache; then it uses them, adds its other blocks, and the policy
evicts, leaf first, until the cache holds C blocks again. Blocks of requests are added whole and at once; a new block
may be the one that is evicted. `optimal` knows the future and evicts what is used last, or never again: no policy can
do better.

    python -m benchmarks.eviction
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.common import print_table, write_result
from tandem.kv_transfer.eviction import POLICIES, create_policy
from tandem.loadtest.traces import TraceRequest, read_trace

TRACES = ("mooncake_conversation_a", "mooncake_synthetic_a", "weka_replay512_a")
CAPACITIES = (500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
OPTIMAL = "optimal"

_QUICK_TRACES, _QUICK_CAPACITIES = TRACES[1:2], CAPACITIES[:4]
_FIRST = ("lru", "hit-density")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest trace and caches")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES, help="(default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    settings = parser.parse_args()
    traces, capacities = (_QUICK_TRACES, _QUICK_CAPACITIES) if settings.quick else (settings.traces, CAPACITIES)
    names = [*_FIRST, *(name for name in sorted(POLICIES) if name not in _FIRST), OPTIMAL]
    cells = [(trace, name, capacity) for trace in traces for name in names for capacity in capacities]
    with ProcessPoolExecutor(settings.processes) as pool:
        ratios = dict(zip(cells, pool.map(_measure, cells), strict=True))
    print_table(
        "Token hit ratio (%) by capacity in blocks",
        ["trace", "policy", *map(str, capacities)],
        [
            [trace, name, *(f"{100 * ratios[trace, name, capacity]:.2f}" for capacity in capacities)]
            for trace in traces
            for name in names
        ],
    )
    results = {
        trace: {name: {capacity: ratios[trace, name, capacity] for capacity in capacities} for name in names}
        for trace in traces
    }
    write_result("eviction", settings, results)
    return 0


def _measure(cell: tuple[str, str, int]) -> float:
    trace, name, capacity = cell
    return optimal(load(trace), capacity) if name == OPTIMAL else replay(load(trace), name, capacity)


@functools.cache
def load(trace: str) -> list[TraceRequest]:
    """A trace of benchmarks/data, read once in each process."""
    return list(read_trace(Path(__file__).parent / "data" / f"{trace}.jsonl.gz"))


def replay(requests: Sequence[TraceRequest], policy_name: str, capacity: int) -> float:
    """Token hit ratio of a cache of `capacity` blocks."""
    policy = create_policy(policy_name, capacity)
    num_hit_tokens = 0
    for request in requests:
        block_ids = request.block_ids
        # Eviction is leaf first, so the cached part of a chain is a prefix of it.
        num_hits = bisect_left(block_ids, True, key=lambda block_id: block_id not in policy)
        num_hit_tokens += request.num_tokens_in(num_hits)
        parent = block_ids[num_hits - 1] if num_hits else None
        if parent is not None:
            policy.touch(parent)
        for block_id in block_ids[num_hits:]:
            policy.add(block_id, parent)
            parent = block_id
        for _ in range(len(policy) - capacity):
            victim = policy.victim()
            assert victim is not None, f"{len(policy)} blocks, none pinned, and no victim"
            policy.remove(victim)
    return num_hit_tokens / sum(request.num_prompt_tokens for request in requests)


def optimal(requests: Sequence[TraceRequest], capacity: int) -> float:
    """Token hit ratio of Belady's policy. Leaf first by itself: a block is used no later than its descendants."""
    next_uses = _next_uses(requests)
    next_use: dict[int, float] = {}  # of the blocks in the cache
    last_first: list[tuple[float, int, int]] = []  # (- next use, - depth, block id); the block may have been used since
    num_hit_tokens = 0
    for request, uses in zip(requests, next_uses, strict=True):
        num_hits = bisect_left(request.block_ids, True, key=lambda block_id: block_id not in next_use)
        num_hit_tokens += request.num_tokens_in(num_hits)
        for depth, (block_id, use) in enumerate(zip(request.block_ids, uses, strict=True)):
            if use == math.inf:
                next_use.pop(block_id, None)
            else:
                next_use[block_id] = use
                heapq.heappush(last_first, (-use, -depth, block_id))
        while len(next_use) > capacity:
            negative_use, _, block_id = heapq.heappop(last_first)
            if next_use.get(block_id) == -negative_use:
                del next_use[block_id]
    return num_hit_tokens / sum(request.num_prompt_tokens for request in requests)


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[float]]:
    """For each block of each request, the index of the next request with it."""
    seen: dict[int, float] = {}
    uses = []
    for idx in range(len(requests) - 1, -1, -1):
        uses.append([seen.get(block_id, math.inf) for block_id in requests[idx].block_ids])
        seen |= dict.fromkeys(requests[idx].block_ids, idx)
    return uses[::-1]


if __name__ == "__main__":
    sys.exit(main())
