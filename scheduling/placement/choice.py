"""The choice among the workers that may serve a request: by cost alone, or by cost among those a strategy prefers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tandem.protocol.routing import COST, STRATEGIES
from tandem.scheduling.cost_model import Mask
from tandem.scheduling.placement.candidate_costs import CandidateCosts, preference
from tandem.scheduling.placement.placement import Candidate
from tandem.scheduling.placement.strategies import Preferences
from tandem.scheduling.workers.worker_table import WorkerTable

SHADOW_EVERY = 10
_OTHERS = {strategy: [name for name in STRATEGIES if name != strategy] for strategy in STRATEGIES}
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly, whatever the period of the traffic


class Pools(NamedTuple):
    """The workers that may serve a request, by the part that they do of it."""

    prefillers: Mask
    decoders: Mask
    standalone: Mask  # they may do all of it


class Choice:
    """One decision. A worker is a row of the table."""

    def __init__(
        self, costs: CandidateCosts, pools: Pools, table: WorkerTable, preferences: Callable[[], Preferences]
    ) -> None:
        """`preferences` is called if a strategy other than cost has a say."""
        self._costs = costs
        self._pools = pools
        self._table = table
        self._make_preferences = preferences

    @cached_property
    def _preferences(self) -> Preferences:
        return self._make_preferences()

    @cached_property
    def _has_pairs(self) -> bool:
        return bool(np.count_nonzero(self._pools.prefillers))

    def candidates(self, strategy: str) -> list[Candidate]:
        """The cheapest pair and the cheapest single worker, or the two cheapest single ones: the cheapest first."""
        prefillers, decoders, standalone = self._pools if strategy == COST else self._preferred(strategy)
        pair, alone = self._costs.best_pair(prefillers, decoders), self._costs.best_alone(standalone)
        other = pair
        if pair is None and alone is not None:
            rest = standalone.copy()
            rest[self._table.rows[alone.decode.worker_id]] = False
            other = self._costs.best_alone(rest)
        return sorted((one for one in (alone, other) if one is not None), key=preference)

    def rank(self, strategy: str, best: Candidate) -> tuple[float, float]:
        """How much the strategy likes this choice, beside those from other pools."""
        if strategy == COST:
            return 0.0, 0.0
        return self._preferences.rank(strategy, self._table.rows[best.decode.worker_id])

    def shadow(self, strategy: str, best: Candidate, *, is_whole: bool) -> dict[str, float]:
        """Predicted seconds that each other strategy would have lost, if `is_whole`.

        Else of one of them in one of `SHADOW_EVERY` decisions, because that takes 20 to 50 us.
        """
        names = _OTHERS[strategy]
        if not is_whole:
            num_decisions = self._table.last_booking.item(self._table.last_booking.argmax())
            turn = int(num_decisions * _GOLDEN % 1.0 * SHADOW_EVERY * len(names))
            names = names[turn : turn + 1]
        return {name: self._best_s(name) - best.terms.total_s for name in names}

    def _best_s(self, strategy: str) -> float:
        """The cost of what this strategy would choose."""
        if strategy == COST:
            return self.candidates(COST)[0].terms.total_s
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
