"""From token ids to text as they come: incremental decoding and the search for stop strings.

Both are plain values in, text out; neither knows of requests or streams. Text once returned is never taken back,
so each keeps back what a later token could still change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

__all__ = ["Detokenizer", "StopMatch", "StopMatcher"]

CONTEXT_TOKENS = 6  # of the prompt: enough for a decoder to know that the answer does not start a text
MAX_OPEN_TOKENS = 3  # a character has at most 4 bytes, so these can be of one that is not complete
MAX_HELD_TOKENS = 32  # more tokens than this without a complete character are no text
REPLACEMENT = "\ufffd"


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


class StopMatcher:
    """Cuts a text just before the earliest stop string, however the text is split into pieces.

    Held back is only the longest end of the text that could still become a stop string. Of several
    stop strings the one that starts first counts; of those that start together, the shortest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        ordered = sorted(set(stops), key=len)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._by_first_char: dict[str, list[str]] = {}
        for stop in ordered:
            self._by_first_char.setdefault(stop[0], []).append(stop)
        self._max_partial = len(ordered[-1]) - 1 if ordered else 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Add text; return what may be shown of it and of what was held back."""
        if self._pattern is None:
            return StopMatch(text, None)
        text = self._held + text
        match = self._pattern.search(text)
        # NOTE: a stop string that starts before the match and is not complete yet would be the earlier one.
        cut = self._partial_start(text, match.start() if match else len(text))
        if match and cut == match.start():
            self._held = ""
            return StopMatch(text[:cut], match.group())
        self._held = text[cut:]
        return StopMatch(text[:cut], None)

    def flush(self) -> StopMatch:
        """Return the held-back text, cut at a stop string that waited for an earlier one. Call it once, at the end."""
        text, self._held = self._held, ""
        match = self._pattern.search(text) if self._pattern else None
        return StopMatch(text[: match.start()], match.group()) if match else StopMatch(text, None)

    def _partial_start(self, text: str, end: int) -> int:
        """First index below `end` from where the rest of the text is the beginning of a stop string, else `end`."""
        for start in range(max(0, len(text) - self._max_partial), end):
            stops = self._by_first_char.get(text[start])
            if stops and any(stop.startswith(text[start:]) for stop in stops):
                return start
        return end
