"""Encodes growing conversations: only new segments are encoded, and the ids equal those of the whole text.

A fast tokenizer first splits a text at its special tokens (`<|im_end|>`, say) and encodes each part by itself. So a
text may be cut before any special token:

    text      <|im_start|>user\\nHi|<|im_end|>\\n|<|im_start|>assistant\\nHello|...
    segments  cut at each |; all but the new ones were in the previous request, and are cached

Special tokens that absorb the spaces beside them are the exception: a tokenizer with one of these never cuts texts.
Each tokenizer is first tested on texts made to break the rule.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tandem.protocol.digest import CacheScope
from tandem.text.token_lengths import PromptLimit

logger = logging.getLogger(__name__)

# With its share of the ids a character takes about two bytes, if four ASCII letters make a token. Other scripts take up
# to four bytes a character, and four for each id.
MAX_CACHED_CHARS = 8 * 1024 * 1024
ENTRY_CHARS = 128  # fixed cost of an entry, in characters: 260 bytes of objects (measured)
MIN_TEXT_CHARS = 512  # a shorter text is encoded faster than it is cut
WINDOW_CHARS = 16 * 1024  # searched at once, while holding the GIL
_PROBE_TEXTS = ("", " ", " a", "a ", "d\n", "\n\nb c", "é", "▁x<", "0 1", "’s", "日本")


class SegmentCache:
    """An LRU cache of ids by scope and segment, bounded by characters. Thread-safe.

    The bound counts the characters of the scopes too, and `ENTRY_CHARS` for each entry.
    """

    def __init__(self, max_chars: int = MAX_CACHED_CHARS) -> None:
        self.num_chars = 0
        self._max_chars = max_chars
        self._ids: OrderedDict[tuple[CacheScope, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, scope: CacheScope, segment: str) -> array[int] | None:
        """The segment's ids, if they are cached."""
        with self._lock:
            ids = self._ids.get((scope, segment))
            if ids is not None:
                self._ids.move_to_end((scope, segment))
            return ids

    def put(self, scope: CacheScope, segment: str, ids: list[int]) -> None:
        """Cache the ids, unless the segment would take more than an eighth of the cache."""
        num_chars = _cost_chars(scope, segment)
        if num_chars > self._max_chars // 8:
            return
        with self._lock:
            if (scope, segment) not in self._ids:
                self.num_chars += num_chars
            self._ids[scope, segment] = array("I", ids)
            while self.num_chars > self._max_chars:
                oldest, _ = self._ids.popitem(last=False)
                self.num_chars -= _cost_chars(*oldest)


def _cost_chars(scope: CacheScope, segment: str) -> int:
    return len(scope) + len(segment) + ENTRY_CHARS


class SegmentEncoder:
    """Encodes with one fast tokenizer, without the special tokens that a model puts around a text. Thread-safe."""

    def __init__(self, fast: Any, cache: SegmentCache | None = None) -> None:
        self._fast = fast
        self.cache = SegmentCache() if cache is None else cache
        self._cuts = _cuts_of(fast)
        if self._cuts is not None and not self._cuts_are_safe():
            logger.warning("this tokenizer does not split texts at its special tokens: conversations are encoded whole")
            self._cuts = None

    def encode(self, text: str, scope: CacheScope, limit: PromptLimit | None = None) -> list[int]:
        """Ids of the text. Only segments cached in the same scope are reused, so no tenant can time another's.

        Raises `ContextLengthExceeded` if there are more ids than the limit allows.
        """
        if self._cuts is None or len(text) < MIN_TEXT_CHARS:
            return self._whole(text, limit)
        ids: list[int] = []
        for segment in self._segments(text, self._cuts):
            cached = self.cache.get(scope, segment)
            if cached is None:
                new = self._whole(segment, limit)
                self.cache.put(scope, segment, new)
                ids += new
            else:
                ids += cached
            if limit is not None:
                limit.check(len(ids), f"at least {len(ids)} tokens")
        return ids

    def _whole(self, text: str, limit: PromptLimit | None = None) -> list[int]:
        # As a batch: the call for one text would hold the GIL.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=False)[0]
        if limit is not None:
            limit.check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _segments(self, text: str, cuts: _Cuts) -> Iterator[str]:
        start = 0
        for cut in cuts.starts(text):
            if cut > start:
                yield text[start:cut]
                start = cut
        if start < len(text):
            yield text[start:]

    def _cuts_are_safe(self) -> bool:
        """Whether cutting changes no ids in texts with two special tokens between parts that tend to merge."""
        assert self._cuts is not None
        specials = _plain_specials(self._fast)
        around = [specials[0], specials[-1], specials[len(specials) // 2]]
        for left, first, middle, second in itertools.product(_PROBE_TEXTS, around, _PROBE_TEXTS, around):
            text = left + first + middle + second
            cut = [token for segment in self._segments(text, self._cuts) for token in self._whole(segment)]
            if cut != self._whole(text):
                return False
        return True


class _Cuts(NamedTuple):
    """Finds the special tokens in a text: the leftmost first, and the longest of those that start together."""

    tokens: re.Pattern[str]
    max_chars: int  # of the longest

    def starts(self, text: str) -> Iterator[int]:
        """Where they start. The search goes by windows, because it holds the GIL until it finds something."""
        start = 0
        while start < len(text):
            end = start + WINDOW_CHARS
            for found in self.tokens.finditer(text, start, end + self.max_chars - 1):
                if found.start() >= end:
                    break  # it may be longer than the searched part shows
                yield found.start()
                start = found.end()
            start = max(start, end)


def _cuts_of(fast: Any) -> _Cuts | None:
    tokens = [token for token in fast.get_added_tokens_decoder().values() if not token.normalized]
    specials = sorted(_plain_specials(fast), key=len, reverse=True)
    if not specials or len(specials) < len(tokens):
        return None
    return _Cuts(re.compile("|".join(map(re.escape, specials))), len(specials[0]))


def _plain_specials(fast: Any) -> list[str]:
    return [
        token.content
        for token in fast.get_added_tokens_decoder().values()
        if token.content and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    ]
