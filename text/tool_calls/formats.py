"""The formats in which models write tool calls, one function each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.harmony import HARMONY_MARKERS, read_harmony
from tandem.text.tool_calls.json_calls import read_json_calls
from tandem.text.tool_calls.marked_calls import (
    DEEPSEEK_V3_MARKS,
    KIMI_K2_MARKS,
    Marks,
    read_marked_call,
    read_marked_calls,
)
from tandem.text.tool_calls.pythonic import read_pythonic_call
from tandem.text.tool_calls.reader import Markers, Reading, TextReader
from tandem.text.tool_calls.tagged_calls import (
    DEEPSEEK_V3_2_TAGS,
    DEEPSEEK_V4_TAGS,
    DSML,
    GLM45_TAGS,
    MINIMAX_M2_TAGS,
    QWEN3_CODER_TAGS,
    SEED_OSS_TAGS,
    Tags,
    read_tagged_calls,
)

Tools = Mapping[str, Mapping[str, Any]]  # JSON schemas of the parameters, by the tool's name

DEFAULT_ID_CHARS = 24


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls."""

    name: str
    read: Callable[[TextReader, EventWriter, Tools], Reading[None]]  # reads an answer after its reasoning
    markers: tuple[str, ...]  # strings that the reader must see even if they are special tokens
    template_mark: str  # pattern; if a chat template contains it, the model writes this format
    ends_reasoning: str = ""  # a marker that may stand in place of the one that closes the reasoning
    call_markers: tuple[str, ...] = ()  # those that only calls have; empty = all
    num_id_chars: int = DEFAULT_ID_CHARS  # the chat templates of Mistral refuse ids of another length than 9


# -- Hermes, Qwen and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_HERMES_OPENING = Markers(_OPENING)


def _read_hermes(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    while (yield from reader.content_until(_HERMES_OPENING)):
        yield from read_json_calls(reader, writer)
        yield from reader.end_calls(_CLOSING)


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
        if (yield from reader.next_char()) in ("{", "["):
            yield from read_json_calls(reader, writer)
        else:
            yield from read_marked_call(_read_mistral_header, reader, writer)
        yield from reader.end_calls()


def _read_mistral_header(reader: TextReader) -> Reading[tuple[str, str]]:
    name = yield from reader.run(_TOOL_NAME)
    if (yield from reader.literal(_CALL_ID)):
        yield from reader.run(_TOOL_NAME)
    yield from reader.literal(_ARGS)
    return name, ""


# -- pythonic: [f(a=1), g(b="x")] as the whole answer, or between <|python_start|> and <|python_end|>

_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_PYTHON_STARTS = Markers(_PYTHON_START)


def _read_pythonic(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
    yield from reader.skip_space()
    is_list = (yield from reader.next_char()) == "["  # a list counts as calls at the beginning only
    while is_list or (yield from reader.content_until(_PYTHON_STARTS)):
        is_list = False
        yield from _read_pythonic_calls(reader, writer)
        yield from reader.end_calls(_PYTHON_END)


def _read_pythonic_calls(reader: TextReader, writer: EventWriter) -> Reading[None]:
    """Read a list of calls. Text that is not a list of calls stays held."""
    reader.hold()
    yield from reader.skip_space()
    if not (yield from reader.literal("[")):
        return
    while (yield from read_pythonic_call(reader, writer)):
        yield from reader.drop_space()
        if not (yield from reader.literal(",")):
            yield from reader.literal("]")
            return


# -- formats that are all data


def _tagged(name: str, tags: Tags, template_mark: str, *tokens: str) -> ToolFormat:
    """A format in tags. `tokens` are marks within its texts that vocabularies have as tokens."""
    texts = (tags.opening, tags.key, *tags.key_ends, tags.value, tags.value_end, tags.call_end, tags.closing)
    markers = tokens or tuple(dict.fromkeys(text for text in texts if text.startswith("<") and text.endswith(">")))
    return ToolFormat(name, partial(read_tagged_calls, tags), markers, template_mark)


def _marked(name: str, marks: Marks, template_mark: str, *, ends_reasoning: str = "") -> ToolFormat:
    def read(reader: TextReader, writer: EventWriter, _: Tools) -> Reading[None]:
        yield from read_marked_calls(marks, reader, writer)

    markers = (marks.opening, marks.call, marks.separator, marks.call_end, marks.closing)
    return ToolFormat(name, read, markers, template_mark, ends_reasoning)


def _without(other: str, mark: str) -> str:
    """A pattern for templates with this mark and without marks of another format."""
    return rf"^(?![\s\S]*(?:{other}))[\s\S]*(?:{mark})"


# In the order in which templates are searched: templates of earlier formats may contain marks of later ones.
_ALL = (
    ToolFormat("harmony", read_harmony, HARMONY_MARKERS, r"<\|channel\|>", call_markers=("<|call|>",)),
    ToolFormat("mistral", _read_mistral, (_TOOL_CALLS, _CALL_ID, _ARGS), r"\[TOOL_CALLS\]", num_id_chars=9),
    _marked("deepseek_v3", DEEPSEEK_V3_MARKS, r"<｜tool▁sep｜>[^`]*```json"),
    _marked("deepseek_v31", DEEPSEEK_V3_MARKS, r"<｜tool▁sep｜>"),
    _tagged("deepseek_v4", DEEPSEEK_V4_TAGS, r"｜DSML｜[\s\S]*tool_calls>", DSML),
    _tagged("deepseek_v32", DEEPSEEK_V3_2_TAGS, DSML, DSML),
    _marked("kimi_k2", KIMI_K2_MARKS, r"<\|tool_calls_section_begin\|>", ends_reasoning=KIMI_K2_MARKS.opening),
    _tagged("glm45", GLM45_TAGS, "<arg_key>"),
    _tagged("minimax_m2", MINIMAX_M2_TAGS, "<minimax:tool_call>"),
    _tagged("seed_oss", SEED_OSS_TAGS, "<seed:tool_call>"),
    _tagged("qwen3_coder", QWEN3_CODER_TAGS, _without(r"<function=\w+>\{", "<function=")),
    ToolFormat("hermes", _read_hermes, (_OPENING, _CLOSING), _without(r"<tool_calls>|minimax\[>\[", _OPENING)),
    ToolFormat(
        "pythonic", _read_pythonic, (_PYTHON_START, _PYTHON_END), r"<\|python_start\|>|\[func_name1\(params_name1="
    ),
    ToolFormat(
        "llama3_json",
        _read_llama3_json,
        (_PYTHON_TAG,),
        _without("<function=", r'<\|python_tag\|>|\{"name": function name, "parameters":'),
    ),
)
TOOL_FORMATS = {format.name: format for format in _ALL}


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """The format in which a model with this template writes tool calls; None if it is not known."""
    return next((one for one in TOOL_FORMATS.values() if re.search(one.template_mark, chat_template)), None)
