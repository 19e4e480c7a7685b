"""Splits the text of an answer, as it arrives, into content, reasoning and tool calls.

However the text is cut into pieces, the joined events are the same. Text that is not a well-formed call is content.
Only markers and the white space beside them are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from functools import partial

from tandem.text.tool_calls.events import Event, EventWriter, ToolCallArguments, ToolCallBegin, new_call_id
from tandem.text.tool_calls.formats import TOOL_FORMATS, ToolFormat, Tools
from tandem.text.tool_calls.reader import Markers, Reading, TextReader
from tandem.text.tool_calls.reasoning import REASONING_FORMATS, ReasoningFormat, read_reasoning

_NOTHING = Markers()
_HARMONY = TOOL_FORMATS["harmony"]


class AnswerParser:
    """The parser of one answer.

    `tools` are the parameters' schemas of the tools that may be called. Without `tool_format` there are no calls, and
    without `reasoning_format` no reasoning. `prompt_end` is the end of the prompt, which may open the reasoning.
    `hidden` are the markers that are special tokens, which never become content. `add_marks` must give the places of
    those in `tokens`. Calls beyond `max_calls` are dropped.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        *,
        tools: Tools,
        prompt_end: str = "",
        hidden: Collection[str] = (),
        tokens: Collection[str] = (),
        max_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        num_id_chars = 0 if tool_format is None else tool_format.num_id_chars
        self._writer = EventWriter(
            tools,
            new_id or partial(new_call_id, num_id_chars),
            has_calls=tool_format is not None,
            has_reasoning=reasoning_format is not None,
            max_calls=max_calls,
        )
        self._reader = TextReader(self._writer, hidden, tokens)
        self._reading = self._read(tool_format, reasoning_format, tools, prompt_end)
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._writer.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next belongs to reasoning."""
        return self._writer.is_reasoning

    @property
    def num_unread_chars(self) -> int:
        """Characters at the end of the text that may be the beginning of a marker."""
        return self._reader.num_unread_chars

    def add_marks(self, positions: Iterable[int]) -> None:
        """Note where markers that are special tokens begin in the answer's text, in the part that was not fed yet."""
        self._reader.add_marks(positions)

    def feed(self, text: str) -> list[Event]:
        """The events that more text adds."""
        if text:
            self._reader.add(text)
            next(self._reading)
        return self._writer.take()

    def finish(self) -> list[Event]:
        """The events left at the end of the answer. Call it once, after the last `feed`."""
        self._reader.end()
        next(self._reading, None)
        return self._writer.take()

    def _read(
        self, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, tools: Tools, prompt_end: str
    ) -> Reading[None]:
        reader, writer = self._reader, self._writer
        if _HARMONY is tool_format or reasoning is REASONING_FORMATS["harmony"]:
            yield from _HARMONY.read(reader, writer, tools)
            return
        calls = _LastCalls(tool_format, tools) if reasoning is not None and tool_format is not None else None
        if reasoning is not None:
            yield from read_reasoning(
                reader,
                writer,
                reasoning,
                is_open=reasoning.is_open(prompt_end),
                ended_by=tool_format.ends_reasoning if tool_format is not None else "",
                sink=calls.add if calls is not None else None,
            )
        if tool_format is not None:
            yield from tool_format.read(reader, writer, tools)
        yield from reader.content_until(_NOTHING)
        if calls is not None and not writer.num_calls and not writer.has_content:
            calls.write(writer)


class _LastCalls:
    """The calls that a text ends with.

    Some models call a tool within their reasoning and stop. They also draft calls there, and write them again after
    it. So these calls count only if nothing follows them.
    """

    def __init__(self, tool_format: ToolFormat, tools: Tools) -> None:
        self._parser = AnswerParser(tool_format, None, tools=tools)
        self._tools = tools
        self._events: list[ToolCallBegin | ToolCallArguments] = []

    def add(self, text: str) -> None:
        """Add text."""
        self._fold(self._parser.feed(text))

    def write(self, writer: EventWriter) -> None:
        """Pass on the calls if all are complete and for known tools. Call it once, after the last `add`."""
        self._fold(self._parser.finish())
        calls: list[tuple[ToolCallBegin, list[str]]] = []
        for event in self._events:
            if isinstance(event, ToolCallBegin):
                calls.append((event, []))
            else:
                calls[-1][1].append(event.text)
        if all(begin.name in self._tools and _is_json("".join(pieces)) for begin, pieces in calls):
            for begin, pieces in calls:
                writer.begin_call(begin.name, begin.id)
                for piece in pieces:
                    writer.arguments(piece)

    def _fold(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ToolCallBegin | ToolCallArguments):
                self._events.append(event)
            elif event.text.strip():
                self._events.clear()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (RecursionError, ValueError):
        return False
    return True
