"""Predicts how many tokens an answer will still get, from the lengths of recent answers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from operator import neg

_NUM_REMEMBERED = 256  # answers
_MIN_LONGER = 8  # remembered answers that must be longer than the current one before they predict its length
_FIRST_GUESS_TOKENS = 2048  # answers that end soon correct a guess that is too long; one too short costs preemptions
_LONGER_SHARE = 0.2  # share of answers that get longer than expected


class OutputLengths:
    """Lengths of the latest answers.

    An answer that was cut at its `max_tokens` only says that it would have been longer (Kaplan-Meier estimate).
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque(maxlen=_NUM_REMEMBERED)
        self._lengths: list[int] = []  # sorted
        self._survival: list[float] = []  # share of answers that get longer
        self._is_current = True

    def note(self, num_tokens: int, max_tokens: int) -> None:
        """An answer has ended after `num_tokens`, by itself or because it reached `max_tokens`."""
        self._latest.append((num_tokens, num_tokens >= max_tokens))
        self._is_current = False

    def expected_rest(self, num_tokens: int, max_tokens: int) -> int:
        """Tokens that an answer of `num_tokens` so far will still get; four of five such answers get no more.

        If too few answers got that long, it is expected to get as long as the longest one, and at least twice as long
        as it is now.
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
        """Share of answers with `num_tokens` so far that get at most `num_more` more.

        If too few answers got that long to tell, only `max_tokens` is expected to end one.
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
