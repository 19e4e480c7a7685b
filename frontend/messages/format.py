"""The JSON shapes of `/v1/messages`: the message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from tandem.frontend.http.errors import messages_error_body
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed
from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

__all__ = ["MessagesFormat"]

Json = dict[str, Any]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Answers with one message.

    `max_tokens` is the request's limit; the context may leave less. `applied_edits` are those of its context
    management; None = it asks for none.
    """

    id_prefix = "msg_"
    prompt_field = "messages"

    def __init__(self, max_tokens: int, applied_edits: list[Json] | None = None) -> None:
        self._max_tokens = max_tokens
        self._edits: Json = {} if applied_edits is None else {"context_management": {"applied_edits": applied_edits}}

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> Json:
        """The message of a plain answer."""
        choice = choices[0]
        stop = self._stop(answer, choice.finish_reason, choice.stop_reason)
        return _message(answer, _whole_blocks(choice.parts), usage) | stop | self._edits

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Events from `message_start` to `message_stop`."""
        return _MessageEvents(answer, self._edits, partial(self._stop, answer))

    def _stop(self, answer: PlannedAnswer, finish_reason: str | None, stop: str | int | None) -> Json:
        if finish_reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if finish_reason == "length" and answer.choices[0].request.sampling.max_tokens < self._max_tokens:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(finish_reason or "", "end_turn"), "stop_sequence": None}


class _MessageEvents:
    """The events of one stream; `edits` are fields of its end, and `stop_of` says why it ended."""

    def __init__(
        self, answer: PlannedAnswer, edits: Json, stop_of: Callable[[str | None, str | int | None], Json]
    ) -> None:
        self._answer = answer
        self._edits = edits
        self._stop_of = stop_of
        self._usage = answer.new_usage()
        self._index = -1  # index of the open block; -1 = none has begun
        self._last: Event | None = None
        self._is_begun = False
        self._stop: Json = {}

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta. The event of the message's start comes before the first one."""
        self._usage.add(delta)
        data = b"" if self._is_begun else self._begin()
        data += b"".join(map(self._piece, delta.parts))
        if delta.finish_reason is not None:
            self._stop = self._stop_of(delta.finish_reason, delta.stop_reason)
        return data

    async def ending(self) -> bytes:
        """The end of the open block, and of the message."""
        usage = _usage(self._usage)
        delta = {"type": "message_delta", "delta": self._stop, "usage": usage} | self._edits
        return self._end_block() + _event(delta) + _event({"type": "message_stop"})

    def error(self, body: Json) -> bytes:
        """The error as the last event; clients raise it."""
        return _event(messages_error_body(body))

    def _begin(self) -> bytes:
        self._is_begun = True
        return _event({"type": "message_start", "message": _message(self._answer, [], self._usage)})

    def _piece(self, event: Event) -> bytes:
        data = b""
        if _begins_block(event, self._last):
            data = self._end_block()
            self._index += 1
            data += _event({"type": "content_block_start", "index": self._index, "content_block": _empty_block(event)})
        self._last = event
        if isinstance(event, ToolCallBegin):
            return data
        return data + _event({"type": "content_block_delta", "index": self._index, "delta": _block_delta(event)})

    def _end_block(self) -> bytes:
        return b"" if self._last is None else _event({"type": "content_block_stop", "index": self._index})


def _message(answer: PlannedAnswer, content: list[Json], usage: TokensUsed) -> Json:
    return {
        "id": answer.answer_id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: TokensUsed) -> Json:
    """Anthropic's usage object: its `input_tokens` do not include those that were cached."""
    counted: Json = {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_read_input_tokens_by_tier": usage.cached_by_tier,
        "output_tokens": usage.num_completion_tokens,
    }
    if usage.has_reasoning:
        counted["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
    return counted


# -- blocks of content


def _begins_block(event: Event, last: Event | None) -> bool:
    """Whether an event begins a block. Adjacent pieces of one kind share a block; arguments belong to their call."""
    return not isinstance(event, ToolCallArguments) and (
        isinstance(event, ToolCallBegin) or type(event) is not type(last)
    )


def _empty_block(event: Event) -> Json:
    match event:
        case Content():
            return {"type": "text", "text": ""}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}  # nobody would check a signature
        case ToolCallBegin(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
        case ToolCallArguments():
            raise AssertionError("arguments of a call that has not begun")


def _block_delta(event: Content | Reasoning | ToolCallArguments) -> Json:
    match event:
        case Content(text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}


def _whole_blocks(events: Iterable[Event]) -> list[Json]:
    """The blocks of a whole answer."""
    blocks: list[tuple[Json, list[str]]] = []
    last: Event | None = None
    for event in events:
        if _begins_block(event, last):
            blocks.append((_empty_block(event), []))
        if not isinstance(event, ToolCallBegin):
            blocks[-1][1].append(event.text)
        last = event
    return [_filled(block, "".join(pieces)) for block, pieces in blocks]


def _filled(block: Json, text: str) -> Json:
    if block["type"] == "tool_use":
        return block | {"input": _input_of(text)}
    return block | {block["type"]: text}  # a text's field is `text`, and a thought's is `thinking`


def _input_of(arguments: str) -> Any:
    """The input of a call, as JSON. If `max_tokens` cut the call short, only complete values are in it, as Anthropic's
    client reads them from a stream. It is empty if the model wrote something that is not a JSON object.
    """
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return (
        orjson.Fragment(to_json(value)) if isinstance(value, dict) else {}
    )  # not `value`: an integer may be too large


def _event(event: Json) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
