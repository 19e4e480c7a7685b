"""The choice among the workers that may serve a request: by cost alone, or by cost among those a strategy prefers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tandem.protocol.routing import COST, STRATEGIES
from tandem.scheduling.cost_model import Mask
from tandem.scheduling.placement.candidate_costs import CandidateCosts, preference
from tandem.scheduling.placement.placement import ANY_RANK, NO_SHADOW, Candidate
from tandem.scheduling.placement.strategies import Preferences
from tandem.scheduling.workers.worker_table import WorkerTable

SHADOW_EVERY = 10
OTHERS = {strategy: [name for name in STRATEGIES if name != strategy] for strategy in STRATEGIES}
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly, whatever the period of the traffic


class Pools(NamedTuple):
    """The workers that may serve a request, by the part that they do of it."""

    prefillers: Mask
    decoders: Mask
    standalone: Mask  # they may do all of it


class Verdict(NamedTuple):
    """What was decided."""

    candidates: list[Candidate]  # the cheapest first; none if nothing can be chosen
    rank: tuple[float, float] = ANY_RANK  # how much the strategy likes the first
    shadow: Mapping[str, float] = NO_SHADOW  # predicted seconds that other strategies would have lost


def cheapest(costs: CandidateCosts, pools: Pools, table: WorkerTable) -> list[Candidate]:
    """The cheapest pair and the cheapest single worker, or the two cheapest single ones: the cheapest first."""
    pair, alone = costs.best_pair(pools.prefillers, pools.decoders), costs.best_alone(pools.standalone)
    other = pair
    if pair is None and alone is not None:
        rest = pools.standalone.copy()
        rest[table.rows[alone.decode.worker_id]] = False
        other = costs.best_alone(rest)
    return sorted((one for one in (alone, other) if one is not None), key=preference)


def shadowed_now(strategy: str, table: WorkerTable) -> list[str]:
    """The other strategy that this decision is compared with, or none: comparing takes 20 to 50 us."""
    others = OTHERS[strategy]
    num_decisions = table.last_booking.item(table.last_booking.argmax())
    turn = int(num_decisions * _GOLDEN % 1.0 * SHADOW_EVERY * len(others))
    return others[turn : turn + 1]


class Choice:
    """One decision in which a strategy other than cost has a say. A worker is a row of the table."""

    def __init__(self, costs: CandidateCosts, pools: Pools, table: WorkerTable, preferences: Preferences) -> None:
        self._costs = costs
        self._pools = pools
        self._table = table
        self._preferences = preferences
        self._has_pairs = bool(np.count_nonzero(pools.prefillers))

    def by(self, strategy: str, shadowed: Iterable[str]) -> Verdict:
        """The cheapest candidates of the workers that the strategy prefers, and what those of `shadowed` would cost."""
        pools = self._pools if strategy == COST else self._preferred(strategy)
        candidates = cheapest(self._costs, pools, self._table)
        if not candidates:
            return Verdict([])
        best = candidates[0]
        rank = ANY_RANK if strategy == COST else self._rank(strategy, best)
        return Verdict(candidates, rank, {name: self._best_s(name) - best.terms.total_s for name in shadowed})

    def _rank(self, strategy: str, best: Candidate) -> tuple[float, float]:
        return self._preferences.rank(strategy, self._table.rows[best.decode.worker_id])

    def _best_s(self, strategy: str) -> float:
        """The cost of what this strategy would choose."""
        if strategy == COST:
            return cheapest(self._costs, self._pools, self._table)[0].terms.total_s
        prefill, decode = self._rows(strategy)
        alone_s = self._costs.total_s(decode, decode) if self._pools.standalone.item(decode) else math.inf
        return alone_s if prefill is None else min(alone_s, self._costs.total_s(prefill, decode))

    def _preferred(self, strategy: str) -> Pools:
        """The pools with the preferred worker of each alone."""
        if not self._has_pairs and not np.count_nonzero(self._pools.standalone):
            return self._pools  # nothing can be chosen
        prefill, decode = self._rows(strategy)
        prefillers, decoders = self._only(prefill), self._only(decode)
        return Pools(prefillers, decoders, self._pools.standalone & decoders)

    def _rows(self, strategy: str) -> tuple[int | None, int]:
        """The preferred worker to compute the prompt on, if there are such, and the one to decode on."""
        if not self._has_pairs:
            return None, self._preferences.rows(strategy, self._pools.standalone)[0]
        prefill, decode = self._preferences.rows(strategy, self._pools.prefillers, self._pools.decoders)
        return prefill, decode

    def _only(self, row: int | None) -> Mask:
        mask = ~self._table.everyone
        if row is not None:
            mask[row] = True
        return mask
