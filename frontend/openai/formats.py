"""Chat's and completions' answers: plain and streamed, made from the text of their choices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from typing_extensions import override

from tandem.frontend.openai import answer_shapes as shapes
from tandem.frontend.openai.choice_format import ChoiceFormat
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.legacy_functions import with_function_call
from tandem.frontend.openai.logprobs import ScoredPrompt, TokenEntry, completion_logprobs, joined_logprobs
from tandem.frontend.openai.planned_answer import FinishedChoice, PlannedAnswer, TokensUsed
from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin


class ChatFormat(ChoiceFormat[shapes.ChatChunkChoice]):
    """`POST /v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    has_choice_prompts = False

    def __init__(self, num_logprobs: int | None, *, has_functions: bool = False) -> None:
        """`has_functions`: calls have the shape that OpenAI's API had before tools."""
        self._num_logprobs = num_logprobs
        self._has_functions = has_functions

    @override
    def opening(self, index: int) -> shapes.ChatChunkChoice | None:
        """The role, without text."""
        return shapes.ChatChunkChoice(index, shapes.MessageDelta(role="assistant", content=""), None, None)

    @override
    def pieces(self, delta: ChoiceDelta) -> list[shapes.ChatChunkChoice]:
        """Message deltas; the last one may be empty. Reasoning and tool calls have pieces of their own."""
        if delta.events is not None:
            return self._parsed_pieces(delta, delta.events)
        logprobs = self._logprobs(delta.entries) if delta.entries else None
        if delta.finish_reason is None:
            return [shapes.ChatChunkChoice(delta.index, shapes.MessageDelta(content=delta.text), logprobs, None)]
        message = shapes.MessageDelta(content=delta.text or UNSET)
        return [shapes.ChatChunkChoice(delta.index, message, logprobs, delta.finish_reason, delta.stop_reason)]

    def _parsed_pieces(self, delta: ChoiceDelta, events: list[Event]) -> list[shapes.ChatChunkChoice]:
        messages = [message_delta(event) for event in events]
        if self._has_functions:
            messages = [with_function_call(message) for message in messages]
        if not messages or delta.finish_reason is not None:
            messages.append(shapes.MessageDelta())
        pieces = [shapes.ChatChunkChoice(delta.index, message, None, None) for message in messages]
        if delta.entries:
            pieces[0].logprobs = self._logprobs(delta.entries)
        if delta.finish_reason is not None:
            pieces[-1].finish_reason = self._finish_reason(delta.finish_reason)
            pieces[-1].stop_reason = delta.stop_reason
        return pieces

    @override
    def chunk(self, answer: PlannedAnswer, created: int, pieces: list[shapes.ChatChunkChoice]) -> shapes.ChatChunk:
        return shapes.ChatChunk(answer.answer_id, "chat.completion.chunk", created, answer.model, pieces)

    @override
    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> shapes.ChatCompletion:
        return shapes.ChatCompletion(
            id=answer.answer_id,
            object="chat.completion",
            created=int(time.time()),
            model=answer.model,
            choices=[self._whole(choice, answer) for choice in choices],
            usage=usage.shown(),
            prompt_token_ids=answer.choices[0].request.token_ids if answer.shows_token_ids else UNSET,
        )

    def _whole(self, choice: FinishedChoice, answer: PlannedAnswer) -> shapes.ChatChoice:
        """Text as a message."""
        message = (
            shapes.AssistantMessage("assistant", choice.text) if choice.events is None else whole_message(choice.events)
        )
        return shapes.ChatChoice(
            index=choice.index,
            message=with_function_call(message) if self._has_functions else message,
            logprobs=self._logprobs(choice.entries),
            finish_reason=self._finish_reason(choice.end_reason),
            stop_reason=choice.stop_reason,
            token_ids=_token_ids(choice, answer),
        )

    def _finish_reason(self, reason: shapes.EndReason) -> shapes.EndReason:
        return "function_call" if self._has_functions and reason == "tool_calls" else reason

    def _logprobs(self, entries: list[TokenEntry]) -> shapes.ChatLogprobs | None:
        if self._num_logprobs is None:
            return None
        num_top = self._num_logprobs
        return shapes.ChatLogprobs([_chosen_token(entry, num_top) for entry in entries])


class CompletionFormat(ChoiceFormat[shapes.CompletionChunkChoice]):
    """`POST /v1/completions`. `echoes` are the prompts to repeat, by choice index; empty = repeat none.

    `scored` are their log probabilities, also by choice; empty = they were not asked for.
    """

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    has_choice_prompts = True

    def __init__(
        self, num_logprobs: int | None, echoes: Sequence[str] = (), scored: Sequence[ScoredPrompt] = ()
    ) -> None:
        self._num_logprobs = num_logprobs
        self._echoes = echoes
        self._scored = scored

    @override
    def opening(self, index: int) -> shapes.CompletionChunkChoice | None:
        """The prompt, if the request asks to repeat it."""
        if not self._echoes:
            return None
        logprobs = self._scored[index].logprobs if self._scored else None
        return shapes.CompletionChunkChoice(index, self._echoes[index], logprobs, None)

    @override
    def pieces(self, delta: ChoiceDelta) -> list[shapes.CompletionChunkChoice]:
        """The new text, as one piece."""
        logprobs = self._logprobs(delta.index, delta.entries) if delta.entries else None
        piece = shapes.CompletionChunkChoice(delta.index, delta.text, logprobs, delta.finish_reason)
        if delta.finish_reason is not None:
            piece.stop_reason = delta.stop_reason
        return [piece]

    @override
    def chunk(
        self, answer: PlannedAnswer, created: int, pieces: list[shapes.CompletionChunkChoice]
    ) -> shapes.CompletionChunk:
        return shapes.CompletionChunk(answer.answer_id, "text_completion", created, answer.model, pieces)

    @override
    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> shapes.Completion:
        return shapes.Completion(
            id=answer.answer_id,
            object="text_completion",
            created=int(time.time()),
            model=answer.model,
            choices=[self._whole(choice, answer) for choice in choices],
            usage=usage.shown(),
        )

    def _whole(self, choice: FinishedChoice, answer: PlannedAnswer) -> shapes.CompletionChoice:
        """Text, after the prompt if the request asks to repeat it."""
        logprobs = self._logprobs(choice.index, choice.entries)
        if logprobs is not None and self._scored:
            logprobs = joined_logprobs(self._scored[choice.index].logprobs, logprobs)
        return shapes.CompletionChoice(
            index=choice.index,
            text=self._echo(choice.index) + choice.text,
            logprobs=logprobs,
            finish_reason=choice.end_reason,
            stop_reason=choice.stop_reason,
            token_ids=_token_ids(choice, answer),
            prompt_token_ids=answer.choices[choice.index].request.token_ids if answer.shows_token_ids else UNSET,
        )

    def _logprobs(self, index: int, entries: list[TokenEntry]) -> shapes.CompletionLogprobs | None:
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
    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> shapes.Completion:
        """The best choices of each prompt, the likeliest first."""
        body = super().body(answer, choices, usage)
        starts = range(0, len(choices), self._num_choices)
        groups = [sorted(choices[i : i + self._num_choices], key=_mean_logprob, reverse=True) for i in starts]
        best = [choice.index for group in groups for choice in group[: self._num_best]]
        body.choices = [msgspec.structs.replace(body.choices[index], index=i) for i, index in enumerate(best)]
        return body


def _mean_logprob(choice: FinishedChoice) -> float:
    entries = choice.entries
    return sum(entry.logprob for entry in entries) / len(entries) if entries else -math.inf


def _token_ids(choice: FinishedChoice, answer: PlannedAnswer) -> list[int] | UnsetType:
    return choice.token_ids or [] if answer.shows_token_ids else UNSET


def _chosen_token(entry: TokenEntry, num_top: int) -> shapes.ChosenToken:
    top = [shapes.AlternativeToken(text, logprob, list(text.encode())) for text, logprob in entry.top[:num_top]]
    return shapes.ChosenToken(entry.text, entry.logprob, list(entry.text.encode()), top)


# -- content, reasoning and tool calls as parts of a chat message


def message_delta(event: Event) -> shapes.MessageDelta:
    """One event as the delta of a streamed message."""
    match event:
        case Content(text):
            return shapes.MessageDelta(content=text)
        case Reasoning(text):
            return shapes.MessageDelta(reasoning_content=text, reasoning=text)
        case ToolCallBegin(index, id, name):
            function = shapes.FunctionDelta(name=name, arguments="")
            return shapes.MessageDelta(
                tool_calls=[shapes.ToolCallDelta(index=index, id=id, type="function", function=function)]
            )
        case ToolCallArguments(index, text):
            return shapes.MessageDelta(
                tool_calls=[shapes.ToolCallDelta(index=index, function=shapes.FunctionDelta(arguments=text))]
            )


def whole_message(events: Iterable[Event]) -> shapes.AssistantMessage:
    """The events of an answer as a whole message. Content is null if there are calls and nothing else."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallBegin, list[str]]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallBegin():
                calls.append((event, []))
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    message = shapes.AssistantMessage("assistant", "".join(content) if content or not calls else None)
    if reasoning:
        message.reasoning_content = message.reasoning = "".join(reasoning)
    if calls:
        message.tool_calls = [
            shapes.ToolCall(begin.id, "function", shapes.CalledFunction(begin.name, "".join(pieces)))
            for begin, pieces in calls
        ]
    return message
