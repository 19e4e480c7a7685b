"""Request bodies.

Types are strict and ranges are checked while decoding. Every optional field may be null. `other_fields.py` handles
fields that are not in these structs. `/openapi.json` is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.http.sessions import MAX_CONVERSATION_ID_CHARS
from tandem.frontend.openai.tool_fields import FunctionName, NamedToolChoice, Tool, ToolFunction
from tandem.protocol.errors import RequestError
from tandem.protocol.sampling import (
    MAX_COUNT,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)

MAX_CHOICES = 128  # for one prompt, as in OpenAI's API
MAX_CACHE_SALT_CHARS = 256

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MaxTokens = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]  # front ends send -1 for no limit
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

ConversationId = Annotated[str, Meta(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)]

ABSENT = msgspec.Raw(b"null")  # of a field whose JSON is kept as it is


def absent() -> msgspec.Raw:
    """The default of a field whose JSON is kept as it is. A JSON schema can be made of a factory, not of `ABSENT`."""
    return ABSENT


def Doc(text: str, **schema: Any) -> Meta:
    """The meaning of a field, and more of its JSON schema that is checked elsewhere: for the references."""
    return Meta(description=text, extra_json_schema=schema or None)


Model = Annotated[str | None, Doc("The served model, by its name in `/v1/models`; may be left out.")]
CacheSalt = Annotated[
    str | None,
    Doc(f"At most {MAX_CACHE_SALT_CHARS} characters: only requests with the same salt share cached prefixes."),
]
CacheHints = Annotated[
    msgspec.Raw,
    Doc(
        "What to do with the cached prompt (`prefix`) or conversation (`session`): docs/tiers.md. Never an error: the "
        "response header `x-tandem-cache-hints` says of each of the first 16 whether it was accepted.",
        examples=[[{"target": "session", "action": "retain", "ttl_s": 300, "priority": 50}]],
    ),
]
AddSpecialTokens = Annotated[
    bool | None, Doc("Whether to add what the model puts around a text, such as BOS: by default to a prompt only.")
]
AddGenerationPrompt = Annotated[bool | None, Doc("Whether the chat template opens the answer; by default it does.")]
ContinueFinalMessage = Annotated[
    bool | None,
    Doc("Whether the answer continues the last message, which is the assistant's; then nothing opens the answer."),
]
ReasoningEffort = Annotated[
    str | None,
    Doc("Passed to the chat template; `none` also sets its `enable_thinking` and `thinking` to false."),
]
TemplateKwargs = Annotated[dict[str, Any] | None, Doc("Variables of the chat template.")]
ToolList = Annotated[list[Tool] | None, Doc("Tools that the model may call: docs/tools.md.")]
ToolChoice = Annotated[
    Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})] | NamedToolChoice | None,
    Doc("`auto` (the default), `none` (hides the tools), `required`, the function to call, or `allowed_tools`."),
]


Conversation = Annotated[
    ConversationId | None, Doc("The conversation that the request belongs to, for pins; also a header.")
]
PromptCacheKey = Annotated[
    Any, Doc("A text of at most 256 characters names the conversation, if neither `conversation_id` nor a header does.")
]
QueuePriority = Annotated[
    Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
    Doc("Order within the tenant's queue; lower is more urgent; by default 0."),
]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says about usage."""

    include_usage: Annotated[bool | None, Doc("A last chunk has the usage of the whole request.")] = None
    continuous_usage_stats: Annotated[bool | None, Doc("Every chunk has the usage so far.")] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A schema that the answer matches."""

    schema: Annotated[msgspec.Raw, Doc("A JSON schema.")] = msgspec.field(default_factory=absent)
    name: Annotated[str | None, Doc("Accepted; not used.")] = None
    strict: Annotated[bool | None, Doc("Accepted: every schema is kept to.")] = None


class Structure(msgspec.Struct, frozen=True):
    """A piece of the answer: `begin`, JSON of this schema, `end`."""

    begin: Annotated[str, Doc("The text before it.")]
    end: Annotated[str, Doc("The text behind it.")]
    schema: Annotated[msgspec.Raw, Doc("The schema; by default any JSON.")] = msgspec.field(
        default_factory=lambda: msgspec.Raw(b"{}")
    )


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of the answer, as OpenAI."""

    type: Annotated[Literal["text", "json_object", "json_schema", "structural_tag"], Doc("What the answer is.")]
    json_schema: Annotated[JsonSchemaFormat | None, Doc("With `json_schema`.")] = None
    format: Annotated[msgspec.Raw, Doc("With `structural_tag`: the form of the answer; see structured_output.md.")] = (
        msgspec.field(default_factory=absent)
    )
    structures: Annotated[list[Structure] | None, Doc("With `structural_tag`, older: structures in free text.")] = None
    triggers: Annotated[list[str] | None, Doc("With `structures`: the texts with which one begins.")] = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """What the answer matches, as vLLM spells it: one of these."""

    json: Annotated[msgspec.Raw, Doc("A JSON schema, as an object or as text.")] = msgspec.field(default_factory=absent)
    json_object: Annotated[bool | None, Doc("Any JSON object.")] = None
    regex: Annotated[str | None, Doc("A regular expression of the whole answer.")] = None
    choice: Annotated[Annotated[list[str], Meta(min_length=1)] | None, Doc("One of these texts.")] = None
    grammar: Annotated[str | None, Doc("A grammar in Lark's form or in GBNF.")] = None
    structural_tag: Annotated[msgspec.Raw, Doc("As `response_format` of type `structural_tag`.")] = msgspec.field(
        default_factory=absent
    )


