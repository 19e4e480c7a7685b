"""Metrics of a run, computed from the outcome of each request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.simulator.simulation import Gaps, Outcome
from tandem.simulator.worker import Job

Vector = npt.NDArray[np.float64]

_MAX_POINTS = 16  # points that represent the gaps of one run of steps
NUM_WINDOWS = 40  # windows of a timeline


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of the time to first token and of the mean gap between tokens (TPOT), both in seconds."""

    ttft_s: float
    itl_s: float

    def is_met(self, job: Job) -> bool:
        """Whether the request is within both limits."""
        return ttft_s(job) <= self.ttft_s and (job.num_output_tokens == 1 or tpot_s(job) <= self.itl_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one policy's run. Hit and load ratios are shares of prompt tokens."""

    policy: str
    num_requests: int
    num_refused: int
    duration_s: float  # virtual, first arrival to last token
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    itl_p50_s: float
    itl_p99_s: float
    token_hit_ratio: float  # found in the pool of the worker that computes the rest
    loaded_ratio: float  # read from a peer or from host memory
    imbalance: float  # prompt tokens computed by each prefilling worker, maximum over mean
    slo_attainment: float  # share of requests
    goodput: float  # requests per second that met the SLO
    pair_ratio: float  # share of requests decoded on another worker
    num_events: int
    wall_s: float  # real seconds of the simulation
    place_s: float  # real seconds in the policy
    step_error: float

    def as_dict(self) -> dict[str, Any]:
        """The metrics as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """A run in windows of equal length, by arrival of the requests. NaN where nothing arrived."""

    centre_s: Vector
    offered: Vector  # requests per second
    goodput: Vector  # requests per second that met the SLO
    token_hit_ratio: Vector
    imbalance: Vector  # prompt tokens to compute by worker, maximum over mean


def ttft_s(job: Job) -> float:
    """Time to first token."""
    assert job.first_token_s is not None, f"request {job.request_id} has no first token"
    return job.first_token_s - job.arrival_s


def tpot_s(job: Job) -> float:
    """Mean gap between the tokens of a request; NaN for one token."""
    assert job.first_token_s is not None, f"request {job.request_id} has no first token"
    assert job.end_s is not None, f"request {job.request_id} has no last token"
    return (job.end_s - job.first_token_s) / (job.num_output_tokens - 1) if job.num_output_tokens > 1 else math.nan


def summarize(outcome: Outcome, slo: Slo) -> Summary:
    """The metrics of a run, which must have served at least one request."""
    jobs = outcome.jobs
    ttfts = sorted(ttft_s(job) for job in jobs)
    tpots = [tpot_s(job) for job in jobs if job.num_output_tokens > 1]
    gaps_s, shares = gap_distribution(outcome.gaps)
    num_tokens = sum(job.num_prompt_tokens for job in jobs)
    duration_s = max(job.end_s or 0.0 for job in jobs)
    num_good = sum(slo.is_met(job) for job in jobs)
    return Summary(
        policy=outcome.policy,
        num_requests=len(jobs),
        num_refused=outcome.num_refused,
        duration_s=duration_s,
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p50_s=float(np.quantile(ttfts, 0.5)),
        ttft_p99_s=float(np.quantile(ttfts, 0.99)),
        tpot_mean_s=sum(tpots) / len(tpots) if tpots else math.nan,
        itl_p50_s=_at_share(gaps_s, shares, 0.5),
        itl_p99_s=_at_share(gaps_s, shares, 0.99),
        token_hit_ratio=sum(job.num_cached_tokens for job in jobs) / num_tokens,
        loaded_ratio=sum(job.num_loaded_tokens for job in jobs) / num_tokens,
        imbalance=_max_over_mean([outcome.prefilled_tokens[worker_id] for worker_id in _prefill_pool(outcome)]),
        slo_attainment=num_good / len(jobs),
        goodput=num_good / duration_s,
        pair_ratio=sum(job.is_pair for job in jobs) / len(jobs),
        num_events=outcome.num_events,
        wall_s=outcome.wall_s,
        place_s=outcome.place_s,
        step_error=outcome.step_error,
    )


def timeline(outcome: Outcome, slo: Slo, num_windows: int = NUM_WINDOWS) -> MeasuredTimeline:
    """The run in windows of time."""
    jobs = outcome.jobs
    width_s = max(jobs[-1].arrival_s, 1e-9) / num_windows
    windows: list[list[Job]] = [[] for _ in range(num_windows)]
    for job in jobs:
        windows[min(int(job.arrival_s / width_s), num_windows - 1)].append(job)
    pool = _prefill_pool(outcome)
    return MeasuredTimeline(
        centre_s=(np.arange(num_windows, dtype=np.float64) + 0.5) * width_s,
        offered=np.array([len(window) / width_s for window in windows]),
        goodput=np.array([sum(slo.is_met(job) for job in window) / width_s for window in windows]),
        token_hit_ratio=np.array([_hit_ratio(window) for window in windows]),
        imbalance=np.array([_imbalance(window, pool) for window in windows]),
    )


def gap_distribution(gaps: Sequence[Gaps]) -> tuple[Vector, Vector]:
    """Inter-token gaps in ascending order, and for each the share of gaps up to it."""
    values: list[float] = []
    weights: list[float] = []
    for run in gaps:
        is_narrow = abs(run.last_s - run.first_s) < 0.01 * run.first_s
        num_points = 1 if is_narrow else min(run.num_gaps, _MAX_POINTS)
        for idx in range(num_points):
            values.append(run.first_s + (run.last_s - run.first_s) * (idx + 0.5) / num_points)
            weights.append(run.num_gaps / num_points)
    order = np.argsort(values)
    shares = np.cumsum(np.array(weights)[order])
    return np.array(values)[order], shares / shares[-1] if len(shares) else shares


def _at_share(values: Vector, shares: Vector, share: float) -> float:
    return float(values[np.searchsorted(shares, share)]) if len(values) else math.nan


def _prefill_pool(outcome: Outcome) -> list[str]:
    """The workers that prefill: the prefill workers, or all workers where they are colocated."""
    cards = outcome.cluster.cards()
    return [card.address.worker_id for card in cards[: outcome.cluster.num_prefill or None]]


def _hit_ratio(jobs: Sequence[Job]) -> float:
    num_tokens = sum(job.num_prompt_tokens for job in jobs)
    return sum(job.num_cached_tokens + job.num_loaded_tokens for job in jobs) / num_tokens if num_tokens else math.nan


def _imbalance(jobs: Sequence[Job], pool: Sequence[str]) -> float:
    tokens = dict.fromkeys(pool, 0)
    for job in jobs:
        if job.prefill_worker_id in tokens:
            tokens[job.prefill_worker_id] += job.num_prompt_tokens - job.num_cached_tokens - job.num_loaded_tokens
    return _max_over_mean(list(tokens.values()))


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else math.nan
