"""Request bodies of the Messages API. Rules as for OpenAI's: strict types, null is allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.openai.schema import (
    CacheHints,
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
from tandem.protocol.sampling import MAX_COUNT

# A system block with this beginning changes with every request, which would prevent all caching. vLLM drops it too.
BILLING_HEADER = "x-anthropic-billing-header"
UNSERVED_FIELDS = ("compaction",)

_BLOCK_TYPES = [
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"),
    *("search_result", "document", "compaction"),
]


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of content; which fields it has depends on its type. Blocks of other types are skipped."""

    type: Annotated[
        str,
        Doc(
            "What it is; docs/messages.md. Images, and documents that are not text, are refused; blocks of tools that "
            "Anthropic runs, and unknown ones, are skipped.",
            examples=_BLOCK_TYPES,
        ),
    ]
    text: Annotated[str | None, Doc("Of `text`.")] = None
    thinking: Annotated[str | None, Doc("Of `thinking`: passed to the chat template as `reasoning_content`.")] = None
    id: Annotated[str | None, Doc("Of `tool_use`.")] = None
    name: Annotated[str | None, Doc("Of `tool_use`: the tool.")] = None
    input: Annotated[dict[str, Any] | None, Doc("Of `tool_use`: the arguments.")] = None
    tool_use_id: Annotated[str | None, Doc("Of `tool_result`: the `id` of the call.")] = None
    content: Annotated[
        str | list[ContentBlock] | dict[str, Any] | None,
        Doc("Of `tool_result`: text, or blocks. Of `search_result`: blocks of text. Of `compaction`: text."),
    ] = None
    is_error: Annotated[bool | None, Doc("Accepted; not used, as the model reads the content.")] = None
    source: Annotated[Any, Doc("Of `document`: `text`, or `content` that is text. Of `search_result`: a text.")] = None
    title: Annotated[str | None, Doc("Of `document` and `search_result`.")] = None
    tool_name: Annotated[str | None, Doc("Of `tool_reference`: a tool that a search has found.")] = None


class InputMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[
        Literal["user", "assistant", "system"], Doc("Whose turn it is. The assistant's at the end is continued.")
    ]
    content: Annotated[
        str | list[ContentBlock] | None,
        Doc("Texts in a row are joined by line breaks; each tool's result is a message. A system message may lack it."),
    ] = None


class MessageTool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    name: Annotated[str | None, Doc("Letters, digits, `_`, `-`, `.`, `:` and `/`, at most 256.")] = None
    input_schema: Annotated[dict[str, Any] | None, Doc("JSON schema of its input; required for `custom`.")] = None
    description: Annotated[str | None, Doc("What it does, for the model.")] = None
    type: Annotated[
        str | None,
        Doc(
            "`custom`, or one of Anthropic's that the client runs: `bash_...`, `text_editor_...`, `memory_...`. Others "
            "are not shown to the model.",
            examples=["custom"],
        ),
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
        str,
        Doc(
            "`enabled` and `disabled` set `enable_thinking` and `thinking` of the chat template; others leave them as "
            "they are.",
            examples=["enabled", "disabled", "adaptive", "between_tools"],
        ),
    ]
    budget_tokens: Annotated[int | None, Doc("Not kept to. `max_tokens` limits thoughts and text.")] = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    type: Annotated[Literal["json_schema"], Doc("`json_schema`.")]
    schema: Annotated[msgspec.Raw, Doc("A JSON schema.")] = msgspec.field(default_factory=absent)


class OutputConfig(msgspec.Struct, frozen=True):
    """How the model answers."""

    effort: Annotated[str | None, Doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputFormat | None, Doc("The form of the answer's text.")] = None


class Quantity(msgspec.Struct, frozen=True):
    """A number of something."""

    type: Annotated[str, Doc("`input_tokens`, `tool_uses`, `thinking_turns` or `all`.")]
    value: Annotated[Annotated[int, Meta(ge=0, le=MAX_COUNT)], Doc("How many.")] = 0


class ContextEdit(msgspec.Struct, frozen=True):
    """What may be taken out of the conversation before the model reads it."""

    type: Annotated[
        str,
        Doc(
            "`clear_tool_uses_20250919` or `clear_thinking_20251015`; others are ignored.",
            examples=["clear_tool_uses_20250919", "clear_thinking_20251015"],
        ),
    ]
    trigger: Annotated[
        Quantity | None, Doc("Of tool uses: from how many `input_tokens` (by default 100,000) or `tool_uses` on.")
    ] = None
    keep: Annotated[
        Quantity | str | None,
        Doc("How many of the latest are kept: `tool_uses` (by default 3), `thinking_turns` (by default 1), or `all`."),
    ] = None
    clear_at_least: Annotated[Quantity | None, Doc("Nothing is cleared if it would be fewer `input_tokens`.")] = None
    exclude_tools: Annotated[list[str] | None, Doc("Tools whose uses are kept.")] = None
    clear_tool_inputs: Annotated[bool | list[str] | None, Doc("Clear inputs too: of all tools, or of these.")] = None


class ContextManagement(msgspec.Struct, frozen=True):
    """How a long conversation is made shorter."""

    edits: Annotated[list[ContextEdit] | None, Doc("Done in this order.")] = None


class Thread(msgspec.Struct, frozen=True):
    """A conversation that the server is to keep."""

    type: Annotated[str, Doc("`create`, with the whole conversation, or `continue`.", examples=["create", "continue"])]
    previous_message_id: Annotated[str | None, Doc("Of `continue`.")] = None


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/messages/count_tokens`: what the prompt depends on."""

    model: Model = None
    messages: Annotated[Annotated[list[InputMessage], Meta(min_length=1)], Doc("The conversation.")]
    system: Annotated[str | list[ContentBlock] | None, Doc("The system prompt: text, or blocks of text.")] = None
    tools: Annotated[list[MessageTool] | None, Doc("Tools that the model may call: docs/tools.md.")] = None
    tool_choice: Annotated[MessageToolChoice | None, Doc("By default `auto`.")] = None
    thinking: Annotated[Thinking | None, Doc("By default as the chat template has it.")] = None
    output_config: Annotated[OutputConfig | None, Doc("Effort and form of the answer.")] = None
    output_format: Annotated[OutputFormat | None, Doc("The older name of `output_config.format`.")] = None
    context_management: Annotated[ContextManagement | None, Doc("What is cleared from a long conversation.")] = None
    # Beyond Anthropic.
    chat_template_kwargs: TemplateKwargs = None
    cache_salt: CacheSalt = None
    # Refused.
    compaction: Annotated[Any, Doc("Refused unless null: the answer would be a summary.")] = None
    thread: Annotated[
        Thread | None,
        Doc("`create` is ignored, because nothing is kept between requests; so to `continue` one gets a 404."),
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_COUNT)],
        Doc("The most tokens to generate, at most what the context leaves. 0: compute and cache the prompt only."),
    ]
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
    cache_hints: CacheHints = msgspec.field(default_factory=absent)
    conversation_id: Conversation = None
    priority: QueuePriority = None
