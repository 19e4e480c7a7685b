"""The items of a response's output, made from an answer's events as they come, and the events that announce them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

from msgspec import UNSET

from tandem.frontend.responses import answer_shapes as shapes
from tandem.frontend.responses.items import item_id, opaque_reasoning
from tandem.frontend.responses.tools import ResponseTools, custom_input
from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin


class OutputItems:
    """Builds the items. A message, reasoning or call is open while its text grows; one is open at a time."""

    def __init__(
        self, response_id: str, tools: ResponseTools, numbers: itertools.count[int], *, has_opaque_reasoning: bool
    ) -> None:
        """`numbers` are those of the stream's events.

        `has_opaque_reasoning`: reasoning gets a copy of its text for clients that only send that back.
        """
        self.items: list[shapes.OutputItem] = []
        self._response_id = response_id
        self._tools = tools
        self._numbers = numbers
        self._has_opaque_reasoning = has_opaque_reasoning
        self._pieces: list[str] = []  # pieces of the open item's text
        self._is_open = False

    def add(self, event: Event) -> Iterator[shapes.OutputEvent]:
        """Take in an event; yields the stream's events for it."""
        if isinstance(event, ToolCallBegin):
            yield from self._open(self._call(event))
        elif isinstance(event, ToolCallArguments):
            self._pieces.append(event.text)
            # The input of a custom tool is a string within these arguments, read at their end.
            if not isinstance(self.items[-1], shapes.CustomToolCall):
                yield shapes.ArgumentsDelta(*self._place, event.text, sequence_number=next(self._numbers))
        elif isinstance(event, Reasoning):
            if not (self._is_open and isinstance(self.items[-1], shapes.ReasoningItem)):
                yield from self._open(shapes.ReasoningItem(self._new_id("reasoning"), [], "in_progress", []))
            self._pieces.append(event.text)
            yield shapes.ReasoningTextDelta(*self._place, 0, event.text, sequence_number=next(self._numbers))
        elif isinstance(event, Content):
            if not (self._is_open and isinstance(self.items[-1], shapes.OutputMessage)):
                yield from self._open(shapes.OutputMessage(self._new_id("message"), "assistant", "in_progress", []))
                yield shapes.ContentPartAdded(*self._place, 0, _text_part(""), sequence_number=next(self._numbers))
            self._pieces.append(event.text)
            yield shapes.OutputTextDelta(*self._place, 0, [], event.text, sequence_number=next(self._numbers))

    def close(self, *, is_cut: bool = False) -> Iterator[shapes.OutputEvent]:
        """End the open item: `completed`, or `incomplete` if a limit has cut it. Yields the events that say so."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open = False
        item.status = "incomplete" if is_cut else "completed"
        yield from self._done(item, "".join(self._pieces))
        yield shapes.OutputItemDone(len(self.items) - 1, item, sequence_number=next(self._numbers))

    def _done(self, item: shapes.OutputItem, text: str) -> Iterator[shapes.OutputEvent]:
        """Give an item its text. Yields the events that tell it."""
        at, numbers = self._place, self._numbers
        match item:
            case shapes.FunctionCall():
                item.arguments = text
                yield shapes.ArgumentsDone(*at, text, item.name, sequence_number=next(numbers))
            case shapes.CustomToolCall():
                item.input = custom_input(text)
                yield shapes.CustomInputDelta(*at, item.input, sequence_number=next(numbers))
                yield shapes.CustomInputDone(*at, item.input, sequence_number=next(numbers))
            case shapes.ReasoningItem():
                item.content = [shapes.ReasoningText(text)]
                if self._has_opaque_reasoning:
                    item.encrypted_content = opaque_reasoning(text)
                yield shapes.ReasoningTextDone(*at, 0, text, sequence_number=next(numbers))
            case shapes.OutputMessage():
                item.content = [_text_part(text)]
                yield shapes.OutputTextDone(*at, 0, text, [], sequence_number=next(numbers))
                yield shapes.ContentPartDone(*at, 0, _text_part(text), sequence_number=next(numbers))

    def _open(self, item: shapes.OutputItem) -> Iterator[shapes.OutputEvent]:
        yield from self.close()
        self.items.append(item)
        self._pieces, self._is_open = [], True
        yield shapes.OutputItemAdded(len(self.items) - 1, copy.copy(item), sequence_number=next(self._numbers))

    @property
    def _place(self) -> tuple[str, int]:
        """The open item's id and index."""
        return self.items[-1].id, len(self.items) - 1

    def _new_id(self, kind: str) -> str:
        return item_id(kind, self._response_id, len(self.items))

    def _call(self, event: ToolCallBegin) -> shapes.FunctionCall | shapes.CustomToolCall:
        tool = self._tools.called(event.name)
        if tool.kind == "custom":
            return shapes.CustomToolCall(
                id=self._new_id("custom_tool_call"),
                call_id=event.id,
                name=tool.name,
                namespace=tool.namespace or UNSET,
                input="",
                status="in_progress",
            )
        return shapes.FunctionCall(
            id=self._new_id("function_call"),
            call_id=event.id,
            name=tool.name,
            namespace=tool.namespace or UNSET,
            arguments="",
            status="in_progress",
        )


def _text_part(text: str) -> shapes.OutputText:
    return shapes.OutputText(text, [], [])
