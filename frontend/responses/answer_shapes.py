"""The JSON shapes of what `/v1/responses` answers, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tandem.frontend.openai.schema import Doc

__all__ = ["InputItems", "InputTokens", "ResponseEvent", "ResponseObject"]


class InputTokensDetails(msgspec.Struct):
    """The input's tokens by what they cost."""

    cached_tokens: Annotated[int, Doc("Those that were not computed.")]
    cached_tokens_by_tier: Annotated[
        dict[str, int], Doc("Where they were: `pool`, `host`, `disk`, `object`, or `peer` for another worker.")
    ]
    cache_write_tokens: Annotated[int, Doc("0: nobody pays for writing.")]


class OutputTokensDetails(msgspec.Struct):
    """The output's tokens by what they were."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Doc("Unix time.")]
    status: Literal["in_progress", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: Annotated[dict[str, str] | None, Doc("The limit that cut it.")]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: Annotated[
        list[dict[str, Any]], Doc("Items of type `message`, `reasoning`, `function_call` and `custom_tool_call`.")
    ]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class InputTokens(msgspec.Struct):
    """Number of tokens of a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(msgspec.Struct):
    """Some of the items that a response was made from, those of earlier responses included."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(msgspec.Struct):
    """An event of a streamed response, with more fields by its type.

    The stream begins with `response.created` and ends with `response.completed` or `response.incomplete`, which have
    the response in `response`, or with `error`.
    """

    type: Annotated[str, Doc("As the event's own type.")]
    sequence_number: Annotated[int, Doc("Counted from 0.")]
