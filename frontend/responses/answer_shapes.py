"""What `/v1/responses` answers. `/openapi.json` describes these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.openai.answer_shapes import PromptTokensDetails
from tandem.frontend.openai.schema import Doc


class InputTokensDetails(PromptTokensDetails):
    """The input's tokens by what they cost."""

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


# -- items of the output

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Namespace = Annotated[str | UnsetType, Doc("The namespace that declares the tool, if one does.")]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: Annotated[list[Any], Doc("None.")]
    logprobs: Annotated[list[Any], Doc("None.")]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model answers."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model reasons."""

    id: str
    summary: Annotated[list[Any], Doc("None.")]
    status: ItemStatus
    content: list[ReasoningText]
    encrypted_content: Annotated[str | UnsetType, Doc("A copy to be sent back, with `include`.")] = UNSET


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    namespace: Namespace = UNSET
    arguments: Annotated[str, Doc("JSON, as far as the model wrote it.")]
    status: ItemStatus


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    namespace: Namespace = UNSET
    input: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


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
    output: list[OutputItem]
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


# -- events of a stream


class StreamEvent(msgspec.Struct, kw_only=True):
    """What all events have."""

    sequence_number: Annotated[int, Doc("Counted from 0.")]


class ResponseCreated(StreamEvent, tag_field="type", tag="response.created"):
    """The first event."""

    response: ResponseObject


class ResponseInProgress(StreamEvent, tag_field="type", tag="response.in_progress"):
    """The second event."""

    response: ResponseObject


class ResponseCompleted(StreamEvent, tag_field="type", tag="response.completed"):
    """The last event of a response that has all of its text."""

    response: ResponseObject


class ResponseIncomplete(StreamEvent, tag_field="type", tag="response.incomplete"):
    """The last event of a response that a limit has cut."""

    response: ResponseObject


class OutputItemAdded(StreamEvent, tag_field="type", tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class OutputItemDone(StreamEvent, tag_field="type", tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: OutputItem


class ItemEvent(StreamEvent):
    """What events within an item have."""

    item_id: str
    output_index: int


class ContentPartAdded(ItemEvent, tag_field="type", tag="response.content_part.added"):
    """A message's text begins."""

    content_index: int
    part: OutputText


class ContentPartDone(ItemEvent, tag_field="type", tag="response.content_part.done"):
    """A message's text is whole."""

    content_index: int
    part: OutputText


class OutputTextDelta(ItemEvent, tag_field="type", tag="response.output_text.delta"):
    """More of a message's text."""

    content_index: int
    logprobs: list[Any]
    delta: str


class OutputTextDone(ItemEvent, tag_field="type", tag="response.output_text.done"):
    """A message's whole text."""

    content_index: int
    text: str
    logprobs: list[Any]


class ReasoningTextDelta(ItemEvent, tag_field="type", tag="response.reasoning_text.delta"):
    """More of the reasoning."""

    content_index: int
    delta: str


class ReasoningTextDone(ItemEvent, tag_field="type", tag="response.reasoning_text.done"):
    """The whole reasoning."""

    content_index: int
    text: str


class ArgumentsDelta(ItemEvent, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, tag_field="type", tag="response.function_call_arguments.done"):
    """A call's whole arguments."""

    arguments: str
    name: str


class CustomInputDelta(ItemEvent, tag_field="type", tag="response.custom_tool_call_input.delta"):
    """The input of a custom tool, in one piece."""

    delta: str


class CustomInputDone(ItemEvent, tag_field="type", tag="response.custom_tool_call_input.done"):
    """The whole input of a custom tool."""

    input: str


class ErrorEvent(StreamEvent, tag_field="type", tag="error"):
    """The last event of a stream that failed."""

    code: str | None
    message: str
    param: str | None


OutputEvent = (
    OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
ResponseEvent = ResponseCreated | ResponseInProgress | OutputEvent | ResponseCompleted | ResponseIncomplete | ErrorEvent
