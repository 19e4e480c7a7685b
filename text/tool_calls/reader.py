"""Reads a text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator that calls the methods here with `yield from`. Only these methods `yield`, to wait for more
text. What a parser finds depends only on the text, not on how the text was cut into pieces.

NOTE: at most one marker of text is ever looked at again when more arrives. So the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from tandem.text.tool_calls.events import EventWriter

T = TypeVar("T")
Reading = Generator[None, None, T]  # returns a result, and may have to wait for text

SPACE = re.compile(r"\s+")


class Markers:
    """Strings to look for; without any, nothing is found."""

    def __init__(self, *markers: str) -> None:
        self.texts = frozenset(markers)
        self.pattern = re.compile(
            "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)) or "(?!)"
        )
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def num_held(self, text: str) -> int:
        """Number of characters at the text's end that may be the beginning of a marker."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@lru_cache(maxsize=256)
def markers_of(texts: frozenset[str]) -> Markers:
    """Markers, cached for later searches."""
    return Markers(*texts)


class TextReader:
    """The text of one answer.

    Text that is read while held (`hold`) can still become content (`reject`) if it turns out to be no tool call.
    White space beside a marker separates parts of an answer and belongs to none, so it waits until it is clear what
    follows.
    """

    def __init__(self, writer: EventWriter, hidden: Collection[str], tokens: Collection[str] = ()) -> None:
        """`hidden` markers are special tokens: they never become content.

        `tokens` are those that `until` finds only where `add_marks` says so; elsewhere the model quotes them.
        """
        self._writer = writer
        self._hidden = frozenset(hidden)
        self._tokens = frozenset(tokens)
        self._marks: set[int] = set()  # where special tokens begin in the whole text
        self._num_dropped_chars = 0  # characters that were read and dropped
        self._text = ""  # unread from `_pos` on
        self._pos = 0
        self._has_ended = False
        self._space: list[str] = []  # white space that was read, and is content if no marker follows
        self._held: list[str] | None = None

    # -- by the owner of the text

    @property
    def num_unread_chars(self) -> int:
        """Number of characters that wait for what follows them."""
        return len(self._text) - self._pos

    def add(self, text: str) -> None:
        """More text has arrived."""
        self._num_dropped_chars += self._pos
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def add_marks(self, positions: Iterable[int]) -> None:
        """Note where special tokens begin in the whole text, which may not have arrived yet."""
        self._marks.update(positions)

    def end(self) -> None:
        """No more text will arrive."""
        self._has_ended = True

    # -- holding

    def hold(self) -> None:
        """Keep the text that is read from here on, and the white space before it."""
        if self._held is None:
            self._held, self._space = self._space, []

    def release(self) -> None:
        """Forget what is held: it is part of a call."""
        self._held, self._space = None, []

    def reject(self) -> None:
        """Turn what is held into content: it is not a call after all."""
        held, self._held = "".join(self._held or ()), None
        hidden = self._hidden - self._tokens  # of `tokens` none is held: `until` drops them
        self._writer.content(markers_of(hidden).pattern.sub("", held) if hidden else held)

    def unread(self, marker: str) -> None:
        """Let the marker that `until` has just read come next again."""
        self._pos -= len(marker)

    # -- reading

    def next_char(self) -> Reading[str]:
        """The next character, without reading it; empty at the end."""
        while self._pos >= len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._pos]

    def literal(self, literal: str) -> Reading[bool]:
        """Read this string if it comes next. Returns whether it did. The start of a hidden marker does not count."""
        for marker in self._hidden:
            if marker != literal and marker.startswith(literal) and (yield from self._is_next(marker)):
                return False
        if not (yield from self._is_next(literal)):
            return False
        self._read(self._pos + len(literal), literal in self._hidden)
        return True

    def _is_next(self, text: str) -> Reading[bool]:
        while not self._text.startswith(text, self._pos):
            rest = self._text[self._pos : self._pos + len(text)]
            if self._has_ended or not text.startswith(rest):
                return False
            yield
        return True

    def comes_next(self, texts: Collection[str]) -> Reading[bool]:
        """Whether one of these texts comes next, or the end. Reads nothing."""
        while True:
            rest = self._text[self._pos : self._pos + max(map(len, texts))]
            if any(rest.startswith(text) for text in texts) or (self._has_ended and not rest):
                return True
            if self._has_ended or not any(text.startswith(rest) for text in texts):
                return False
            yield

    def each_of(self, pattern: re.Pattern[str], sink: Callable[[str], None]) -> Reading[None]:
        """Read while the pattern, which has the form `[...]+`, matches, and pass on each piece."""
        while (yield from self.next_char()):
            match = pattern.match(self._text, self._pos)
            if match is None:
                return
            sink(match.group())
            self._read(match.end())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read while the pattern, which has the form `[...]+`, matches. Returns the text."""
        pieces: list[str] = []
        yield from self.each_of(pattern, pieces.append)
        return "".join(pieces)

    def skip_space(self) -> Reading[None]:
        """Read white space. It becomes content if content follows, and is dropped before a marker."""
        yield from self.each_of(SPACE, self._space.append if self._held is None else ignore)

    def drop_space(self) -> Reading[None]:
        """Read white space after a marker, and drop it."""
        yield from self.skip_space()
        self._space = []

    def end_calls(self, closing: str = "") -> Reading[None]:
        """After calls: read their closing marker, which models may forget, unless something held is not a call."""
        if self._held:
            self.reject()
            return
        self._held = None
        yield from self.drop_space()
        if not (yield from self.literal(closing)) and self._has_ended and closing.startswith(self._text[self._pos :]):
            self._read(len(self._text))  # the answer was cut within the marker
        yield from self.drop_space()

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Read through a marker, and pass on the text before it. Returns the marker, or "" at the end."""
        while True:
            match = self._search(markers)
            end = match.start() if match else len(self._text)
            if not self._has_ended:
                open_at = len(self._text) - markers.num_held(self._text[self._pos :])
                if open_at <= end:  # a longer marker, with this one in it, may follow
                    match, end = None, open_at
            sink(self._read(end))
            if match is not None:
                self._read(match.end(), match.group() in self._hidden)
                return match.group()
            if self._has_ended:
                return ""
            yield

    def text_until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """As `until`, without the white space before the marker."""
        marker = yield from self._trimmed_until(markers, sink)
        self._space = []
        return marker

    def content_until(self, markers: Markers) -> Reading[str]:
        """Read content through a marker, and hold the marker; "" at the end. Other hidden markers are dropped."""
        looked_for = markers_of(markers.texts | self._hidden) if self._hidden else markers
        while (marker := (yield from self._trimmed_until(looked_for, self._writer.content))) not in markers.texts:
            if not marker:
                break
        if marker:
            self.hold()
            assert self._held is not None
            self._held += [] if marker in self._hidden else [marker]
        return marker

    def _trimmed_until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """As `until`, but the white space before the marker stays in `_space`."""

        def trimmed(piece: str) -> None:
            text = piece.rstrip()
            if text:
                self._pass_space(sink)
                sink(text)
            if len(text) < len(piece):
                self._space.append(piece[len(text) :])

        marker = yield from self.until(markers, trimmed)
        if not marker:
            self._pass_space(sink)
        return marker

    def _search(self, markers: Markers) -> re.Match[str] | None:
        """The next marker that is not just quoted."""
        start = self._pos
        while (match := markers.pattern.search(self._text, start)) is not None:
            if match.group() not in self._tokens or self._num_dropped_chars + match.start() in self._marks:
                break
            start = match.start() + 1
        return match

    def _pass_space(self, sink: Callable[[str], None]) -> None:
        for space in self._space:
            sink(space)
        self._space = []

    def _read(self, end: int, is_hidden: bool = False) -> str:
        text = self._text[self._pos : end]
        self._pos = end
        if self._held is not None and text and not is_hidden:
            self._held.append(text)
        return text


def ignore(_: str) -> None:
    """A sink for text that nobody needs."""
