"""Where a request goes: the (prefill, decode) pair, or the single worker, that costs the fewest predicted seconds.

Reads registry, index and cost model; changes none of them. No I/O, no weights: every term is in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import NoWorker
from tandem.protocol.messages import is_readable, worker_of
from tandem.scheduling.cost_model import CostModel, Mask, Number, TransferCosts, Vector, prefill_attention
from tandem.scheduling.load import RequestLoad
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.worker_table import Workers, WorkerTable
from tandem.scheduling.workers import RegisteredWorker, can_decode

__all__ = ["Candidate", "Holder", "Placement", "Placer", "Terms"]

_MAX_HOLDERS = 4  # looked at more closely
_NOTHING_HELD: Mapping[str, Held] = {}
_ROUNDING = 1 + 1e-12  # equal sums in another order may differ by this factor
_FETCH_GAIN = 0.95  # reading from a peer must save this much, as predictions are not that exact


class Terms(NamedTuple):
    """What a placement costs, term by term, in seconds."""

    queue_s: float = 0.0  # prompts before this one: booked on the worker, and held in the router for it
    fetch_s: float = 0.0  # reading what another worker has of the prompt
    prefill_s: float = 0.0  # computing the rest of it
    delay_s: float = 0.0  # what that takes from the sequences decoding on the same worker, summed over them
    transfer_s: float = 0.0  # part of the KV transfer that prefill does not hide
    memory_s: float = 0.0  # until the decode worker has room and a seat
    decode_s: float = 0.0  # own decoding, and what it adds to that of the others

    @property
    def total_s(self) -> float:
        """What placement minimises."""
        return sum(self)

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token: it comes from the prefill side and waits for no transfer."""
        return self.queue_s + self.fetch_s + self.prefill_s


class Held(NamedTuple):
    """What waits in the router for one worker. To a request behind it that is as if it were on the worker."""

    prefill_s: float = 0.0  # of prompts to compute there
    num_seqs: int = 0  # to decode there
    kv_tokens: int = 0  # of these, prompts and expected outputs

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(self.prefill_s + other.prefill_s, self.num_seqs + other.num_seqs, self.kv_tokens + other.kv_tokens)


class Holder(NamedTuple):
    """A worker that has leading blocks of the prompt."""

    worker: RegisteredWorker
    num_blocks: int


