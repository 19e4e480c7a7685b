"""How often drafted tokens come true, by the length of the match that they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.speculation.token_index import MAX_MATCH

_KEPT = 0.96  # of the counts, with each further observation of a length
_PRIOR_WEIGHT = 4.0  # observations that the prior counts as
_HALF = 6.0  # length of the match from which, as long as nothing is known, a token comes true as often as not


class Acceptance:
    """A moving share for each length of a match. What was not observed here yet is taken from `prior`.

    Every prediction is observed, also those that no step checked: the token that came tells whether it was right.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._num_right = [0.0] * (MAX_MATCH + 1)
        self._num = [0.0] * (MAX_MATCH + 1)

    def share(self, length: int) -> float:
        """The share of tokens behind matches of this length that came true."""
        length = min(length, MAX_MATCH)
        prior = length / (length + _HALF) if self._prior is None else self._prior.share(length)
        return (self._num_right[length] + _PRIOR_WEIGHT * prior) / (self._num[length] + _PRIOR_WEIGHT)

    def observe(self, length: int, drafted: Sequence[int], came: Sequence[int]) -> int:
        """Learn from a draft behind a match of this length. Returns how many tokens came before a wrong one."""
        for num_right, (token, right) in enumerate(zip(drafted, came, strict=False)):
            self._note(min(length + num_right, MAX_MATCH), token == right)
            if token != right:
                return num_right
        return min(len(drafted), len(came))

    def _note(self, length: int, is_right: bool) -> None:
        if self._prior is not None:
            self._prior._note(length, is_right)
        self._num_right[length] = self._num_right[length] * _KEPT + is_right
        self._num[length] = self._num[length] * _KEPT + 1
