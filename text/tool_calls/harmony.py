"""The format of gpt-oss: an answer is a row of messages, each with a header that names its channel and its recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>

The prompt ends with `<|start|>assistant`, so the answer begins within a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.reader import Markers, Reading, TextReader

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
RECIPIENT = "to="

_HEADERS = Markers(START, CHANNEL)
_HEADER_ENDS = Markers(MESSAGE, *ENDS)
_BODY_ENDS = Markers(START, CHANNEL, *ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


def read_harmony(reader: TextReader, writer: EventWriter, _: Mapping[str, Any]) -> Reading[None]:
    """Read messages: of `analysis` as reasoning, to `functions.x` as calls, and the others as content."""
    marker = yield from _read_recipient(reader)
    spoken: set[str] = set()
    while True:
        marker = marker or (yield from reader.content_until(_HEADERS))
        if not marker:
            return
        reader.hold()
        header: list[str] = [marker]
        if (yield from reader.until(_HEADER_ENDS, header.append)) != MESSAGE:
            reader.reject()
            marker = ""
            continue
        reader.release()
        marker = yield from _read_body(reader, writer, "".join(header), spoken)
        if marker in ENDS:
            marker = ""


def _read_recipient(reader: TextReader) -> Reading[str]:
    """Read a recipient before the first channel: the role before it is in the prompt."""
    yield from reader.skip_space()
    if (yield from reader.next_char()) != RECIPIENT[0]:
        return ""
    reader.hold()
    if (yield from reader.literal(RECIPIENT)):
        return RECIPIENT
    reader.reject()
    return ""


def _read_body(reader: TextReader, writer: EventWriter, header: str, spoken: set[str]) -> Reading[str]:
    """Read a message's text. Returns the marker after it. `spoken`: the channels that had messages before."""
    function = _FUNCTION.search(header)
    if function and writer.has_calls and writer.is_name(function[1], known_only=False):
        return (yield from _read_call(reader, writer, function[1]))
    channel = _CHANNEL.search(header)
    is_reasoning = channel is not None and channel[1] == "analysis" and writer.has_reasoning
    sink = writer.reasoning if is_reasoning else writer.content
    name = sink.__name__
    if name in spoken:
        sink("\n")  # between two messages that become one text
    spoken.add(name)
    writer.is_reasoning = is_reasoning
    yield from reader.drop_space()
    marker = yield from reader.text_until(_BODY_ENDS, sink)
    writer.is_reasoning = False
    return marker


def _read_call(reader: TextReader, writer: EventWriter, name: str) -> Reading[str]:
    writer.begin_call(name)
    yield from reader.drop_space()
    is_empty = (yield from reader.next_char()) in ("", "<")
    marker = yield from reader.text_until(_BODY_ENDS, writer.arguments)
    if is_empty:
        writer.arguments("{}")
    return marker
