"""The JSON shapes of answers: plain and streamed, for chat and for completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from tandem.frontend.openai.choice_format import ChoiceFormat
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.legacy_functions import with_function_call
from tandem.frontend.openai.logprobs import ScoredPrompt, TokenEntry, completion_logprobs
from tandem.frontend.openai.message_parts import message, message_delta
from tandem.frontend.openai.planned_answer import FinishedChoice, PlannedAnswer, TokensUsed
from tandem.text.tool_calls.events import Event

__all__ = ["ChatFormat", "CompletionFormat"]


class ChatFormat(ChoiceFormat):
    """`POST /v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_choice_prompts = False

    def __init__(self, num_logprobs: int | None, *, has_functions: bool = False) -> None:
        """`has_functions`: calls have the shape that OpenAI's API had before tools."""
        self._num_logprobs = num_logprobs
        self._has_functions = has_functions

    @override
    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, without text."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    @override
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
        if self._has_functions:
            messages = [with_function_call(message) for message in messages]
        if not messages or delta.finish_reason is not None:
            messages.append({})
        pieces: list[dict[str, Any]] = [
            {"index": delta.index, "delta": message, "logprobs": None, "finish_reason": None} for message in messages
        ]
        if delta.entries:
            pieces[0]["logprobs"] = self._logprobs(delta.entries)
        if delta.finish_reason is not None:
            pieces[-1]["finish_reason"] = self._finish_reason(delta.finish_reason)
            pieces[-1]["stop_reason"] = delta.stop_reason
        return pieces

    @override
    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """Text as a message."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text}
            if choice.events is None
            else self._part(message(choice.events)),
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        return with_function_call(part) if self._has_functions else part

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if self._has_functions and reason == "tool_calls" else reason

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


class CompletionFormat(ChoiceFormat):
    """`POST /v1/completions`. `echoes` are the prompts to repeat, by choice index; empty = repeat none.

    `scored` are their log probabilities, also by choice; empty = they were not asked for.
    """

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    plain_object = "text_completion"
    chunk_object = "text_completion"
    has_choice_prompts = True

    def __init__(
        self, num_logprobs: int | None, echoes: Sequence[str] = (), scored: Sequence[ScoredPrompt] = ()
    ) -> None:
        self._num_logprobs = num_logprobs
        self._echoes = echoes
        self._scored = scored

    @override
    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt, if the request asks to repeat it."""
        if not self._echoes:
            return None
        logprobs = self._scored[index].logprobs if self._scored else None
        return {"index": index, "text": self._echoes[index], "logprobs": logprobs, "finish_reason": None}

    @override
    def pieces(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The new text, as one piece."""
        piece: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.entries) if delta.entries else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            piece["stop_reason"] = delta.stop_reason
        return [piece]

    @override
    def whole(self, choice: FinishedChoice) -> dict[str, Any]:
        """Text, after the prompt if the request asks to repeat it."""
        logprobs = self._logprobs(choice.index, choice.entries)
        if logprobs is not None and self._scored:
            prompt = self._scored[choice.index].logprobs
            logprobs = {name: prompt[name] + values for name, values in logprobs.items()}
        return {
            "index": choice.index,
            "text": self._echo(choice.index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, index: int, entries: list[TokenEntry]) -> dict[str, list[Any]] | None:
        if self._num_logprobs is None:
            return None
        return completion_logprobs(entries, self._num_logprobs, len(self._echo(index)))

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""


class BestOfFormat(CompletionFormat):
    """`POST /v1/completions` with `best_of`: of `num_choices` for each prompt, it returns the `num_best` likeliest."""

    def __init__(
        self,
        num_logprobs: int | None,
        echoes: Sequence[str],
        scored: Sequence[ScoredPrompt],
        *,
        num_choices: int,
        num_best: int,
    ) -> None:
        super().__init__(num_logprobs, echoes, scored)
        self._num_choices = num_choices
        self._num_best = num_best

    @override
    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> dict[str, Any]:
        """The best choices of each prompt, the likeliest first."""
        body = super().body(answer, choices, usage)
        starts = range(0, len(choices), self._num_choices)
        groups = [sorted(choices[i : i + self._num_choices], key=_mean_logprob, reverse=True) for i in starts]
        best = [choice.index for group in groups for choice in group[: self._num_best]]
        body["choices"] = [{**body["choices"][index], "index": i} for i, index in enumerate(best)]
        return body


def _mean_logprob(choice: FinishedChoice) -> float:
    entries = choice.entries
    return sum(entry.logprob for entry in entries) / len(entries) if entries else -math.inf


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
