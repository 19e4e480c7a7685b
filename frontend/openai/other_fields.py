"""Fields of a body that its struct does not have: not served, or ignored.

Clients send many fields that a server need not know, and OpenAI adds new ones all the time, so they are ignored and
named in the response header `x-tandem-ignored`; a misspelt name is named with the field that was meant. Only the fields
of `UNSERVED` are refused: the answer without them would be to another question than the one asked.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.wrong_value import members, shown
from tandem.frontend.openai.schema import ABSENT, ChatMessage, ChatRequest, GenerationFields, PinFields, TokenizeRequest
from tandem.protocol.errors import RequestError

MAX_NEUTRAL_BYTES = 256  # in a value that asks for nothing
# Similarity of two names (difflib's ratio) from which one is taken for a misspelling of the other. `max_token` and
# `max_tokens` have 0.95, `temprature` and `temperature` 0.95, `max_new_tokens` (another API's) and `max_tokens` 0.83.
MIN_SIMILARITY = 0.85
MIN_NAME_CHARS, MAX_NAME_CHARS = 3, 64
MAX_UNKNOWN_NAMES = 32  # in one body; comparing a name takes 0.2 ms
MAX_COLONS = 4096  # in JSON whose names are listed, so at most that many names
_EMPTY = (b"null", b'""', b"[]", b"{}", b"false")  # values of a message's field that ask for nothing

# For chat, completions and pins: field -> values that ask for nothing (null always does).
UNSERVED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}

# Fields of clients and of other servers that are ignored. Listing one here saves time, and keeps it from being taken
# for a misspelling of another field.
_PASSED_OVER = """
access_programs cache_control cached_content context_length_exceeded_behavior conversation deferred diagnostics
documents ec_transfer_params enable_response_messages extra_body extra_headers image include_obfuscation
include_reasoning inference_geo inputs instruction keep_alive kv_transfer_params length_penalty logprob_token_ids
max_tool_calls media_io_kwargs metadata min_completion_tokens min_output_tokens mm_payload mm_processor_kwargs mode
models moderation options prediction previous_input_messages prompt_cache_key prompt_cache_options
prompt_cache_retention prompt_mode provider reasoning reasoning_effort reasoning_format repeat_penalty
repetition_detection request_id return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens
return_tokens_as_token_ids routed_experts_prompt_start safe_prompt safety_identifier search_parameters service_tier
session_id spaces_between_special_tokens speed store stream_interval thinking_token_budget timeout top_a
top_logprobs_num transforms truncation_side user_profile_id verbosity vllm_xargs watermarking web_search_options
workspace_id
"""
PASSED_OVER = frozenset(_PASSED_OVER.split())


class _Names(NamedTuple):
    """The names of a struct's fields, those that are not served included."""

    known: frozenset[str]
    raw: type[Any]  # a struct with these and those passed over, each as undecoded JSON; it passes over all others
    strict: type[Any]  # the same; refuses all others
    passed_over: tuple[str, ...]
    parts: dict[str, type[msgspec.Struct]]  # fields that are structs themselves
    messages: Any  # type of a list of messages with these fields alone; None if there are no messages


def check_other_fields(body: bytes, request_type: type[msgspec.Struct]) -> None:
    """Note the fields that are ignored. Raises `RequestError` for one that is not served.

    Wrong JSON passes: `decode_body` reports it.
    """
    try:
        fields = _note_names(body, request_type, "")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if issubclass(request_type, GenerationFields | PinFields):
        _refuse_unserved(fields, request_type)


def unsupported(name: str, value: bytes, accepted: Sequence[Any] = ()) -> RequestError:
    """The error for a field that is not served. `value` is JSON, and so is what it may be instead."""
    instead = "".join(f", or send {msgspec.json.encode(one).decode()}" for one in accepted)
    return RequestError(
        f"'{name}' is not supported by this server: got {shown(value)}; leave it out{instead}.",
        param=name,
        code="unsupported_parameter",
    )


# -- names


