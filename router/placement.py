"""Where a request goes: the (prefill, decode) pair, or the single worker, that costs the fewest predicted seconds.

Reads registry, index and cost model; changes none of them. No I/O, no weights: every term is in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from protocol.config import RouterConfig
from protocol.errors import NoWorker
from protocol.messages import Role, WorkerState
from router.cost_model import CostModel, StepModel, prefill_attention
from router.prefix_index import PrefixIndex
from router.registry import Registry, Worker, can_decode, can_prefill, queue_s

__all__ = ["Candidate", "Held", "Holder", "Placement", "Placer", "Terms"]

_MAX_HOLDERS = 4  # looked at more closely
_FETCH_GAIN = 0.95  # reading from a peer must save this much, as predictions are not that exact


class Terms(NamedTuple):
    """What a placement costs, term by term, in seconds."""

    queue_s: float = 0.0  # prompts before this one: booked on the worker, and held in the router for it
    fetch_s: float = 0.0  # reading what another worker has of the prompt
    prefill_s: float = 0.0  # computing the rest of it
    delay_s: float = 0.0  # what that takes from the sequences decoding on the same worker, summed over them
    transfer_s: float = 0.0  # part of the KV transfer that prefill does not hide
    memory_s: float = 0.0  # until the decode worker has room
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


_NOTHING = Held()
_NOTHING_HELD: Mapping[str, Held] = {}


class Holder(NamedTuple):
    """A worker that has leading blocks of the prompt."""

    worker: Worker
    num_blocks: int


class Candidate(NamedTuple):
    """One way to serve the request: on a pair, or on one worker twice."""

    prefill: Worker
    decode: Worker
    num_cached_tokens: int  # of the prompt, on the prefill side, those it is to fetch from `holder` included
    holder: Holder | None  # another worker that has more of the prompt, if reading that is worth it
    terms: Terms

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


class _PrefillSide(NamedTuple):
    """A worker's cost as the one that computes the prompt. The first two fields say which of several is better."""

    cost_s: float
    num_placed_tokens: int
    worker: Worker
    hit_tokens: int
    holder: Holder | None
    queue_s: float
    fetch_s: float
    prefill_s: float
    delay_s: float


class _DecodeSide(NamedTuple):
    """A worker's cost as the one that decodes."""

    cost_s: float
    num_placed_tokens: int
    worker: Worker
    hit_tokens: int
    memory_s: float
    decode_s: float


_Side = TypeVar("_Side", _PrefillSide, _DecodeSide)


