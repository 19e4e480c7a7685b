"""Turns requests of the Responses API into conversations of chat, and answers back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.wrong_value import shown
from tandem.frontend.openai.other_fields import unsupported
from tandem.frontend.openai.request_limits import check_num_parts
from tandem.frontend.openai.schema import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat
from tandem.frontend.responses.items import read_reasoning
from tandem.frontend.responses.schema import ResponsesRequest, TextFormat
from tandem.frontend.responses.tools import ResponseTools, custom_arguments, shown_name
from tandem.protocol.errors import RequestError, missing_parameter

_UNSERVED = ("background", "conversation", "prompt", "top_logprobs")
_OPAQUE_REASONING, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
# Items of tools that OpenAI's servers run, and what only those servers can read: the model does not see them.
_HOSTED = re.compile(r"[a-z_]+_call(_output)?|mcp_[a-z_]+|tool_search_output|(context_)?compaction|program(_output)?")
_ROLES = ("system", "developer", "user", "assistant")
# Names of fields in checks of the chat request -> names here.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}


def refuse_unserved(request: ResponsesRequest) -> None:
    """Raise `RequestError` for a field that would change the answer and is not served. Others are noted."""
    for name in _UNSERVED:
        if getattr(request, name):
            raise unsupported(name, msgspec.json.encode(getattr(request, name)))
    for one in request.include or ():
        if one == _LOGPROBS:
            raise unsupported("include", msgspec.json.encode(one))
        if one != _OPAQUE_REASONING:
            note_ignored(f"include.{one}")


def wants_opaque_reasoning(request: ResponsesRequest) -> bool:
    """Whether reasoning items get a copy of their text for clients that only send opaque reasoning back."""
    return _OPAQUE_REASONING in (request.include or ())


def chat_request(
    request: ResponsesRequest, messages: Sequence[ChatMessage], tools: ResponseTools, conversation_id: str | None
) -> ChatRequest:
    """The same question as a request of chat. `messages` are the conversation without the instructions."""
    messages = list(messages)
    if request.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    text_format = request.text.format if request.text is not None else None
    return ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=None if text_format is None else _response_format(text_format),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=request.parallel_tool_calls,
        seed=request.seed,
        top_k=request.top_k,
        min_p=request.min_p,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        chat_template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt,
        cache_hints=request.cache_hints,
        conversation_id=request.conversation_id or conversation_id,
        prompt_cache_key=request.prompt_cache_key,
        user=request.user,
        priority=request.priority,
    )


def input_messages(earlier: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """The messages of earlier items and of those of this input. Raises `RequestError` that names the wrong item."""
    if not given:
        raise RequestError("'input' must not be an empty list.", param="input")
    check_num_parts(0, len(earlier) + len(given), "input")
    messages = [_message(item, "previous_response_id") for item in earlier]
    messages += [_message(item, f"input[{i}]") for i, item in enumerate(given)]
    joined = _joined(message for message in messages if message is not None)
    if not joined:
        raise RequestError("'input' has no item that the model could see.", param="input")
    return joined


def turn_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """Where the conversation may begin if its oldest turns are left out: before each user's message but the first."""
    return [i for i, message in enumerate(messages) if message.role == "user"][1:]


def _joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Join items into messages: one turn's reasoning, text and calls are separate items, but one message of chat."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.tool_calls and message.tool_calls:
            last.tool_calls.extend(message.tool_calls)  # in place: a copy for each of many calls would take seconds
        elif last is not None and last.role == message.role == "assistant" and _follows(last, message):
            joined[-1] = msgspec.structs.replace(
                last,
                reasoning=last.reasoning or message.reasoning,
                content=message.content if last.content is None else last.content,
                tool_calls=message.tool_calls,
            )
        else:
            joined.append(message)
    return joined


def _follows(last: ChatMessage, message: ChatMessage) -> bool:
    """Whether a message may be part of the same turn: reasoning comes first, calls come last, and text comes once."""
    if message.tool_calls:
        return True
    return last.tool_calls is None and last.content is None and message.reasoning is None


def _message(item: dict[str, Any], where: str) -> ChatMessage | None:
    """An item as a message; None if the model does not see it."""
    kind = item.get("type")
    match kind:
        case "message" | None:
            role = _string(item, "role", where)
            if role not in _ROLES:
                raise RequestError(
                    f"Unknown role {role[:50]!r}; expected one of {', '.join(_ROLES)}.", param=f"{where}.role"
                )
            return ChatMessage(role=role, content=_text(item.get("content"), f"{where}.content"))
        case "function_call":
            return _call_message(item, _string(item, "arguments", where), where)
        case "custom_tool_call":
            return _call_message(item, custom_arguments(_string(item, "input", where)), where)
        case "function_call_output" | "custom_tool_call_output":
            output = _text(item.get("output"), f"{where}.output")
            return ChatMessage(role="tool", content=output, tool_call_id=_string(item, "call_id", where))
        case "reasoning":
            return _reasoning_message(item, where)
        case "additional_tools":
            return None
        case str() if _HOSTED.fullmatch(kind):
            note_ignored(f"input.{kind}", "the model does not see it")
            return None
        case _:
            raise RequestError(f"Items of type {str(kind)[:50]!r} are not supported.", param=f"{where}.type")


def _call_message(item: dict[str, Any], arguments: str, where: str) -> ChatMessage:
    name = shown_name(str(item.get("namespace") or ""), _string(item, "name", where))
    function = {"name": name, "arguments": arguments}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    return ChatMessage(role="assistant", tool_calls=[call])


def _reasoning_message(item: dict[str, Any], where: str) -> ChatMessage | None:
    """Reasoning as far as it can be read: its text, our own opaque copy of it, or its summary."""
    text = _text(item.get("content") or "", f"{where}.content") or read_reasoning(item.get("encrypted_content"))
    text = text or _text(item.get("summary") or "", f"{where}.summary")
    if not text and item.get("encrypted_content"):
        note_ignored("input.reasoning", "another server has encrypted it")
    return ChatMessage(role="assistant", reasoning=text) if text else None


def _text(content: Any, where: str) -> str:
    """Content as one text. Raises `RequestError` for parts that are not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"Content must be a string or a list of parts, not {shown(msgspec.json.encode(content))}.", param=where
        )
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS or not isinstance(text, str):
            raise RequestError(
                f"Content of type {str(kind)[:50]!r} is not supported: this server reads text, but no images or files.",
                param=f"{where}[{i}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    param = f"{where}.{name}"
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, str):
        got = shown(msgspec.json.encode(value))
        raise RequestError(f"Invalid value for '{param}': expected a string, got {got}.", param=param)
    return value


def _response_format(wanted: TextFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(wanted.schema, wanted.name, wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema if wanted.type == "json_schema" else None)
