"""Content, reasoning and tool calls as parts of a chat message, whole and streamed.

vLLM calls the reasoning `reasoning`, and called it `reasoning_content` before, as DeepSeek and SGLang do; clients read
one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

__all__ = ["message", "message_delta"]


def message_delta(event: Event) -> dict[str, Any]:
    """One event as the delta of a streamed message."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallBegin(index):
            return {"tool_calls": [{"index": index, **_call(event, "")}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(events: Iterable[Event]) -> dict[str, Any]:
    """The events of an answer as a whole message. Content is null if there are calls and nothing else."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallBegin, list[str]]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallBegin():
                calls.append((event, []))
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    parts: dict[str, Any] = {"role": "assistant", "content": "".join(content) if content or not calls else None}
    if reasoning:
        parts["reasoning_content"] = parts["reasoning"] = "".join(reasoning)
    if calls:
        parts["tool_calls"] = [_call(begin, "".join(pieces)) for begin, pieces in calls]
    return parts


def _call(begin: ToolCallBegin, arguments: str) -> dict[str, Any]:
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}
