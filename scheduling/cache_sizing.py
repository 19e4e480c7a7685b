"""What prompt caches of other sizes would have found in the live traffic, beside the sizes that are configured.

Knows requests as digests; places nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tandem.scheduling.miss_ratio import MissRatioCurve
from tandem.scheduling.registry import Registry
from tandem.scheduling.workers import RegisteredWorker

__all__ = ["CacheSizing"]

# What the last hour brought is half of the curve: long enough for conversations to come back, short enough to follow
# the day. Counts fade once a minute at most and only while requests come, so after a quiet night the first request
# does not outweigh all that was seen before.
_HALF_LIFE_S = 3600.0
_FADE_INTERVAL_S = 60.0
_OCTAVES = range(-3, 6)  # around the present size of the pools


class CacheSizing:
    """Estimates the share of prompt tokens found by caches of many sizes, over all tenants and for each.

    One cache that all workers share is meant. Each router knows only the traffic that went through it.
    """

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._curve = MissRatioCurve(block_size=1)  # until a request tells the real one
        self._num_cached_tokens = 0.0  # fades with the curve
        self._faded_at = clock()
        self.num_tokens = 0  # observed since the start

    def observe(
        self,
        prompt: Sequence[bytes],
        answer: Sequence[bytes],
        *,
        block_size: int,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        tenant: str,
    ) -> None:
        """Count a request, by the digests of its prompt's blocks and of those that its answer added.

        `num_cached_tokens` of the prompt were really found.
        """
        if self._curve.block_size != block_size:
            self._curve, self._num_cached_tokens = MissRatioCurve(block_size), 0.0
        self._fade()
        self._curve.observe(prompt, num_prompt_tokens, answer=answer, tenant=tenant)
        self._num_cached_tokens += num_cached_tokens
        self.num_tokens += num_prompt_tokens

    def hit_ratios(self, capacities: Sequence[int]) -> list[float]:
        """Predicted token hit ratio of all traffic, for caches of so many blocks."""
        return self._curve.curve(capacities)

    def levels(self) -> dict[str, int]:
        """Blocks that the workers have room for by configuration: in their pools, and in each kind of tier.

        What workers share counts once. The levels do not add up: a tier is given every block of the pools.
        """
        levels = Counter({"pool": sum(worker.card.num_blocks for worker in self._registry)})
        tiers = {
            (tier.name, _owner(tier.name, worker)): tier.capacity_blocks
            for worker in self._registry
            for tier in worker.tiers
        }
        for (name, _), capacity_blocks in tiers.items():
            levels[name] += capacity_blocks
        return dict(levels)

    def report(self) -> dict[str, Any]:
        """The curves around the configured sizes, as JSON."""
        levels = self.levels()
        capacities = _capacities(levels)
        block_bytes = max((worker.card.block_bytes for worker in self._registry), default=0)
        predicted = self._curve.report(capacities)
        return {
            "num_tokens": predicted["num_tokens"],
            "measured_hit_ratio": self._num_cached_tokens / max(1.0, self._curve.num_tokens),
            "block_bytes": block_bytes,
            "capacities": [
                {
                    "num_blocks": capacity,
                    "num_bytes": capacity * block_bytes,
                    "configured": [name for name, num_blocks in levels.items() if num_blocks == capacity],
                    "hit_ratio": ratio,
                }
                for capacity, ratio in zip(capacities, predicted["hit_ratios"], strict=True)
            ],
            "tenants": predicted["tenants"],
        }

    def _fade(self) -> None:
        now = self._clock()
        if now - self._faded_at < _FADE_INTERVAL_S:
            return
        self._faded_at = now
        share = 0.5 ** (_FADE_INTERVAL_S / _HALF_LIFE_S)
        self._curve.fade(share)
        self._num_cached_tokens *= share


def _owner(tier: str, worker: RegisteredWorker) -> str:
    """Who the tier of this worker belongs to: the worker, its host, or everyone."""
    if tier == "object":
        return ""
    return urlsplit(worker.card.address.endpoint).hostname or "" if tier == "disk" else worker.worker_id


def _capacities(levels: dict[str, int]) -> list[int]:
    """Sizes in blocks to answer for, in order: powers of two around the pools, each level as it is, and twice that."""
    around = levels["pool"].bit_length() - 1
    sizes = {int(2.0 ** (around + octave)) for octave in _OCTAVES} if levels["pool"] else set()
    for num_blocks in levels.values():
        sizes |= {num_blocks, 2 * num_blocks}
    return sorted(sizes - {0})
