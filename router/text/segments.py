"""Encoding of growing texts: only what is new in a conversation is encoded, with the ids that the whole would give.

A fast tokenizer first splits a text at its special tokens (`<|im_end|>`, say) and treats each part by itself, so a text
may be cut before any of them:

    text      <|im_start|>user\\nHi|<|im_end|>\\n|<|im_start|>assistant\\nHello|...
    segments  cut at each |; all but the new ones were in the turn before, and are remembered

Tokens that take spaces beside them with them are the exception: with one of these, texts are not cut. Each tokenizer
is tried out on texts made to break the rule before it is believed.
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
from tandem.router.text.token_lengths import PromptLimit

__all__ = ["SegmentEncoder", "SegmentMemo"]

logger = logging.getLogger(__name__)

# Each costs about two bytes with its part of the ids where four ASCII letters make a token; other scripts take up to
# four bytes a character, and as many for each id.
MAX_MEMO_CHARS = 8 * 1024 * 1024
ENTRY_CHARS = 128  # what an entry costs beside its text, in characters: 260 bytes of objects (measured)
MIN_TEXT_CHARS = 512  # a shorter text is encoded before it is cut
WINDOW_CHARS = 16 * 1024  # searched at once, with the interpreter's lock held
_PROBE_TEXTS = ("", " ", " a", "a ", "d\n", "\n\nb c", "é", "▁x<", "0 1", "’s", "日本")


class SegmentMemo:
    """Ids by segment and scope, up to a number of characters; what was used longest ago goes first. For many threads.

    The characters of the scopes count too, and `ENTRY_CHARS` for each entry.
    """

    def __init__(self, max_chars: int = MAX_MEMO_CHARS) -> None:
        self.num_chars = 0
        self._max_chars = max_chars
        self._ids: OrderedDict[tuple[CacheScope, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, scope: CacheScope, segment: str) -> array[int] | None:
        """Its ids, if they are remembered."""
        with self._lock:
            ids = self._ids.get((scope, segment))
            if ids is not None:
                self._ids.move_to_end((scope, segment))
            return ids

    def put(self, scope: CacheScope, segment: str, ids: list[int]) -> None:
        """Remember them, unless they are too many to be worth it."""
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
    """Encodes with one fast tokenizer, without what a model puts around a text. May be called from many threads."""

    def __init__(self, fast: Any, memo: SegmentMemo | None = None) -> None:
        self._fast = fast
        self.memo = SegmentMemo() if memo is None else memo
        self._cuts = _cuts_of(fast)
        if self._cuts is not None and not self._is_proven():
            logger.warning("this tokenizer does not split texts at its special tokens: they are encoded whole")
            self._cuts = None

    @property
    def can_cut(self) -> bool:
        """Whether texts are encoded in segments at all."""
        return self._cuts is not None

    def encode(self, text: str, scope: CacheScope, limit: PromptLimit | None = None) -> list[int]:
        """Ids of the text. What is remembered of it was encoded in the same scope: no tenant can time another's.

        Raises `ContextLengthExceeded` where they are more than the limit allows.
        """
        if self._cuts is None or len(text) < MIN_TEXT_CHARS:
            return self._whole(text, limit)
        ids: list[int] = []
        for segment in self._segments(text, self._cuts):
            known = self.memo.get(scope, segment)
            if known is None:
                new = self._whole(segment, limit)
                self.memo.put(scope, segment, new)
                ids += new
            else:
                ids += known
            if limit is not None:
                limit.check(len(ids), f"{len(ids)} tokens at least")
        return ids

    def _whole(self, text: str, limit: PromptLimit | None = None) -> list[int]:
        # As a batch: the call for one text would keep the interpreter's lock.
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

    def _is_proven(self) -> bool:
        """Whether texts of two specials among parts that tend to merge give the same ids cut as whole."""
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
    """Finds the tokens that a text is split at: the leftmost, and of those that start together the longest."""

    tokens: re.Pattern[str]
    max_chars: int  # of the longest

    def starts(self, text: str) -> Iterator[int]:
        """Where they start. Searched by windows: a search keeps the interpreter's lock up to what it finds."""
        start = 0
        while start < len(text):
            end = start + WINDOW_CHARS
            for found in self.tokens.finditer(text, start, end + self.max_chars - 1):
                if found.start() >= end:
                    break  # it may go on behind what was searched
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
