"""Predicts the SLO attainment of given numbers of prefill and decode workers over the next minutes.

A fluid model: prompts queue for the prefill pool, and sequences for room in the decode pool, while arrivals follow
their forecast. On top of that, requests wait because lengths and the gaps between arrivals vary (Sakasegawa's formula
for many servers), and because traffic comes in bursts (`waits`). Answers wait for room where long prompts happen to
meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tandem.scheduling.autoscaling.burstiness import Burstiness
from tandem.scheduling.autoscaling.traffic import Traffic
from tandem.scheduling.autoscaling.waits import Queue
from tandem.scheduling.cost_model import StepCosts, prefill_attention
from tandem.scheduling.workers.demand import Bucket

_TIMES_S = (2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 110.0, 160.0, 240.0, 360.0, 600.0, 900.0)
_PART_CREDIT = 0.25  # credit for one SLO without the other: where both pools are short, a worker for either is a gain
_LATE_CREDIT = 0.5  # credit for an answer just beyond its SLO; it falls with the wait, so that overload has a slope
_LEAST_LIMIT = 2.0  # limit / time on an idle worker: no number of workers makes one request faster
_FAR_LATE_S = 1e6
LOST_S = 60.0  # a lost cache costs the hits that it would have had in this time


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one worker can do."""

    costs: StepCosts
    step_tokens: int
    kv_tokens: int  # size of its pool
    num_seats: int  # 0 = not known


class Pools(NamedTuple):
    """Workers that serve."""

    num_prefill: int
    num_decode: int


