"""From token ids to text as they come: incremental decoding and the search for stop strings.

Both are plain values in, text out; neither knows of requests or streams. Text once returned is never taken back,
so each keeps back what a later token could still change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Detokenizer", "StopMatch", "StopMatcher", "StopStrings"]

CONTEXT_TOKENS = 6  # of the prompt: enough for a decoder to know that the answer does not start a text
MAX_OPEN_TOKENS = 3  # a character has at most 4 bytes, so these can be of one that is not complete
MAX_HELD_TOKENS = 32  # more tokens than this without a complete character are no text
REPLACEMENT = "\ufffd"
CHAR_BITS = 21  # of a Unicode code point


class Detokenizer:
    """Text of one growing token sequence, in pieces that join to the decoded whole.

    A token's text depends on its neighbours (a leading space, a character of several byte tokens), so the new
    text is what a window gains by the new tokens:

        ids   ... [window, sent)   already returned, decoded again as context
                  [sent, end)      new, or held back because its last character is incomplete
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, prompt_ids: Sequence[int] = (), skip_ids: Collection[int] = ()
    ) -> None:
        self._decode = decode
        self._skip_ids = skip_ids
        self._ids = [i for i in prompt_ids[-CONTEXT_TOKENS:] if i not in skip_ids]
        self._sent_text = decode(self._ids) if self._ids else ""
        if self._sent_text.endswith(REPLACEMENT):  # the prompt ends within a character: no clean boundary to start at
            self._ids, self._sent_text = [], ""
        self._num_sent = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text they complete, often of all of them, sometimes none."""
        self._ids.extend(i for i in token_ids if i not in self._skip_ids)
        num_held = len(self._ids) - self._num_sent
        for num_open in range(min(num_held, MAX_OPEN_TOKENS + 1)):
            end = len(self._ids) - num_open
            text = self._decode(self._ids[:end])
            if not text.endswith(REPLACEMENT):
                return self._release(text, end) if len(text) > len(self._sent_text) else ""
        return self.flush() if num_held >= MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """Return what is held back, with U+FFFD for a character cut short. Call it once, at the end."""
        end = len(self._ids)
        return self._release(self._decode(self._ids), end) if self._num_sent < end else ""

    def _release(self, text: str, end: int) -> str:
        """Return what `text`, that of the ids before `end`, adds to what was sent; the context moves on to them."""
        new = text[len(self._sent_text) :]
        context = self._ids[self._num_sent : end]
        self._ids = self._ids[self._num_sent :]
        self._num_sent = len(context)
        self._sent_text = self._decode(context)
        return new


class StopMatch(NamedTuple):
    """Text that may be shown now, and the stop string that ends it, if one does."""

    text: str
    stop: str | None


class StopStrings:
    """The stop strings of a request as an automaton (Aho-Corasick). Built once and shared by all its choices.

    A state is the longest end of the text that is the beginning of a stop string; state 0 is the empty one. So one
    lookup takes in one character, however many stop strings there are and however long they are. Lists are by state.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.next: dict[int, int] = {}  # the state behind (state << CHAR_BITS | character), where the beginning grows
        self.depths = [0]  # characters of this beginning
        self.ends: list[str | None] = [None]  # the longest stop string that the text ends with
        self._shorter = [0]  # the longest end of the text that is a beginning too, and shorter
        reached_by = [(0, 0)]  # the state before it, and the character between them
        for stop in stops:
            state = 0
            for char in map(ord, stop):
                state = self._grown(state, char, reached_by)
            self.ends[state] = stop
        for state in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):  # what is shorter is known first
            before, char = reached_by[state]
            shorter = self._shorter[state] = self.fall(self._shorter[before], char) if before else 0
            self.ends[state] = self.ends[state] or self.ends[shorter]

    def fall(self, state: int, char: int) -> int:
        """The state behind a character, also where the beginning that `state` is does not grow by it."""
        while (following := self.next.get(state << CHAR_BITS | char)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return following

    def _grown(self, state: int, char: int, reached_by: list[tuple[int, int]]) -> int:
        following = self.next.setdefault(state << CHAR_BITS | char, len(self.depths))
        if following == len(self.depths):
            self.depths.append(self.depths[state] + 1)
            self.ends.append(None)
            self._shorter.append(0)
            reached_by.append((state, char))
        return following


class StopMatcher:
    """Cuts a text just before the earliest stop string, however the text is split into pieces.

    Held back is only the longest end of the text that could still become a stop string. Of several
    stop strings the one that starts first counts; of those that start together, the shortest.
    """

    def __init__(self, stops: StopStrings | None) -> None:
        """None = there are no stop strings."""
        self._stops = stops
        self._held = ""
        self._state = 0  # of `stops`, behind what is held
        self._found: StopMatch | None = None  # the earliest stop string in what is held, and the text before it

    def push(self, text: str) -> StopMatch:
        """Add text; return what may be shown of it and of what was held back."""
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
        """Return the held-back text, cut at a stop string that waited for an earlier one. Call it once, at the end."""
        match = self._found or StopMatch(self._held, None)
        self._held, self._state, self._found = "", 0, None
        return match
