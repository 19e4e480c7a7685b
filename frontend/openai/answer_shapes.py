"""What chat, completions, tokenization and pins answer. `/openapi.json` describes these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.openai.schema import Doc
from tandem.protocol.messages import Prefetch

EndReason = Annotated[
    Literal["stop", "length", "tool_calls", "function_call"],
    Doc("`length`: a limit of tokens. `tool_calls`: it ended with calls; `function_call`: of one of `functions`."),
]
StopReason = Annotated[str | int | None, Doc("The stop string or stop token that ended it, if one of the request did.")]
Created = Annotated[int, Doc("Unix time.")]


class RoleTokens(msgspec.Struct, gc=False):
    """The prompt's tokens of one role."""

    tokens: Annotated[int, Doc("With what the template writes ahead of them, such as tools.")]
    cached_tokens: Annotated[int, Doc("Those that were not computed.")]


class PromptTokensDetails(msgspec.Struct, gc=False):
    """The prompt's tokens by what they cost."""

    cached_tokens: Annotated[int, Doc("Those that were not computed.")]
    cached_tokens_by_tier: Annotated[
        dict[str, int],
        Doc("Where they were: `pool`, a tier by its name, as `host`, or `peer` for another worker."),
    ]


class PromptTokensByRole(PromptTokensDetails, gc=False):
    """The same, and by the roles of a chat's messages if the request asks."""

    by_role: Annotated[dict[str, RoleTokens] | UnsetType, Doc("With `usage_by_role`.")] = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """The answer's tokens by what they were."""

    reasoning_tokens: Annotated[int | UnsetType, Doc("If the server tells reasoning from content.")] = UNSET
    accepted_prediction_tokens: Annotated[
        int | UnsetType, Doc("With `prediction`: its tokens that came, and were computed several in a step.")
    ] = UNSET
    rejected_prediction_tokens: Annotated[
        int | UnsetType,
        Doc("With `prediction`: its tokens that were computed and did not come. No other number here counts them."),
    ] = UNSET


class Usage(msgspec.Struct, gc=False):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Doc("Of all prompts; the choices of a prompt share it.")]
    completion_tokens: Annotated[int, Doc("Of all choices.")]
    total_tokens: int
    prompt_tokens_details: PromptTokensByRole
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, Doc("If there is one of its numbers to tell.")
    ] = UNSET


# -- chat


class CalledFunction(msgspec.Struct):
    """A function and its arguments."""

    name: str
    arguments: Annotated[str, Doc("JSON, as far as the model wrote it.")]


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(msgspec.Struct):
    """What the model answers."""

    role: Literal["assistant"]
    content: Annotated[str | None, Doc("Null if there are calls and nothing else.")]
    reasoning_content: str | UnsetType = UNSET
    reasoning: Annotated[str | UnsetType, Doc("The same, as newer vLLM calls it.")] = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: Annotated[CalledFunction | UnsetType, Doc("In place of `tool_calls`, with `functions`.")] = UNSET


class AlternativeToken(msgspec.Struct):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(AlternativeToken):
    """A token of the answer."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of an answer's tokens."""

    content: list[ChosenToken]


class ChatChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    stop_reason: StopReason
    token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET


class ChatCompletion(msgspec.Struct):
    """A whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: Created
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET


class FunctionDelta(msgspec.Struct):
    """A piece of a call."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of the call `index`. Its first piece has `id`, `type` and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(msgspec.Struct, gc=False):  # made for each token, and never in a cycle
    """A piece of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: Annotated[FunctionDelta | UnsetType, Doc("In place of `tool_calls`, with `functions`.")] = UNSET


class ChatChunkChoice(msgspec.Struct, gc=False):
    """A piece of the choice `index`."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[EndReason | None, Doc("In the last piece of a choice.")]
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET


class ChatChunk(msgspec.Struct, gc=False):
    """An event of a streamed answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Created
    model: str
    choices: Annotated[list[ChatChunkChoice], Doc("None in the chunk with the usage.")]
    prompt_token_ids: Annotated[list[int] | UnsetType, Doc("In the first chunk, with `return_token_ids`.")] = UNSET
    usage: Annotated[Usage | UnsetType | None, Doc("With `stream_options.include_usage`.")] = UNSET
    tandem_explain: Annotated[dict[str, Any] | UnsetType, Doc("In the last chunk with choices, if asked for.")] = UNSET


# -- completions


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities by token. Of a prompt's first token they are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of the continuations."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    stop_reason: StopReason
    token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET
    prompt_token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET


class Completion(msgspec.Struct):
    """The whole continuations of one or many prompts."""

    id: str
    object: Literal["text_completion"]
    created: Created
    model: str
    choices: Annotated[list[CompletionChoice], Doc("In the order of the prompts.")]
    usage: Usage


class CompletionChunkChoice(msgspec.Struct, gc=False):
    """A piece of the choice `index`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[EndReason | None, Doc("In the last piece of a choice.")]
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: Annotated[list[int] | UnsetType, Doc("With `return_token_ids`.")] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, Doc("In the first piece of a choice, with `return_token_ids`.")
    ] = UNSET


class CompletionChunk(msgspec.Struct):
    """An event of a streamed continuation."""

    id: str
    object: Literal["text_completion"]
    created: Created
    model: str
    choices: Annotated[list[CompletionChunkChoice], Doc("None in the chunk with the usage.")]
    usage: Annotated[Usage | UnsetType | None, Doc("With `stream_options.include_usage`.")] = UNSET
    tandem_explain: Annotated[dict[str, Any] | UnsetType, Doc("In the last chunk with choices, if asked for.")] = UNSET


# -- tokenizer and cache


class Tokenized(msgspec.Struct):
    """The tokens of a prompt."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Doc("If asked for.")]


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class PinCard(msgspec.Struct):
    """A prefix that is kept in the KV cache for a while."""

    id: str
    object: Literal["cache.pin"]
    tenant: str
    conversation_id: str | None
    num_tokens: int
    num_blocks: int
    prefetch: Prefetch
    remaining_s: float
    expires_at: Annotated[int, Doc("Unix time.")]
    held: Annotated[
        dict[str, dict[str, int] | None],
        Doc("By worker: leading blocks by place; null for a worker that did not answer in time."),
    ]


class PinList(msgspec.Struct):
    """Live pins, oldest first."""

    object: Literal["list"]
    data: list[PinCard]


class Unpinned(msgspec.Struct):
    """The pin that was ended."""

    id: str
    object: Literal["cache.pin"]
    deleted: Literal[True]


class PoolCheck(msgspec.Struct):
    """Whether any worker holds something."""

    idle: bool
    workers: Annotated[dict[str, str], Doc("What is wrong with each, or what it holds; empty = nothing.")]