class Backlog(NamedTuple):
    """Work that waits or runs now."""

    prompt_tokens: float = 0.0  # to be computed
    num_seqs: float = 0.0  # sequences of the decode pool
    kv_tokens_per_seq: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a prediction depends on, beyond the number of workers."""

    traffic: Traffic
    capacity: Capacity
    backlog: Backlog
    output_tokens: float
    horizon_s: float
    start_s: float  # until a new worker serves. Pools are sized for shorter bursts, and follow longer ones
    demand_factor: float = 1.0  # multiplies the forecast traffic


@dataclass(frozen=True, slots=True)
class Prediction:
    """What clients will see: means over the horizon, weighted by arrivals."""

    attainment: float  # share of requests within TTFT and ITL SLO
    score: float  # attainment, with some credit for answers that are not very late
    least: float  # least attainment at any time
    prefill_wait_s: float  # wait of the prompts that are queued now
    decode_wait_s: float
    itl_s: float  # at present
    load: float  # load of the prefill pool at present
    last_wait_s: float  # wait for both pools at the end of the horizon; large for overload that lasts
    is_unreachable: bool  # whether most requests would miss their SLO on an idle worker


class _Step(NamedTuple):
    attainment: float
    score: float
    prefill_wait_s: float
    decode_wait_s: float
    itl_s: float
    load: float


def predict(
    sizing: Sizing,
    pools: Pools,
    now: float,
    *,
    later: Pools | None = None,
    later_s: float = 0.0,
    extra_s: float = 0.0,
    lost_s: float = 0.0,
) -> Prediction:
    """What clients will see. `later` serves from `later_s` on.

    A move costs `extra_s` worker-seconds of prefill at once, and `lost_s` over a minute: what a lost cache would have
    saved comes with the requests that would have hit it.
    """
    model = _Model.of(sizing, extra_s, lost_s)
    steps: list[tuple[float, _Step]] = []
    begin_s = 0.0
    ends = sorted({*(t for t in _TIMES_S if t < sizing.horizon_s), sizing.horizon_s, max(later_s, 1e-3)})
    for end_s in (t for t in ends if t <= sizing.horizon_s):
        serving = later if later is not None and begin_s >= later_s else pools
        rate = max(sizing.traffic.rate(now, (begin_s + end_s) / 2), 0.0) * sizing.demand_factor
        step = model.step(rate, serving, end_s - begin_s)
        steps.append(((rate + 1e-6) * (end_s - begin_s), step))
        begin_s = end_s
    weight = sum(one for one, _ in steps)
    first, last = steps[0][1], steps[-1][1]
    return Prediction(
        attainment=sum(one * step.attainment for one, step in steps) / weight,
        score=sum(one * step.score for one, step in steps) / weight,
        least=min(step.attainment for _, step in steps),
        prefill_wait_s=first.prefill_wait_s,
        decode_wait_s=first.decode_wait_s,
        itl_s=first.itl_s,
        load=first.load,
        last_wait_s=last.prefill_wait_s + last.decode_wait_s,
        is_unreachable=model.is_unreachable,
    )


class _Class(NamedTuple):
    """Requests of similar prompts."""

    share: float
    work_s: float  # worker-seconds of one of them
    own_s: float  # TTFT on an idle worker
    limit_s: float


@dataclass(slots=True)
class _Model:
    """The state of the fluid queues."""

    classes: Sequence[_Class]
    mean_s: float  # worker-seconds of a prompt
    variation: float  # their variance / mean^2
    capacity: Capacity
    output_tokens: float
    kv_tokens: float  # of one sequence
    kv_variation: float  # their variance / mean^2
    itl_limit_s: float
    bursts: Burstiness
    longest_burst_s: float
    is_unreachable: bool
    queued_s: float  # worker-seconds of prompts
    lost_s: float  # worker-seconds that a lost cache will still cost
    refill_s: float  # how many of these per second
    num_seqs: float

    @classmethod
    def of(cls, sizing: Sizing, extra_s: float, lost_s: float) -> _Model:
        traffic, capacity, backlog = sizing.traffic, sizing.capacity, sizing.backlog
        costs = capacity.costs
        context = traffic.hit_ratio * traffic.prompt_tokens
        classes, num_missed = _classes(traffic.buckets, capacity, context)
        length = backlog.kv_tokens_per_seq or traffic.prompt_tokens + sizing.output_tokens / 2
        token_s = costs.base_s / capacity.step_tokens + costs.prefill_token_s
        mean_s = sum(one.share * one.work_s for one in classes)
        num_new = sum(bucket.new_tokens for bucket in traffic.buckets)
        if num_new > 0:
            token_s = max(token_s, mean_s / num_new)  # attention included
        square = sum(one.share * one.work_s**2 for one in classes)
        alone_s = costs.step_s(1.0, length)
        slo_s = traffic.itl_slo_s or math.inf
        return cls(
            classes=classes,
            mean_s=mean_s,
            variation=square / mean_s**2 - 1 if mean_s**2 > 0 else 0.0,
            capacity=capacity,
            output_tokens=max(sizing.output_tokens, 1.0),
            kv_tokens=max(length, 1.0),
            kv_variation=traffic.length_variation,
            itl_limit_s=min(max(slo_s, 1.5 * alone_s), _FAR_LATE_S),
            bursts=traffic.bursts,
            longest_burst_s=sizing.start_s,
            is_unreachable=num_missed > 0.5 or alone_s > slo_s,
            queued_s=backlog.prompt_tokens * token_s + extra_s,
            lost_s=lost_s,
            refill_s=lost_s / LOST_S,
            num_seqs=backlog.num_seqs,
        )

    def step(self, rate: float, pools: Pools, duration_s: float) -> _Step:
        """Let time pass."""
        if pools.num_prefill < 1 or pools.num_decode < 1:
            return _Step(0.0, 0.0, _FAR_LATE_S, _FAR_LATE_S, _FAR_LATE_S, 1.0)
        queue = Queue(rate, self.mean_s, self.variation, pools.num_prefill, self.bursts, self.longest_burst_s)
        num_first, wait_s = self._prefill(queue, duration_s)
        in_time, itl_credit, decode_wait_s, itl_s = self._decode(num_first, pools.num_decode, duration_s)
        ttft, credit = self._ttft(queue, wait_s)
        attainment = ttft * in_time
        parts = ttft + _LATE_CREDIT * (1 - ttft) * credit + in_time + _LATE_CREDIT * (1 - in_time) * itl_credit
        score = (1 - _PART_CREDIT) * attainment + _PART_CREDIT * parts / 2
        return _Step(attainment, score, wait_s, decode_wait_s, itl_s, queue.load)

    def _prefill(self, queue: Queue, duration_s: float) -> tuple[float, float]:
        """First tokens per second, and the wait for what is queued."""
        num, load, before_s = queue.num_workers, queue.load, self.queued_s
        refill_s = min(self.refill_s * duration_s, self.lost_s)
        self.lost_s -= refill_s
        self.queued_s = max(before_s + (load - 1) * num * duration_s + refill_s, 0.0)
        done_s = before_s + load * num * duration_s - self.queued_s
        num_first = max(done_s, 0.0) / duration_s / self.mean_s if self.mean_s > 0 else 0.0
        return num_first, (before_s + self.queued_s) / 2 / num

    def _ttft(self, queue: Queue, wait_s: float) -> tuple[float, float]:
        """Share of requests whose first token comes in time, and the credit of the others: the later, the less."""
        if not self.classes:
            return 1.0, 1.0
        slack_s = np.array([one.limit_s - one.own_s - wait_s for one in self.classes])
        late = np.where(slack_s > 0, queue.late(np.maximum(slack_s, 0.0)), 1.0)
        in_time = credit = 0.0
        for one, share_late in zip(self.classes, late.tolist(), strict=True):
            in_time += one.share * (1 - share_late)
            credit += one.share * min(one.limit_s / max(one.own_s + wait_s + queue.mean_wait_s, 1e-9), 1.0)
        return in_time, credit

    def _decode(self, num_first: float, num: int, duration_s: float) -> tuple[float, float, float, float]:
        """Share of answers whose gaps are in time, credit of the others, wait for room and gap between two tokens."""
        costs, out = self.capacity.costs, self.output_tokens
        dispersion = self.bursts.dispersion(out * costs.base_s)
        kv_room = max(self.capacity.kv_tokens / self.kv_tokens, 1.0)
        room = min(kv_room, float(self.capacity.num_seats or math.inf))
        full_rate = num * room / (out * max(costs.base_s + self.seq_s * room, 1e-9))  # answers per second
        mean = self._num_decoding(num_first, num, room, full_rate, duration_s)
        batch = min(mean / num, room)
        step_s = costs.step_s(batch, batch * self.kv_tokens)
        variance = mean * (dispersion + (self.kv_variation if room == kv_room else 0.0))
        share_waits, excess = _beyond(num * room, mean, variance)
        wait_s = excess / full_rate
        itl_s = step_s + wait_s / out
        most = min((self.itl_limit_s - costs.base_s) / self.seq_s if self.seq_s > 0 else math.inf, 1e9)
        in_time = _at_most(most - 1, batch, dispersion) if itl_s <= self.itl_limit_s else 0.0
        if share_waits > 0:  # lengths are assumed to be exponential: a short answer has no time to wait
            slack_s = max(out * (self.itl_limit_s - step_s), 1e-6)
            in_time *= 1 - share_waits * (1 - math.exp(-wait_s / share_waits / slack_s))
        return in_time, min(self.itl_limit_s / max(itl_s, 1e-9), 1.0), wait_s, itl_s

    def _num_decoding(self, num_first: float, num: int, room: float, full_rate: float, duration_s: float) -> float:
        """Sequences that run or wait for room: the mean over this time."""
        base_s, out, before = self.capacity.costs.base_s, self.output_tokens, self.num_seqs
        share = num_first * out * self.seq_s / num
        steady = num_first * out * base_s / (1 - share) if share < 1 else math.inf
        if steady <= num * room and before <= num * room:
            life_s = out * (base_s + self.seq_s * before / num)
            self.num_seqs = steady + (before - steady) * math.exp(-duration_s / max(life_s, 1e-6))
        else:
            self.num_seqs = max(before + (num_first - full_rate) * duration_s, 0.0)
        return (before + self.num_seqs) / 2

    @property
    def seq_s(self) -> float:
        """Seconds by which a sequence lengthens a step."""
        costs = self.capacity.costs
        return costs.decode_seq_s + costs.kv_token_s * self.kv_tokens


def _classes(buckets: Sequence[Bucket], capacity: Capacity, context: float) -> tuple[list[_Class], float]:
    """The requests by length, and the share of them that cannot be in time on an idle worker."""
    costs, chunk = capacity.costs, capacity.step_tokens
    total = sum(bucket.num_requests for bucket in buckets)
    classes: list[_Class] = []
    num_missed = 0.0
    for bucket in buckets:
        if bucket.num_requests <= 1e-9 or total <= 0:
            continue
        tokens, slo_s = bucket.new_tokens / bucket.num_requests, bucket.ttft_slo_s / bucket.num_requests
        work_s = costs.prefill_work_s(tokens, prefill_attention(tokens, context))
        own_s = math.ceil(tokens / chunk) * costs.base_s + work_s
        share = bucket.num_requests / total
        num_missed += share * (own_s > slo_s)
        limit_s = max(slo_s, _LEAST_LIMIT * own_s)
        classes.append(_Class(share, work_s + costs.base_s * tokens / chunk, own_s, limit_s))
    return classes, num_missed


def _at_most(most: float, mean: float, dispersion: float) -> float:
    """Probability that no more than `most` other answers run beside one.

    `mean` and `dispersion * mean` are the mean and the variance of the number that runs. Each of them sees
    `mean + dispersion - 1` others on average: a burst is seen by many, and a client that waits for its answer has no
    other one beside it. Their number is modelled as `dispersion` times a Poisson variable. That is a Gamma tail, by
    Wilson and Hilferty.
    """
    others = (mean + dispersion - 1) / dispersion
    if others <= 0:
        return 1.0
    shape = max((max(most, 0.0) + 0.5) / dispersion + 0.5, 0.5)  # in the middle between two values of the variable
    deviation = 3 * math.sqrt(shape) * ((others / shape) ** (1 / 3) - 1 + 1 / (9 * shape))
    return 0.5 * math.erfc(deviation / math.sqrt(2))


def _beyond(limit: float, mean: float, variance: float) -> tuple[float, float]:
    """Probability that a normal variable exceeds a limit, and its mean excess, which is 0 where it does not."""
    std = math.sqrt(variance)
    if std <= 0:
        return float(mean > limit), max(mean - limit, 0.0)
    deviation = (limit - mean) / std
    share = 0.5 * math.erfc(deviation / math.sqrt(2))
    excess = std * math.exp(-deviation * deviation / 2) / math.sqrt(2 * math.pi) - (limit - mean) * share
    return share, max(excess, 0.0)
