"""How much of a load each shape of the same workers serves within an SLO, and how many workers a load needs.

By bisection over simulated runs of one trace at many paces: the product's own placement, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.loadtest.traces import TraceRequest
from tandem.scheduling.planning.roofline import PlannedWorker
from tandem.simulator.arrivals import load_of
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import Machine
from tandem.simulator.measures import Slo, Summary, summarize
from tandem.simulator.simulation import simulate

ATTAINMENT = 0.95  # share of requests within the SLO that makes a shape good enough
MAX_WORKERS = 64
_DOUBLINGS = 6
_BISECTIONS = 4  # of a factor of two: capacities are within 5 %


class Shape(NamedTuple):
    """Workers by role; no prefill workers = all are colocated."""

    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        """Workers of both roles."""
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill else f"{self.num_decode} colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a shape serves at a rate."""

    shape: Shape
    rate: float  # requests per second offered; 0 = even the slowest pace is too much
    attainment: float  # share of requests within the SLO; those longer than a pool are not
    summary: Summary | None  # None if no request fits

    @property
    def is_good(self) -> bool:
        """Whether enough requests are within the SLO."""
        return self.attainment >= ATTAINMENT


def machine_of(worker: PlannedWorker, kind: str, num_tokens: float) -> Machine:
    """The worker for the simulator, in which each token has as much KV as those of a context of `num_tokens`."""
    token_bytes = max(worker.kv_bytes(num_tokens) / num_tokens, 1.0)
    return Machine(
        kind=kind,
        costs=worker.costs,
        kv_token_bytes=round(token_bytes),
        pool_tokens=int(worker.pool_bytes / token_bytes),
        step_tokens=worker.step_tokens,
        colocated_step_tokens=worker.colocated_step_tokens,
        max_num_seqs=worker.max_num_seqs,
        link_latency_s=worker.link.latency_s,
        link_bytes_per_s=1 / max(worker.link.byte_s, 1e-15),
        host_bytes_per_s=worker.tiers["host"].load.bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSearch:
    """A trace, the machines and the objective. `requests` are in order, from second 0 on."""

    requests: Sequence[TraceRequest]
    machine: Machine
    slo: Slo
    host_cache_tokens: int = 0
    seed: int = 0
    on_run: Callable[[], object] = lambda: None

    @property
    def pace(self) -> float:
        """Requests per second of the trace itself."""
        return len(self.requests) / max(self.requests[-1].arrival_s, 1e-9)

    @property
    def output_tokens(self) -> float:
        """Mean tokens of an answer."""
        return sum(one.num_output_tokens for one in self.requests) / len(self.requests)

    def serve(self, shape: Shape, rate: float) -> Served:
        """Serve the trace at this rate."""
        self.on_run()
        factor = self.pace / rate
        timed = [replace(request, arrival_s=request.arrival_s * factor) for request in self.requests]
        outcome = simulate(timed, self._cluster(shape), "tandem", self.seed)
        if not outcome.jobs:
            return Served(shape=shape, rate=rate, attainment=0.0, summary=None)
        summary = summarize(outcome, self.slo)
        share = summary.slo_attainment * len(outcome.jobs) / len(self.requests)
        return Served(shape=shape, rate=rate, attainment=share, summary=summary)

    def capacity(self, shape: Shape) -> Served:
        """The highest rate, within 5 %, at which the shape meets the SLO. Its rate is 0 if there is none."""
        rate = len(self.requests) / load_of(self.requests, self._cluster(shape))
        slowest = self.serve(shape, rate / 2**_DOUBLINGS)
        if not slowest.is_good:
            return replace(slowest, rate=0.0)
        best, bad_rate = self._bracket(shape, rate, slowest)
        for _ in range(_BISECTIONS):
            tried = self.serve(shape, (best.rate * bad_rate) ** 0.5)
            if tried.is_good:
                best = tried
            else:
                bad_rate = tried.rate
        return best

    def _bracket(self, shape: Shape, rate: float, slowest: Served) -> tuple[Served, float]:
        """A run within the SLO near this rate, and twice its rate, which is too much (or the fastest tried)."""
        best, tried = slowest, self.serve(shape, rate)
        if not tried.is_good:
            while not tried.is_good and tried.rate > 2 * slowest.rate:
                tried = self.serve(shape, tried.rate / 2)
            return (tried, 2 * tried.rate) if tried.is_good else (best, tried.rate)
        for _ in range(_DOUBLINGS):
            best, tried = tried, self.serve(shape, 2 * tried.rate)
            if not tried.is_good:
                break
        return best, 2 * best.rate

    def shapes(self, num_workers: int) -> list[Shape]:
        """Colocated, and the splits of so many workers: all of them, or those around the share of prefill work."""
        one = self._cluster(Shape(0, 1))
        answers = [replace(request, num_output_tokens=1) for request in self.requests]
        share = load_of(answers, one) / load_of(self.requests, one)
        middle = min(max(round(num_workers * share), 1), num_workers - 1)
        near = range(max(middle - 2, 1), min(middle + 2, num_workers - 1) + 1)
        return [Shape(0, num_workers), *(Shape(one, num_workers - one) for one in near)]

    def least_workers(self, like: Shape, rate: float, guess: int) -> Served | None:
        """The fewest workers, in the proportions of `like`, that meet the SLO at this rate; None if too many."""
        least = 2 if like.num_prefill else 1
        good: Served | None = None
        low, high = least - 1, max(guess, least)
        while good is None:
            if high > MAX_WORKERS:
                return None
            served = self.serve(_in_proportion(like, high), rate)
            low, good, high = (low, served, high) if served.is_good else (high, None, 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            served = self.serve(_in_proportion(like, middle), rate)
            low, high, good = (low, middle, served) if served.is_good else (middle, high, good)
        return good

    def _cluster(self, shape: Shape) -> Cluster:
        return Cluster(
            machine=self.machine,
            num_prefill=shape.num_prefill,
            num_decode=shape.num_decode,
            host_cache_tokens=self.host_cache_tokens,
        )


def _in_proportion(like: Shape, num_workers: int) -> Shape:
    if not like.num_prefill:
        return Shape(0, num_workers)
    num_prefill = min(max(round(num_workers * like.num_prefill / like.num_workers), 1), num_workers - 1)
    return Shape(num_prefill, num_workers - num_prefill)
