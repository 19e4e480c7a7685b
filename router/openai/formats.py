"""The JSON shapes of answers: plain and streamed, for chat and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.router.openai.choice_text import ChoiceDelta, TokenEntry
from tandem.router.openai.message_parts import message, message_delta
from tandem.router.tool_calls.events import Event

__all__ = ["AnswerFormat", "ChatFormat", "CompletionFormat", "FinishedChoice", "Usage"]


@dataclass(slots=True)
class Usage:
    """Tokens that a request has used so far. A prompt counts once, even if several choices share it."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Count one delta of any choice."""
        self.num_completion_tokens += delta.num_tokens
        self.num_cached_tokens += delta.num_cached_tokens or 0

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class FinishedChoice:
    """A choice joined from its deltas, for a plain answer."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    events: list[Event] | None = None  # None = all text is content
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(self._texts)

    def add(self, delta: ChoiceDelta) -> None:
        """Append one delta of this choice."""
        self._texts.append(delta.text)
        if delta.events is not None:
            self.events = self.events or []
            self.events += delta.events
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class AnswerFormat(Protocol):
    """The JSON shapes of one API: chat or completions."""

    id_prefix: str
    prompt_field: str  # request field with the prompt
    plain_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """A streamed piece before the first delta of a choice, if there is one."""

    def pieces(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Streamed pieces of a choice, at least one."""

    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """A choice of a plain answer."""


class ChatFormat:
    """`POST /v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, without text."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def pieces(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Message deltas; the last one may be empty. Reasoning and tool calls have pieces of their own."""
        if delta.events is not None:
            return self._parsed_pieces(delta, delta.events)
        piece: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": self._logprobs(delta.entries) if delta.entries else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            piece["stop_reason"] = delta.stop_reason
        return [piece]

    def _parsed_pieces(self, delta: ChoiceDelta, events: list[Event]) -> list[dict[str, Any]]:
        messages = [message_delta(event) for event in events]
        if not messages or delta.finish_reason is not None:
            messages.append({})
        pieces: list[dict[str, Any]] = [
            {"index": delta.index, "delta": message, "logprobs": None, "finish_reason": None} for message in messages
        ]
        if delta.entries:
            pieces[0]["logprobs"] = self._logprobs(delta.entries)
        if delta.finish_reason is not None:
            pieces[-1]["finish_reason"], pieces[-1]["stop_reason"] = delta.finish_reason, delta.stop_reason
        return pieces

    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """Text as a message."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text}
            if choice.events is None
            else message(choice.events),
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        num_top = self._num_logprobs
        return {
            "content": [
                _chat_token(e.text, e.logprob)
                | {"top_logprobs": [_chat_token(text, logprob) for text, logprob in e.top[:num_top]]}
                for e in entries
            ]
        }


class CompletionFormat:
    """`POST /v1/completions`. `echoes` are the prompts to repeat, by choice index; empty = repeat none."""

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    plain_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, num_logprobs: int | None, echoes: Sequence[str] = ()) -> None:
        self._num_logprobs = num_logprobs
        self._echoes = echoes

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt, if the request asks to repeat it."""
        if not self._echoes:
            return None
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}

    def pieces(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The new text, as one piece."""
        piece: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries) if delta.entries else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            piece["stop_reason"] = delta.stop_reason
        return [piece]

    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """Text, after the prompt if the request asks to repeat it."""
        return {
            "index": choice.index,
            "text": (self._echoes[choice.index] if self._echoes else "") + choice.text,
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        num_top = self._num_logprobs
        top_logprobs: list[dict[str, float]] = []
        for entry in entries:
            # Tokens may have equal texts (parts of characters): the likelier keeps the key. The chosen one is included.
            top: dict[str, float] = {}
            for text, logprob in [*entry.top[:num_top], (entry.text, entry.logprob)]:
                top.setdefault(text, logprob)
            top_logprobs.append(top)
        return {
            "tokens": [e.text for e in entries],
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": top_logprobs,
            "text_offset": [e.offset for e in entries],
        }


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