class Placer:
    """Places one request at a time. The caller books the result before it decides again.

    `config.local_prefill=False` takes "decode worker alone" out of the candidates while any pair is there; colocated
    workers stay.
    """

    def __init__(
        self,
        registry: Registry,
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
        num_prompt_tokens: int,
        digests: Sequence[bytes],
        expected_output_tokens: int,
        now: float,
        *,
        held: Mapping[str, Held] = _NOTHING_HELD,
        order: float = math.inf,
        num_others: int = 0,
        excluded: Container[str] = (),
    ) -> Placement:
        """The cheapest candidate without workers whose id is `excluded`, and on demand the next best ones.

        `held`: by worker, what waits in the router for it and goes before this one. `order`: the prompt's place among
        those at a worker, whose later ones it overtakes.
        Raises `NoWorker` with the reasons when nothing can take the request.
        """
        skipped: Counter[str] = Counter()
        open_to_it = (worker for worker in self._registry if worker.worker_id not in excluded)
        workers = [worker for worker in open_to_it if self._fits(worker, num_prompt_tokens, skipped)]
        decoders = [worker for worker in workers if can_decode(worker)]
        if not decoders:
            raise NoWorker(self._explain_no_worker(len(workers), skipped))
        hits = self._index.longest_prefix(digests, now)
        holders = self._holders(hits, digests)
        request = _Request(num_prompt_tokens, expected_output_tokens, hits, holders, held, order, self._costs)
        decode_sides = [request.decode_side(worker) for worker in decoders]
        prefill_sides = [request.prefill_side(worker) for worker in workers if can_prefill(worker)]
        pair = request.best_pair(prefill_sides, decode_sides)
        solo_sides = decode_sides
        if pair is not None and not self._config.local_prefill:
            solo_sides = [side for side in decode_sides if side.worker.role == Role.COLOCATED]
        alone = request.best_alone(solo_sides)
        candidates = sorted((c for c in (pair, alone) if c is not None), key=_preference)
        others = request.next_best(candidates[0], prefill_sides, decode_sides, solo_sides, num_others)
        return Placement(
            best=candidates[0],
            runner_up=candidates[1] if len(candidates) > 1 else None,
            others=tuple(others),
            num_prompt_tokens=num_prompt_tokens,
            expected_output_tokens=expected_output_tokens,
            skipped=dict(skipped),
        )

    def _holders(self, hits: dict[str, int], digests: Sequence[bytes]) -> list[Holder]:
        """The two workers with the most of the prompt, best first: one to read from, and another for that one.

        Speculative hits do not count: nobody can read what is not computed yet.
        """
        found = []
        for worker_id in sorted(hits, key=lambda worker_id: -hits[worker_id])[:_MAX_HOLDERS]:
            worker = self._registry.get(worker_id)
            num_blocks = self._index.count_held(worker_id, digests)
            if worker is not None and num_blocks:
                found.append(Holder(worker, num_blocks))
        return sorted(found, key=lambda holder: -holder.num_blocks)[:2]

    def _fits(self, worker: Worker, num_prompt_tokens: int, skipped: Counter[str]) -> bool:
        if worker.state != WorkerState.READY:
            skipped[worker.state] += 1
            return False
        card = worker.card
        # The prompt and its first token must fit, or the worker could never run it.
        if num_prompt_tokens >= min(card.num_blocks * card.block_size, card.max_model_len):
            skipped["too small"] += 1
            return False
        return True

    def _explain_no_worker(self, num_fit: int, skipped: Counter[str]) -> str:
        reasons = [f"{count} {reason}" for reason, count in sorted(skipped.items())]
        if num_fit:
            reasons.append(f"{num_fit} prefill only")
        return f"no worker can take this request: {', '.join(reasons) or 'none is connected'}"


