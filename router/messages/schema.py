"""Request bodies of the Messages API. Rules as for OpenAI's: strict types, null is allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.protocol.sampling import MAX_COUNT
from tandem.router.openai.schema import (
    CacheSalt,
    Conversation,
    Doc,
    Model,
    Probability,
    QueuePriority,
    StopString,
    TemplateKwargs,
    absent,
)

__all__ = [
    "BILLING_HEADER",
    "UNSERVED_FIELDS",
    "ContentBlock",
    "CountTokensRequest",
    "InputMessage",
    "MessageTool",
    "MessageToolChoice",
    "MessagesRequest",
    "OutputConfig",
    "OutputFormat",
    "Thinking",
]

# A system block with this beginning changes with every request, which would prevent all caching. vLLM drops it too.
BILLING_HEADER = "x-anthropic-billing-header"
UNSERVED_FIELDS = ("container", "context_management", "mcp_servers", "output_format")


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of content; which fields it has depends on its type."""

    type: Annotated[
        str,
        Doc(
            "`text`, `thinking`, `redacted_thinking` (skipped), `tool_use` or `tool_result`.",
            enum=["text", "thinking", "redacted_thinking", "tool_use", "tool_result"],
        ),
    ]
    text: Annotated[str | None, Doc("Of `text`.")] = None
    thinking: Annotated[str | None, Doc("Of `thinking`: passed to the chat template as `reasoning_content`.")] = None
    id: Annotated[str | None, Doc("Of `tool_use`.")] = None
    name: Annotated[str | None, Doc("Of `tool_use`: the tool.")] = None
    input: Annotated[dict[str, Any] | None, Doc("Of `tool_use`: the arguments.")] = None
    tool_use_id: Annotated[str | None, Doc("Of `tool_result`: the `id` of the call.")] = None
    content: Annotated[str | list[ContentBlock] | None, Doc("Of `tool_result`: text, or blocks of text.")] = None
    is_error: Annotated[bool | None, Doc("Accepted; not used, as the model reads the content.")] = None


class InputMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[Literal["user", "assistant", "system"], Doc("Whose turn it is; the last one is not `assistant`.")]
    content: Annotated[
        str | list[ContentBlock], Doc("Texts in a row are joined by line breaks; each tool's result is a message.")
    ]


class MessageTool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    name: Annotated[str, Doc("Letters, digits, `_`, `-`, `.`, `:` and `/`, at most 256.")]
    input_schema: Annotated[dict[str, Any] | None, Doc("JSON schema of its input; required.")] = None
    description: Annotated[str | None, Doc("What it does, for the model.")] = None
    type: Annotated[
        str | None, Doc("`custom`. Tools that Anthropic defines or runs are refused.", enum=["custom", None])
    ] = None
    strict: Annotated[bool | None, Doc("Accepted. Calls follow the schema if `tool_choice` forces them.")] = None


class MessageToolChoice(msgspec.Struct, frozen=True):
    """What the model may or must do with the tools."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        Doc("`any`: it must call one. `tool`: it must call `name`. `none`: it does not see the tools."),
    ]
    name: Annotated[str | None, Doc("With `tool`.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Doc("`true`: at most one call.")] = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model thinks before it answers, where its chat template has a switch for that."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Doc("Sets `enable_thinking` and `thinking` of the chat template; `adaptive` leaves them as they are."),
    ]
    budget_tokens: Annotated[int | None, Doc("Accepted; not kept to. `max_tokens` limits thoughts and text.")] = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    type: Annotated[Literal["json_schema"], Doc("`json_schema`.")]
    schema: Annotated[msgspec.Raw, Doc("A JSON schema.")] = msgspec.field(default_factory=absent)


class OutputConfig(msgspec.Struct, frozen=True):
    """How the model answers."""

    effort: Annotated[str | None, Doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputFormat | None, Doc("The form of the answer's text.")] = None


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/messages/count_tokens`: what the prompt depends on."""

    model: Model = None
    messages: Annotated[Annotated[list[InputMessage], Meta(min_length=1)], Doc("The conversation.")]
    system: Annotated[str | list[ContentBlock] | None, Doc("The system prompt: text, or blocks of text.")] = None
    tools: Annotated[list[MessageTool] | None, Doc("Tools that the model may call, at most 128: docs/tools.md.")] = None
    tool_choice: Annotated[MessageToolChoice | None, Doc("By default `auto`.")] = None
    thinking: Annotated[Thinking | None, Doc("By default as the chat template has it.")] = None
    output_config: Annotated[OutputConfig | None, Doc("Effort and form of the answer.")] = None
    # Beyond Anthropic.
    chat_template_kwargs: TemplateKwargs = None
    cache_salt: CacheSalt = None
    # Refused.
    container: Annotated[Any, Doc("Refused unless null or empty, as the next three.")] = None
    context_management: Annotated[Any, Doc("Refused.")] = None
    mcp_servers: Annotated[Any, Doc("Refused.")] = None
    output_format: Annotated[Any, Doc("Refused: `output_config.format` replaces it.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[Annotated[int, Meta(ge=1, le=MAX_COUNT)], Doc("The most tokens to generate.")]
    stream: Annotated[bool | None, Doc("Answer with server-sent events.")] = None
    stop_sequences: Annotated[
        list[StopString] | None, Doc("Strings that end the answer, at most 1,024; they are not shown.")
    ] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Doc("0 = greedy; by default 1.")] = None
    top_p: Annotated[Probability | None, Doc("Nucleus sampling; 0 = only the likeliest token.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=0)] | None, Doc("0 = off.")] = None
    # Beyond Anthropic.
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, Doc("Makes sampling repeatable; by default random.")
    ] = None
    conversation_id: Conversation = None
    priority: QueuePriority = None
