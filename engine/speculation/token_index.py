"""Where the last tokens of a text occurred before. What followed them there is a draft of what comes next.

Prompt lookup of Saxena (2023), with the hash chains of LZ77 compressors: the places of each three tokens are linked,
latest first, and of the latest few the one with the longest match wins.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

GRAM = 3  # tokens of the shortest match
MAX_MATCH = 16  # a longer match says no more
SEPARATOR = -1  # between texts: no token, so no match and no draft reaches over it
_MAX_PLACES = 8  # of a gram that are compared
_BITS = 21  # of a token id in a gram's key


class Match(NamedTuple):
    """A place behind tokens that equal the end of a text."""

    tokens: Sequence[int]  # of the index
    place: int  # of the token that came next there
    length: int  # equal tokens before it, at most `MAX_MATCH`

    def draft(self, num_tokens: int) -> list[int]:
        """At most this many tokens from the place on. At the end of the tokens it goes on with the draft itself."""
        drafted = list(self.tokens[self.place : self.place + num_tokens])
        if SEPARATOR in drafted:
            return drafted[: drafted.index(SEPARATOR)]
        while drafted and len(drafted) < num_tokens:  # a text that repeats itself with a shorter period
            drafted += drafted[: num_tokens - len(drafted)]
        return drafted


class TokenIndex:
    """An index of growing tokens, which belong to the caller. It takes about 100 bytes a token."""

    def __init__(self, tokens: MutableSequence[int], first: int = 0) -> None:
        """Tokens before the `first` are not indexed."""
        self.tokens = tokens
        self._first = first
        self._latest: dict[int, int] = {}  # gram -> the latest place behind it
        self._earlier = array("i", [-1] * GRAM)  # place -> the one before it behind the same gram; -1 = none

    @property
    def num_indexed(self) -> int:
        """Tokens that were indexed, from the first on."""
        return len(self._earlier)

    def extend(self, num_tokens: int, max_grams: int) -> None:
        """Index the tokens before `num_tokens`, or the next `max_grams` of them: each gram that a token follows."""
        tokens, latest, earlier = self.tokens, self._latest, self._earlier
        next_place = self._first + len(earlier)
        for place in range(next_place, min(num_tokens, next_place + max_grams)):
            gram = _key(tokens[place - 3], tokens[place - 2], tokens[place - 1])
            earlier.append(latest.get(gram, -1))
            latest[gram] = place

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest match of the end of `tail`, which has `MAX_MATCH` tokens if there are as many."""
        if len(tail) < GRAM:
            return None
        best, length = -1, 0
        place = self._latest.get(_key(*tail[-GRAM:]), -1)
        for _ in range(_MAX_PLACES):
            if place < 0 or length == MAX_MATCH:
                break
            if (found := self._length(tail, place)) > length:
                best, length = place, found
            place = self._earlier[place - self._first]
        return None if best < 0 else Match(self.tokens, best, length)

    def _length(self, tail: Sequence[int], place: int) -> int:
        tokens, limit = self.tokens, min(len(tail), place, MAX_MATCH)
        length = GRAM
        while length < limit and tokens[place - 1 - length] == tail[-1 - length] != SEPARATOR:
            length += 1
        return length


def _key(first: int, second: int, third: int) -> int:
    return (first << 2 * _BITS) ^ (second << _BITS) ^ third