class _Request:
    """Scores one request on the workers it could use."""

    def __init__(
        self,
        num_prompt_tokens: int,
        expected_output_tokens: int,
        hits: dict[str, int],
        holders: Sequence[Holder],
        held: Mapping[str, Held],
        order: float,
        costs: CostModel,
    ) -> None:
        self._held = held
        self._order = order
        self._num_prompt_tokens = num_prompt_tokens
        self._num_outputs = expected_output_tokens
        self._num_kv_tokens = num_prompt_tokens + expected_output_tokens
        self._hits = hits
        self._holders = holders
        self._costs = costs

    def best_alone(self, decode_sides: Iterable[_DecodeSide]) -> Candidate | None:
        """The cheapest single worker."""
        sides = ((self.prefill_side(decode.worker), decode) for decode in decode_sides)
        best = min(sides, key=lambda both: (both[0].cost_s + both[1].cost_s, both[0].num_placed_tokens), default=None)
        return _candidate(*best) if best is not None else None

    def best_pair(self, prefill_sides: Iterable[_PrefillSide], decode_sides: Iterable[_DecodeSide]) -> Candidate | None:
        """The cheapest pair, without looking at all of them.

        Which worker of a side is chosen matters to the other side only through what sets the transfer. Among
        workers equal in that, the cheapest alone can be part of the best pair, so thousands of pairs come down to
        a few.
        """
        best: Candidate | None = None
        decoders = _best_of_equals(decode_sides, _decode_group)
        for prefill in _best_of_equals(prefill_sides, _prefill_group):
            for decode in decoders:
                if best is not None and prefill.cost_s + decode.cost_s > best.terms.total_s:
                    break  # sides are sorted by cost, and a transfer costs no less than nothing
                candidate = self.pair(prefill, decode)
                if best is None or _preference(candidate) < _preference(best):
                    best = candidate
        return best

    def next_best(
        self,
        best: Candidate,
        prefill_sides: Iterable[_PrefillSide],
        decode_sides: Iterable[_DecodeSide],
        solo_sides: Iterable[_DecodeSide],
        num_others: int,
    ) -> list[Candidate]:
        """The cheapest candidates behind `best`, of the cheapest workers of each side: to be shown, not exact."""
        if num_others <= 0:
            return []
        num_sides = num_others + 1
        prefillers = heapq.nsmallest(num_sides, prefill_sides, key=_side_order)
        decoders = heapq.nsmallest(num_sides, decode_sides, key=_side_order)
        found = [self.pair(prefill, decode) for prefill in prefillers for decode in decoders]
        found += [_candidate(self.prefill_side(side.worker), side) for side in solo_sides]
        found = [c for c in found if (c.prefill, c.decode) != (best.prefill, best.decode)]
        return heapq.nsmallest(num_others, found, key=_preference)

    def pair(self, prefill: _PrefillSide, decode: _DecodeSide) -> Candidate:
        """Both sides and the transfer between them: whole blocks, and only those the decode worker lacks."""
        card = decode.worker.card
        link = self._costs.transfer(prefill.worker.card.kind, card.kind)
        num_bytes = math.ceil((self._num_prompt_tokens - decode.hit_tokens) / card.block_size) * card.block_bytes
        chunk_bytes = prefill.worker.card.max_num_batched_tokens / card.block_size * card.block_bytes
        return _candidate(prefill, decode, link.exposed_s(num_bytes, chunk_bytes, prefill.prefill_s))

    def prefill_side(self, worker: Worker) -> _PrefillSide:
        """What it costs to compute the prompt there, or to read what another has of it and compute the rest."""
        model = self._costs.steps(worker.card.kind)
        hit, holder, fetch_s = self._hit_tokens(worker), None, 0.0
        prefill_s, work_s = self._prefill_s(worker, model, hit)
        other = self._holder_for(worker)
        if other is not None:
            other_hit = self._usable_tokens(other.num_blocks * worker.card.block_size)
            num_bytes = (other_hit - hit) / worker.card.block_size * worker.card.block_bytes
            other_fetch_s = self._fetch_s(other.worker, worker, num_bytes)
            other_prefill_s, other_work_s = self._prefill_s(worker, model, other_hit)
            if other_fetch_s + other_prefill_s < _FETCH_GAIN * prefill_s:
                hit, holder, fetch_s = other_hit, other, other_fetch_s
                prefill_s, work_s = other_prefill_s, other_work_s
        held = self._held.get(worker.worker_id, _NOTHING)
        # A decode worker that computes a prompt stalls what decodes there, and be it the request that comes next.
        num_stalled = worker.num_booked_seqs + held.num_seqs
        if worker.role is Role.DECODE:
            num_stalled = max(num_stalled, 1)
        waiting_s = queue_s(worker, model, self._order) + held.prefill_s
        delay_s = num_stalled * work_s
        cost_s = waiting_s + fetch_s + prefill_s + delay_s
        return _PrefillSide(
            cost_s, worker.num_placed_tokens, worker, hit, holder, waiting_s, fetch_s, prefill_s, delay_s
        )

    def _prefill_s(self, worker: Worker, model: StepModel, num_cached: int) -> tuple[float, float]:
        """Seconds to compute the prompt behind its cached tokens, and how much that takes from sequences beside it."""
        num_new = self._num_prompt_tokens - num_cached
        work_s = model.prefill_work_s(num_new, prefill_attention(num_new, num_cached))
        num_steps = math.ceil(num_new / worker.card.max_num_batched_tokens)
        return num_steps * model.step_s(worker.num_booked_seqs, worker.booked_kv_tokens) + work_s, work_s

    def _fetch_s(self, holder: Worker, reader: Worker, num_bytes: float) -> float:
        """Seconds to read so much from another worker, which answers between two of its steps."""
        model = self._costs.steps(holder.card.kind)
        num_tokens = min(holder.uncomputed_tokens, holder.card.max_num_batched_tokens)
        step_s = model.step_s(holder.num_booked_seqs, holder.booked_kv_tokens) + model.prefill_work_s(num_tokens, 0)
        return step_s + self._costs.transfer(holder.card.kind, reader.card.kind).transfer_s(num_bytes)

    def _holder_for(self, worker: Worker) -> Holder | None:
        """The other worker that has the most of the prompt, if that is more than this one has itself."""
        other = next((holder for holder in self._holders if holder.worker is not worker), None)
        if other is None or other.num_blocks <= self._hits.get(worker.worker_id, 0):
            return None
        is_alike = other.worker.card.namespace == worker.card.namespace
        return other if is_alike and other.worker.card.block_size == worker.card.block_size else None

    def decode_side(self, worker: Worker) -> _DecodeSide:
        """What it costs to decode there."""
        model = self._costs.steps(worker.card.kind)
        held = self._held.get(worker.worker_id, _NOTHING)
        num_seqs, kv_tokens = worker.num_booked_seqs + held.num_seqs, worker.booked_kv_tokens + held.kv_tokens
        memory_s = self._memory_s(worker, model, num_seqs, kv_tokens)
        decode_s = model.added_decode_s(
            num_seqs,
            kv_tokens,
            self._num_prompt_tokens + self._num_outputs / 2,
            self._num_outputs,
        )
        hit = self._hit_tokens(worker)
        return _DecodeSide(memory_s + decode_s, worker.num_placed_tokens, worker, hit, memory_s, decode_s)

    def _hit_tokens(self, worker: Worker) -> int:
        """Cached prompt tokens; the last token is always computed, for its logits."""
        return self._usable_tokens(self._hits.get(worker.worker_id, 0) * worker.card.block_size)

    def _usable_tokens(self, num_tokens: int) -> int:
        return min(num_tokens, self._num_prompt_tokens - 1)

    def _memory_s(self, worker: Worker, model: StepModel, num_seqs: int, kv_tokens: int) -> float:
        """Wait until running sequences have given back what this one lacks: they end evenly over one lifetime."""
        capacity = worker.card.num_blocks * worker.card.block_size
        lacking = kv_tokens + self._num_kv_tokens - capacity
        if lacking <= 0 or kv_tokens == 0:
            return 0.0
        return lacking / kv_tokens * self._num_outputs * model.step_s(num_seqs, kv_tokens)


