"""What `/v1/messages` answers. `/openapi.json` describes these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.http.answer_shapes import MessagesError
from tandem.frontend.openai.schema import Doc

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(msgspec.Struct):
    """The answer's tokens by what they were."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of a message."""

    input_tokens: Annotated[int, Doc("Of the prompt, without those that were cached.")]
    cache_creation_input_tokens: Annotated[int, Doc("0: nobody pays for writing.")]
    cache_read_input_tokens: Annotated[int, Doc("Those that were cached.")]
    cache_read_input_tokens_by_tier: Annotated[
        dict[str, int], Doc("Where they were: `pool`, `host`, `disk`, `object`, or `peer` for another worker.")
    ]
    output_tokens: int
    output_tokens_details: Annotated[ThinkingTokens | UnsetType, Doc("If the server tells thoughts from text.")] = UNSET


class AppliedEdits(msgspec.Struct):
    """What was cleared from the conversation before the model read it."""

    applied_edits: Annotated[
        list[dict[str, Any]],
        Doc("Each with `type`, `cleared_input_tokens`, and `cleared_tool_uses` or `cleared_thinking_turns`."),
    ]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """A thought."""

    thinking: str
    signature: Annotated[str, Doc("Empty: nobody would check it.")]


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Annotated[dict[str, Any], Doc("Empty in a stream, where `input_json_delta` has it.")]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct):
    """The model's answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: Annotated[
        AppliedEdits | UnsetType, Doc("If the request has this field; of a stream in `message_delta`.")
    ] = UNSET


# -- events of a stream


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event: the message, without content."""

    message: Message


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, gc=False, tag_field="type", tag="text_delta"):  # made for each token, never in a cycle
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(msgspec.Struct, gc=False, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageEnd(msgspec.Struct):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageChange(msgspec.Struct, tag_field="type", tag="message_delta"):
    """What is known of a message at its end."""

    delta: MessageEnd
    usage: MessageUsage
    context_management: Annotated[AppliedEdits | UnsetType, Doc("If the request has this field.")] = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageChange
    | MessageStop
    | MessagesError
)


class UneditedTokens(msgspec.Struct):
    """Number of tokens of a prompt before anything was cleared from it."""

    original_input_tokens: int


class CountedTokens(msgspec.Struct):
    """Number of tokens of a prompt."""

    input_tokens: int
    context_management: Annotated[UneditedTokens | UnsetType, Doc("If the request has this field.")] = UNSET