class GenerationFields(msgspec.Struct, kw_only=True, frozen=True):
    """What chat and completions have in common."""

    model: Model = None
    max_tokens: Annotated[
        MaxTokens | None, Doc("The most tokens to generate for a choice; -1 = the rest of the context.")
    ] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, Doc("Choices for each prompt; by default 1.")] = (
        None
    )
    stream: Annotated[bool | None, Doc("Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Doc("Only with `stream`.")] = None
    stop: Annotated[
        str | list[StopString] | None,
        Doc('Strings that end the answer, at most 1,024; they are not shown. `""` = none.'),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, Doc("Show the stop string that ended the answer.")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Doc("Makes sampling repeatable; by default, and with -1, it is random."),
    ] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, Doc("0 = greedy.")] = None
    top_p: Annotated[Probability | None, Doc("Nucleus sampling; 0 = only the likeliest token.")] = None
    frequency_penalty: Annotated[Penalty | None, Doc("As OpenAI.")] = None
    presence_penalty: Annotated[Penalty | None, Doc("As OpenAI.")] = None
    logit_bias: Annotated[
        Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None, Doc("Bias by token id.")
    ] = None
    # Beyond OpenAI, as vLLM and SGLang spell them.
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Doc("0 and -1 = off.")] = None
    min_p: Annotated[Probability | None, Doc("Least probability, as a share of the likeliest token's; 0 = off.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None, Doc("1 = off.")
    ] = None
    ignore_eos: Annotated[bool | None, Doc("Go on after the end-of-sequence token.")] = None
    min_tokens: Annotated[Count | None, Doc("No stop string or token counts before this many tokens.")] = None
    stop_token_ids: Annotated[
        Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None, Doc("More tokens that end the answer.")
    ] = None
    skip_special_tokens: Annotated[bool | None, Doc("Leave special tokens out of the text; by default true.")] = None
    return_token_ids: Annotated[
        bool | None, Doc("Also the token ids, as vLLM: `prompt_token_ids`, and `token_ids` of each choice or piece.")
    ] = None
    add_special_tokens: AddSpecialTokens = None
    response_format: Annotated[ResponseFormat | None, Doc("The form of the answer.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, Doc("What the answer matches.")] = None
    # The same as other servers, and older vLLM, spell it.
    guided_json: Annotated[msgspec.Raw, Doc("As `structured_outputs.json`.")] = msgspec.field(default_factory=absent)
    guided_regex: Annotated[str | None, Doc("As `structured_outputs.regex`.")] = None
    guided_choice: Annotated[list[str] | None, Doc("As `structured_outputs.choice`.")] = None
    guided_grammar: Annotated[str | None, Doc("As `structured_outputs.grammar`.")] = None
    json_schema: Annotated[msgspec.Raw, Doc("As `structured_outputs.json`.")] = msgspec.field(default_factory=absent)
    regex: Annotated[str | None, Doc("As `structured_outputs.regex`.")] = None
    ebnf: Annotated[str | None, Doc("As `structured_outputs.grammar`.")] = None
    grammar: Annotated[str | None, Doc("As `structured_outputs.grammar`.")] = None
    cache_salt: CacheSalt = None
    cache_hints: CacheHints = msgspec.field(default_factory=absent)
    conversation_id: Conversation = None
    prompt_cache_key: PromptCacheKey = None
    user: Annotated[Any, Doc("The session of the routing strategy `session`, if no conversation is named.")] = None
    priority: QueuePriority = None


class CompletionRequest(GenerationFields, kw_only=True, frozen=True):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        str | list[str | Count | list[Count]],
        Doc("Text, token ids, or a list of prompts of either form."),
    ]
    echo: Annotated[bool | None, Doc("Repeat the prompt before the answer; with `logprobs`, score it too.")] = None
    logprobs: Annotated[
        TopLogprobs | bool | None, Doc("Log probabilities of this many likeliest tokens; `false` = none.")
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Doc("Choices to generate for each prompt; the `n` with the highest mean log probability are returned."),
    ] = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served."""

    type: Annotated[
        str,
        Doc(
            "`text`, or as it is called in the Responses API; `refusal`: what an assistant said instead.",
            enum=["text", "input_text", "output_text", "refusal"],
        ),
    ]
    text: Annotated[str | None, Doc("The text.")] = None
    refusal: Annotated[str | None, Doc("Of `refusal`: the text.")] = None


ROLES = ["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[str, Doc("`system`, `developer` (the same), `user`, `assistant`, `tool`, `function`.", enum=ROLES)]
    content: Annotated[
        str | list[ContentPart] | None, Doc("Parts are joined by line breaks. Only an assistant's may be null.")
    ] = None
    name: Annotated[str | None, Doc("Passed to the chat template.")] = None
    tool_calls: Annotated[
        list[dict[str, Any]] | None, Doc("Passed to the chat template, with JSON arguments decoded.")
    ] = None
    tool_call_id: Annotated[str | None, Doc("Passed to the chat template.")] = None
    function_call: Annotated[
        dict[str, Any] | None, Doc("A call as OpenAI had it before `tool_calls`; a `function` message has its result.")
    ] = None
    reasoning: Annotated[str | None, Doc("Passed to the chat template as `reasoning_content`.")] = None
    reasoning_content: Annotated[str | None, Doc("The same under its other name.")] = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class PredictedPart(msgspec.Struct, frozen=True):
    """One part of a prediction. Of any other type than text it is ignored."""

    type: Annotated[str | None, Doc("`text`.")] = None
    text: Annotated[str | None, Doc("The text.")] = None


class Prediction(msgspec.Struct, frozen=True):
    """What the answer will probably be like, as OpenAI has it. It makes the answer faster where it is right."""

    content: Annotated[str | list[PredictedPart] | None, Doc("Text that much of the answer repeats.")] = None
    type: Annotated[str | None, Doc("`content`.")] = None


class ChatRequest(GenerationFields, kw_only=True, frozen=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Messages, Doc("The conversation.")]
    max_tokens: Annotated[
        MaxTokens | None, Doc("The most tokens to generate for a choice; -1 and 0 = the rest of the context.")
    ] = None
    max_completion_tokens: Annotated[
        MaxTokens | None, Doc("Overrides `max_tokens`; by default the rest of the context.")
    ] = None
    logprobs: Annotated[bool | Literal[0] | None, Doc("Log probabilities of the chosen tokens.")] = None
    top_logprobs: Annotated[TopLogprobs | None, Doc("Also of this many likeliest tokens; needs `logprobs`.")] = None
    chat_template_kwargs: TemplateKwargs = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    reasoning_effort: ReasoningEffort = None
    tools: ToolList = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, Doc("`false`: at most one call.")] = None
    usage_by_role: Annotated[
        bool | None, Doc("Also tell the prompt's tokens by the roles of the messages, and which of them were cached.")
    ] = None
    prediction: Annotated[
        Prediction | None, Doc("Text that the answer is like, such as a file to be changed. The answer stays the same.")
    ] = None
    functions: Annotated[
        list[ToolFunction] | None, Doc("As OpenAI had them before `tools`: the answer has at most one `function_call`.")
    ] = None
    function_call: Annotated[
        Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none"]})] | FunctionName | None,
        Doc("`auto` (the default), `none`, or the function to call."),
    ] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: Model = None
    prompt: Annotated[str | None, Doc("Text. Give this or `messages`.")] = None
    messages: Annotated[Messages | None, Doc("A conversation.")] = None
    add_special_tokens: AddSpecialTokens = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    reasoning_effort: ReasoningEffort = None
    chat_template_kwargs: TemplateKwargs = None
    tools: ToolList = None
    tool_choice: ToolChoice = None
    return_token_strs: Annotated[bool | None, Doc("Also return each token as the vocabulary spells it.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /detokenize`."""

    model: Model = None
    tokens: Annotated[list[Count], Doc("Token ids.")]


class PinFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/pin`: messages, a prompt or a conversation."""

    model: Model = None
    messages: Annotated[Messages | None, Doc("Give exactly one of `messages`, `prompt` and `conversation_id`.")] = None
    prompt: Annotated[str | list[Count] | None, Doc("Text or token ids.")] = None
    conversation_id: Annotated[
        ConversationId | None, Doc("All that this conversation consists of, now and after later requests.")
    ] = None
    ttl_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Doc("Seconds; by default 300, at most the server's `max_pin_ttl_s`.")
    ] = None
    cache_salt: CacheSalt = None
    prefetch: Annotated[
        Literal["none", "host", "pool"] | None,
        Doc("How far up to bring the blocks before a request needs them; by default `host`."),
    ] = None
    add_special_tokens: AddSpecialTokens = None
    add_generation_prompt: Annotated[
        bool | None, Doc("Whether the prefix includes the answer's opening; by default after a user or tool message.")
    ] = None
    continue_final_message: ContinueFinalMessage = None
    reasoning_effort: ReasoningEffort = None
    chat_template_kwargs: TemplateKwargs = None
    tools: ToolList = None
    tool_choice: ToolChoice = None


class UnpinFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/unpin`."""

    id: Annotated[str, Doc("The pin's id.")]


class PrefetchFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/prefetch`."""

    id: Annotated[str, Doc("The pin's id.")]
    to: Annotated[Literal["host", "pool"] | None, Doc("How far up to bring its blocks; by default `pool`.")] = None


# Of some structs exactly one of these fields must be given; null is as if it were left out.
EXACTLY_ONE: dict[str, tuple[str, ...]] = {
    TokenizeRequest.__name__: ("prompt", "messages"),
    PinFields.__name__: ("messages", "prompt", "conversation_id"),
}


def check_exactly_one(fields: msgspec.Struct, param: str) -> None:
    """Raise `RequestError` unless exactly one of those fields is given that `EXACTLY_ONE` names for this struct."""
    names = EXACTLY_ONE[type(fields).__name__]
    given = [name for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"Give exactly one of {', '.join(names)}; got {' and '.join(given) or 'none of them'}.", param=param
        )


def check_cache_salt(salt: str | None) -> None:
    """Raise `RequestError` for a salt that is too long."""
    if salt is not None and len(salt) > MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"'cache_salt' has {len(salt)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed.", param="cache_salt"
        )
