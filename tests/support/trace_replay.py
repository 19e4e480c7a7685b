"""Recorded traffic in a cache of C blocks: the share of prompt tokens found there, by a policy and at best.

A request finds the leading blocks that are in the cache. Then it uses them, adds its other blocks, and the policy
evicts, leaf first, until the cache holds C blocks again. All new blocks of a request are added at once, and one of them
may be evicted. `optimal` knows the future and evicts what is used last, or never again: no policy can do better.
"""

from __future__ import annotations

import functools
import gzip
import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from tandem.kv_transfer.eviction import EvictionPolicy
from tandem.loadtest.traces import TraceRequest, read_trace

TRACES = ("mooncake_conversation_a", "mooncake_synthetic_a", "weka_replay512_a")
_FOLDER = Path(__file__).parents[2] / "benchmarks" / "data"
CAPACITIES = (500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)


@functools.cache
def load(trace: str) -> list[TraceRequest]:
    """A trace of benchmarks/data, read once in each process."""
    return list(read_trace(_FOLDER / f"{trace}.jsonl.gz"))


def load_ends(trace: str) -> str:
    """How each answer of a trace ended: `t` with a call of a tool, `e` without one, `-` unknown. "" = all unknown."""
    path = _FOLDER / f"{trace}_ends.txt.gz"
    return gzip.decompress(path.read_bytes()).decode() if path.exists() else ""


def replay(requests: Sequence[TraceRequest], policy: EvictionPolicy, capacity: int, ends: str = "") -> float:
    """Token hit ratio of a cache of `capacity` blocks with this policy, which knows no keys yet.

    The policy is told the `ends` of the answers (`load_ends`) at once, as if they took no time.
    """
    num_hit_tokens = 0
    for request, end in zip_longest(requests, ends, fillvalue="-"):
        assert isinstance(request, TraceRequest), "more ends than requests"
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
        if parent is not None and end != "-":
            policy.note_end(parent, has_calls=end == "t")
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
