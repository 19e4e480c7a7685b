"""Search for stop strings in a text that arrives in pieces. Plain values in, text out.

Text once returned is never taken back, so the matcher holds back what a later piece could turn into a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CHAR_BITS = 21  # of a Unicode code point


class StopMatch(NamedTuple):
    """Text that may be shown now, and the stop string that ends it, if there is one."""

    text: str
    stop: str | None


class StopStrings:
    """The stop strings of a request as an Aho-Corasick automaton. Built once and shared by all its choices.

    A state stands for the longest suffix of the text that is a prefix of a stop string; state 0 is the empty prefix. So
    each character takes one lookup, however many stop strings there are and however long. Lists are indexed by state.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.next: dict[int, int] = {}  # (state << CHAR_BITS | character) -> the state of the prefix one longer
        self.depths = [0]  # length of the prefix
        self.ends: list[str | None] = [None]  # the longest stop string that the prefix ends with
        self._shorter = [0]  # the state of the prefix's longest proper suffix that is a prefix too
        reached_by = [(0, 0)]  # the state before, and the character between them
        for stop in stops:
            state = 0
            for char in map(ord, stop):
                state = self._extend(state, char, reached_by)
            self.ends[state] = stop
        for state in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):  # needs those of shorter prefixes
            before, char = reached_by[state]
            shorter = self._shorter[state] = self.fall(self._shorter[before], char) if before else 0
            self.ends[state] = self.ends[state] or self.ends[shorter]

    def fall(self, state: int, char: int) -> int:
        """The state after a character, also if it does not extend the state's prefix."""
        while (following := self.next.get(state << CHAR_BITS | char)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return following

    def _extend(self, state: int, char: int, reached_by: list[tuple[int, int]]) -> int:
        following = self.next.setdefault(state << CHAR_BITS | char, len(self.depths))
        if following == len(self.depths):
            self.depths.append(self.depths[state] + 1)
            self.ends.append(None)
            self._shorter.append(0)
            reached_by.append((state, char))
        return following


class StopMatcher:
    """Cuts a text just before the earliest stop string, however the text is split into pieces.

    It holds back only the longest end of the text that could still become a stop string. Of several stop strings the
    one that starts first counts; of those that start together, the shortest.
    """

    def __init__(self, stops: StopStrings | None) -> None:
        """None = there are no stop strings."""
        self._stops = stops
        self._held = ""
        self._state = 0  # of `stops`, after the held text
        self._found: StopMatch | None = None  # the earliest stop string in the held text, and the text before it

    def push(self, text: str) -> StopMatch:
        """Add text; return what may be shown of it and of the held text."""
        stops = self._stops
        if stops is None:
            return StopMatch(text, None)
        following, depths, ends = stops.next.get, stops.depths, stops.ends
        state, found, whole = self._state, self._found, self._held + text
        for end, char in enumerate(map(ord, text), len(self._held) + 1):
            state = following(state << CHAR_BITS | char) or (state and stops.fall(state, char))
            stop = ends[state]
            if stop is not None and (found is None or end - len(stop) < len(found.text)):
                found = StopMatch(whole[: end - len(stop)], stop)
            # NOTE: a stop string that starts before the one found and is not complete yet would be the earlier one.
            if found is not None and end - depths[state] >= len(found.text):
                self._held, self._state, self._found = "", 0, None
                return found
        start = len(whole) - depths[state]
        self._held, self._state = whole[start:], state
        self._found = found and StopMatch(found.text[start:], found.stop)
        return StopMatch(whole[:start], None)

    def flush(self) -> StopMatch:
        """Return the held text, cut at a stop string that waited for an earlier one. Call it once, at the end."""
        match = self._found or StopMatch(self._held, None)
        self._held, self._state, self._found = "", 0, None
        return match
