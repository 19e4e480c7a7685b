"""`functions` and `function_call`, which OpenAI's API had before tools.

A request with them becomes one with tools, and so do the calls and results in its messages. The answer has at most one
call, in the shape of that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET

from tandem.frontend.openai.answer_shapes import AssistantMessage, MessageDelta
from tandem.frontend.openai.schema import ChatMessage, ChatRequest
from tandem.frontend.openai.tool_fields import FunctionName, NamedToolChoice, Tool
from tandem.protocol.errors import RequestError

Part = TypeVar("Part", bound=AssistantMessage | MessageDelta)


def with_tools(fields: ChatRequest) -> ChatRequest:
    """The request with its functions as tools. Raises `RequestError` for one that has both."""
    if not fields.functions and fields.function_call in (None, "none", "auto"):
        return fields
    if fields.tools:
        raise RequestError("'functions' and 'tools' exclude each other; send only 'tools'.", param="functions")
    choice = fields.function_call
    return msgspec.structs.replace(
        fields,
        tools=[Tool("function", function) for function in fields.functions or ()],
        tool_choice=NamedToolChoice("function", choice) if isinstance(choice, FunctionName) else choice,
        parallel_tool_calls=False,
    )


def function_field_names(fields: ChatRequest) -> Mapping[str, str]:
    """Names of fields in checks of tools -> the fields of functions, if the request has those."""
    if not fields.functions and fields.function_call is None:
        return {}
    names = {f"tools[{i}].function.name": f"functions[{i}].name" for i in range(len(fields.functions or ()))}
    return names | {"tools": "functions", "tool_choice": "function_call"}


def with_tool_calls(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages with calls of functions and their results as those of tools."""
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    changed: list[ChatMessage] = []
    call_id = ""
    for i, message in enumerate(messages):
        if message.function_call is not None:
            call_id = f"call_{i}"
            call = {"id": call_id, "type": "function", "function": message.function_call}
            calls = [*(message.tool_calls or ()), call]
            message = msgspec.structs.replace(message, tool_calls=calls, function_call=None)
        elif message.role == "function":
            message = msgspec.structs.replace(message, role="tool", tool_call_id=call_id)
        changed.append(message)
    return changed


def with_function_call(part: Part) -> Part:
    """A message or a piece of one with its call of a tool as that of a function."""
    if part.tool_calls is UNSET:
        return part
    return msgspec.structs.replace(part, tool_calls=UNSET, function_call=part.tool_calls[0].function)
