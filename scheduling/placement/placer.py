"""Decides where a request goes: the (prefill, decode) pair, or the single worker, with the fewest predicted seconds.

Reads workers, index and cost model; changes none of them. No I/O, no weights: every term is in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import NoWorker
from tandem.protocol.messages import Role, worker_of
from tandem.protocol.routing import COST
from tandem.scheduling.cost_model import CostModel, Mask
from tandem.scheduling.placement.candidate_costs import CandidateCosts
from tandem.scheduling.placement.choice import OTHERS, Choice, Pools, Verdict, cheapest, shadowed_now
from tandem.scheduling.placement.placement import Held, Holder, Placement
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.placement.strategies import Preferences
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.worker_table import Workers, WorkerTable
from tandem.scheduling.workers.workers import can_decode, can_prefill

_MAX_HOLDERS = 4  # workers whose readable blocks are counted exactly
_NOTHING_HELD: Mapping[str, Held] = {}


class Placer:
    """Places one request at a time. The caller books the result before the next placement.

    `config.local_prefill=False` excludes decode workers alone from the candidates while there is a pair; colocated
    workers remain. A strategy other than cost leaves one worker of each pool to choose from (`strategies.py`).
    """

    def __init__(self, workers: Workers, index: PrefixIndex, costs: CostModel, config: RouterConfig) -> None:
        self._workers = workers
        self._index = index
        self._costs = costs
        self._strategy, self._is_paired = config.strategy, not config.local_prefill

    @property
    def can_place(self) -> bool:
        """Whether there is a worker that can decode; such a worker can compute prompts too."""
        return any(can_decode(worker) for worker in self._workers)

    @property
    def can_cover(self) -> bool:
        """Whether a worker could do all of a request that `may_cover` and `may_fall_back`."""
        return any(
            can_decode(one)
            or (can_prefill(one) and one.card.serves_alone)
            or (one.is_fallback and (one.role is not Role.PREFILL or one.card.serves_alone))
            for one in self._workers
        )

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

        `held`: for each worker, the work that waits in the router and goes before this request.
        `order`: the prompt's place among those at a worker; it overtakes those of a later order.
        The digests are those of the workers that remain, which must all hash alike.
        A worker whose heartbeats are missing is chosen only where no other one can decode.
        Where no worker decodes, a request that `may_cover` goes to a prefill worker. So does a resumed one
        where none that decodes can take it: its client has a part of the answer.
        Where no ready worker can take it, a request that `may_fall_back` goes to one that drains.
        Raises `NoWorker` with the reasons when no worker can take the request.
        """
        try:
            return self._place(request, now, held, order, num_others, excluded, falls_back=False)
        except NoWorker:
            if not (request.may_fall_back and self._workers.table.has_fallback):
                raise
            return self._place(request, now, held, order, num_others, excluded, falls_back=True)

    def _place(
        self,
        request: PlacementRequest,
        now: float,
        held: Mapping[str, Held],
        order: float,
        num_others: int,
        excluded: Collection[str],
        *,
        falls_back: bool,
    ) -> Placement:
        """As `place`. If it `falls_back`, the draining workers that may serve are as good as ready ones."""
        table = self._workers.table
        is_usable, skipped = self._usable(table, request, excluded, falls_back=falls_back)
        if table.has_silent:
            is_usable = _preferably_heard(table, is_usable, skipped)
        decoders = is_usable & ~table.is_prefiller
        can_hand_over = request.can_hand_over
        if not np.count_nonzero(decoders) and (request.is_resumed or (request.may_cover and not self.can_place)):
            decoders, can_hand_over = is_usable, False
        if not np.count_nonzero(decoders):
            raise NoWorker(self._explain_no_worker(request, int(np.count_nonzero(is_usable)), skipped))
        prefillers = is_usable & table.is_prefiller if can_hand_over else ~table.everyone
        pools = Pools(prefillers, decoders, self._standalone(table, request, prefillers, decoders))
        card = table.workers[int(decoders.argmax())].card
        digests = request.digests.of(card)
        hits = self._index.longest_prefix(digests, now)
        holder = self._deepest_holder(hits, digests) if table.has_peers else None
        costs = CandidateCosts(request, table, self._costs, hits=hits, holder=holder, held=held, order=order)
        strategy = request.service_class.routing or self._strategy
        shadowed = OTHERS[strategy] if num_others else shadowed_now(strategy, table)
        if strategy == COST and not shadowed:  # mostly
            verdict = Verdict(cheapest(costs, pools, table))
        else:
            preferences = Preferences(request, table, costs.hit_tokens, digests, card.block_size)
            verdict = Choice(costs, pools, table, preferences).by(strategy, shadowed)
        candidates = verdict.candidates
        if not candidates:
            raise NoWorker("no worker can take this request: none computes prompts, and those that decode need one")
        best = candidates[0]
        return Placement(
            best=best,
            runner_up=candidates[1] if len(candidates) > 1 else None,
            others=tuple(costs.next_best(best, *pools, num_others)),
            num_prompt_tokens=request.num_prompt_tokens,
            expected_output_tokens=request.expected_output_tokens,
            skipped=skipped,
            strategy=strategy,
            rank=verdict.rank,
            shadow=verdict.shadow,
        )

    def _standalone(self, table: WorkerTable, request: PlacementRequest, prefillers: Mask, decoders: Mask) -> Mask:
        """The workers that may serve the whole request."""
        if self._is_paired and np.count_nonzero(prefillers):
            return decoders & table.is_colocated
        return decoders & table.serves_alone if table.has_halves and request.generates else decoders

    def _usable(
        self, table: WorkerTable, request: PlacementRequest, excluded: Collection[str], *, falls_back: bool
    ) -> tuple[Mask, dict[str, int]]:
        """Which workers could take the request, and why the others cannot: reason -> number of workers.

        Each worker counts under the first reason that applies; excluded workers do not count.
        """
        is_usable = table.everyone
        if excluded:
            is_usable = is_usable.copy()
            is_usable[[table.rows[worker_id] for worker_id in excluded if worker_id in table.rows]] = False
        skipped: dict[str, int] = {}
        for reason, mask in self._conditions(table, request, falls_back=falls_back):
            num_before = int(np.count_nonzero(is_usable))
            is_usable = is_usable & mask
            if num_skipped := num_before - int(np.count_nonzero(is_usable)):
                skipped[reason] = num_skipped
        return is_usable, skipped

    def _conditions(
        self, table: WorkerTable, request: PlacementRequest, *, falls_back: bool
    ) -> Iterator[tuple[str, Mask]]:
        """Each condition that a worker must meet, with the reason given where it does not."""
        for state, mask in table.not_in_state.items():
            yield state, mask | table.is_fallback if falls_back else mask
        if request.allowed_workers:
            yield "not for this tenant", table.named(request.allowed_workers)
        if request.adapter:
            yield "without the adapter", table.serving(request.adapter)
        if request.num_prompt_tokens > table.fits_all_tokens:
            yield "too small", request.num_prompt_tokens <= table.max_prompt_tokens

    def _deepest_holder(self, hits: Mapping[str, int], digests: Sequence[bytes]) -> Holder | None:
        """The worker that others can read most of the prompt from: in its pool or its host memory.

        Speculative hits do not count: a block that is not computed yet cannot be read.
        """
        deepest: Holder | None = None
        num_left = _MAX_HOLDERS
        for name in sorted(hits, key=hits.__getitem__, reverse=True):
            least = deepest.num_blocks if deepest is not None else 0
            if not num_left or hits[name] <= least:
                break  # the others have no more
            worker = self._workers.get(worker_of(name))
            if worker is None or not worker.card.lends(name):
                continue
            num_left -= 1
            num_blocks = self._index.count_held(name, digests, hits[name])
            if num_blocks > least:
                deepest = Holder(worker, num_blocks)
        return deepest

    def _explain_no_worker(self, request: PlacementRequest, num_fit: int, skipped: Mapping[str, int]) -> str:
        reasons = [f"{count} {reason}" for reason, count in sorted(skipped.items())]
        if num_fit:
            reasons.append(f"{num_fit} prefill only")
        asked = f" of tenant '{request.tenant}'" if request.allowed_workers else ""
        asked += f" for adapter '{request.adapter}'" if request.adapter else ""
        return f"no worker can take this request{asked}: {', '.join(reasons) or 'none is connected'}"


def _preferably_heard(table: WorkerTable, is_usable: Mask, skipped: dict[str, int]) -> Mask:
    """The usable workers without those that are silent now, unless no other one decodes.

    A silent worker is dead, stopped or cut off more often than late. Until that is known, a request there would wait
    for the whole timeout.
    """
    heard = is_usable & table.is_heard
    if not np.count_nonzero(heard & ~table.is_prefiller):
        return is_usable
    if num_silent := int(np.count_nonzero(is_usable)) - int(np.count_nonzero(heard)):
        skipped["silent"] = num_silent
    return heard
