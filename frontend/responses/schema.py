"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.openai.schema import (
    CacheHints,
    CacheSalt,
    ConversationId,
    Count,
    Doc,
    Model,
    Probability,
    PromptCacheKey,
    QueuePriority,
    ReasoningEffort,
    TemplateKwargs,
    absent,
)


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    type: Annotated[Literal["function"], Doc("`function`.")]
    name: Annotated[str, Doc("As in a tool of chat.")]
    description: Annotated[str | None, Doc("What it does, for the model.")] = None
    parameters: Annotated[dict[str, Any] | None, Doc("JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, Doc("Accepted.")] = None


class CustomFormat(msgspec.Struct, frozen=True):
    """What the input of a custom tool matches."""

    type: Annotated[Literal["text", "grammar"], Doc("`text`: anything.")]
    syntax: Annotated[Literal["lark", "regex"] | None, Doc("Of a grammar.")] = None
    definition: Annotated[str | None, Doc("The grammar.")] = None


class CustomTool(msgspec.Struct, frozen=True):
    """A tool whose input is one text."""

    type: Annotated[Literal["custom"], Doc("`custom`.")]
    name: Annotated[str, Doc("As of a function.")]
    description: Annotated[str | None, Doc("What it does, for the model.")] = None
    format: Annotated[CustomFormat | None, Doc("What its input matches; by default anything.")] = None


class NamespaceTool(msgspec.Struct, frozen=True):
    """Functions and custom tools under a common name."""

    type: Annotated[Literal["namespace"], Doc("`namespace`.")]
    name: Annotated[str, Doc("The first part of its tools' names, as the model sees them.")]
    tools: Annotated[list[dict[str, Any]], Doc("Its tools.")]
    description: Annotated[str | None, Doc("Of those of its tools that have none.")] = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How the model reasons."""

    effort: ReasoningEffort = None


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    type: Annotated[Literal["text", "json_object", "json_schema"], Doc("What the text is.")]
    name: Annotated[str | None, Doc("Accepted; not used.")] = None
    schema: Annotated[msgspec.Raw, Doc("With `json_schema`: the schema.")] = msgspec.field(default_factory=absent)
    strict: Annotated[bool | None, Doc("Accepted: every schema is kept to.")] = None


class TextOptions(msgspec.Struct, frozen=True):
    """What the answer's text is like."""

    format: Annotated[TextFormat | None, Doc("Its form.")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        str | list[dict[str, Any]],
        Doc("A user's text, or items: messages of text, calls and their outputs, `reasoning`, `item_reference`."),
    ]
    model: Model = None
    instructions: Annotated[str | None, Doc("A system message before the input; not kept for later responses.")] = None
    previous_response_id: Annotated[
        str | None, Doc("A response that is kept: its input and output go before this input.")
    ] = None
    store: Annotated[bool | None, Doc("Whether the response is kept for later ones; by default it is.")] = None
    stream: Annotated[bool | None, Doc("Answer with server-sent events.")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Doc("The most tokens to generate; by default the rest of the context.")
    ] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, Doc("0 = greedy.")] = None
    top_p: Annotated[Probability | None, Doc("Nucleus sampling.")] = None
    text: Annotated[TextOptions | None, Doc("What the text is like.")] = None
    reasoning: Annotated[ReasoningOptions | None, Doc("How the model reasons.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Doc("Tools of the types `function`, `custom` and `namespace`; the model does not see those of other types."),
    ] = None
    tool_choice: Annotated[
        Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})] | dict[str, Any] | None,
        Doc("`auto`, `none`, `required`, the tool that it must call, or `allowed_tools`."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Doc("Whether it may call more than one; by default it may.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Doc("Of an input that does not fit: `auto` leaves its oldest turns out; `disabled`, the default, refuses it."),
    ] = None
    include: Annotated[
        list[str] | None, Doc("`reasoning.encrypted_content`: an opaque copy of the reasoning, to be sent back.")
    ] = None
    metadata: Annotated[dict[str, str] | None, Doc("Returned as it is.")] = None
    user: Annotated[str | None, Doc("Returned as it is.")] = None
    # Beyond OpenAI, as in chat.
    seed: Annotated[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, Doc("Makes sampling repeatable.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Doc("0 and -1 = off.")] = None
    min_p: Annotated[Probability | None, Doc("Least probability; 0 = off.")] = None
    ignore_eos: Annotated[bool | None, Doc("Go on after the end-of-sequence token.")] = None
    min_tokens: Annotated[Count | None, Doc("No end before this many tokens.")] = None
    chat_template_kwargs: TemplateKwargs = None
    cache_salt: CacheSalt = None
    cache_hints: CacheHints = msgspec.field(default_factory=absent)
    conversation_id: Annotated[ConversationId | None, Doc("The conversation, for pins; else the first response's.")] = (
        None
    )
    prompt_cache_key: PromptCacheKey = None
    priority: QueuePriority = None
    # Not served: a value that asks for something is refused.
    background: Annotated[bool | None, Doc("Not served.")] = None
    conversation: Annotated[Any, Doc("Not served; see `conversation_id`.")] = None
    prompt: Annotated[Any, Doc("Not served.")] = None
    top_logprobs: Annotated[int | None, Doc("Not served; chat has log probabilities.")] = None
