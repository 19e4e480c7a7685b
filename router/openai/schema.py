"""Request bodies, and the errors a client gets for a body that does not fit them.

Types are strict and ranges are checked while decoding. Every optional field may be null. Fields not named here are
tolerated: OpenAI adds them all the time. Fields that would change the answer but are not served are named in
`UNSERVED`, because dropping them silently would answer another question than the one asked.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tandem.protocol.errors import RequestError
from tandem.protocol.sampling import (
    MAX_COUNT,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "GenerationFields",
    "PinFields",
    "PrefetchFields",
    "StreamOptions",
    "TokenizeRequest",
    "UnpinFields",
    "check_cache_salt",
    "decode_body",
    "refuse_unserved",
]

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_CONVERSATION_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

ConversationId = Annotated[str, Meta(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)]

MAX_NOTHING_BYTES = 256  # of a value that asks for nothing
LARGE_BODY_BYTES = 64 * 1024  # whose objects are so many that the collector would look at them again and again

R = TypeVar("R", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells about usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True, frozen=True):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | list[StopString] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    # Beyond OpenAI, as vLLM and SGLang spell them.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    conversation_id: ConversationId | None = None  # as the header x-tandem-conversation
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower is more urgent


class CompletionRequest(GenerationFields, kw_only=True, frozen=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | Count | list[Count]]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, kw_only=True, frozen=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Count]


class PinFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/pin`: messages, a prompt or a conversation."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    prompt: str | list[Count] | None = None
    conversation_id: ConversationId | None = None
    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    cache_salt: str | None = None
    prefetch: Literal["none", "host", "pool"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


class UnpinFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/unpin`."""

    id: str


class PrefetchFields(msgspec.Struct, kw_only=True, frozen=True):
    """Body of `POST /v1/cache/prefetch`."""

    id: str
    to: Literal["host", "pool"] | None = None


# Field -> values that ask for nothing (null always does).
UNSERVED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


_ABSENT = msgspec.Raw(b"null")
_Unserved = msgspec.defstruct("_Unserved", [(name, msgspec.Raw, _ABSENT) for name in UNSERVED])


def decode_body(body: bytes, request_type: type[R]) -> R:
    """Body as a request. Raises `RequestError` naming the field that is wrong."""
    with _decoding_errors(), _collector_paused(body):
        return msgspec.json.decode(body, type=request_type)


def refuse_unserved(body: bytes, request: GenerationFields | PinFields) -> None:
    """Raise `RequestError` if the body sets a field that would change the answer and is not served, or a huge salt."""
    check_cache_salt(request.cache_salt)
    with _decoding_errors(), _collector_paused(body):
        fields = msgspec.json.decode(body, type=_Unserved)
        for name, raw in zip(UNSERVED, msgspec.structs.astuple(fields), strict=True):
            if raw is _ABSENT or _asks_for_nothing(name, raw):
                continue
            if name == "tools" and isinstance(request, ChatRequest | PinFields) and request.tool_choice == "none":
                continue  # the model may not call them, so the answer is plain text
            raise RequestError(f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter")


def check_cache_salt(salt: str | None) -> None:
    """Raise `RequestError` for a salt that is too long."""
    if salt is not None and len(salt) > MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"'cache_salt' has {len(salt)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed.", param="cache_salt"
        )


def _asks_for_nothing(name: str, raw: msgspec.Raw) -> bool:
    return len(raw) <= MAX_NOTHING_BYTES and msgspec.json.decode(raw) in (None, *UNSERVED[name])


@contextmanager
def _collector_paused(body: bytes) -> Iterator[None]:
    """Have no garbage collected meanwhile: among a million lists that are being made there is none to find."""
    if len(body) < LARGE_BODY_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _decoding_errors() -> Iterator[None]:
    """Turn msgspec's errors into ours, with the field as `param`."""
    try:
        yield
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc)) from exc
    except RecursionError as exc:
        raise RequestError("The request body is nested too deeply.") from exc
    except UnicodeDecodeError as exc:
        raise RequestError("The request body is not valid UTF-8.") from exc
    except msgspec.DecodeError as exc:
        raise RequestError(f"The request body is not valid JSON: {exc}") from exc


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


def _field_error(message: str) -> RequestError:
    """msgspec's `Expected X, got Y - at $.path` in OpenAI's words."""
    path = _PATH.search(message)
    param = path.group(1).removesuffix("[...]") if path else None
    problem = (message[: path.start()] if path else message).replace(" | null", "").replace("`", "'")
    missing = _MISSING.match(message)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    where = f"Invalid value for '{param}'" if param else "Invalid request body"
    return RequestError(f"{where}: {problem[0].lower()}{problem[1:]}.", param=param)
