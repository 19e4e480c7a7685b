"""Hit ratios that prompt caches of other sizes would have in the live traffic, next to the configured sizes.

Knows requests as digests; places nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tandem.protocol.load_prior import TIER_PRIORS
from tandem.protocol.messages import DISK_TIER, HOST_TIER
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.miss_ratio import MissRatioCurve
from tandem.scheduling.planning.advice import Worth, advise
from tandem.scheduling.workers.workers import RegisteredWorker

# The last hour's traffic has half the weight in the curve: long enough for conversations to return, short enough to
# follow the day. Counts fade at most once a minute and only while requests arrive, so that the first request after a
# quiet night does not outweigh everything before it.
_HALF_LIFE_S = 3600.0
_FADE_INTERVAL_S = 60.0
_OCTAVES = range(-3, 6)  # reported sizes, relative to the present size of the pools
_ADVISED = range(9)  # doublings of the present size on which advice is given


class CacheSizing:
    """Estimates the token hit ratio of caches of many sizes, over all tenants and for each tenant.

    The model is one cache that all workers share. Each router knows only its own traffic.
    """

    def __init__(
        self, workers: Iterable[RegisteredWorker], costs: CostModel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = workers
        self._costs = costs
        self._clock = clock
        self._curve = MissRatioCurve(block_size=1)  # until the first request shows the block size
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
        """Count a request: the digests of its prompt's blocks, and of the blocks that its answer added.

        `num_cached_tokens` prompt tokens were found in the real cache.
        """
        if self._curve.block_size != block_size:
            self._curve, self._num_cached_tokens = MissRatioCurve(block_size), 0.0
        self._fade()
        self._curve.observe(prompt, num_prompt_tokens, answer=answer, tenant=tenant)
        self._num_cached_tokens += num_cached_tokens
        self.num_tokens += num_prompt_tokens

    def hit_ratios(self, capacities: Sequence[int]) -> list[float]:
        """Predicted token hit ratio of all traffic, for caches of these numbers of blocks."""
        return self._curve.curve(capacities)

    def levels(self) -> dict[str, int]:
        """Configured capacity of the workers in blocks: of their pools, and of each kind of tier.

        A shared store counts once. The levels do not add up: every block of the pools is also stored in each tier.
        """
        levels = Counter({"pool": sum(worker.card.num_blocks for worker in self._workers)})
        tiers = {
            (tier.name, tier_owner(tier.name, worker)): tier.capacity_blocks
            for worker in self._workers
            for tier in worker.tiers
        }
        for (name, _), capacity_blocks in tiers.items():
            levels[name] += capacity_blocks
        return dict(levels)

    def advice(self) -> list[dict[str, Any]]:
        """For each tier, or one that could be had: the size to have, what it would find, and whether that pays back.

        Tiers faster than the largest one are left out, as all their blocks are found already. Nothing is said before
        the traffic could have filled that one. A block counts as computed without context, which takes least.
        """
        levels = self.levels()
        num_largest = max(levels.values())
        if not (num_largest and self._block_bytes and self._curve.num_tokens >= num_largest * self._curve.block_size):
            return []
        loads = self._load_s()
        least_s = max(loads.get(name, 0.0) for name, num_blocks in levels.items() if num_blocks == num_largest)
        slower = sorted((tier for tier in loads if loads[tier] >= least_s), key=loads.__getitem__)
        return [self._advice(tier, num_largest, levels.get(tier, 0), loads[tier]) for tier in slower]

    def _load_s(self) -> dict[str, float]:
        """Seconds to load a block from each tier, and from host memory and a disk as assumed where there are none."""
        loads = {name: self._block_bytes / TIER_PRIORS[name].bytes_per_s for name in (HOST_TIER, DISK_TIER)}
        tiers = [tier for worker in self._workers for tier in worker.tiers if 0 < tier.block_s < math.inf]
        return loads | {tier.name: min(one.block_s for one in tiers if one.name == tier.name) for tier in tiers}

    @property
    def _block_bytes(self) -> int:
        return max((worker.card.block_bytes for worker in self._workers), default=0)

    def _advice(self, tier: str, base: int, present: int, load_s: float) -> dict[str, Any]:
        capacities, block_bytes, block_size = [base << n for n in _ADVISED], self._block_bytes, self._curve.block_size
        compute_s = min(self._costs.steps(worker.card.kind).costs.prefill_token_s for worker in self._workers)
        sizes = [float(num_blocks * block_bytes) for num_blocks in capacities]
        worth = Worth(compute_s, load_s / block_size)
        return advise(tier, sizes, self.hit_ratios(capacities), worth, present=float(present * block_bytes))

    def report(self) -> dict[str, Any]:
        """The curves around the configured sizes, of all traffic and of each tenant, as JSON."""
        return self.summary() | {"tenants": self._curve.report(_capacities(self.levels()))["tenants"]}

    def summary(self) -> dict[str, Any]:
        """The curve of all traffic around the configured sizes, as JSON."""
        levels = self.levels()
        capacities = _capacities(levels)
        block_bytes = self._block_bytes
        return {
            "num_tokens": round(self._curve.num_tokens),
            "measured_hit_ratio": self._num_cached_tokens / max(1.0, self._curve.num_tokens),
            "block_bytes": block_bytes,
            "advice": self.advice(),
            "capacities": [
                {
                    "num_blocks": capacity,
                    "num_bytes": capacity * block_bytes,
                    "configured": [name for name, num_blocks in levels.items() if num_blocks == capacity],
                    "hit_ratio": ratio,
                }
                for capacity, ratio in zip(capacities, self.hit_ratios(capacities), strict=True)
            ],
        }

    def _fade(self) -> None:
        now = self._clock()
        if now - self._faded_at < _FADE_INTERVAL_S:
            return
        self._faded_at = now
        share = 0.5 ** (_FADE_INTERVAL_S / _HALF_LIFE_S)
        self._curve.fade(share)
        self._num_cached_tokens *= share


def tier_owner(tier: str, worker: RegisteredWorker) -> str:
    """What this worker's tier belongs to: the store that several workers share, or the worker itself.

    Engines do not name their stores: the disk of each belongs to its host.
    """
    card = worker.card
    if tier == DISK_TIER and tier not in card.tiers:
        return urlsplit(card.address.endpoint).hostname or ""
    return card.tiers.get(tier) or worker.worker_id


def _capacities(levels: dict[str, int]) -> list[int]:
    """Sizes to report in blocks, ascending: powers of two around the pools, each level, and twice each level."""
    around = levels["pool"].bit_length() - 1
    sizes = {int(2.0 ** (around + octave)) for octave in _OCTAVES} if levels["pool"] else set()
    for num_blocks in levels.values():
        sizes |= {num_blocks, 2 * num_blocks}
    return sorted(sizes - {0})
