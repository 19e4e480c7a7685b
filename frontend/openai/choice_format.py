"""What chat and completions share: an answer is a list of choices, and a stream has pieces of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import orjson

from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed

__all__ = ["ChoiceFormat"]

EXPLANATION_FIELD = "tandem_explain"
DONE_EVENT = b"data: [DONE]\n\n"


class ChoiceFormat(ABC):
    """The JSON shapes of one of the two APIs."""

    id_prefix: str
    prompt_field: str
    plain_object: str
    chunk_object: str
    has_choice_prompts: bool  # whether each choice has its own prompt, and so shows that prompt's ids

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """A streamed piece before the first delta of a choice, if there is one."""

    @abstractmethod
    def pieces(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Streamed pieces of a choice, at least one."""

    @abstractmethod
    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """A choice of a plain answer."""

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> dict[str, Any]:
        """A plain answer."""
        body: dict[str, Any] = {
            "id": answer.answer_id,
            "object": self.plain_object,
            "created": int(time.time()),
            "model": answer.model,
            "choices": [self.whole(choice) for choice in choices],
            "usage": usage.to_json(),
        }
        if answer.shows_token_ids:
            prompts = [choice.request.token_ids for choice in answer.choices]
            for shown, prompt, choice in zip(body["choices"], prompts, choices, strict=True):
                shown["token_ids"] = choice.token_ids or []
                if self.has_choice_prompts:
                    shown["prompt_token_ids"] = prompt
            if not self.has_choice_prompts:
                body["prompt_token_ids"] = prompts[0]
        return body

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Chunks with pieces of choices, and `[DONE]`."""
        return _ChoiceEvents(self, answer)


class _ChoiceEvents:
    """Makes the server-sent events of one answer."""

    def __init__(self, format: ChoiceFormat, answer: PlannedAnswer) -> None:
        self._format = format
        self._answer = answer
        self._usage = answer.new_usage()
        self._opened: set[int] = set()
        self._num_finished = 0
        self._decision: dict[str, Any] | None = None
        self._envelope = {
            "id": answer.answer_id,
            "object": format.chunk_object,
            "created": int(time.time()),
            "model": answer.model,
        }
        self._opening = b"data: " + orjson.dumps(self._envelope)[:-1] + b',"choices":['  # starts every event
        self._closing = b'],"usage":null}\n\n' if answer.has_usage else b"]}\n\n"

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
                events = self._chunk(opening, self._prompt_ids(delta) if shows_prompt else None)
        if delta.is_empty:
            return events
        pieces = self._format.pieces(delta)
        if delta.token_ids is not None:
            pieces[0]["token_ids"] = delta.token_ids
            if is_new and self._format.has_choice_prompts:
                pieces[0] |= self._prompt_ids(delta)
        for piece in pieces:
            events += self._chunk(piece)
        return events

    def _prompt_ids(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {"prompt_token_ids": self._answer.choices[delta.index].request.token_ids}

    async def ending(self) -> bytes:
        """The last events of a complete answer."""
        if not self._answer.has_usage:
            return DONE_EVENT
        return _event({**self._envelope, "choices": [], "usage": self._usage.to_json()}) + DONE_EVENT

    def error(self, body: dict[str, Any]) -> bytes:
        """The error itself; no end follows it."""
        return _event(body)

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        is_explained = self._decision and choice["finish_reason"] and self._num_finished == len(self._answer.choices)
        if not is_explained and not self._answer.has_running_usage and extra is None:
            return self._opening + orjson.dumps(choice) + self._closing
        chunk = {**self._envelope, "choices": [choice], **(extra or {})}
        if self._answer.has_usage:
            chunk["usage"] = self._usage.to_json() if self._answer.has_running_usage else None
        if is_explained:
            chunk[EXPLANATION_FIELD] = self._decision  # in the last chunk with choices; OpenAI's clients keep extras
        return _event(chunk)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
