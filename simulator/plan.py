"""The whole plan for a load: tiers that pay, the size of each, shapes of workers, and what they cost.

Figures are kept as plain values; `plan_report.py` draws them, `cli/plan.py` prints them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.scheduling.miss_ratio import MissRatioCurve
from tandem.scheduling.planning.advice import MONTH_S, Worth, advise, best_size
from tandem.scheduling.planning.roofline import PlannedWorker
from tandem.simulator.measures import Slo
from tandem.simulator.shapes import MAX_WORKERS, Served, ShapeSearch

CONTEXTS = tuple(1 << power for power in range(10, 21))  # 1 Ki to 1 Mi tokens
_NUM_SIZES = 10  # doublings of the pools for which hits are shown
_SAME = 0.05  # capacities are known within this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a GPU costs and draws; 0 = not known."""

    dollars_per_hour: float = 0.0
    watts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Hit ratios by size of one cache for all workers, advice on each tier, and the gap of the workers' own pools."""

    num_bytes: Sequence[float]  # the pools, and doublings of them
    hits: Sequence[float]
    advice: Sequence[dict[str, Any]]
    gap: dict[str, float]


def contexts(worker: PlannedWorker) -> list[dict[str, float]]:
    """For each of `CONTEXTS`: KV bytes, seconds to compute, to hand over, and to restore from each tier."""
    return [
        {
            "num_tokens": num_tokens,
            "kv_bytes": worker.kv_bytes(num_tokens),
            "prefill_s": worker.prefill_s(num_tokens),
            "transfer_s": worker.transfer_s(num_tokens),
            **{f"{tier}_s": worker.restore_s(tier, num_tokens) for tier in worker.tiers},
        }
        for num_tokens in CONTEXTS
    ]


