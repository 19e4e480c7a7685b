"""The exact miss-ratio curve of LRU caches (Mattson with a Fenwick tree), and how far the online one is from it.

The online curve gets a hundredth of the exact one's memory. Which blocks it samples depends on their digests, so a
trace is measured several times, each time with other digests.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.protocol.digest import DIGEST_BYTES
from tandem.scheduling.miss_ratio import MissRatioCurve
from tests.support.trace_replay import CAPACITIES

_MEMORY_SHARE = 0.01


def measure(requests: Sequence[TraceRequest], num_draws: int, seed: int) -> dict[str, Any]:
    """The exact curve of a trace and `num_draws` estimates of it."""
    num_blocks = 1 + max(max(request.block_ids, default=-1) for request in requests)
    exact = ExactCurve()
    estimates = []
    for draw in range(num_draws):
        digests = draw_digests(num_blocks, f"{seed}/{draw}")
        chains = [[digests[block_id] for block_id in request.block_ids] for request in requests]
        if draw == 0:
            for request, chain in zip(requests, chains, strict=True):
                exact.observe(request, chain)
        online = MissRatioCurve(TRACE_BLOCK_SIZE, num_bytes=int(_MEMORY_SHARE * exact.num_bytes))
        for request, chain in zip(requests, chains, strict=True):
            online.observe(chain, request.num_prompt_tokens)
        estimates.append(online.curve(CAPACITIES))
    return {
        "exact": exact.curve(CAPACITIES),
        "estimates": estimates,
        "exact_bytes": exact.num_bytes,
        "online_bytes": online.num_bytes,
    }


def draw_digests(num_blocks: int, seed: str) -> list[bytes]:
    """A digest for each block id."""
    drawn = random.Random(seed).randbytes(num_blocks * DIGEST_BYTES)
    return [drawn[start : start + DIGEST_BYTES] for start in range(0, len(drawn), DIGEST_BYTES)]


class ExactCurve:
    """Hit ratios of LRU caches by how many blocks were used since a block's last use, for every block of a trace."""

    def __init__(self) -> None:
        self._last_use: dict[bytes, int] = {}
        self._tree = np.zeros(1 << 12, np.int32)  # Fenwick tree over uses: 1 where a block was used last, 1-based
        self._num_uses = 0
        self._num_tokens = 0
        self._hit_tokens = np.zeros(1 << 12, np.int64)  # by the smallest capacity that finds them

    @property
    def num_bytes(self) -> int:
        """Size of what it looks up and counts with; its results are left out."""
        entries = sum(sys.getsizeof(digest) + sys.getsizeof(use) for digest, use in self._last_use.items())
        return sys.getsizeof(self._last_use) + entries + self._tree.itemsize * self._num_uses

    def observe(self, request: TraceRequest, digests: Sequence[bytes]) -> None:
        """Count a request, then make its blocks the most recently used, the root last."""
        end = self._num_uses + len(digests)
        self._reserve(end)
        last_uses = np.array([self._last_use.get(digest, 0) for digest in digests], np.int64)
        num_known = int(np.cumprod(last_uses > 0).sum())
        depths = len(self._last_use) - self._count_before(last_uses[:num_known])
        ends = [request.num_tokens_in(num_blocks) for num_blocks in range(num_known + 1)]
        np.add.at(self._hit_tokens, np.maximum.accumulate(depths), np.diff(ends))
        self._num_tokens += request.num_prompt_tokens
        uses = np.arange(end, self._num_uses, -1)
        self._add(last_uses[last_uses > 0], -1)
        self._add(uses, 1)
        self._last_use.update(zip(digests, uses.tolist(), strict=True))
        self._num_uses = end

    def curve(self, capacities: Sequence[int]) -> list[float]:
        """Token hit ratios of LRU caches with these capacities in blocks."""
        hits = np.cumsum(self._hit_tokens)
        return [float(hits[min(capacity, len(hits) - 1)]) / max(1, self._num_tokens) for capacity in capacities]

    def _reserve(self, num_uses: int) -> None:
        while num_uses >= len(self._tree):
            grown = np.zeros(2 * len(self._tree), np.int32)
            grown[: len(self._tree)] = self._tree
            grown[len(self._tree)] = len(self._last_use)  # a node of the tree that covers all there was
            self._tree = grown
            self._hit_tokens = np.concatenate([self._hit_tokens, np.zeros_like(self._hit_tokens)])

    def _add(self, uses: NDArray[np.int64], change: int) -> None:
        while len(uses):
            np.add.at(self._tree, uses, change)
            uses = uses + (uses & -uses)
            uses = uses[uses < len(self._tree)]

    def _count_before(self, uses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of blocks last used before each of these uses."""
        nodes, counts = uses - 1, np.zeros(len(uses), np.int64)
        while nodes.any():
            counts += self._tree[nodes]  # [0] is 0
            nodes = nodes & (nodes - 1)
        return counts
