"""Calls written as tags: each parameter in a tag of its own, strings without quotes.

    <tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>

Strings are passed on as they come; other values are known only at their end. A closing tag ends a string only if
another parameter or the end of the call follows, because a string may quote one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.reader import SPACE, Markers, Reading, TextReader, markers_of

_NAME = re.compile(r'[^<>"\n]+')
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # chat templates show some values as Python does
DSML = "｜DSML｜"
_ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Tags:
    """How one family of models writes calls: the texts in order. Newlines may come between them."""

    opening: str  # before a call, or before several
    name: str
    name_end: str
    key: str
    key_ends: Mapping[str, bool | None]  # -> whether a string follows; None = as the schema says
    value: str
    value_space: str  # surrounds each value, and is not part of it
    value_end: str
    call_end: str
    closing: str


_BY_SCHEMA = None
QWEN3_CODER_TAGS = Tags(
    "<tool_call>", "<function=", ">", "<parameter=", {">": _BY_SCHEMA}, "", "\n", "</parameter>", "</function>",
    "</tool_call>",
)  # fmt: skip
SEED_OSS_TAGS = Tags(
    "<seed:tool_call>", "<function=", ">", "<parameter=", {">": _BY_SCHEMA}, "", "", "</parameter>", "</function>",
    "</seed:tool_call>",
)  # fmt: skip
MINIMAX_M2_TAGS = Tags(
    "<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', {'">': _BY_SCHEMA}, "", "", "</parameter>",
    "</invoke>", "</minimax:tool_call>",
)  # fmt: skip
GLM45_TAGS = Tags(
    "<tool_call>",
    "",
    "",
    "<arg_key>",
    {"</arg_key>": _BY_SCHEMA},
    "<arg_value>",
    "",
    "</arg_value>",
    "</tool_call>",
    "",
)


def _dsml_tags(section: str) -> Tags:
    key_ends = {'" string="true">': True, '" string="false">': False, '">': _BY_SCHEMA}
    return Tags(
        f"<{DSML}{section}>", f'<{DSML}invoke name="', '">', f'<{DSML}parameter name="', key_ends, "", "",
        f"</{DSML}parameter>", f"</{DSML}invoke>", f"</{DSML}{section}>",
    )  # fmt: skip


DEEPSEEK_V3_2_TAGS = _dsml_tags("function_calls")
DEEPSEEK_V4_TAGS = _dsml_tags("tool_calls")


def read_tagged_calls(
    tags: Tags, reader: TextReader, writer: EventWriter, tools: Mapping[str, Mapping[str, Any]]
) -> Reading[None]:
    """Read an answer with calls in tags."""
    openings = Markers(*filter(None, (tags.opening, tags.name)))
    while marker := (yield from reader.content_until(openings)):
        is_named = marker == tags.name or not tags.name
        while True:
            yield from reader.drop_space()
            reader.hold()
            if not is_named and not (yield from reader.literal(tags.name)):
                break
            yield from _read_call(tags, reader, writer, tools)
            is_named = False
            if not tags.name:
                break
        yield from reader.end_calls(tags.closing)


def _read_call(
    tags: Tags, reader: TextReader, writer: EventWriter, tools: Mapping[str, Mapping[str, Any]]
) -> Reading[None]:
    """Read a call from its name on. It is reported with its first parameter. Text that is not a call stays held."""
    name = (yield from reader.run(_NAME)).strip()
    if not (yield from reader.literal(tags.name_end)) or not writer.is_name(name, known_only=False):
        return
    separator = "{"
    while True:
        yield from reader.drop_space()
        has_parameter = yield from reader.literal(tags.key)
        if not has_parameter and not (yield from _read_end(tags, reader)):
            if separator != "{":
                writer.arguments("}")  # the end is missing, but its parameters are complete
            return
        if separator == "{":
            reader.release()
            writer.begin_call(name)
        if not has_parameter:
            writer.arguments("{}" if separator == "{" else "}")
            return
        if not (yield from _Parameter(tags, reader, writer, separator).read(tools.get(name, {}))):
            return
        separator = ", "


def _read_end(tags: Tags, reader: TextReader) -> Reading[bool]:
    """Read the end of a call; the end of all calls counts too."""
    has_ended = yield from reader.literal(tags.call_end)
    return has_ended or (bool(tags.closing) and (yield from reader.literal(tags.closing)))


class _Parameter:
    """A parameter that is being read."""

    def __init__(self, tags: Tags, reader: TextReader, writer: EventWriter, separator: str) -> None:
        self._tags = tags
        self._reader = reader
        self._writer = writer
        self._separator = separator  # text before it in the JSON object

    def read(self, schema: Mapping[str, Any]) -> Reading[bool]:
        """Read it from its key on, and pass it on as an item of a JSON object. Returns whether it is complete."""
        tags, reader = self._tags, self._reader
        key = (yield from reader.run(_NAME)).strip()
        types: set[str] | None = None
        for key_end, is_string in tags.key_ends.items():
            if (yield from reader.literal(key_end)):
                types = _types_of(schema, key) if is_string is None else {"string"} if is_string else set()
                break
        if types is None:
            return False
        if tags.value:
            yield from reader.drop_space()
        if not (yield from reader.literal(tags.value)):
            return False
        yield from reader.literal(tags.value_space)
        return (yield from (self._read_string(key) if types == {"string"} else self._read_value(key, types)))

    def _read_string(self, key: str) -> Reading[bool]:
        self._writer.arguments(f'{self._separator}{_quoted(key)}: "')
        has_ended = yield from self._read_until_end(self._add_text, may_quote=True)
        if has_ended:
            self._writer.arguments('"')
        return has_ended

    def _read_value(self, key: str, types: set[str]) -> Reading[bool]:
        pieces: list[str] = []
        has_ended = yield from self._read_until_end(pieces.append, may_quote=not types or "string" in types)
        if has_ended:
            self._writer.arguments(f"{self._separator}{_quoted(key)}: {_json_value(''.join(pieces), types)}")
        return has_ended

    def _read_until_end(self, sink: Callable[[str], None], *, may_quote: bool) -> Reading[bool]:
        """Read up to the closing tag, and pass on the text before it. Returns whether there is one."""
        tags, reader = self._tags, self._reader
        markers = markers_of(frozenset((tags.value_end, tags.value_space + tags.value_end)))
        while marker := (yield from reader.until(markers, sink)):
            if not may_quote:
                return True
            space = yield from reader.run(SPACE)
            if (yield from reader.comes_next([one for one in (tags.key, tags.call_end, tags.closing) if one])):
                return True
            sink(marker + space)
        return False

    def _add_text(self, text: str) -> None:
        self._writer.arguments(_quoted(text)[1:-1])


def value_types(schema: object) -> set[str]:
    """The JSON types that a value may have by its schema; empty = not known."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        return {_type_of(choice) for choice in choices}
    found = [value_types(one) for name in _ALTERNATIVES for one in _list(schema.get(name))]
    return set().union(*found) if all(found) else set()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    properties = schema.get("properties")
    return value_types(properties.get(key)) if isinstance(properties, dict) else set()


def _json_value(text: str, types: set[str]) -> str:
    """A value's text as JSON. It becomes a string if it is not JSON, or if only a string fits its types."""
    shown = text if "string" in types else _PYTHON_NAMES.get(text.strip(), text)
    try:
        value = json.loads(shown)
        if "string" in types and not {_type_of(value), "number" if isinstance(value, int) else ""} & types:
            return _quoted(text)
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _quoted(text)


def _type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
