"""The JSON shapes of what `/v1/messages` answers, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.openai.schema import Doc

__all__ = ["CountedTokens", "Message", "MessageEvent"]


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


class Message(msgspec.Struct):
    """The model's answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[dict[str, Any]], Doc("Blocks of type `text`, `thinking` and `tool_use`.")]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: Annotated[
        AppliedEdits | UnsetType, Doc("If the request has this field; of a stream in `message_delta`.")
    ] = UNSET


class MessageEvent(msgspec.Struct):
    """An event of a streamed message, with more fields by its type.

    The stream begins with `message_start` and ends with `message_stop`, or with `error`.
    """

    type: Annotated[str, Doc("As the event's own type.")]


class UneditedTokens(msgspec.Struct):
    """Number of tokens of a prompt before anything was cleared from it."""

    original_input_tokens: int


class CountedTokens(msgspec.Struct):
    """Number of tokens of a prompt."""

    input_tokens: int
    context_management: Annotated[UneditedTokens | UnsetType, Doc("If the request has this field.")] = UNSET
