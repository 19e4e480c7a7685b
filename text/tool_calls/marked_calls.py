"""Calls written as a name and JSON between marks, most of which are tokens of the vocabulary.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.json_calls import read_json_arguments
from tandem.text.tool_calls.reader import Markers, Reading, TextReader

_HEADER = re.compile(r"[\w.:/-]+", re.ASCII)
_KIMI_ID = re.compile(r"(?P<function>functions\.)?(?P<name>.+?)(?P<number>:\d+)?", re.ASCII)

Header = tuple[str, str]  # a call's name and, if the model wrote one, its id


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one format, in the order in which they stand."""

    opening: str  # before all calls
    call: str  # before each call
    separator: str  # after the name, or before it
    call_end: str
    closing: str
    read_header: Callable[[TextReader], Reading[Header]]  # reads from `call` up to the arguments
    fence: str = ""  # after the arguments


def read_marked_calls(marks: Marks, reader: TextReader, writer: EventWriter) -> Reading[None]:
    """Read an answer with calls between marks."""
    openings = Markers(marks.opening, marks.call)
    while marker := (yield from reader.content_until(openings)):
        has_call = marker == marks.call
        while True:
            yield from reader.drop_space()
            reader.hold()
            if not has_call and not (yield from reader.literal(marks.call)):
                break
            has_call = False
            if not (yield from read_marked_call(marks.read_header, reader, writer)):
                break
            for end in (marks.fence, marks.call_end):
                yield from reader.drop_space()
                yield from reader.literal(end)
        yield from reader.end_calls(marks.closing)


def read_marked_call(
    read_header: Callable[[TextReader], Reading[Header]], reader: TextReader, writer: EventWriter
) -> Reading[bool]:
    """Read a call from its name on. Returns whether it is one. Other text stays held."""
    name, id = yield from read_header(reader)
    yield from reader.skip_space()
    if (yield from reader.next_char()) != "{" or not writer.is_name(name, known_only=False):
        return False
    reader.release()
    writer.begin_call(name, id)
    yield from read_json_arguments(reader, writer.arguments)
    return True


def _read_kimi_header(reader: TextReader) -> Reading[Header]:
    """`functions.name:0`, which is the call's id."""
    text = yield from reader.run(_HEADER)
    yield from reader.literal(KIMI_K2_MARKS.separator)
    match = _KIMI_ID.fullmatch(text)
    if match is None:
        return "", ""
    return match["name"], text if match["function"] and match["number"] else ""


def _read_deepseek_header(reader: TextReader) -> Reading[Header]:
    """A name before the separator (V3.1), or `function` before it and the name after it (V3, R1)."""
    name = yield from reader.run(_HEADER)
    yield from reader.literal(DEEPSEEK_V3_MARKS.separator)
    yield from reader.skip_space()
    if (yield from reader.next_char()) != "{":
        name = yield from reader.run(_HEADER)
        yield from reader.skip_space()
        yield from reader.literal("```json")
    return name, ""


KIMI_K2_MARKS = Marks(
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", _read_kimi_header,
)  # fmt: skip
DEEPSEEK_V3_MARKS = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    _read_deepseek_header, "```",
)  # fmt: skip
