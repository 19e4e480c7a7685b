"""Turns requests of the Responses API into conversations of chat, and answers back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.protocol.errors import RequestError
from tandem.router.http.wrong_value import shown
from tandem.router.openai.other_fields import unsupported
from tandem.router.openai.request_limits import check_num_parts
from tandem.router.openai.schema import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat
from tandem.router.openai.tool_fields import FunctionName, NamedToolChoice, Tool, ToolFunction
from tandem.router.responses.schema import FunctionTool, NamedFunction, ResponsesRequest, TextFormat

__all__ = ["FIELD_NAMES", "chat_request", "input_messages", "output_messages", "refuse_unserved", "stored_messages"]

_UNSERVED = ("background", "conversation", "prompt", "include", "max_tool_calls", "top_logprobs")
_ROLES = ("system", "developer", "user", "assistant")
# Names of fields in checks of the chat request -> names here.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}


def refuse_unserved(request: ResponsesRequest) -> None:
    """Raise `RequestError` for a field that would change the answer and is not served."""
    for name in _UNSERVED:
        if getattr(request, name):
            raise unsupported(name, msgspec.json.encode(getattr(request, name)))


def chat_request(request: ResponsesRequest, messages: list[ChatMessage], conversation_id: str | None) -> ChatRequest:
    """The same question as a request of chat. `messages` are the conversation without the instructions."""
    if request.instructions is not None:
        messages = [ChatMessage(role="system", content=request.instructions), *messages]
    choice = request.tool_choice
    text_format = request.text.format if request.text is not None else None
    return ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=None if text_format is None else _response_format(text_format),
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=NamedToolChoice("function", FunctionName(choice.name))
        if isinstance(choice, NamedFunction)
        else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        seed=request.seed,
        top_k=request.top_k,
        min_p=request.min_p,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        chat_template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt,
        conversation_id=request.conversation_id or conversation_id,
        priority=request.priority,
    )


def input_messages(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """The messages of an input. Raises `RequestError` that names the wrong item."""
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    if not given:
        raise RequestError("'input' must not be an empty list.", param="input")
    check_num_parts(0, len(given), "input")
    return _joined(_message(item, f"input[{i}]") for i, item in enumerate(given))


def output_messages(output: Iterable[dict[str, Any]]) -> list[ChatMessage]:
    """The messages of an answer's items."""
    return _joined(_message(item, "output") for item in output)


def stored_messages(messages: bytes) -> list[ChatMessage]:
    """The messages of a stored response."""
    return msgspec.json.decode(messages, type=list[ChatMessage])


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


def _message(item: dict[str, Any], where: str) -> ChatMessage:
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = _string(item, "role", where)
            if role not in _ROLES:
                raise RequestError(
                    f"Unknown role {role[:50]!r}; expected one of {', '.join(_ROLES)}.", param=f"{where}.role"
                )
            return ChatMessage(role=role, content=_text(item.get("content"), f"{where}.content"))
        case "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            return ChatMessage(role="assistant", tool_calls=[call])
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            return ChatMessage(role="tool", content=output, tool_call_id=_string(item, "call_id", where))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or ""
            return ChatMessage(role="assistant", reasoning=_text(parts, f"{where}.content"))
        case _:
            raise RequestError(f"Items of type {str(kind)[:50]!r} are not supported.", param=f"{where}.type")


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
        if not isinstance(kind, str) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RequestError(f"Content of type {str(kind)[:50]!r} is not supported.", param=f"{where}[{i}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    param = f"{where}.{name}"
    if value is None:
        raise RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if not isinstance(value, str):
        got = shown(msgspec.json.encode(value))
        raise RequestError(f"Invalid value for '{param}': expected a string, got {got}.", param=param)
    return value


def _tool(tool: FunctionTool) -> Tool:
    return Tool("function", ToolFunction(tool.name, tool.description, tool.parameters, tool.strict))


def _response_format(wanted: TextFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(wanted.schema, wanted.name, wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema if wanted.type == "json_schema" else None)
