"""Routing of block-hash traces under the semantics by which their published cache numbers were computed.

Each worker has a private LRU of C blocks, leaf first, and a first-in first-out queue, a fluid that drains at R tokens
per second. A request's work on a worker is its prompt less the leading tokens cached there; its blocks enter the cache
when it is routed. R is set so that the workers are busy a share `utilisation` of the trace's span if nothing is cached.
There is no decoding. Everything is known exactly, so policies differ in their routing decisions only.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import Role, WorkerCard
from tandem.scheduling.cost_model import StepCosts
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.simulator.fleet import SimulatedFleet, make_card
from tandem.simulator.prefix_cache import PrefixCache

UTILISATION = 0.7
_KIND = "reference"
_UNLIMITED_TOKENS = 1 << 60


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What one policy did with one trace. Waits are seconds from arrival to the end of the request's own prefill."""

    block_hit_ratio: float
    token_hit_ratio: float
    imbalance: float  # uncached tokens by worker, maximum over mean
    request_imbalance: float
    wait_mean_s: float
    wait_p50_s: float
    wait_p99_s: float
    tokens_per_s: float  # R


class _Worker:
    """Private cache and fluid queue."""

    def __init__(self, worker_id: str, capacity_blocks: int) -> None:
        self.worker_id = worker_id
        self.cache = PrefixCache(capacity_blocks)
        self.queued_tokens = 0.0
        self.num_assigned_tokens = 0
        self.num_requests = 0

    def drain(self, num_tokens: float) -> None:
        """Compute up to this number of the queued tokens."""
        self.queued_tokens = max(self.queued_tokens - num_tokens, 0.0)

    def give(self, num_new_tokens: int) -> None:
        """Queue a request's work."""
        self.queued_tokens += num_new_tokens
        self.num_assigned_tokens += num_new_tokens
        self.num_requests += 1


class _Routing(ABC):
    """A policy under reference semantics. `hits`: leading blocks cached, by worker id."""

    def __init__(self, workers: Sequence[_Worker], fleet: SimulatedFleet, tokens_per_s: float) -> None:
        self.workers = workers
        self.fleet = fleet

    @abstractmethod
    def choose(self, request: TraceRequest, digests: Sequence[bytes], hits: dict[str, int], now: float) -> _Worker:
        """The worker for this request."""

    def note(self, worker: _Worker, num_new_tokens: int, num_cached_tokens: int, now: float) -> None:  # noqa: B027
        """The request was given to this worker."""


class _RoundRobin(_Routing):
    """Request i to worker i mod N."""

    def choose(self, request: TraceRequest, digests: Sequence[bytes], hits: dict[str, int], now: float) -> _Worker:
        num_routed = sum(worker.num_requests for worker in self.workers)
        return self.workers[num_routed % len(self.workers)]


class _LeastLoaded(_Routing):
    """Fewest queued tokens."""

    def choose(self, request: TraceRequest, digests: Sequence[bytes], hits: dict[str, int], now: float) -> _Worker:
        return min(self.workers, key=lambda worker: (worker.queued_tokens, worker.num_assigned_tokens))


class _Cost(_Routing):
    """Least sum of the request's uncached tokens and the queued tokens."""

    def choose(self, request: TraceRequest, digests: Sequence[bytes], hits: dict[str, int], now: float) -> _Worker:
        def cost(worker: _Worker) -> tuple[float, int]:
            num_cached = request.num_tokens_in(hits.get(worker.worker_id, 0))
            return request.num_prompt_tokens - num_cached + worker.queued_tokens, worker.num_assigned_tokens

        return min(self.workers, key=cost)


