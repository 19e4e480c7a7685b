"""The formats in which models write tool calls, one function each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.router.tool_calls.events import EventWriter
from tandem.router.tool_calls.harmony import HARMONY_MARKERS, read_harmony
from tandem.router.tool_calls.json_calls import read_json_arguments, read_json_calls
from tandem.router.tool_calls.pythonic import read_pythonic_call
from tandem.router.tool_calls.reader import Markers, Reading, TextReader

__all__ = ["TOOL_FORMATS", "ToolFormat", "Tools"]

Tools = Mapping[str, Mapping[str, Any]]  # JSON schemas of the parameters, by the tool's name

DEFAULT_ID_CHARS = 24


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls."""

    name: str
    read: Callable[[TextReader, EventWriter, Tools], Reading[None]]  # an answer, behind its reasoning
    markers: tuple[str, ...]  # strings that the reader must see, also where they are special tokens
    template_marks: tuple[str, ...]  # any of these in a chat template tells that the model writes this format
    num_id_chars: int = DEFAULT_ID_CHARS  # the chat templates of Mistral refuse ids of another length than 9


# -- Hermes, Qwen and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_HERMES_OPENING = Markers(_OPENING)


def _read_hermes(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    while (yield from reader.content_until(_HERMES_OPENING)):
        if (yield from read_json_calls(reader, writer)):
            yield from _end_calls(reader, _CLOSING)
        else:
            reader.reject()


def _end_calls(reader: TextReader, closing: str) -> Reading[None]:
    """Read the marker behind calls, which models may forget, and the white space around it."""
    yield from reader.drop_space()
    yield from reader.literal(closing)
    yield from reader.drop_space()


# -- Llama 3.1 and later: bare JSON, or behind <|python_tag|>; several calls are separated by semicolons

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_TAGS = Markers(_PYTHON_TAG)


def _read_llama3_json(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    yield from reader.skip_space()
    marker = (yield from reader.next_char()) in ("{", "[")  # JSON counts as a call at the beginning only
    while marker or (yield from reader.content_until(_PYTHON_TAGS)):
        marker = False
        while (yield from read_json_calls(reader, writer, known_only=True)):
            yield from reader.drop_space()
            if not (yield from reader.literal(";")):
                break
        reader.reject()


# -- Mistral: [TOOL_CALLS][{...}, ...], or later [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} once for each call

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_OPENING = Markers(_TOOL_CALLS)
_TOOL_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def _read_mistral(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    while (yield from reader.content_until(_MISTRAL_OPENING)):
        yield from reader.skip_space()
        is_json = (yield from reader.next_char()) in ("{", "[")
        if (yield from (read_json_calls if is_json else _read_mistral_call)(reader, writer)):
            yield from reader.drop_space()
        else:
            reader.reject()


def _read_mistral_call(reader: TextReader, writer: EventWriter) -> Reading[bool]:
    name = yield from reader.run(_TOOL_NAME)
    if (yield from reader.literal(_CALL_ID)):
        yield from reader.run(_TOOL_NAME)
    yield from reader.literal(_ARGS)
    yield from reader.skip_space()
    if (yield from reader.next_char()) != "{" or not writer.is_name(name, known_only=False):
        return False
    reader.release()
    writer.begin_call(name)
    return (yield from read_json_arguments(reader, writer.arguments))


# -- pythonic: [f(a=1), g(b="x")] as the whole answer, or between <|python_start|> and <|python_end|>

_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_PYTHON_STARTS = Markers(_PYTHON_START)


def _read_pythonic(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    yield from reader.skip_space()
    is_list = (yield from reader.next_char()) == "["  # a list counts as calls at the beginning only
    while is_list or (yield from reader.content_until(_PYTHON_STARTS)):
        is_list = False
        if (yield from _read_pythonic_calls(reader, writer)):
            yield from _end_calls(reader, _PYTHON_END)
        else:
            reader.reject()


def _read_pythonic_calls(reader: TextReader, writer: EventWriter) -> Reading[bool]:
    """Read a list of calls; whether it is one. What is none stays held."""
    reader.hold()
    yield from reader.skip_space()
    if not (yield from reader.literal("[")):
        return False
    while (yield from read_pythonic_call(reader, writer)):
        yield from reader.skip_space()
        if not (yield from reader.literal(",")):
            return (yield from reader.literal("]"))
    return False


# -- Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>

_QWEN_OPENINGS = Markers(_OPENING, "<function=")
_QWEN_VALUE_ENDS = Markers("</parameter>")
_IN_TAG = re.compile(r"[^<>\n]+")


def _read_qwen3_coder(reader: TextReader, writer: EventWriter, tools: Tools) -> Reading[None]:
    while marker := (yield from reader.content_until(_QWEN_OPENINGS)):
        yield from reader.skip_space()
        has_function = marker != _OPENING or (yield from reader.literal("<function="))
        if has_function and (yield from _read_function(reader, writer, tools)):
            yield from _end_calls(reader, _CLOSING)
        else:
            reader.reject()


def _read_function(reader: TextReader, writer: EventWriter, tools: Tools) -> Reading[bool]:
    """Read from behind `<function=`. The call is told of with its first parameter."""
    name = (yield from reader.run(_IN_TAG)).strip()
    if not (yield from reader.literal(">")) or not writer.is_name(name, known_only=False):
        return False
    separator = "{"
    while True:
        yield from reader.skip_space()
        has_parameter = yield from reader.literal("<parameter=")
        if not has_parameter and not (yield from reader.literal("</function>")):
            return False
        if separator == "{":
            reader.release()
            writer.begin_call(name)
        if not has_parameter:
            writer.arguments("{}" if separator == "{" else "}")
            return True
        parameter = yield from _read_parameter(reader, tools.get(name, {}))
        if parameter is None:
            return False
        writer.arguments(separator + parameter)
        separator = ", "


def _read_parameter(reader: TextReader, schema: Mapping[str, Any]) -> Reading[str | None]:
    """Read from behind `<parameter=`; the parameter as an item of a JSON object."""
    key = (yield from reader.run(_IN_TAG)).strip()
    if not (yield from reader.literal(">")):
        return None
    pieces: list[str] = []
    if not (yield from reader.until(_QWEN_VALUE_ENDS, pieces.append)):
        return None
    value = "".join(pieces).removeprefix("\n").removesuffix("\n")
    return f"{json.dumps(key)}: {_json_value(value, schema, key)}"


def _json_value(text: str, schema: Mapping[str, Any], key: str) -> str:
    """A parameter's text as JSON: a string if its schema says so, or if it is no JSON."""
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(parameter, dict) and parameter.get("type") == "string":
        return json.dumps(text)
    try:
        return json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text)


_ALL = (
    ToolFormat("harmony", read_harmony, HARMONY_MARKERS, ("<|channel|>",)),
    ToolFormat("mistral", _read_mistral, (_TOOL_CALLS, _CALL_ID, _ARGS), (_TOOL_CALLS,), num_id_chars=9),
    ToolFormat("qwen3_coder", _read_qwen3_coder, (_OPENING, _CLOSING), ("<function=",)),
    ToolFormat("hermes", _read_hermes, (_OPENING, _CLOSING), (_OPENING,)),
    ToolFormat("pythonic", _read_pythonic, (_PYTHON_START, _PYTHON_END), (_PYTHON_START, "[func_name1(params_name1=")),
    ToolFormat(
        "llama3_json", _read_llama3_json, (_PYTHON_TAG,), (_PYTHON_TAG, '{"name": function name, "parameters":')
    ),
)
TOOL_FORMATS = {format.name: format for format in _ALL}  # in the order in which templates are looked through