def _prefill_group(side: _PrefillSide) -> tuple[Hashable, ...]:
    """All that the transfer takes from the prefill side."""
    return side.worker.card.kind, side.worker.card.max_num_batched_tokens, side.prefill_s


def _decode_group(side: _DecodeSide) -> tuple[Hashable, ...]:
    """All that the transfer takes from the decode side."""
    return side.worker.card.kind, side.worker.card.block_bytes, side.hit_tokens


def _side_order(side: _PrefillSide | _DecodeSide) -> tuple[float, int]:
    return side.cost_s, side.num_placed_tokens


def _best_of_equals(sides: Iterable[_Side], group: Callable[[_Side], Hashable]) -> list[_Side]:
    """The best side of each group, cheapest first."""
    best: dict[Hashable, _Side] = {}
    for side in sides:
        key = group(side)
        known = best.get(key)
        if known is None or side[:2] < known[:2]:
            best[key] = side
    return sorted(best.values(), key=lambda side: side[:2])


def _candidate(prefill: _PrefillSide, decode: _DecodeSide, transfer_s: float = 0.0) -> Candidate:
    terms = Terms(
        queue_s=prefill.queue_s,
        fetch_s=prefill.fetch_s,
        prefill_s=prefill.prefill_s,
        delay_s=prefill.delay_s,
        transfer_s=transfer_s,
        memory_s=decode.memory_s,
        decode_s=decode.decode_s,
    )
    return Candidate(prefill.worker, decode.worker, prefill.hit_tokens, prefill.holder, terms)


def _preference(candidate: Candidate) -> tuple[float, int]:
    """Fewest seconds; among equals the workers with the least work done."""
    work_done = candidate.prefill.num_placed_tokens
    if candidate.is_pair:
        work_done += candidate.decode.num_placed_tokens
    return candidate.terms.total_s, work_done