def _note_names(body: bytes | msgspec.Raw, struct: type[msgspec.Struct], where: str) -> Any:
    """The fields as undecoded JSON, after noting those that are ignored, also in a field's own fields."""
    names = _names_of(struct)
    try:
        fields = msgspec.json.decode(body, type=names.strict)
    except msgspec.ValidationError as exc:
        for name in _unknown_names(bytes(body), str(exc), names):
            _note_unknown(name, names.known, where)
        fields = msgspec.json.decode(body, type=names.raw)
    for name in names.passed_over:
        if (raw := getattr(fields, name)) is not ABSENT and not _is_null(raw):
            note_ignored(where + name)
    for name, part in names.parts.items():
        raw = getattr(fields, name)
        if raw is not ABSENT and bytes(memoryview(raw)[:1]) == b"{":
            _note_names(raw, part, f"{where}{name}.")
    if names.messages is not None and bytes(memoryview(fields.messages)[:1]) == b"[":
        _note_message_names(fields.messages, names.messages)
    return fields


def _note_message_names(messages: msgspec.Raw, strict: Any) -> None:
    """Note the fields of messages that have no effect, such as the `images` of another API, unless they are empty."""
    try:
        msgspec.json.decode(messages, type=strict)
        return
    except msgspec.ValidationError as exc:
        first = re.findall(r"^Object contains unknown field `(.{1,64}?)` - at `\$", str(exc))
    if bytes(messages).count(b":") > MAX_COLONS:
        unknown = first
    else:
        given = msgspec.json.decode(messages, type=list[dict[str, msgspec.Raw]])
        names = (name for message in given for name, raw in message.items() if bytes(raw) not in _EMPTY)
        unknown = [name for name in dict.fromkeys(names) if name not in ChatMessage.__struct_fields__]
    for name in unknown[:MAX_UNKNOWN_NAMES]:
        note_ignored(f"messages.{name}")


def _unknown_names(body: bytes, message: str, names: _Names) -> Iterable[str]:
    """Names that are in no list; only some of many. `message` is msgspec's, which has the first one."""
    if body.count(b":") > MAX_COLONS:
        return re.findall(r"^Object contains unknown field `(.{1,64})`$", message)
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = [name for name in given if name not in names.known and name not in PASSED_OVER]
    return unknown[:MAX_UNKNOWN_NAMES]


def _note_unknown(name: str, known: frozenset[str], where: str) -> None:
    is_comparable = MIN_NAME_CHARS <= len(name) <= MAX_NAME_CHARS
    meant = _meant(name, known) if is_comparable else None
    note_ignored(where + name, f"did you mean {where}{meant}?" if meant else "")


@functools.lru_cache(maxsize=4096)
def _meant(name: str, known: frozenset[str]) -> str | None:
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=MIN_SIMILARITY)
    return close[0] if close else None


@functools.cache
def _names_of(struct: type[msgspec.Struct]) -> _Names:
    served = struct.__struct_fields__
    is_generation = issubclass(struct, GenerationFields | PinFields)
    known = frozenset([*served, *(UNSERVED if is_generation else ())])
    raw = msgspec.defstruct("Raw", [(name, msgspec.Raw, ABSENT) for name in sorted(known | PASSED_OVER)])
    strict = msgspec.defstruct("Strict", [], bases=(raw,), forbid_unknown_fields=True)
    message = [(name, msgspec.Raw, ABSENT) for name in ChatMessage.__struct_fields__]
    is_chat = struct in (ChatRequest, TokenizeRequest, PinFields)
    messages = (
        GenericAlias(list, msgspec.defstruct("Message", message, forbid_unknown_fields=True)) if is_chat else None
    )
    return _Names(known, raw, strict, tuple(sorted(PASSED_OVER - known)), dict(_parts(struct)), messages)


def _parts(struct: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType), info
    for field in info.fields:
        for one in members(field.type):
            if isinstance(one, inspect.StructType):
                yield field.name, one.cls


# -- fields that are not served


def _refuse_unserved(fields: Any, request_type: type[msgspec.Struct]) -> None:
    for name, accepted in UNSERVED.items():
        raw = getattr(fields, name)
        if raw is ABSENT or name in request_type.__struct_fields__:
            continue
        if not _is_neutral(name, raw):
            raise unsupported(name, bytes(raw), accepted)
        if not _is_null(raw):
            note_ignored(name)


def _is_null(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:5]) == b"null"


def _is_neutral(name: str, raw: msgspec.Raw) -> bool:
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError:  # a number that no float can hold is not a neutral value
        return False
    # In Python 0 is False, but in JSON it is not.
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in (None, *UNSERVED[name]))
