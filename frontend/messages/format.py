"""The answers of `/v1/messages`: the message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from tandem.frontend.http.answer_shapes import Error
from tandem.frontend.http.errors import messages_error_body
from tandem.frontend.messages import answer_shapes as shapes
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed
from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

_STOP_REASONS: dict[str | None, shapes.StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class MessagesFormat:
    """Answers with one message.

    `max_tokens` is the request's limit; the context may leave less. `applied_edits` are those of its context
    management; None = it asks for none.
    """

    id_prefix = "msg_"
    prompt_field = "messages"

    def __init__(self, max_tokens: int, applied_edits: list[dict[str, Any]] | None = None) -> None:
        self._max_tokens = max_tokens
        self._edits = UNSET if applied_edits is None else shapes.AppliedEdits(applied_edits)

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> shapes.Message:
        """The message of a plain answer."""
        choice = choices[0]
        message = _message(answer, _whole_blocks(choice.parts), usage)
        end = self._end(answer, choice.finish_reason, choice.stop_reason)
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        message.context_management = self._edits
        return message

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Events from `message_start` to `message_stop`."""
        return _MessageEvents(answer, self._edits, partial(self._end, answer))

    def _end(self, answer: PlannedAnswer, finish_reason: str | None, stop: str | int | None) -> shapes.MessageEnd:
        if finish_reason == "stop" and isinstance(stop, str):
            return shapes.MessageEnd("stop_sequence", stop)
        if finish_reason == "length" and answer.choices[0].request.sampling.max_tokens < self._max_tokens:
            return shapes.MessageEnd("model_context_window_exceeded", None)
        return shapes.MessageEnd(_STOP_REASONS.get(finish_reason, "end_turn"), None)


class _MessageEvents:
    """The events of one stream; `edits` are a field of its end, and `end_of` says why it ended."""

    def __init__(
        self,
        answer: PlannedAnswer,
        edits: shapes.AppliedEdits | UnsetType,
        end_of: Callable[[str | None, str | int | None], shapes.MessageEnd],
    ) -> None:
        self._answer = answer
        self._edits = edits
        self._end_of = end_of
        self._usage = answer.new_usage()
        self._index = -1  # index of the open block; -1 = none has begun
        self._last: Event | None = None
        self._is_begun = False
        self._end = shapes.MessageEnd("end_turn", None)

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta. The event of the message's start comes before the first one."""
        self._usage.add(delta)
        data = b"" if self._is_begun else self._begin()
        data += b"".join(map(self._piece, delta.parts))
        if delta.finish_reason is not None:
            self._end = self._end_of(delta.finish_reason, delta.stop_reason)
        return data

    async def ending(self) -> bytes:
        """The end of the open block, and of the message."""
        change = shapes.MessageChange(self._end, _usage(self._usage), self._edits)
        return self._end_block() + _event(change) + _event(shapes.MessageStop())

    def error(self, body: Error) -> bytes:
        """The error as the last event; clients raise it."""
        return _event(messages_error_body(body))

    def _begin(self) -> bytes:
        self._is_begun = True
        return _event(shapes.MessageStart(_message(self._answer, [], self._usage)))

    def _piece(self, event: Event) -> bytes:
        data = b""
        if _begins_block(event, self._last):
            data = self._end_block()
            self._index += 1
            data += _event(shapes.ContentBlockStart(self._index, _empty_block(event)))
        self._last = event
        if isinstance(event, ToolCallBegin):
            return data
        return data + _event(shapes.ContentBlockDelta(self._index, _block_delta(event)))

    def _end_block(self) -> bytes:
        return b"" if self._last is None else _event(shapes.ContentBlockStop(self._index))


def _message(answer: PlannedAnswer, content: list[shapes.Block], usage: TokensUsed) -> shapes.Message:
    return shapes.Message(
        id=answer.answer_id,
        type="message",
        role="assistant",
        model=answer.model,
        content=content,
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(usage),
    )


def _usage(usage: TokensUsed) -> shapes.MessageUsage:
    """Anthropic's usage object: its `input_tokens` do not include those that were cached."""
    return shapes.MessageUsage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.num_cached_tokens,
        cache_read_input_tokens_by_tier=usage.cached_by_tier,
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=shapes.ThinkingTokens(usage.num_reasoning_tokens) if usage.has_reasoning else UNSET,
    )


# -- blocks of content


def _begins_block(event: Event, last: Event | None) -> bool:
    """Whether an event begins a block. Adjacent pieces of one kind share a block; arguments belong to their call."""
    return not isinstance(event, ToolCallArguments) and (
        isinstance(event, ToolCallBegin) or type(event) is not type(last)
    )


def _empty_block(event: Event) -> shapes.Block:
    match event:
        case Content():
            return shapes.TextBlock("")
        case Reasoning():
            return shapes.ThinkingBlock("", signature="")
        case ToolCallBegin(_, id, name):
            return shapes.ToolUseBlock(id, name, {})
        case ToolCallArguments():
            raise AssertionError("arguments of a call that has not begun")


def _block_delta(event: Content | Reasoning | ToolCallArguments) -> shapes.BlockDelta:
    match event:
        case Content(text):
            return shapes.TextDelta(text)
        case Reasoning(text):
            return shapes.ThinkingDelta(text)
        case ToolCallArguments(_, text):
            return shapes.InputJsonDelta(text)


def _whole_blocks(events: Iterable[Event]) -> list[shapes.Block]:
    """The blocks of a whole answer."""
    blocks: list[tuple[shapes.Block, list[str]]] = []
    last: Event | None = None
    for event in events:
        if _begins_block(event, last):
            blocks.append((_empty_block(event), []))
        if not isinstance(event, ToolCallBegin):
            blocks[-1][1].append(event.text)
        last = event
    return [_filled(block, "".join(pieces)) for block, pieces in blocks]


def _filled(block: shapes.Block, text: str) -> shapes.Block:
    match block:
        case shapes.ToolUseBlock():
            block.input = _input_of(text)
        case shapes.ThinkingBlock():
            block.thinking = text
        case shapes.TextBlock():
            block.text = text
    return block


def _input_of(arguments: str) -> dict[str, Any]:
    """The input of a call. If `max_tokens` cut the call short, only complete values are in it, as Anthropic's client
    reads them from a stream. It is empty if the model wrote something that is not a JSON object.
    """
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(event: shapes.MessageEvent) -> bytes:
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"
