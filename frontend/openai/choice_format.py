"""What chat and completions share: an answer is a list of choices, and a stream has pieces of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.http.answer_shapes import Error
from tandem.frontend.openai import answer_shapes as shapes
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed

Piece = TypeVar("Piece", bound=shapes.ChatChunkChoice | shapes.CompletionChunkChoice)

DONE_EVENT = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ChoiceFormat(ABC, Generic[Piece]):
    """The answers of one of the two APIs."""

    id_prefix: str
    prompt_field: str
    has_choice_prompts: bool  # whether each choice has its own prompt, and so shows that prompt's ids

    @abstractmethod
    def opening(self, index: int) -> Piece | None:
        """A streamed piece before the first delta of a choice, if there is one."""

    @abstractmethod
    def pieces(self, delta: ChoiceDelta) -> list[Piece]:
        """Streamed pieces of a choice, at least one."""

    @abstractmethod
    def chunk(
        self, answer: PlannedAnswer, created: int, pieces: list[Piece]
    ) -> shapes.ChatChunk | shapes.CompletionChunk:
        """An event of a stream. `created` is the Unix time of its first one."""

    @abstractmethod
    def body(
        self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed
    ) -> shapes.ChatCompletion | shapes.Completion:
        """A plain answer."""

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Chunks with pieces of choices, and `[DONE]`."""
        return _ChoiceEvents(self, answer)


class _ChoiceEvents(Generic[Piece]):
    """Makes the server-sent events of one answer."""

    def __init__(self, format: ChoiceFormat[Piece], answer: PlannedAnswer) -> None:
        self._format = format
        self._answer = answer
        self._usage = answer.new_usage()
        self._opened: set[int] = set()
        self._num_finished = 0
        self._decision: dict[str, Any] | None = None
        self._created = int(time.time())
        # What the usual events have in common is encoded once. NOTE: quotes are escaped in strings, so the field's name
        # is found nowhere else.
        head, name, rest = _event(self._chunk([])).partition(b'"choices":[')
        self._opening, self._closing = head + name, rest

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta, maybe none. A choice's opening is sent with its first delta."""
        self._usage.add(delta)
        self._num_finished += delta.finish_reason is not None
        self._decision = self._decision or delta.decision
        events = b""
        is_new = delta.index not in self._opened
        if is_new:
            self._opened.add(delta.index)
            opening = self._format.opening(delta.index)
            if opening is not None:
                shows_prompt = self._answer.shows_token_ids and not self._format.has_choice_prompts
                events = self._event(opening, self._prompt_ids(delta) if shows_prompt else UNSET)
        if delta.is_empty:
            return events
        pieces = self._format.pieces(delta)
        if delta.token_ids is not None:
            first = pieces[0]
            first.token_ids = delta.token_ids
            if is_new and isinstance(first, shapes.CompletionChunkChoice):
                first.prompt_token_ids = self._prompt_ids(delta)
        for piece in pieces:
            events += self._event(piece)
        return events

    async def ending(self) -> bytes:
        """The last events of a complete answer."""
        if not self._answer.has_usage:
            return DONE_EVENT
        chunk = self._chunk([])
        chunk.usage = self._usage.shown()
        return _event(chunk) + DONE_EVENT

    def error(self, body: Error) -> bytes:
        """The error itself; no end follows it."""
        return _event(body)

    def _event(self, piece: Piece, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        is_explained = self._decision and piece.finish_reason and self._num_finished == len(self._answer.choices)
        if not is_explained and not self._answer.has_running_usage and prompt_ids is UNSET:
            return self._opening + _encode(piece) + self._closing
        chunk = self._chunk([piece])
        if isinstance(chunk, shapes.ChatChunk):
            chunk.prompt_token_ids = prompt_ids
        if self._answer.has_usage and self._answer.has_running_usage:
            chunk.usage = self._usage.shown()
        if is_explained:  # in the last chunk with choices; OpenAI's clients keep extras
            chunk.tandem_explain = self._decision or UNSET
        return _event(chunk)

    def _chunk(self, pieces: list[Piece]) -> shapes.ChatChunk | shapes.CompletionChunk:
        chunk = self._format.chunk(self._answer, self._created, pieces)
        chunk.usage = None if self._answer.has_usage else UNSET
        return chunk

    def _prompt_ids(self, delta: ChoiceDelta) -> list[int]:
        return self._answer.choices[delta.index].request.token_ids


def _event(data: msgspec.Struct) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"
