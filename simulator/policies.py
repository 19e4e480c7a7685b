"""Routing policies behind one interface: ours, and those that other routers publish, in their own units and defaults.

All policies see the same: the product's registry with the bookings of each decision, and its prefix index with the
workers' block events. The docstring of a policy says where it keeps state of its own instead. With separate roles,
policies that choose a worker, not a pair, choose one of each role, as their projects do.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import join_digests
from tandem.protocol.messages import BlockEvents
from tandem.protocol.routing import KV, LEAST_LOADED, PREFIX, ROUND_ROBIN
from tandem.scheduling.placement.placement import Candidate
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.placement.strategies import Preferences
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode, can_prefill
from tandem.simulator.fleet import SimulatedFleet

Hits = Mapping[str, int]  # leading cached blocks, by worker id
UNLIMITED_TOKENS = 1 << 60  # no policy refuses a request: all serve the same requests


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as the router sees it."""

    num_prompt_tokens: int
    expected_output_tokens: int
    digests: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RoutingChoice:
    """The workers of a request; prefill and decode may be the same worker."""

    prefill: RegisteredWorker
    decode: RegisteredWorker
    num_cached_tokens: int  # expected, as booked
    candidate: Candidate | None = None  # our placement's candidate, with all its terms

    @property
    def is_pair(self) -> bool:
        """Whether prompt and decoding are on different workers."""
        return self.prefill is not self.decode


class Policy(ABC):
    """Chooses for one request at a time; the caller books the choice before the next."""

    def __init__(self, fleet: SimulatedFleet, rng: random.Random) -> None:
        self.fleet = fleet
        self.rng = rng

    @abstractmethod
    def choose(self, request: RoutingRequest, now: float) -> RoutingChoice:
        """The workers for this request."""


class Tandem(Policy):
    """The product's placement: the fewest predicted seconds. See scheduling/placement/placer.py."""

    def __init__(self, fleet: SimulatedFleet, rng: random.Random) -> None:
        super().__init__(fleet, rng)
        config = RouterConfig(max_queued_prompt_tokens=UNLIMITED_TOKENS)
        self._placer = Placer(fleet.registry, fleet.index, fleet.costs, config)

    def choose(self, request: RoutingRequest, now: float) -> RoutingChoice:
        """The product's decision."""
        best = self._placer.place(placement_request(request), now).best
        return RoutingChoice(best.prefill, best.decode, best.num_cached_tokens, best)


class _ByRole(Policy):
    """A policy that picks one worker of a pool: of the colocated, or of the prefill and then of the decode workers."""

    def choose(self, request: RoutingRequest, now: float) -> RoutingChoice:
        """One worker, or one of each role."""
        hits = self.fleet.index.longest_prefix(request.digests, now)
        prefillers = [worker for worker in self.fleet.registry if can_prefill(worker)]
        decoders = [worker for worker in self.fleet.registry if can_decode(worker)]
        prefill = self.pick(prefillers or decoders, request, hits)
        decode = self.pick_decode(decoders, request, hits) if prefillers else prefill
        num_cached = hits.get(prefill.worker_id, 0) * prefill.card.block_size
        return RoutingChoice(prefill, decode, min(num_cached, request.num_prompt_tokens - 1))

    @abstractmethod
    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The worker that computes the prompt."""

    def pick_decode(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The worker that decodes, where roles are separate."""
        return self.pick(workers, request, hits)


class _ByStrategy(_ByRole):
    """A strategy of `--routing`, by the product's own code, for the worker of each role."""

    strategy: ClassVar[str]

    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The worker of this pool that the strategy prefers."""
        table, pool = self.fleet.registry.table, {worker.worker_id for worker in workers}
        hit_tokens = np.minimum(table.column(hits) * table.block_size, request.num_prompt_tokens - 1)
        block_size = workers[0].card.block_size
        preferences = Preferences(placement_request(request), table, hit_tokens, request.digests, block_size)
        mask = np.array([worker_id in pool for worker_id in table.rows])
        return table.workers[preferences.rows(self.strategy, mask)[0]]


class RoundRobin(_ByStrategy):
    """Each worker of a pool after the other. Dynamo's default mode; each pool alone, as in vLLM production-stack."""

    strategy = ROUND_ROBIN


class LeastLoaded(_ByStrategy):
    """Fewest uncomputed prompt tokens; among equals fewest KV tokens. Knows no cache.

    The reference's `ll` with decoding; routers that count requests (Dynamo's least-loaded) see less.
    """

    strategy = LEAST_LOADED


class MostKv(_ByStrategy):
    """The most prompt tokens in the pool, within the bound of load."""

    strategy = KV


class PrefixHash(_ByStrategy):
    """A rendezvous hash of the prompt's beginning, within the bound of load; consistent hashing elsewhere."""

    strategy = PREFIX


class PowerOfTwo(_ByRole):
    """The less loaded of two random workers (SGLang's gateway, `power_of_two`, which compares tokens where known).

    Load is uncomputed prompt tokens plus KV tokens of booked sequences.
    """

    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """Compare two different workers, or take the only one."""
        drawn = self.rng.sample(workers, min(2, len(workers)))
        return min(drawn, key=lambda worker: worker.uncomputed_tokens + worker.booked_kv_tokens)


