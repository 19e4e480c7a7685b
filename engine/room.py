"""The one account of what the pool has promised: who may take blocks now, so that those who hold some can go on.

A sequence that is let in takes the blocks of its tokens now and one more every `block_size` steps until it ends. When
that is, is expected from the lengths of recent answers. So the pool's use is forecast: it grows with all that run, and
falls by all blocks of each that ends.

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
from bisect import bisect_left, bisect_right, insort
from collections import deque
from operator import neg
from typing import NamedTuple

__all__ = ["AnswerLengths", "Claim", "Room"]

_NUM_REMEMBERED = 256  # answers
_MIN_LONGER = 8  # remembered answers that got longer than this one, to tell from them how long it will be
_FIRST_GUESS_TOKENS = 2048  # too long a guess is soon corrected by answers that end; too short a one costs preemptions
_LONGER_SHARE = 0.2  # of answers that get longer than is expected


class AnswerLengths:
    """Lengths of the latest answers, to tell how long one that is under way will be.

    One that was cut at its `max_tokens` says only that it would have been longer (Kaplan and Meier's estimate).
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque(maxlen=_NUM_REMEMBERED)
        self._lengths: list[int] = []  # sorted
        self._survival: list[float] = []  # share of answers that get longer
        self._is_current = True

    def note(self, num_tokens: int, max_tokens: int) -> None:
        """An answer has ended after so many tokens, by itself or cut."""
        self._latest.append((num_tokens, num_tokens >= max_tokens))
        self._is_current = False

    def expected_rest(self, num_tokens: int, max_tokens: int) -> int:
        """Tokens that an answer of `num_tokens` so far will still get; of five that got as long four get no more.

        Where too few got that long it is expected to get as long as any did, and at least twice as long as it is.
        """
        if not self._is_current:
            self._estimate()
        idx = bisect_right(self._lengths, num_tokens)
        total = max(2 * num_tokens, _FIRST_GUESS_TOKENS, *self._lengths[-1:])
        if len(self._lengths) - idx >= _MIN_LONGER:
            share = _LONGER_SHARE * (self._survival[idx - 1] if idx else 1.0)
            end = bisect_left(self._survival, -share, lo=idx, key=neg)
            if end < len(self._lengths):
                total = self._lengths[end]
        return max(min(total, max_tokens) - num_tokens, 1)

    def share_ending(self, num_tokens: int, num_more: int, max_tokens: int) -> float:
        """Of answers of `num_tokens` so far, the share that gets at most `num_more` more.

        Where too few got that long to tell, none is expected to end but by its `max_tokens`.
        """
        if num_tokens + num_more >= max_tokens:
            return 1.0
        if not self._is_current:
            self._estimate()
        idx = bisect_right(self._lengths, num_tokens)
        end = bisect_right(self._lengths, num_tokens + num_more, lo=idx)
        if end == idx or len(self._lengths) - idx < _MIN_LONGER:
            return 0.0
        return 1 - self._survival[end - 1] / (self._survival[idx - 1] if idx else 1.0)

    def _estimate(self) -> None:
        self._is_current = True
        answers = sorted(self._latest)
        self._lengths, self._survival, survival = [num_tokens for num_tokens, _ in answers], [], 1.0
        for num_left, (_, is_cut) in zip(range(len(answers), 0, -1), answers, strict=True):
            if not is_cut:
                survival *= 1 - 1 / num_left
            self._survival.append(survival)


class Claim(NamedTuple):
    """What one sequence takes of the pool."""

    num_steps: int  # until it ends; a token's room in each
    num_blocks: int  # it takes these now, or has them; at its end they are free


class Room:
    """The forecast at one moment, for those in line: ask for each in order. What may take blocks is counted at once."""

    def __init__(self, num_blocks: int, num_used: int, holders: list[Claim], *, block_size: int) -> None:
        """`holders` are the claims of sequences that have blocks, which are among the `num_used`, and get more."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_used = num_used
        self._holders = sorted(holders)
        self._head: Claim | None = None  # the first that did not fit
        self._head_start: float = 0

    @property
    def has_head(self) -> bool:
        """Whether somebody was asked for that does not fit."""
        return self._head is not None

    @property
    def num_spare(self) -> int:
        """Blocks that nobody who was asked for is expected to need."""
        return 0 if self.has_head else max(self._num_blocks - self._peak(self._holders, self._num_used), 0)

    def try_take(
        self, claim: Claim, *, grows: bool = True, may_pass: bool = True, num_sure_steps: int | None = None
    ) -> bool:
        """Whether it may take its blocks now, with those that were let in before it: for good, or for so many steps.

        The first that may not is the head: from then on only those may that let it begin no later, as they end before
        it does or fit beside it, and of those only the ones that `may_pass`.
        """
        num_used, holders = self._num_used + claim.num_blocks, self._holders
        if grows:
            holders = holders.copy()
            insort(holders, claim)
        # One that is alone may go as far as it gets.
        peak = self._peak(holders, num_used, num_sure_steps) if self._holders else num_used
        fits = peak <= self._num_blocks
        if fits and self._head is not None:
            fits = may_pass and self._start(self._head, holders, num_used) <= self._head_start
        if fits:
            self._holders, self._num_used = holders, num_used
        elif self._head is None:
            self._head, self._head_start = claim, self._start(claim, self._holders, self._num_used)
        return fits

    def _peak(self, holders: list[Claim], num_used: int, num_sure_steps: int | None = None) -> int:
        """Blocks that will be used at most."""
        peak, num_left = num_used, len(holders)
        for num_steps, num_blocks in holders:
            if num_sure_steps is not None and num_steps >= num_sure_steps:
                return max(peak, num_used + num_left * self._grown(num_sure_steps))
            peak = max(peak, num_used + num_left * self._grown(num_steps))
            num_used -= num_blocks
            num_left -= 1
        return peak

    def _start(self, claim: Claim, holders: list[Claim], num_used: int) -> float:
        """Steps until the claim's blocks are free, and stay so while it is not there; inf if that is not in sight."""
        limit = self._num_blocks - claim.num_blocks
        num_used -= sum(num_blocks for _, num_blocks in holders)  # when all have ended
        if num_used > limit:
            return math.inf
        for num_left, (num_steps, num_blocks) in enumerate(reversed(holders), 1):
            num_used += num_blocks
            if num_used + num_left * self._grown(num_steps) > limit:
                return num_steps
        return 0

    def _grown(self, num_steps: int) -> int:
        """Blocks that a sequence gets at most in so many steps."""
        return -(-num_steps // self._block_size)
