"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`, alone or in a list.

The arguments are passed on as the model writes them. So only brackets and strings are checked, not whether everything
is valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.reader import Reading, TextReader, ignore

NAME_KEYS = ("name", "function")
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # which models write without being asked

_PLAIN = re.compile(r"[\s\w+.,:-]+", re.ASCII)  # between brackets and strings
_SCALAR = re.compile(r"[\w+.-]+", re.ASCII)
_IN_STRING = re.compile(r'[^"\\]+')
_OPENING = re.compile(r"[{[]+")


def read_json_calls(reader: TextReader, writer: EventWriter, *, known_only: bool = False) -> Reading[bool]:
    """Read a call, or a list of calls. Returns whether they are well-formed. Other text stays held."""
    reader.hold()
    yield from reader.skip_space()
    if not (yield from reader.literal("[")):
        return (yield from _read_call(reader, writer, known_only))
    while True:
        if not (yield from _read_call(reader, writer, known_only)):
            return False
        yield from reader.skip_space()
        if not (yield from reader.literal(",")):
            return (yield from reader.literal("]"))


def read_json_arguments(reader: TextReader, sink: Callable[[str], None]) -> Reading[bool]:
    """Read the JSON object or list that comes next, and pass it on. Returns whether its brackets are balanced."""
    depth = 0
    while True:
        yield from reader.each_of(_PLAIN, sink)
        char = yield from reader.next_char()
        if char == '"':
            if not (yield from _pass_string(reader, sink)):
                return False
        elif char and char in "{[":
            opening = yield from reader.run(_OPENING)
            depth += len(opening)
            sink(opening)
        elif char and char in "}]" and (yield from reader.literal(char)):
            depth -= 1
            sink(char)
        else:
            return False
        if depth <= 0:
            return depth == 0


def _read_call(reader: TextReader, writer: EventWriter, known_only: bool) -> Reading[bool]:
    """Read one call. It is reported once its name is known and its arguments begin, or at its end without arguments."""
    reader.hold()
    yield from reader.skip_space()
    if not (yield from reader.literal("{")):
        return False
    call = _Call(reader, writer, known_only)
    while (yield from call.read_item()):
        yield from reader.skip_space()
        if (yield from reader.literal("}")):
            return call.end()
        if not (yield from reader.literal(",")):
            return False
    return False


class _Call:
    """A call whose keys are being read. They may come in any order."""

    def __init__(self, reader: TextReader, writer: EventWriter, known_only: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._known_only = known_only
        self._name = ""
        self._early_arguments: list[str] = []  # arguments that came before the name
        self._has_begun = False
        self._has_arguments = False

    def read_item(self) -> Reading[bool]:
        """Read one key with its value. Returns whether a call may have it."""
        reader = self._reader
        key = yield from self._read_key()
        if key in NAME_KEYS and not self._name:
            self._name = (yield from _read_string(reader)) or ""
            return self._writer.is_name(self._name, known_only=self._known_only)
        if key in ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._read_arguments())
        if key not in OTHER_KEYS:
            return False
        yield from reader.run(_SCALAR)
        if (yield from reader.next_char()) == '"':
            return (yield from _pass_string(reader, ignore))
        return True

    def end(self) -> bool:
        """The object is closed. Returns whether it is a call."""
        if self._name and not self._has_begun:
            self._begin()
            if not self._early_arguments:
                self._writer.arguments("{}")
            for piece in self._early_arguments:
                self._writer.arguments(piece)
        return self._has_begun

    def _begin(self) -> None:
        self._has_begun = True
        self._reader.release()
        self._writer.begin_call(self._name)

    def _read_key(self) -> Reading[str]:
        yield from self._reader.skip_space()
        key = yield from _read_string(self._reader)
        yield from self._reader.skip_space()
        if not (yield from self._reader.literal(":")):
            return ""
        yield from self._reader.skip_space()
        return key or ""

    def _read_arguments(self) -> Reading[bool]:
        """Read arguments: an object, the text of one as a string, or null."""
        first = yield from self._reader.next_char()
        if first == "{":
            if self._name:
                self._begin()
            sink = self._writer.arguments if self._name else self._early_arguments.append
            return (yield from read_json_arguments(self._reader, sink))
        if first == '"':
            text = yield from _read_string(self._reader)
            if text is None or not text.lstrip().startswith("{"):
                return False
            self._early_arguments.append(text)
            return True
        return (yield from self._reader.literal("null"))


def _read_string(reader: TextReader) -> Reading[str | None]:
    """Read the JSON string that comes next; None if there is none, or if it has characters that are no text."""
    pieces: list[str] = []
    if not (yield from _pass_string(reader, pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces), strict=False)
        text.encode()  # a lone surrogate cannot be sent
    except ValueError:
        return None
    return text


def _pass_string(reader: TextReader, sink: Callable[[str], None]) -> Reading[bool]:
    """Read the JSON string that comes next, and pass it on as it is. Returns whether it is one, with its end."""
    if not (yield from reader.literal('"')):
        return False
    sink('"')
    while True:
        yield from reader.each_of(_IN_STRING, sink)
        if (yield from reader.literal('"')):
            sink('"')
            return True
        if not (yield from reader.literal("\\")):
            return False
        escaped = yield from reader.next_char()
        yield from reader.literal(escaped)
        sink("\\" + escaped)
