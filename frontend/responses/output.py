"""The items of a response's output, made from an answer's events as they come, and the events that announce them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.frontend.responses.items import item_id, opaque_reasoning
from tandem.frontend.responses.tools import CalledTool, ResponseTools, custom_input
from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

__all__ = ["OutputItems"]

Json = dict[str, Any]


class OutputItems:
    """Builds the items. A message, reasoning or call is open while its text grows; one is open at a time."""

    def __init__(self, response_id: str, tools: ResponseTools, *, has_opaque_reasoning: bool) -> None:
        """`has_opaque_reasoning`: reasoning gets a copy of its text for clients that only send that back."""
        self.items: list[Json] = []
        self._response_id = response_id
        self._tools = tools
        self._has_opaque_reasoning = has_opaque_reasoning
        self._pieces: list[str] = []  # pieces of the open item's text
        self._is_open = False

    def add(self, event: Event) -> Iterator[Json]:
        """Take in an event; yields the stream's events for it, without their sequence numbers."""
        if isinstance(event, ToolCallBegin):
            yield from self._open(_call(event, self._tools.called(event.name)))
        elif isinstance(event, ToolCallArguments):
            if self.items[-1]["type"] == "custom_tool_call":
                self._pieces.append(event.text)  # its input is a string within these arguments, read at their end
            else:
                yield from self._grow("response.function_call_arguments.delta", event.text)
        elif isinstance(event, Reasoning):
            yield from self._in("reasoning")
            yield from self._grow("response.reasoning_text.delta", event.text, content_index=0)
        elif isinstance(event, Content):
            yield from self._in("message")
            yield from self._grow("response.output_text.delta", event.text, content_index=0, logprobs=[])

    def close(self, status: str) -> Iterator[Json]:
        """End the open item with this status, `completed` or `incomplete`. Yields the events that say so."""
        if not self._is_open:
            return
        item, text, at = self.items[-1], "".join(self._pieces), self._place
        self._is_open = False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield {"type": "response.function_call_arguments.done", **at, "arguments": text, "name": item["name"]}
        elif item["type"] == "custom_tool_call":
            item["input"] = text = custom_input(text)
            yield {"type": "response.custom_tool_call_input.delta", **at, "delta": text}
            yield {"type": "response.custom_tool_call_input.done", **at, "input": text}
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            if self._has_opaque_reasoning:
                item["encrypted_content"] = opaque_reasoning(text)
            yield {"type": "response.reasoning_text.done", **at, "content_index": 0, "text": text}
        else:
            item["content"] = [_text_part(text)]
            yield {"type": "response.output_text.done", **at, "content_index": 0, "text": text, "logprobs": []}
            part = {"content_index": 0, "part": _text_part(text)}
            yield {"type": "response.content_part.done", **at, **part}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}

    @property
    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _in(self, kind: str) -> Iterator[Json]:
        """Open an item of this kind, unless one is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self._open(_message() if kind == "message" else _reasoning())
        if kind == "message":
            part = {"content_index": 0, "part": _text_part("")}
            yield {"type": "response.content_part.added", **self._place, **part}

    def _open(self, item: Json) -> Iterator[Json]:
        yield from self.close("completed")
        item = {"id": item_id(item["type"], self._response_id, len(self.items)), **item}
        self.items.append(item)
        self._pieces, self._is_open = [], True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _grow(self, kind: str, text: str, **more: Any) -> Iterator[Json]:
        self._pieces.append(text)
        yield {"type": kind, **self._place, **more, "delta": text}


def _message() -> Json:
    return {"type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> Json:
    return {"type": "reasoning", "summary": [], "status": "in_progress", "content": []}


def _call(event: ToolCallBegin, tool: CalledTool) -> Json:
    is_custom = tool.kind == "custom"
    return {
        "type": "custom_tool_call" if is_custom else "function_call",
        "call_id": event.id,
        "name": tool.name,
        **({"namespace": tool.namespace} if tool.namespace else {}),
        "input" if is_custom else "arguments": "",
        "status": "in_progress",
    }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