class Candidate(NamedTuple):
    """One way to serve the request: on a pair, or on one worker twice."""

    prefill: RegisteredWorker
    decode: RegisteredWorker
    num_cached_tokens: int  # of the prompt, on the prefill side, those it is to fetch included
    holder: Holder | None  # another worker that has more of the prompt, if reading that is worth it
    terms: Terms
    tier: str = ""  # the worker's own tier that has more of it, if loading that is

    @property
    def is_pair(self) -> bool:
        """Whether prompt and decoding are on different workers."""
        return self.prefill is not self.decode

    def explain(self) -> dict[str, object]:
        """The candidate with its terms, as JSON."""
        return {
            "prefill_worker": self.prefill.worker_id,
            "decode_worker": self.decode.worker_id,
            "num_cached_tokens": self.num_cached_tokens,
            "kv_holder": self.holder.worker.worker_id if self.holder else None,
            "kv_tier": self.tier or None,
            "total_s": self.terms.total_s,
            **self.terms._asdict(),
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision, and what it was preferred to."""

    best: Candidate
    runner_up: Candidate | None  # the best of the other shape: alone if `best` is a pair, else a pair
    others: tuple[Candidate, ...]  # the next best of any shape, where asked for
    num_prompt_tokens: int
    expected_output_tokens: int
    skipped: dict[str, int]  # reason -> number of workers not considered

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens to compute."""
        return self.num_prompt_tokens - self.best.num_cached_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Length the sequence is expected to reach."""
        return self.num_prompt_tokens + self.expected_output_tokens

    @property
    def load(self) -> RequestLoad:
        """What it puts on its workers, to be booked."""
        best = self.best
        prefill, decode = best.prefill.worker_id, best.decode.worker_id
        return RequestLoad(prefill, decode, self.num_new_tokens, best.num_cached_tokens, self.num_kv_tokens)


class _Source(NamedTuple):
    """Where KV that a worker's pool lacks could come from: arrays over all workers."""

    holder: Holder | None  # another worker, or
    tier: str  # this one's own tier
    num_tokens: Any  # of the prompt, that it has from the start on: a number, or one for each worker
    may_read: Mask
    read_s: Vector


class _PrefillSides(NamedTuple):
    """What each worker costs as the one that computes the prompt: arrays over all workers."""

    queue_s: Vector
    fetch_s: Vector
    prefill_s: Vector
    delay_s: Vector
    cost_s: Vector  # the sum
    readers: list[Mask]  # by source, who would read from it, were it not for a later one


class _DecodeSides(NamedTuple):
    """What each worker costs as the one that decodes: arrays over all workers."""

    memory_s: Vector
    decode_s: Vector
    cost_s: Vector  # the sum


class Placer:
    """Places one request at a time. The caller books the result before it decides again.

    `config.local_prefill=False` takes "decode worker alone" out of the candidates while any pair is there; colocated
    workers stay.
    """

    def __init__(
        self,
        registry: Workers,
        index: PrefixIndex,
        costs: CostModel,
        config: RouterConfig,
    ) -> None:
        self._registry = registry
        self._index = index
        self._costs = costs
        self._config = config

    @property
    def can_place(self) -> bool:
        """Whether there is a worker to decode on; it can prefill too."""
        return any(can_decode(worker) for worker in self._registry)

    def place(
        self,
        request: PlacementRequest,
        now: float,
        *,
        held: Mapping[str, Held] = _NOTHING_HELD,
        order: float = math.inf,
        num_others: int = 0,
        excluded: Collection[str] = (),
    ) -> Placement:
        """The cheapest candidate without the workers whose ids are `excluded`, and the `num_others` next best ones.

        `held`: by worker, what waits in the router for it and goes before this request. `order`: the prompt's place
        among those at a worker; it overtakes those of a later order.
        The digests are those of the workers that remain, which must all hash alike.
        Raises `NoWorker` with the reasons when no worker can take the request.
        """
        table = self._registry.table
        is_usable, skipped = self._usable(table, request, excluded)
        decoders = is_usable & table.can_decode
        if not np.count_nonzero(decoders):
            raise NoWorker(self._explain_no_worker(request, int(np.count_nonzero(is_usable)), skipped))
        digests = request.digests.of(table.workers[int(decoders.argmax())].card)
        hits = self._index.longest_prefix(digests, now)
        holder = self._deepest_holder(hits, digests) if table.has_peers else None
        costs = _RequestCosts(request, table, self._costs, hits=hits, holder=holder, held=held, order=order)
        prefillers = is_usable & table.can_prefill
        pair = costs.best_pair(prefillers, decoders)
        standalone = decoders
        if pair is not None and not self._config.local_prefill:
            standalone = decoders & table.is_colocated
        alone = costs.best_alone(standalone)
        candidates = sorted((c for c in (pair, alone) if c is not None), key=_preference)
        others = costs.next_best(candidates[0], prefillers, decoders, standalone, num_others)
        return Placement(
            best=candidates[0],
            runner_up=candidates[1] if len(candidates) > 1 else None,
            others=tuple(others),
            num_prompt_tokens=request.num_prompt_tokens,
            expected_output_tokens=request.expected_output_tokens,
            skipped=skipped,
        )

    def _usable(
        self, table: WorkerTable, request: PlacementRequest, excluded: Collection[str]
    ) -> tuple[Mask, dict[str, int]]:
        """Which workers could take the request, and why others could not: reason -> number of workers.

        Of the reasons the first that applies counts; those that are excluded are not counted.
        """
        is_usable = table.everyone
        if excluded:
            is_usable = is_usable.copy()
            is_usable[[table.rows[worker_id] for worker_id in excluded if worker_id in table.rows]] = False
        skipped: dict[str, int] = {}
        for reason, mask in self._conditions(table, request):
            num_before = int(np.count_nonzero(is_usable))
            is_usable = is_usable & mask
            if num_skipped := num_before - int(np.count_nonzero(is_usable)):
                skipped[reason] = num_skipped
        return is_usable, skipped

    def _conditions(self, table: WorkerTable, request: PlacementRequest) -> Iterator[tuple[str, Mask]]:
        """What a worker must meet, and what it is called when it does not."""
        yield from table.not_in_state.items()
        if request.allowed_workers:
            yield "not for this tenant", table.named(request.allowed_workers)
        if request.adapter:
            yield "without the adapter", table.serving(request.adapter)
        if request.num_prompt_tokens > table.fits_all_tokens:
            yield "too small", request.num_prompt_tokens <= table.max_prompt_tokens

    def _deepest_holder(self, hits: Mapping[str, int], digests: Sequence[bytes]) -> Holder | None:
        """The worker with the most of the prompt in its pool or its host memory, to read it from.

        Speculative hits do not count: nobody can read what is not computed yet.
        """
        readable = [name for name in hits if is_readable(name)]
        deepest: Holder | None = None
        for name in sorted(readable, key=hits.__getitem__, reverse=True)[:_MAX_HOLDERS]:
            least = deepest.num_blocks if deepest is not None else 0
            if hits[name] <= least:
                break  # so have the others
            worker = self._registry.get(worker_of(name))
            num_blocks = self._index.count_held(name, digests, hits[name])
            if worker is not None and num_blocks > least:
                deepest = Holder(worker, num_blocks)
        return deepest

    def _explain_no_worker(self, request: PlacementRequest, num_fit: int, skipped: Mapping[str, int]) -> str:
        reasons = [f"{count} {reason}" for reason, count in sorted(skipped.items())]
        if num_fit:
            reasons.append(f"{num_fit} prefill only")
        asked = f" of tenant '{request.tenant}'" if request.allowed_workers else ""
        asked += f" for adapter '{request.adapter}'" if request.adapter else ""
        return f"no worker can take this request{asked}: {', '.join(reasons) or 'none is connected'}"


class _RequestCosts:
    """What one request costs on every worker, in seconds, and the best of it.

    Workers are rows of the registry's table here. Formulas are those of docs/architecture.md.
    """

    def __init__(
        self,
        request: PlacementRequest,
        table: WorkerTable,
        costs: CostModel,
        *,
        hits: Mapping[str, int],
        holder: Holder | None,
        held: Mapping[str, Held],
        order: float,
    ) -> None:
        # As floats: numpy takes half as long again to make one of an int, each time.
        self._num_prompt_tokens = float(request.num_prompt_tokens)
        self._num_outputs = float(request.expected_output_tokens)
        self._table = table
        self._costs = costs
        self._steps, self._step_s, self._queue_s = table.pace(costs, order)
        self._hit_blocks = table.column(hits)
        # The last token of the prompt is always computed, for its logits.
        self._hit_tokens = np.minimum(self._hit_blocks * table.block_size, self._num_prompt_tokens - 1)
        self._missed_tokens = self._num_prompt_tokens - self._hit_tokens
        self._sources = [*self._own_tiers(hits), *([self._peer(holder)] if holder is not None else [])]
        self._num_seqs, self._kv_tokens = table.num_booked_seqs, table.booked_kv_tokens
        self._decode_step_s = self._step_s
        if held:
            self._num_seqs = self._num_seqs + table.column({name: one.num_seqs for name, one in held.items()})
            self._kv_tokens = self._kv_tokens + table.column({name: one.kv_tokens for name, one in held.items()})
            self._queue_s = self._queue_s + table.column({name: one.prefill_s for name, one in held.items()})
            self._decode_step_s = self._steps.step_s(self._num_seqs, self._kv_tokens)
        self._prefill = self._prefill_sides()
        self._decode = self._decode_sides()

    def best_alone(self, standalone: Mask) -> Candidate | None:
        """The cheapest single worker."""
        row = self._cheapest(_among(standalone, self._prefill.cost_s + self._decode.cost_s))
        return self._candidate(row, row) if standalone.item(row) else None

    def best_pair(self, prefillers: Mask, decoders: Mask) -> Candidate | None:
        """The cheapest pair, without looking at all of them.

        Which worker decodes matters to the others only through what sets the transfer. Of workers equal in that, the
        cheapest alone can be part of the best pair; and none can that costs more with the cheapest prefill, and the
        least that its transfer could take, than a whole pair. Mostly that leaves one.
        """
        prefill_s = _among(prefillers, self._prefill.cost_s.copy())
        least_prefill_s, num_placed = prefill_s.item(prefill_s.argmin()), self._table.num_placed_tokens
        if least_prefill_s == math.inf:
            return None
        decode_s = _among(decoders, self._decode.cost_s + self._least_transfer_s())
        best = (math.inf, 0.0, 0, 0, 0.0)  # seconds, work done, the two workers, seconds of the transfer
        while least_prefill_s + decode_s.item(decode_s.argmin()) <= best[0] * _ROUNDING:
            decode = self._cheapest(decode_s)
            transfer_s = self._transfer_s(decode)
            total_s = prefill_s + transfer_s + self._decode.memory_s.item(decode) + self._decode.decode_s.item(decode)
            prefill = self._cheapest(total_s)
            work_done = num_placed.item(prefill) + num_placed.item(decode)
            best = min(best, (total_s.item(prefill), work_done, prefill, decode, transfer_s.item(prefill)))
            np.putmask(decode_s, self._takes_handoffs_like(decode), math.inf)
        return self._candidate(*best[2:])

    def next_best(
        self, best: Candidate, prefillers: Mask, decoders: Mask, standalone: Mask, num_others: int
    ) -> list[Candidate]:
        """The cheapest candidates behind `best`, of the cheapest workers of each side: to be shown, not exact."""
        if num_others <= 0:
            return []
        found = [self._candidate(row, row) for row in standalone.nonzero()[0].tolist()]
        for decode in self._by_cost(decoders, self._decode.cost_s)[: num_others + 1]:
            transfer_s = self._transfer_s(decode)
            for prefill in self._by_cost(prefillers, self._prefill.cost_s)[: num_others + 1]:
                found.append(self._candidate(prefill, decode, transfer_s.item(prefill)))
        found = [c for c in found if (c.prefill, c.decode) != (best.prefill, best.decode)]
        return heapq.nsmallest(num_others, found, key=_preference)

    def _prefill_sides(self) -> _PrefillSides:
        """What it costs to compute the prompt, or to read what a source has of it and compute the rest."""
        table = self._table
        prefill_s, work_s = self._prefill_s(self._missed_tokens, self._hit_tokens)
        fetch_s, must_beat_s, readers = np.zeros(len(table)), _FETCH_GAIN * prefill_s, []
        for source in self._sources:
            rest_s, rest_work_s = self._prefill_s(self._num_prompt_tokens - source.num_tokens, source.num_tokens)
            total_s = source.read_s + rest_s
            is_chosen = source.may_read & (total_s < must_beat_s)
            np.putmask(must_beat_s, is_chosen, total_s)
            np.putmask(fetch_s, is_chosen, source.read_s)
            np.putmask(prefill_s, is_chosen, rest_s)
            np.putmask(work_s, is_chosen, rest_work_s)
            readers.append(is_chosen)
        # A decode worker that computes a prompt stalls what decodes there, and be it the request that comes next.
        delay_s = np.maximum(self._num_seqs, table.is_decoder) * work_s
        cost_s = self._queue_s + fetch_s + prefill_s + delay_s
        return _PrefillSides(self._queue_s, fetch_s, prefill_s, delay_s, cost_s, readers)

    def _prefill_s(self, num_new: Number, num_cached: Number) -> tuple[Vector, Number]:
        """Seconds to compute the prompt behind its cached tokens, and how much that takes from sequences beside it."""
        work_s = self._steps.prefill_work_s(num_new, prefill_attention(num_new, num_cached))
        return np.ceil(num_new / self._table.chunk_tokens) * self._step_s + work_s, work_s

    def _own_tiers(self, hits: Mapping[str, int]) -> Iterator[_Source]:
        """What workers find in their tiers, from fast to slow."""
        table = self._table
        for tier, load_costs in table.tiers.items():
            depths = [(rows, depth) for name, depth in hits.items() if (rows := load_costs.readers.get(name))]
            if not depths:
                continue
            num_blocks = np.zeros(len(table))
            for rows, depth in depths:
                num_blocks[rows] = depth
            num_tokens = np.minimum(num_blocks * table.block_size, self._num_prompt_tokens - 1)
            may_read = (num_blocks > self._hit_blocks) & np.isfinite(load_costs.block_s)
            missing = np.where(may_read, num_blocks - self._hit_blocks, 0.0)
            read_s = load_costs.latency_s + missing * np.where(may_read, load_costs.block_s, 0.0)
            yield _Source(None, tier, num_tokens, may_read, read_s)

    def _peer(self, holder: Holder) -> _Source:
        """What the holder has, for those that have less of the prompt and could read its blocks.

        It answers between two of its steps.
        """
        table, row = self._table, self._table.rows[holder.worker.worker_id]
        costs = self._costs.steps(holder.worker.card.kind).costs
        num_computed = min(table.uncomputed_tokens.item(row), holder.worker.card.max_num_batched_tokens)
        step_s = self._step_s.item(row) + costs.prefill_work_s(num_computed, 0.0)
        links = self._costs.transfers_of([(holder.worker.card.kind, kind) for kind in table.kinds], table.kind_idx)
        num_held = min(float(holder.num_blocks * holder.worker.card.block_size), self._num_prompt_tokens - 1)
        num_bytes = (num_held - self._hit_tokens) * table.token_bytes
        may_read: Mask = self._hit_blocks < holder.num_blocks
        if not table.is_one_cache:
            may_read &= table.cache_idx == table.cache_idx.item(row)
        may_read[row] = False  # what it has in host memory is a tier of its own
        return _Source(holder, "", num_held, may_read, step_s + links.transfer_s(num_bytes))

    def _decode_sides(self) -> _DecodeSides:
        """What it costs to decode."""
        num_tokens = self._num_prompt_tokens + self._num_outputs / 2
        decode_s = self._steps.added_decode_s(self._decode_step_s, self._num_seqs, num_tokens, self._num_outputs)
        memory_s = self._memory_s()
        if memory_s is None:
            return _DecodeSides(self._table.zeros, decode_s, decode_s)
        return _DecodeSides(memory_s, decode_s, memory_s + decode_s)

    def _memory_s(self) -> Vector | None:
        """Wait until running sequences have given back what this one lacks: they end evenly over one lifetime.

        None where every worker has room, and a seat.
        """
        booked, num_seqs = self._kv_tokens, self._num_seqs
        num_tokens, room = self._num_prompt_tokens + self._num_outputs, self._table.capacity_tokens - booked
        seats = self._table.capacity_seqs - num_seqs
        if room.item(room.argmin()) >= num_tokens and seats.item(seats.argmin()) >= 1:
            return None
        lacking = np.maximum((num_tokens - room) / np.maximum(booked, 1.0), (1 - seats) / np.maximum(num_seqs, 1.0))
        lifetime_s = self._num_outputs * self._decode_step_s
        # Where nothing is booked there is nothing to wait for.
        return np.where(booked > 0, np.maximum(lacking, 0.0) * lifetime_s, 0.0)

    def _transfer_s(self, decode: int) -> Vector:
        """What prefill does not hide of the transfer to this worker: whole blocks, and only those that it lacks."""
        table, card = self._table, self._table.workers[decode].card
        num_bytes = math.ceil(self._missed_tokens.item(decode) / card.block_size) * card.block_bytes
        chunk_bytes = table.chunk_tokens * table.token_bytes.item(decode)
        links = self._costs.transfers_of([(kind, card.kind) for kind in table.kinds], table.kind_idx)
        return links.exposed_s(num_bytes, chunk_bytes, self._prefill.prefill_s)

    def _least_transfer_s(self) -> Vector:
        """What no transfer to each worker can take less than, wherever the prompt is computed."""
        table = self._table
        links = [self._costs.transfer(source, target).costs for source in table.kinds for target in table.kinds]
        least = links[0] if len(links) == 1 else TransferCosts(*map(min, zip(*links, strict=True)))
        return least.transfer_s(np.minimum(self._missed_tokens, table.least_chunk_tokens) * table.token_bytes)

    def _takes_handoffs_like(self, decode: int) -> Mask:
        """Workers to which a transfer takes what it takes to this one."""
        table = self._table
        is_alike: Mask = self._hit_tokens == self._hit_tokens.item(decode)
        return is_alike if table.is_one_shape else is_alike & (table.shape_idx == table.shape_idx.item(decode))

    def _by_cost(self, mask: Mask, cost_s: Vector) -> list[int]:
        rows = mask.nonzero()[0]
        ordered: list[int] = rows[np.lexsort((self._table.num_placed_tokens[rows], cost_s[rows]))].tolist()
        return ordered

    def _cheapest(self, cost_s: Vector) -> int:
        """The worker of the least cost; among equals that with the least work done, and then the first."""
        equals = (cost_s == cost_s.item(cost_s.argmin())).nonzero()[0]
        if len(equals) == 1:
            return int(equals[0])
        return int(equals[self._table.num_placed_tokens[equals].argmin()])

    def _candidate(self, prefill: int, decode: int, transfer_s: float = 0.0) -> Candidate:
        prefill_side, decode_side, workers = self._prefill, self._decode, self._table.workers
        terms = Terms(
            queue_s=prefill_side.queue_s.item(prefill),
            fetch_s=prefill_side.fetch_s.item(prefill),
            prefill_s=prefill_side.prefill_s.item(prefill),
            delay_s=prefill_side.delay_s.item(prefill),
            transfer_s=transfer_s,
            memory_s=decode_side.memory_s.item(decode),
            decode_s=decode_side.decode_s.item(decode),
        )
        for source, readers in zip(reversed(self._sources), reversed(prefill_side.readers), strict=True):
            if readers.item(prefill):
                num_cached = source.num_tokens
                if isinstance(num_cached, np.ndarray):
                    num_cached = num_cached.item(prefill)
                return Candidate(workers[prefill], workers[decode], int(num_cached), source.holder, terms, source.tier)
        return Candidate(workers[prefill], workers[decode], int(self._hit_tokens.item(prefill)), None, terms)


def _among(mask: Mask, cost_s: Vector) -> Vector:
    """The same array, after the costs of workers that are not in the mask became infinite."""
    np.putmask(cost_s, ~mask, math.inf)
    return cost_s


def _preference(candidate: Candidate) -> tuple[float, int]:
    """Fewest seconds; among equals the workers with the least work done."""
    work_done = candidate.prefill.num_placed_tokens
    if candidate.is_pair:
        work_done += candidate.decode.num_placed_tokens
    return candidate.terms.total_s, work_done
