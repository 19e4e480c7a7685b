"""Forecasts the pool's use: which sequences may take blocks now without stopping those that already hold some.

A sequence that is let in takes the blocks of its tokens now, and one more every `block_size` steps until it ends. Its
end is predicted from the lengths of recent answers. So the forecast use grows with all running sequences, and
falls by all blocks of each sequence that ends.

    blocks                     the highest peak must fit the pool
      |          /|  /|
      |    /|   / | / |/|
      |   / |  /  |/    |__
      |__/  |_/         |__ held by others: handed over, lent to readers, in quarantine
      +-----------------------> steps; each fall is an end

Plain values; knows no sequence, no clock and no tensor.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple


class BlockDemand(NamedTuple):
    """What one sequence takes of the pool."""

    num_steps: int  # until it ends; each step needs room for one token
    num_blocks: int  # taken now or held already; free again when it ends
    num_growing: int = 1  # sequences that take a slot in each step: this one, and its forks


class PoolForecast:
    """The forecast at one moment. Ask for each waiting sequence in order; those let in are counted at once."""

    def __init__(self, num_blocks: int, num_used: int, holders: list[BlockDemand], *, block_size: int) -> None:
        """`holders` are sequences that hold blocks, which are part of `num_used`, and will need more."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_used = num_used
        self._holders = sorted(holders)
        self._head: BlockDemand | None = None  # the first that did not fit
        self._head_start: float = 0

    def copy(self) -> PoolForecast:
        """The same forecast, to try changes on."""
        forecast = PoolForecast(self._num_blocks, self._num_used, self._holders, block_size=self._block_size)
        forecast._head, forecast._head_start = self._head, self._head_start
        return forecast

    @property
    def has_head(self) -> bool:
        """Whether a sequence did not fit."""
        return self._head is not None

    @property
    def num_spare(self) -> int:
        """Blocks that no sequence let in so far is expected to need; 0 if one did not fit."""
        return 0 if self.has_head else max(self._num_blocks - self.peak_of(self._holders, self._num_used), 0)

    def try_take(
        self, demand: BlockDemand, *, grows: bool = True, may_pass: bool = True, num_sure_steps: int | None = None
    ) -> bool:
        """Whether a sequence may take its blocks now, beside those let in before it.

        With `num_sure_steps` it only needs room for that many steps, otherwise until its end. The first sequence that
        does not fit is the head. Later ones are let in only if they `may_pass` and do not make the head begin later:
        they end before it can begin, or fit beside it.
        """
        fits = self.fits(demand, grows=grows, may_pass=may_pass, num_sure_steps=num_sure_steps)
        if fits:
            self.take(demand, grows=grows)
        elif self._head is None:
            self._head, self._head_start = demand, self.start_of(demand, self._holders, self._num_used)
        return fits

    def fits(
        self, demand: BlockDemand, *, grows: bool = True, may_pass: bool = True, num_sure_steps: int | None = None
    ) -> bool:
        """As `try_take`, but changes nothing."""
        num_used, holders = self._with(demand, grows=grows)
        # A sequence that is alone may use all of the pool.
        peak = self.peak_of(holders, num_used, num_sure_steps) if self._holders else num_used
        if peak > self._num_blocks or self._head is None:
            return peak <= self._num_blocks
        return may_pass and self.start_of(self._head, holders, num_used) <= self._head_start

    def take(self, demand: BlockDemand, *, grows: bool) -> None:
        """Count one more sequence, whether it fits or not."""
        self._num_used, self._holders = self._with(demand, grows=grows)

    def give_back(self, demand: BlockDemand, num_blocks: int) -> None:
        """Count a holder no more; `num_blocks` of its blocks have no other user.

        They may be more than it demanded, once others that shared its prefix have given theirs back, too.
        """
        self._holders.remove(demand)
        self._num_used -= num_blocks
        if self._head is not None:
            self._head_start = self.start_of(self._head, self._holders, self._num_used)

    def _with(self, demand: BlockDemand, *, grows: bool) -> tuple[int, list[BlockDemand]]:
        """Blocks used, and the holders, with one more sequence."""
        holders = self._holders
        if grows:
            holders = holders.copy()
            insort(holders, demand)
        return self._num_used + demand.num_blocks, holders

    def peak_of(self, holders: list[BlockDemand], num_used: int, num_sure_steps: int | None = None) -> int:
        """The most blocks that will be used at any step."""
        peak, num_left = num_used, sum(holder.num_growing for holder in holders)
        for num_steps, num_blocks, num_growing in holders:
            if num_sure_steps is not None and num_steps >= num_sure_steps:
                return max(peak, num_used + num_left * self._grown(num_sure_steps))
            peak = max(peak, num_used + num_left * self._grown(num_steps))
            num_used -= num_blocks
            num_left -= num_growing
        return peak

    def start_of(self, demand: BlockDemand, holders: list[BlockDemand], num_used: int) -> float:
        """Steps until the demanded blocks are free and stay free without it; inf if the forecast shows no such step."""
        limit = self._num_blocks - demand.num_blocks
        num_used -= sum(holder.num_blocks for holder in holders)  # when all have ended
        if num_used > limit:
            return math.inf
        num_left = 0
        for num_steps, num_blocks, num_growing in reversed(holders):
            num_used += num_blocks
            num_left += num_growing
            if num_used + num_left * self._grown(num_steps) > limit:
                return num_steps
        return 0

    def _grown(self, num_steps: int) -> int:
        """The most blocks that a sequence takes in this many steps."""
        return -(-num_steps // self._block_size)