class _Tandem(_Routing):
    """The product's placement: prefill workers of known speed, and one decode worker that costs nothing.

    Each worker has a namespace of its own, because under these semantics no KV can be read from a peer.
    """

    def __init__(self, workers: Sequence[_Worker], fleet: SimulatedFleet, tokens_per_s: float) -> None:
        super().__init__(workers, fleet, tokens_per_s)
        self._by_id = {worker.worker_id: worker for worker in workers}
        self._tokens_per_s = tokens_per_s
        self._bookings: dict[str, deque[tuple[float, Booking]]] = {worker.worker_id: deque() for worker in workers}
        self._booked_tokens = dict.fromkeys(self._by_id, 0)  # uncomputed tokens by the registry's count
        fleet.costs.steps(_KIND).costs = StepCosts(0.0, 1 / tokens_per_s, 0.0, 0.0, 0.0)
        fleet.join(_card("sink", Role.DECODE))
        config = RouterConfig(routing="cost,pairs", max_queued_prompt_tokens=_UNLIMITED_TOKENS)
        self._placer = Placer(fleet.registry, fleet.index, fleet.costs, config)

    def choose(self, request: TraceRequest, digests: Sequence[bytes], hits: dict[str, int], now: float) -> _Worker:
        for worker in self.workers:
            self._report(worker, now)
        num_prompt_tokens, common = request.num_prompt_tokens, CommonDigests(digests)
        placement = self._placer.place(
            PlacementRequest(num_prompt_tokens=num_prompt_tokens, expected_output_tokens=1, digests=common), now
        )
        return self._by_id[placement.best.prefill.worker_id]

    def note(self, worker: _Worker, num_new_tokens: int, num_cached_tokens: int, now: float) -> None:
        num_tokens = num_new_tokens + num_cached_tokens
        load = RequestLoad(worker.worker_id, "sink", num_new_tokens, num_cached_tokens, num_tokens)
        booking = self.fleet.registry.reserve(load)
        done_s = now + worker.queued_tokens / self._tokens_per_s
        self._bookings[worker.worker_id].append((done_s, booking))
        self._booked_tokens[worker.worker_id] += num_new_tokens

    def _report(self, worker: _Worker, now: float) -> None:
        """Report to the registry what was computed since the last decision."""
        num_queued = math.ceil(worker.queued_tokens)  # a token counts once all of it is computed
        num_computed = self._booked_tokens[worker.worker_id] - num_queued
        if num_computed > 0:
            self.fleet.note_computed(worker.worker_id, num_computed)
            self._booked_tokens[worker.worker_id] = num_queued
        bookings = self._bookings[worker.worker_id]
        while bookings and bookings[0][0] <= now:
            bookings.popleft()[1].release()


REFERENCE_POLICIES: dict[str, Callable[[Sequence[_Worker], SimulatedFleet, float], _Routing]] = {
    "round_robin": _RoundRobin,
    "least_loaded": _LeastLoaded,
    "cost": _Cost,
    "tandem": _Tandem,
}


def route(
    requests: Sequence[TraceRequest],
    policy: str,
    *,
    num_workers: int,
    capacity_blocks: int,
    on_arrival: Callable[[], object] = lambda: None,
) -> ReferenceResult:
    """Route a trace, in order, with one of `REFERENCE_POLICIES`. `on_arrival` is called for each request."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    tokens_per_s = num_prompt_tokens / (num_workers * span_s * UTILISATION)
    fleet = SimulatedFleet()
    workers = [_Worker(f"w{idx}", capacity_blocks) for idx in range(num_workers)]
    for worker in workers:
        fleet.join(_card(worker.worker_id, Role.PREFILL))
    routing = REFERENCE_POLICIES[policy](workers, fleet, tokens_per_s)

    waits_s: list[float] = []
    num_hit_blocks = num_hit_tokens = 0
    last_s = requests[0].arrival_s
    for request in requests:
        on_arrival()
        now = request.arrival_s
        for worker in workers:
            worker.drain((now - last_s) * tokens_per_s)
        last_s = now
        digests = [block_id.to_bytes(16) for block_id in request.block_ids]
        hits = fleet.index.longest_prefix(digests, now)
        worker = routing.choose(request, digests, hits, now)
        num_hits = hits.get(worker.worker_id, 0)
        num_cached = request.num_tokens_in(num_hits)
        worker.give(request.num_prompt_tokens - num_cached)
        routing.note(worker, request.num_prompt_tokens - num_cached, num_cached, now)
        fleet.announce(worker.worker_id, *worker.cache.store(digests))
        num_hit_blocks += num_hits
        num_hit_tokens += num_cached
        waits_s.append(worker.queued_tokens / tokens_per_s)
    return ReferenceResult(
        block_hit_ratio=num_hit_blocks / sum(len(request.block_ids) for request in requests),
        token_hit_ratio=num_hit_tokens / num_prompt_tokens,
        imbalance=_max_over_mean([worker.num_assigned_tokens for worker in workers]),
        request_imbalance=_max_over_mean([worker.num_requests for worker in workers]),
        wait_mean_s=statistics.fmean(waits_s),
        wait_p50_s=float(np.quantile(waits_s, 0.5)),
        wait_p99_s=float(np.quantile(waits_s, 0.99)),
        tokens_per_s=tokens_per_s,
    )


def _card(worker_id: str, role: Role) -> WorkerCard:
    return make_card(
        worker_id,
        role,
        kind=_KIND,
        num_blocks=_UNLIMITED_TOKENS // TRACE_BLOCK_SIZE,
        block_size=TRACE_BLOCK_SIZE,
        block_bytes=0,
        max_num_batched_tokens=TRACE_BLOCK_SIZE,
        namespace=worker_id.encode(),
    )


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) / statistics.fmean(values)