class CacheAwareThreshold(_ByRole):
    """SGLang's gateway, `cache_aware`, with the defaults of its command line.

        imbalanced  iff  max_load - min_load > 64  and  max_load > 1.5 * min_load      load = requests in flight
        imbalanced: least load; else the worker of the longest match if it is over 0.3 of the prompt, else least load

    The match is in a tree of the policy's own decisions, not in what workers hold; its default limit of 2^26 nodes is
    beyond any trace here, so the tree forgets nothing. Decode workers: `power_of_two`, its P/D default.
    """

    CACHE_THRESHOLD, ABSOLUTE_THRESHOLD, RELATIVE_THRESHOLD = 0.3, 64, 1.5

    def __init__(self, fleet: SimulatedFleet, rng: random.Random) -> None:
        super().__init__(fleet, rng)
        self._tree = PrefixIndex()
        self._num_inserts: dict[str, int] = {}
        self._decode = PowerOfTwo(fleet, rng)

    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """Apply the two thresholds."""
        loads = {worker.worker_id: self.fleet.num_in_flight(worker) for worker in workers}
        least, most = min(loads.values()), max(loads.values())
        chosen = min(workers, key=lambda worker: loads[worker.worker_id])
        is_imbalanced = most - least > self.ABSOLUTE_THRESHOLD and most > self.RELATIVE_THRESHOLD * least
        if not is_imbalanced and request.digests:
            matches = self._tree.longest_prefix(request.digests, 0.0)
            matched = max(workers, key=lambda worker: matches.get(worker.worker_id, 0))
            if matches.get(matched.worker_id, 0) / len(request.digests) > self.CACHE_THRESHOLD:
                chosen = matched
        self._insert(chosen.worker_id, request.digests)
        return chosen

    def pick_decode(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The less loaded of two."""
        return self._decode.pick(workers, request, hits)

    def _insert(self, worker_id: str, digests: Sequence[bytes]) -> None:
        if worker_id not in self._num_inserts:
            self._tree.add_worker(worker_id, 1)
        number = self._num_inserts[worker_id] = self._num_inserts.get(worker_id, 0) + 1
        self._tree.apply(
            BlockEvents(worker_id=worker_id, epoch=1, sequence=number, stored=join_digests(digests), removed=b"")
        )


class Dynamo(_ByRole):
    """NVIDIA Dynamo's KV router, default cost and temperature 0 (docs/components/router/router-concepts.md), in blocks.

        cost = 1.0 * max(active prefill blocks + prompt blocks - overlap, 0) + active decode blocks + incoming blocks

    Least cost, at random among equals. Prefill load is charged in full until the first token. Separate roles: prefill
    ignores decode blocks; decode counts no overlap, so it goes by load alone.
    """

    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The lowest cost."""

        def cost(worker: RegisteredWorker) -> float:
            block_size = worker.card.block_size
            prefill_tokens = worker.queued_prompt_tokens + request.num_prompt_tokens
            prefill = max(prefill_tokens / block_size - hits.get(worker.worker_id, 0), 0.0)
            return prefill + (worker.booked_kv_tokens + request.num_prompt_tokens) / block_size

        return _lowest(workers, cost, self.rng)

    def pick_decode(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """Fewest active blocks."""
        return _lowest(workers, lambda worker: worker.booked_kv_tokens, self.rng)


class LlmD(_ByRole):
    """llm-d's default profile (pkg/epp/config/loader/defaults.go): weighted scores in [0, 1], the highest wins.

        score = 2 * queue + 2 * (1 - KV usage) + 3 * matched blocks / blocks        random among equals
        queue = (max - q) / (max - min) of waiting requests, 1 where all are equal

    The prefix is matched in the index of block events, as by its precise scorer. Decode workers: fewest active
    requests, as in its P/D guide.
    """

    QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2, 2, 3

    def pick(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """The highest score."""
        queues = {worker.worker_id: self.fleet.num_prompts(worker) for worker in workers}
        most, least = max(queues.values()), min(queues.values())

        def negative_score(worker: RegisteredWorker) -> float:
            queue = (most - queues[worker.worker_id]) / (most - least) if most > least else 1.0
            usage = worker.booked_kv_tokens / (worker.card.num_blocks * worker.card.block_size)
            prefix = hits.get(worker.worker_id, 0) / max(len(request.digests), 1)
            return -(self.QUEUE_WEIGHT * queue + self.KV_WEIGHT * (1 - min(usage, 1)) + self.PREFIX_WEIGHT * prefix)

        return _lowest(workers, negative_score, self.rng)

    def pick_decode(self, workers: Sequence[RegisteredWorker], request: RoutingRequest, hits: Hits) -> RegisteredWorker:
        """Fewest sequences."""
        return _lowest(workers, lambda worker: worker.num_booked_seqs, self.rng)


def placement_request(request: RoutingRequest) -> PlacementRequest:
    """The request as the product's placement knows it."""
    return PlacementRequest(
        num_prompt_tokens=request.num_prompt_tokens,
        expected_output_tokens=request.expected_output_tokens,
        digests=CommonDigests(request.digests),
    )


def _lowest(
    workers: Sequence[RegisteredWorker], cost: Callable[[RegisteredWorker], float], rng: random.Random
) -> RegisteredWorker:
    costs = [cost(worker) for worker in workers]
    lowest = min(costs)
    return rng.choice([worker for worker, value in zip(workers, costs, strict=True) if value == lowest])


POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "kv": MostKv,
    "prefix": PrefixHash,
    "power_of_two": PowerOfTwo,
    "cache_aware": CacheAwareThreshold,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "tandem": Tandem,
}
