"""What one request costs on every worker, computed for all workers at once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tandem.scheduling.cost_model import CostModel, Mask, Number, TransferCosts, Vector, prefill_attention
from tandem.scheduling.placement.placement import Candidate, Held, Holder, Terms
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.worker_table import WorkerTable

_ROUNDING = 1 + 1e-12  # sums that are equal in theory may differ by this factor
_FETCH_GAIN = 0.95  # a fetch may take this share of computing, because predictions are not more exact


class _Source(NamedTuple):
    """Where a worker could get KV that its pool lacks: arrays over all workers."""

    holder: Holder | None  # another worker, or
    tier: str  # each worker's own tier of this name
    num_tokens: Any  # leading prompt tokens that the source has: a number, or one for each worker
    may_read: Mask
    read_s: Vector


class _PrefillSides(NamedTuple):
    """The cost of computing the prompt on each worker: arrays over all workers."""

    queue_s: Vector
    fetch_s: Vector
    prefill_s: Vector
    delay_s: Vector
    cost_s: Vector  # the sum
    readers: list[Mask]  # for each source, the workers for which it beats the sources before it


class _DecodeSides(NamedTuple):
    """The cost of decoding on each worker: arrays over all workers."""

    memory_s: Vector
    decode_s: Vector
    cost_s: Vector  # the sum


class CandidateCosts:
    """The cost of one request on every worker, in seconds, and the cheapest candidates.

    A worker is a row of the registry's table here. The formulas are those of docs/cost.md.
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
        # Floats, because numpy converts an int at every use, which makes the operation half as slow again.
        self._num_prompt_tokens = float(request.num_prompt_tokens)
        self._num_outputs = float(request.expected_output_tokens)
        self._table = table
        self._costs = costs
        self._steps, self._step_s, self._queue_s = table.pace(costs, order)
        self._hit_blocks = table.column(hits)
        # The last token of the prompt is always computed, for its logits.
        self.hit_tokens = np.minimum(self._hit_blocks * table.block_size, self._num_prompt_tokens - 1)
        self._missed_tokens = self._num_prompt_tokens - self.hit_tokens
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

    def total_s(self, prefill: int, decode: int) -> float:
        """The cost of one pair, or of one worker that does both: that of its `Candidate`, without making it."""
        transfer_s = 0.0
        if prefill != decode:
            table, prefill_s = self._table, self._prefill.prefill_s.item(prefill)
            kinds = table.workers[prefill].card.kind, table.workers[decode].card.kind
            chunk_tokens = float(table.workers[prefill].card.max_num_batched_tokens)
            links = self._costs.transfer(*kinds).costs
            chunk_bytes = chunk_tokens * table.token_bytes.item(decode)
            transfer_s = float(links.exposed_s(self._handoff_bytes(decode), chunk_bytes, prefill_s))
        return self._prefill.cost_s.item(prefill) + transfer_s + self._decode.cost_s.item(decode)

    def best_alone(self, standalone: Mask) -> Candidate | None:
        """The cheapest single worker."""
        row = self._cheapest(_among(standalone, self._prefill.cost_s + self._decode.cost_s))
        return self._candidate(row, row) if standalone.item(row) else None

    def best_pair(self, prefillers: Mask, decoders: Mask) -> Candidate | None:
        """The cheapest pair, without looking at all pairs.

        The choice of the decode worker changes the prefill side's cost through the transfer alone. So of decode workers
        with equal transfers only the cheapest can be in the best pair, and none can whose cost with the cheapest
        prefill and the least possible transfer exceeds that of a known pair. Mostly one decode worker remains.
        """
        prefill_s = _among(prefillers, self._prefill.cost_s.copy())
        least_prefill_s, num_placed = prefill_s.item(prefill_s.argmin()), self._table.num_placed_tokens
        if least_prefill_s == math.inf:
            return None
        decode_s = _among(decoders, self._decode.cost_s + self._least_transfer_s())
        best = (math.inf, 0.0, 0, 0, 0.0)  # total seconds, work done, the two workers, seconds of the transfer
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
        """The cheapest candidates after `best`, made of the cheapest workers of each side: for display, not exact."""
        if num_others <= 0:
            return []
        found = [self._candidate(row, row) for row in standalone.nonzero()[0].tolist()]
        for decode in self._by_cost(decoders, self._decode.cost_s)[: num_others + 1]:
            transfer_s = self._transfer_s(decode)
            for prefill in self._by_cost(prefillers, self._prefill.cost_s)[: num_others + 1]:
                found.append(self._candidate(prefill, decode, transfer_s.item(prefill)))
        found = [c for c in found if (c.prefill, c.decode) != (best.prefill, best.decode)]
        return heapq.nsmallest(num_others, found, key=preference)

    def _prefill_sides(self) -> _PrefillSides:
        """Cost of computing the prompt, or of reading what a source has of it and computing the rest."""
        table = self._table
        prefill_s, work_s = self._prefill_s(self._missed_tokens, self.hit_tokens)
        fetch_s, must_beat_s, readers = np.zeros(len(table)), _FETCH_GAIN * prefill_s, []
        read_tokens = self.hit_tokens
        for source in self._sources:
            rest_s, rest_work_s = self._prefill_s(self._num_prompt_tokens - source.num_tokens, source.num_tokens)
            total_s = source.read_s + rest_s
            is_chosen = source.may_read & (total_s < must_beat_s)
            if source.tier and table.some_load_all:
                is_deeper = source.may_read & (source.num_tokens > read_tokens)
                is_chosen = np.where(table.loads_all, is_deeper, is_chosen)
                read_tokens = np.where(is_chosen, source.num_tokens, read_tokens)
            np.putmask(must_beat_s, is_chosen, total_s)
            np.putmask(fetch_s, is_chosen, source.read_s)
            np.putmask(prefill_s, is_chosen, rest_s)
            np.putmask(work_s, is_chosen, rest_work_s)
            readers.append(is_chosen)
        # A decode worker that computes a prompt stalls the sequences there; if there are none, at least the next one.
        end_s = self._queue_s + fetch_s + prefill_s
        delay_s = np.maximum(self._num_stalled(end_s), table.is_decoder) * work_s
        return _PrefillSides(self._queue_s, fetch_s, prefill_s, delay_s, end_s + delay_s, readers)

    def _num_stalled(self, end_s: Vector) -> Vector:
        """The number of sequences stalled by a prompt that is computed until `end_s`, in seconds from now.

        Those whose prompts other workers compute come one by one, the last of them when the longest queue is empty.
        """
        num_incoming = self._table.num_incoming_seqs
        if not np.count_nonzero(num_incoming):
            return self._num_seqs
        waits_s = self._queue_s * self._table.can_prefill
        last_s = waits_s.item(waits_s.argmax())
        if last_s <= 0.0:
            return self._num_seqs
        return self._num_seqs - num_incoming * np.maximum(1.0 - end_s / last_s, 0.0)

    def _prefill_s(self, num_new: Number, num_cached: Number) -> tuple[Vector, Number]:
        """Seconds to compute the new tokens after the cached ones, and how long this delays each sequence beside it."""
        work_s = self._steps.prefill_work_s(num_new, prefill_attention(num_new, num_cached))
        return np.ceil(num_new / self._table.chunk_tokens) * self._step_s + work_s, work_s

    def _own_tiers(self, hits: Mapping[str, int]) -> Iterator[_Source]:
        """Each worker's own tiers as sources, fastest tier first."""
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
        """The holder as a source, for workers that have less of the prompt and can read its blocks.

        The holder answers between two of its steps.
        """
        table, row = self._table, self._table.rows[holder.worker.worker_id]
        costs = self._costs.steps(holder.worker.card.kind).costs
        num_computed = min(table.uncomputed_tokens.item(row), holder.worker.card.max_num_batched_tokens)
        step_s = self._step_s.item(row) + costs.prefill_work_s(num_computed, 0.0)
        links = self._costs.transfers_of([(holder.worker.card.kind, kind) for kind in table.kinds], table.kind_idx)
        num_held = min(float(holder.num_blocks * holder.worker.card.block_size), self._num_prompt_tokens - 1)
        num_bytes = (num_held - self.hit_tokens) * table.token_bytes
        may_read: Mask = self._hit_blocks < holder.num_blocks
        if not table.is_one_cache:
            may_read &= table.cache_idx == table.cache_idx.item(row)
        may_read[row] = False  # its own host memory is a tier of its own
        return _Source(holder, "", num_held, may_read, step_s + links.transfer_s(num_bytes))

    def _decode_sides(self) -> _DecodeSides:
        """Cost of decoding, and of waiting for memory."""
        num_tokens = self._num_prompt_tokens + self._num_outputs / 2
        decode_s = self._steps.added_decode_s(self._decode_step_s, self._num_seqs, num_tokens, self._num_outputs)
        memory_s = self._memory_s()
        if memory_s is None:
            return _DecodeSides(self._table.zeros, decode_s, decode_s)
        return _DecodeSides(memory_s, decode_s, memory_s + decode_s)

    def _memory_s(self) -> Vector | None:
        """Seconds until running sequences have freed what this one lacks: they end evenly over one lifetime.

        None where every worker has room and a seat.
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
        """The part of the transfer to this worker that prefill does not hide: whole blocks that the worker lacks."""
        table, card = self._table, self._table.workers[decode].card
        chunk_bytes = table.chunk_tokens * table.token_bytes.item(decode)
        links = self._costs.transfers_of([(kind, card.kind) for kind in table.kinds], table.kind_idx)
        return links.exposed_s(self._handoff_bytes(decode), chunk_bytes, self._prefill.prefill_s)

    def _handoff_bytes(self, decode: int) -> int:
        card = self._table.workers[decode].card
        return math.ceil(self._missed_tokens.item(decode) / card.block_size) * card.block_bytes

    def _least_transfer_s(self) -> Vector:
        """A lower bound of the transfer to each worker, wherever the prompt is computed."""
        table = self._table
        links = [self._costs.transfer(source, target).costs for source in table.kinds for target in table.kinds]
        least = links[0] if len(links) == 1 else TransferCosts(*map(min, zip(*links, strict=True)))
        return least.transfer_s(np.minimum(self._missed_tokens, table.least_chunk_tokens) * table.token_bytes)

    def _takes_handoffs_like(self, decode: int) -> Mask:
        """Workers to which a transfer takes as long as to this one."""
        table = self._table
        is_alike: Mask = self.hit_tokens == self.hit_tokens.item(decode)
        return is_alike if table.is_one_shape else is_alike & (table.shape_idx == table.shape_idx.item(decode))

    def _by_cost(self, mask: Mask, cost_s: Vector) -> list[int]:
        rows = mask.nonzero()[0]
        ordered: list[int] = rows[np.lexsort((self._table.num_placed_tokens[rows], cost_s[rows]))].tolist()
        return ordered

    def _cheapest(self, cost_s: Vector) -> int:
        """The worker with the least cost; among equals the one with the least work placed, then the first."""
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
        return Candidate(workers[prefill], workers[decode], int(self.hit_tokens.item(prefill)), None, terms)


def _among(mask: Mask, cost_s: Vector) -> Vector:
    """Set the costs of workers outside the mask to infinity, in place, and return the same array."""
    np.putmask(cost_s, ~mask, math.inf)
    return cost_s


def preference(candidate: Candidate) -> tuple[float, int]:
    """Sort key: fewest seconds; among equals the workers with the least work placed."""
    work_done = candidate.prefill.num_placed_tokens
    if candidate.is_pair:
        work_done += candidate.decode.num_placed_tokens
    return candidate.terms.total_s, work_done