def memory_for(
    worker: PlannedWorker, num_workers: int, requests: Sequence[TraceRequest], rate: float, prices: Prices
) -> Memory:
    """Which tiers and sizes pay for these requests at this rate, beside the pools of so many workers.

    Each tier is judged as if it were the only one; a token is priced at the mean depth of a prompt.
    """
    curve = MissRatioCurve(TRACE_BLOCK_SIZE)
    digests: dict[int, bytes] = {}
    for request in requests:
        chain = [digests.get(one) or digests.setdefault(one, _digest(one)) for one in request.block_ids]
        curve.observe(chain, request.num_prompt_tokens)
    mean = sum(request.num_prompt_tokens for request in requests) / len(requests)
    token_bytes = worker.kv_bytes(mean) / mean
    sizes = [worker.pool_bytes * num_workers * 2.0**doubling for doubling in range(_NUM_SIZES)]
    hits = curve.curve([int(size / (token_bytes * TRACE_BLOCK_SIZE)) for size in sizes])
    worths = {
        name: Worth(
            compute_s=worker.prefill_s(mean) / mean,
            load_s=worker.restore_s(name, mean) / mean,
            tokens_per_s=rate * mean,
            dollars_per_s=prices.dollars_per_hour * worker.num_gpus / 3600,
            dollars_per_byte_s=tier.dollars_per_gb_month / 1e9 / MONTH_S,
        )
        for name, tier in worker.tiers.items()
    }
    saturated = best_size(sizes, hits, Worth(compute_s=1.0, load_s=0.0))
    found_per_s = rate * mean * token_bytes * (hits[saturated] - hits[0])
    gap = {
        "pool_bytes": sizes[0],
        "useful_bytes": sizes[saturated],
        "restore_bytes_per_s": found_per_s,
        **{f"{name}_bytes_per_s": tier.load.bytes_per_s * num_workers for name, tier in worker.tiers.items()},
    }
    advice = [advise(name, sizes, hits, worth, present=0.0) for name, worth in worths.items()]
    return Memory(num_bytes=sizes, hits=hits, advice=advice, gap=gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """What each shape of the same workers serves, and what the load needs."""

    served: Sequence[Served]  # at the highest rate within the SLO, colocated first
    at_load: Sequence[Served]  # the same shapes at the load
    needed: dict[str, Served | None]  # "colocated" and the best split; None = more than can be simulated
    rate: float  # the load
    num_workers: int
    host_cache_tokens: int  # of each worker
    slo: Slo
    verdict: str

    @property
    def best_split(self) -> Served:
        """The split of workers into prefill and decode that serves most."""
        return max(self.served[1:], key=lambda one: one.rate)


def plan_shapes(search: ShapeSearch, worker: PlannedWorker, num_workers: int, rate: float) -> ShapePlan:
    """Find the capacity of each shape, and how many workers the load needs."""
    served = [search.capacity(shape) for shape in search.shapes(num_workers)]
    unknown = ShapePlan(
        served=served,
        at_load=[],
        needed={},
        rate=rate,
        num_workers=num_workers,
        host_cache_tokens=search.host_cache_tokens,
        slo=search.slo,
        verdict=_unreachable(search, worker, served),
    )
    colocated, split = served[0], unknown.best_split
    if not max(colocated.rate, split.rate):
        return unknown
    needed = {
        name: search.least_workers(one.shape, rate, math.ceil(rate / one.rate * num_workers)) if one.rate else None
        for name, one in (("colocated", colocated), (str(split.shape), split))
    }
    at_load = [search.serve(one.shape, rate) for one in served]
    return replace(unknown, at_load=at_load, needed=needed, verdict=_verdict(colocated, split))


def cost_of(served: Served, worker: PlannedWorker, output_tokens: float, prices: Prices) -> dict[str, float]:
    """Output tokens per second and GPU, dollars per million of them, and joules of each at the boards' full power."""
    num_gpus = served.shape.num_workers * worker.num_gpus
    tokens_per_s = served.rate * output_tokens
    if not tokens_per_s:
        return {"tokens_per_s_gpu": 0.0, "dollars_per_million": math.nan, "joules_per_token": math.nan}
    return {
        "tokens_per_s_gpu": tokens_per_s / num_gpus,
        "dollars_per_million": num_gpus * prices.dollars_per_hour / 3600 / tokens_per_s * 1e6 or math.nan,
        "joules_per_token": num_gpus * prices.watts / tokens_per_s or math.nan,
    }


def needed_text(name: str, served: Served | None) -> str:
    """How many workers, in words."""
    return f"{served.shape} ({served.attainment:.0%})" if served else f"{name}: more than {MAX_WORKERS} workers"


def _verdict(colocated: Served, split: Served) -> str:
    if not colocated.rate:
        return f"P/D pays: {split.shape} meets the SLO, and {colocated.shape} never does."
    change = split.rate / colocated.rate - 1
    if change > _SAME:
        return f"P/D pays: {split.shape} serves {change:.0%} more within the SLO than {colocated.shape}."
    if change < -_SAME:
        return (
            f"P/D does not pay here: the best split, {split.shape}, serves {-change:.0%} less within the SLO than "
            f"{colocated.shape}."
        )
    return f"P/D does not pay here: {split.shape} serves as much within the SLO as {colocated.shape}."


def _unreachable(search: ShapeSearch, worker: PlannedWorker, served: Sequence[Served]) -> str:
    """Why no shape meets the SLO, and the remedy."""
    slo = search.slo
    too_long = [one for one in search.requests if worker.prefill_s(one.num_prompt_tokens) > slo.ttft_s]
    share = len(too_long) / len(search.requests)
    context = sum(one.num_prompt_tokens for one in search.requests) / len(search.requests)
    step_s = worker.costs.step_s(1.0, context)
    reached = max(one.attainment for one in served)
    reasons = [f"{share:.0%} of the prompts take longer than slo_ttft={slo.ttft_s:g} s to compute alone"] * (share > 0)
    if step_s > slo.itl_s:
        reasons.append(f"a step of one sequence takes {step_s:.3g} s, more than slo_itl={slo.itl_s:g}")
    return (
        f"Nothing meets this SLO: at the slowest pace {reached:.1%} of the requests do, and 95 % should. "
        + "; ".join(reasons or ["requests disturb each other at any pace that was tried"])
        + ". Raise --slo-ttft or --slo-itl, or --tensor-parallel-size."
    )


def _digest(block_id: int) -> bytes:
    """The curve samples by digest, so ids that count upwards must be spread."""
    return hashlib.blake2b(block_id.to_bytes(8), digest_size=16).digest()
