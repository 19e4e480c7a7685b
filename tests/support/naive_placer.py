"""Placement worker by worker and pair by pair, in plain numbers: what `Placer` must agree with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b

from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.cost_model import CostModel, prefill_attention
from tandem.scheduling.placement.placement import Candidate, Held, Holder, Terms
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode, can_prefill, wait_s


class NaivePlacer:
    """Scores every candidate by itself."""

    def __init__(self, registry: Registry, index: PrefixIndex, costs: CostModel, *, local_prefill: bool = True) -> None:
        self.registry = registry
        self.index = index
        self.costs = costs
        self.local_prefill = local_prefill

    def candidates(
        self,
        num_prompt_tokens: int,
        digests: Sequence[bytes],
        num_outputs: int,
        now: float,
        *,
        in_router: Mapping[str, Held] | None = None,
        order: float = math.inf,
        excluded: Collection[str] = (),
    ) -> list[Candidate]:
        """All of them, the best first: fewest seconds, then the workers with the least work done."""
        hits = self.index.longest_prefix(digests, now)
        readable = [name for name in hits if "/" not in name or name.endswith("/host")]
        deepest = sorted(readable, key=lambda name: -hits[name])[:4]  # only these are asked what they do hold
        held = {name: self.index.count_held(name, digests, len(digests)) for name in deepest}
        readers = list(self.registry)
        request = _NaiveRequest(self.costs, num_prompt_tokens, num_outputs, hits, held, in_router or {}, order, readers)
        workers = [
            worker
            for worker in self.registry
            if worker.worker_id not in excluded
            and worker.state is WorkerState.READY
            and num_prompt_tokens < min(worker.card.num_blocks * worker.card.block_size, worker.card.max_model_len)
        ]
        decoders = [worker for worker in workers if can_decode(worker)]
        pairs = [(prefill, decode) for prefill in workers if can_prefill(prefill) for decode in decoders]
        has_pair = bool(pairs)
        pairs += [(w, w) for w in decoders if self.local_prefill or not has_pair or w.role is Role.COLOCATED]
        return sorted((request.candidate(prefill, decode, readers) for prefill, decode in pairs), key=preference)


class NaiveStrategy:
    """A routing strategy worker by worker: which candidates `Placer` may still choose from."""

    def __init__(self, registry: Registry, index: PrefixIndex, request: PlacementRequest, digests: Sequence[bytes]):
        self.workers = list(registry)
        self.hits = index.longest_prefix(digests, 0.0)
        self.request = request
        self.digests = digests

    def among(self, strategy: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of the preferred workers, in their order."""
        pairs = [one for one in candidates if one.is_pair]
        if strategy == "cost" or not candidates:
            return list(candidates)
        if not pairs:
            decode = self.preferred(strategy, [one.decode for one in candidates])
            return [one for one in candidates if one.decode is decode]
        prefill = self.preferred(strategy, [one.prefill for one in pairs])
        decode = self.preferred(strategy, [one.decode for one in pairs])
        return [one for one in candidates if one.decode is decode and one.prefill in (prefill, decode)]

    def preferred(self, strategy: str, pool: Collection[RegisteredWorker]) -> RegisteredWorker:
        """The worker of a pool that the strategy prefers."""
        members = [worker for worker in self.workers if worker in pool]
        own = self.request.num_prompt_tokens + self.request.expected_output_tokens
        most = 1.25 * (sum(map(load_tokens, members)) + own) / len(members)
        if strategy != "least-loaded":
            members = [worker for worker in members if load_tokens(worker) <= most]
        return max(members, key=lambda worker: (self.score(strategy, worker), -load_tokens(worker)))

    def score(self, strategy: str, worker: RegisteredWorker) -> float:
        """The higher, the better."""
        service_class, block_size = self.request.service_class, worker.card.block_size
        if strategy == "kv":
            return min(self.hits.get(worker.worker_id, 0) * block_size, self.request.num_prompt_tokens - 1)
        if strategy == "prefix":
            return rendezvous(worker.worker_id, self.digests[: 256 // block_size][-1]) if self.digests else 0
        if strategy == "session":
            key = f"{service_class.tenant}\n{service_class.session}".encode()
            return rendezvous(worker.worker_id, blake2b(key).digest()) if service_class.session else 0
        return -worker.last_booking if strategy == "round-robin" else -worker.uncomputed_tokens


def load_tokens(worker: RegisteredWorker) -> int:
    return worker.uncomputed_tokens + worker.booked_kv_tokens


def rendezvous(worker_id: str, key: bytes) -> float:
    digest = blake2b(worker_id.encode(), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little") ^ int.from_bytes(key[:8], "little")
    mixed = mixed * 0xFF51AFD7ED558CCD % 2**64
    return float((mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53 % 2**64)


def preference(candidate: Candidate) -> tuple[float, int]:
    """What the best candidate has least of."""
    workers = {candidate.prefill, candidate.decode}
    return candidate.terms.total_s, sum(worker.num_placed_tokens for worker in workers)


class _NaiveRequest:
    def __init__(
        self,
        costs: CostModel,
        num_prompt_tokens: int,
        num_outputs: int,
        hits: Mapping[str, int],
        held: Mapping[str, int],
        in_router: Mapping[str, Held],
        order: float,
        workers: Sequence[RegisteredWorker],
    ) -> None:
        self.workers = workers
        self.costs = costs
        self.num_prompt_tokens = num_prompt_tokens
        self.num_outputs = num_outputs
        self.hits = hits
        self.held = held
        self.in_router = in_router
        self.order = order

    def candidate(
        self, prefill: RegisteredWorker, decode: RegisteredWorker, others: Sequence[RegisteredWorker]
    ) -> Candidate:
        """Prompt on one worker, answer on the other or the same."""
        best, *sources = self.prefill_options(prefill, others)
        must_beat_s = 0.95 * best[-1][2]  # reading must save 5 % of computing, as predictions are not that exact
        for option in sources:
            is_better = option[-1][1] + option[-1][2] < must_beat_s
            if option[2] and prefill.card.loads_all:
                is_better = option[0] > best[0]
            if is_better:
                best, must_beat_s = option, option[-1][1] + option[-1][2]
        hit, holder, tier, prefill_terms = best
        transfer_s = self.transfer_s(prefill, decode, prefill_terms[2]) if prefill is not decode else 0.0
        terms = Terms(*prefill_terms, transfer_s, self.memory_s(decode), self.decode_s(decode))
        return Candidate(prefill, decode, hit, holder, terms, tier)

    def prefill_options(
        self, worker: RegisteredWorker, others: Sequence[RegisteredWorker]
    ) -> Iterator[tuple[int, Holder | None, str, tuple[float, float, float, float]]]:
        """Cached tokens, where some are read from, seconds of queue, fetch, prefill, delay: first without reading."""
        block_size = worker.card.block_size
        own = self.hits.get(worker.worker_id, 0)
        yield self.usable(own * block_size), None, "", self.prefill_terms(worker, self.usable(own * block_size), 0.0)
        names = dict.fromkeys(tier.name for other in others for tier in other.tiers)  # of equals, the first one
        for tier in sorted(worker.tiers, key=lambda tier: list(names).index(tier.name)):
            num_blocks = self.hits.get(f"{worker.worker_id}/{tier.name}", 0)
            if num_blocks > own and math.isfinite(tier.block_s):
                hit, load_s = self.usable(num_blocks * block_size), tier.latency_s + (num_blocks - own) * tier.block_s
                yield hit, None, tier.name, self.prefill_terms(worker, hit, load_s)
        name = max(self.held, key=self.held.__getitem__, default=None)
        if name is None:
            return
        holder_id, num_blocks = name.partition("/")[0], self.held[name]
        holder = next(other for other in others if other.worker_id == holder_id)
        is_alike = (holder.card.namespace, holder.card.block_size) == (worker.card.namespace, block_size)
        if holder is worker or num_blocks <= own or not is_alike:
            return
        hit = self.usable(num_blocks * block_size)
        num_bytes = (hit - self.usable(own * block_size)) * (worker.card.block_bytes / block_size)
        yield (
            hit,
            Holder(holder, num_blocks),
            "",
            self.prefill_terms(worker, hit, self.read_s(holder, worker, num_bytes)),
        )

    def prefill_terms(
        self, worker: RegisteredWorker, num_cached: int, fetch_s: float
    ) -> tuple[float, float, float, float]:
        costs = self.costs.steps(worker.card.kind).costs
        num_new = self.num_prompt_tokens - num_cached
        work_s = costs.prefill_work_s(num_new, prefill_attention(num_new, num_cached))
        num_steps = math.ceil(num_new / worker.card.max_num_batched_tokens)
        waits_s, prefill_s = self.waits_s(worker), num_steps * self.step_s(worker) + work_s
        num_stalled = self.num_seqs(worker) - self.num_too_late(worker, waits_s + fetch_s + prefill_s)
        return waits_s, fetch_s, prefill_s, max(num_stalled, worker.role is Role.DECODE) * work_s

    def waits_s(self, worker: RegisteredWorker) -> float:
        waits_s = wait_s(worker, self.costs.steps(worker.card.kind), self.order)
        return waits_s + self.in_router.get(worker.worker_id, Held()).prefill_s

    def num_too_late(self, worker: RegisteredWorker, end_s: float) -> float:
        """Sequences whose handoff comes after `end_s`: they come evenly until the last queue is empty."""
        last_s = max((self.waits_s(other) for other in self.workers if can_prefill(other)), default=0.0)
        return worker.num_incoming_seqs * max(1 - end_s / last_s, 0.0) if last_s > 0 else 0.0

    def read_s(self, holder: RegisteredWorker, reader: RegisteredWorker, num_bytes: float) -> float:
        costs = self.costs.steps(holder.card.kind).costs
        num_tokens = min(holder.uncomputed_tokens, holder.card.max_num_batched_tokens)
        link = self.costs.transfer(holder.card.kind, reader.card.kind).costs
        return self.step_s(holder) + costs.prefill_work_s(num_tokens, 0) + link.transfer_s(num_bytes)

    def transfer_s(self, prefill: RegisteredWorker, decode: RegisteredWorker, prefill_s: float) -> float:
        card, hit = decode.card, self.usable(self.hits.get(decode.worker_id, 0) * decode.card.block_size)
        num_bytes = math.ceil((self.num_prompt_tokens - hit) / card.block_size) * card.block_bytes
        chunk_bytes = prefill.card.max_num_batched_tokens * (card.block_bytes / card.block_size)
        link = self.costs.transfer(prefill.card.kind, card.kind).costs
        return link.exposed_s(num_bytes, chunk_bytes, prefill_s)

    def memory_s(self, worker: RegisteredWorker) -> float:
        capacity = worker.card.num_blocks * worker.card.block_size
        booked = self.kv_tokens(worker)
        if booked == 0:
            return 0.0
        share = (booked + self.num_prompt_tokens + self.num_outputs - capacity) / booked
        if worker.card.max_num_seqs:
            share = max(share, (self.num_seqs(worker) + 1 - worker.card.max_num_seqs) / max(self.num_seqs(worker), 1))
        costs = self.costs.steps(worker.card.kind).costs
        lifetime_s = self.num_outputs * costs.step_s(self.num_seqs(worker), booked)
        return max(share, 0.0) * lifetime_s

    def decode_s(self, worker: RegisteredWorker) -> float:
        mean_tokens = self.num_prompt_tokens + self.num_outputs / 2
        costs = self.costs.steps(worker.card.kind).costs
        step_s = costs.step_s(self.num_seqs(worker), self.kv_tokens(worker))
        return costs.added_decode_s(step_s, self.num_seqs(worker), mean_tokens, self.num_outputs)

    def num_seqs(self, worker: RegisteredWorker) -> int:
        return worker.num_booked_seqs + self.in_router.get(worker.worker_id, Held()).num_seqs

    def kv_tokens(self, worker: RegisteredWorker) -> int:
        return worker.booked_kv_tokens + self.in_router.get(worker.worker_id, Held()).kv_tokens

    def step_s(self, worker: RegisteredWorker) -> float:
        return self.costs.steps(worker.card.kind).costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)

    def usable(self, num_tokens: int) -> int:
        return min(num_tokens, self.num_prompt_tokens - 1)
