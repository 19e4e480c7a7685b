"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.router.openai.schema import (
    CacheSalt,
    ConversationId,
    Count,
    Doc,
    Model,
    Probability,
    QueuePriority,
    TemplateKwargs,
    absent,
)

__all__ = ["FunctionTool", "NamedFunction", "ResponsesRequest", "TextFormat", "TextOptions"]


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call; tools that a server would run are not served."""

    type: Annotated[Literal["function"], Doc("`function`.")]
    name: Annotated[str, Doc("As in a tool of chat.")]
    description: Annotated[str | None, Doc("What it does, for the model.")] = None
    parameters: Annotated[dict[str, Any] | None, Doc("JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, Doc("Accepted.")] = None


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that the model must call."""

    type: Annotated[Literal["function"], Doc("`function`.")]
    name: Annotated[str, Doc("The name of one of the tools.")]


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
        Doc("A user's text, or items: messages of text, `function_call`, `function_call_output`, `reasoning`."),
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
    tools: Annotated[list[FunctionTool] | None, Doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})] | NamedFunction | None,
        Doc("`auto`, `none`, `required`, or the function that it must call."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Doc("Whether it may call more than one; by default it may.")] = None
    truncation: Annotated[Literal["disabled"] | None, Doc("`disabled`: an input that is too long is refused.")] = None
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
    conversation_id: Annotated[ConversationId | None, Doc("The conversation, for pins; else the first response's.")] = (
        None
    )
    priority: QueuePriority = None
    # Not served: a value that asks for something is refused.
    background: Annotated[bool | None, Doc("Not served.")] = None
    conversation: Annotated[Any, Doc("Not served; see `conversation_id`.")] = None
    prompt: Annotated[Any, Doc("Not served.")] = None
    include: Annotated[list[str] | None, Doc("Not served.")] = None
    max_tool_calls: Annotated[int | None, Doc("Not served.")] = None
    top_logprobs: Annotated[int | None, Doc("Not served; chat has log probabilities.")] = None
