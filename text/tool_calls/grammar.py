"""Grammars of answers that must call tools: in the model's own format, with arguments that fit the tools' schemas.

They are texts in llguidance's dialect of Lark. All white space is fixed: models are trained on one form, and with a
free choice white space could go on forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tandem.text.structured_output.lark_rules import LarkRules, quoted, row
from tandem.text.tool_calls.formats import ToolFormat, Tools
from tandem.text.tool_calls.marked_calls import DEEPSEEK_V3_MARKS, KIMI_K2_MARKS
from tandem.text.tool_calls.reasoning import ReasoningFormat
from tandem.text.tool_calls.tagged_calls import (
    DEEPSEEK_V3_2_TAGS,
    DEEPSEEK_V4_TAGS,
    GLM45_TAGS,
    MINIMAX_M2_TAGS,
    QWEN3_CODER_TAGS,
    SEED_OSS_TAGS,
    Tags,
    value_types,
)

MAX_CALLS = 16  # in one answer: a model that finds no end would write calls until its tokens are used up

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if"}  # may add properties to an object's own
_DEFINITIONS = ("$defs", "definitions")

_OPTIONAL_MARKERS = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}
_ANNOTATIONS = {"type", "title", "description", "default", "examples", *_DEFINITIONS}  # which allow any value
_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1F]|\\['"\\nrt])*'/"""
_CONTENT = "content"  # name of the grammar of content

Schema = Mapping[str, Any]


class _CallForm(NamedTuple):
    """How calls are written in one format: each of them, and the texts around and between them."""

    call: Callable[[LarkRules, str, Schema], str]  # the rule for a call, from a tool's name and schema
    opening: str = ""
    separator: str = ""
    closing: str = ""
    max_calls: int = MAX_CALLS


def tool_call_grammar(
    tool_format: ToolFormat | None,
    tools: Tools,
    *,
    max_calls: int | None,
    reasoning: ReasoningFormat | None,
    is_reasoning_open: bool,
    special_ids: Mapping[str, int],
    content: str = "",
) -> str:
    """The grammar of an answer that calls tools, at least once and at most `max_calls` times, in llguidance's form.

    With `content`, a grammar in the same form, the answer may be such content instead. It must be, if there are no
    tools, or if the format has calls without markers and the vocabulary has no token for one. The model may reason
    first if it has a format for that. `special_ids` are the ids of those markers of both formats that are special
    tokens. Raises `ValueError` for tools that cannot be written in the format.
    """
    rules = LarkRules(_JSON_STYLE, special_ids)
    is_harmony = "harmony" in (tool_format and tool_format.name, reasoning and reasoning.name)
    answers: list[str] = []
    # If other content is allowed, a call must begin with a marker: the lexer cannot tell its "{" from the content's.
    marker = _OPTIONAL_MARKERS.get(tool_format.name, "") if tool_format is not None and content else ""
    if tool_format is not None and tools and (not marker or marker in special_ids):
        calls = _calls(rules, _form(tool_format, special_ids), tools, max_calls)
        answers.append(row(rules.text(marker) if marker else "", calls))
    if content:
        header = rules.text("<|channel|>final<|message|>") if is_harmony else ""
        answers.append(row(header, f"@{_CONTENT}"))
    before = _reasoning(rules, reasoning, is_open=is_reasoning_open)
    text = rules.grammar(row(before, f"({' | '.join(answers)})"))
    if not content:
        return text
    first, *others = json.loads(content)["grammars"] if content.startswith("{") else [{"lark_grammar": content}]
    grammars = [{"lark_grammar": text}, {**first, "name": _CONTENT}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _calls(rules: LarkRules, form: _CallForm, tools: Tools, max_calls: int | None) -> str:
    call = rules.add(" | ".join(form.call(rules, name, _object_schema(name, schema)) for name, schema in tools.items()))
    num_more = min(MAX_CALLS if max_calls is None else max_calls, form.max_calls) - 1
    more = f"({row(rules.text(form.separator), call)}){{0,{num_more}}}" if num_more else ""
    return row(rules.text(form.opening), call, more, rules.text(form.closing))


def _form(tool_format: ToolFormat, special_ids: Mapping[str, int]) -> _CallForm:
    if tool_format.name == "mistral" and "[ARGS]" in special_ids:  # a vocabulary of the later form
        return _CallForm(partial(_json_call, "[TOOL_CALLS]NAME[ARGS]", ""))
    return _FORMS[tool_format.name]


def _reasoning(rules: LarkRules, reasoning: ReasoningFormat | None, *, is_open: bool) -> str:
    """Reasoning before the answer: the rest of it if the prompt has opened it, otherwise any or none."""
    if reasoning is None:
        return ""
    if reasoning.name == "harmony":
        opening, closing = rules.text("<|channel|>analysis<|message|>"), rules.text("<|start|>assistant")
        return f"({row(opening, rules.any_until('<|end|>'), closing)})?"
    rest = f"{rules.any_until(reasoning.closing)} /[ \\n]{{0,3}}/"
    return rest if is_open else f"({rules.text(reasoning.opening)} {rest})?"


def _object_schema(name: str, schema: Schema) -> Schema:
    """A tool's schema, restricted to an object with only the properties that the schema names."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the parameters of the tool {name!r} must be a schema of an object, not of type {kind!r}")
    is_closed = not _COMBINING & schema.keys()
    return {**({"properties": {}, "additionalProperties": False} if is_closed else {}), **schema, "type": "object"}


def _properties(tool: str, schema: Schema) -> list[tuple[str, Schema, bool]]:
    """The properties of an object: name, schema, and whether it is required. Raises `ValueError`."""
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError(f"of the tool {tool!r} 'properties' must be an object and 'required' a list")
    for name in required:
        if not isinstance(name, str) or properties.get(name, False) is False:
            raise ValueError(f"the tool {tool!r} requires {name!r}, which is none of its 'properties'")
    for name, one in properties.items():
        if not isinstance(one, dict | bool):
            raise ValueError(f"the parameter {name!r} of the tool {tool!r} must have a schema")
    return [
        (name, {**definitions, **({} if one is True else one)}, name in required)
        for name, one in properties.items()
        if one is not False
    ]


# -- formats


def _json_call(opening: str, closing: str, rules: LarkRules, name: str, schema: Schema) -> str:
    """A call with its arguments as JSON. `NAME` in the text before them is the tool's."""
    return row(rules.text(opening.replace("NAME", name)), rules.json(schema), rules.text(closing))


def _kimi_k2_call(rules: LarkRules, name: str, schema: Schema) -> str:
    marks = KIMI_K2_MARKS
    header = row(rules.text(f"{marks.call}functions.{name}:"), "/[0-9]{1,3}/", rules.text(marks.separator))
    return row(header, rules.json(schema), rules.text(marks.call_end))


def _pythonic_call(rules: LarkRules, name: str, schema: Schema) -> str:
    """`f(a=1, b="x")`, the arguments in the order of the properties."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"the name of the tool {name!r} is not an identifier of Python")
    first = rest = quoted("")  # what may follow: at the beginning, and after another argument
    for key, one, is_required in reversed(_properties(name, schema)):
        if not key.isidentifier():
            raise ValueError(f"the parameter {key!r} of the tool {name!r} is not an identifier of Python")
        item = row(rules.text(f"{key}="), _python_value(rules, one))
        behind = row(rules.text(", "), item)
        first = rules.add(row(item, rest) if is_required else f"{row(item, rest)} | {first}")
        rest = rules.add(row(behind if is_required else f"({behind})?", rest))
    return row(rules.text(f"{name}("), first, rules.text(")"))


def _python_value(rules: LarkRules, schema: Schema) -> str:
    """A value in Python's notation, or as JSON if the schema asks for more than a type; our parser reads both."""
    kind, others = schema.get("type"), schema.keys() - _ANNOTATIONS
    if kind == "boolean" and not others:
        return rules.add('"True" | "False"')
    if kind == "string" and not others:
        return rules.add(f"{rules.json(schema)} | {_SINGLE_QUOTED}")
    choices = schema.get("enum")
    if kind == "string" and others == {"enum"} and isinstance(choices, list):
        texts = [text for choice in choices if isinstance(choice, str) for text in {quoted(choice), repr(choice)}]
        return rules.add(" | ".join(map(quoted, sorted(texts)))) if texts else rules.json(schema)
    if kind == "array" and others <= {"items"} and isinstance(items := schema.get("items"), dict):
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        item = _python_value(rules, {**definitions, **items})
        return rules.add(f'"[" ({item} (", " {item})*)? "]"')
    return rules.json(schema)


def _tagged_call(tags: Tags, rules: LarkRules, name: str, schema: Schema) -> str:
    """A call in tags, one per line. GLM 4.7 leaves out the newlines that GLM 4.5 writes."""
    newline = '"\\n"?' if tags is GLM45_TAGS else '"\\n"'
    opening, closing = tags.name or tags.opening, rules.text(tags.call_end)
    items: list[str] = []
    for key, one, is_required in _properties(name, schema):
        if not key or set(key) & set('<>"\n'):
            raise ValueError(f"the parameter {key!r} of the tool {name!r} cannot be written within a tag")
        item = row(_tagged_item(tags, rules, key, one, newline), newline)
        items.append(item if is_required else f"({item})?")
    return row(rules.text(f"{opening}{name}{tags.name_end}"), newline, *items, closing)


def _wrapped_call(tags: Tags, rules: LarkRules, name: str, schema: Schema) -> str:
    call = _tagged_call(tags, rules, name, schema)
    return row(rules.text(f"{tags.opening}\n"), call, rules.text(f"\n{tags.closing}"))


def _tagged_item(tags: Tags, rules: LarkRules, key: str, schema: Schema, newline: str) -> str:
    """A parameter. Strings are written as they are, without quotes."""
    has_string = value_types(schema) == {"string"}
    key_end = next(end for end, is_string in tags.key_ends.items() if is_string in (None, has_string))
    opening = rules.text(f"{tags.key}{key}{key_end}")
    if tags.value:
        opening = row(opening, newline, rules.text(tags.value))
    space, end = rules.text(tags.value_space), f"{tags.value_space}{tags.value_end}"
    if not has_string:
        return row(opening, space, rules.json(schema), rules.text(end))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(choices, list):
        return row(opening, space, rules.any_until(tags.value_end))
    texts = [choice for choice in choices if isinstance(choice, str)]
    if not texts:
        raise ValueError("an 'enum' of strings must have one")
    return row(opening, space, rules.add(" | ".join(map(quoted, texts))), rules.text(end))


def _section(tags: Tags) -> _CallForm:
    """A form with one opening and one closing around all calls."""

    # NOTE: the newline belongs to the call: the lexer cannot tell a separating one from one before the closing.
    def call(rules: LarkRules, name: str, schema: Schema) -> str:
        return row(_tagged_call(tags, rules, name, schema), rules.text("\n"))

    return _CallForm(call, f"{tags.opening}\n", "", tags.closing)


_V3 = DEEPSEEK_V3_MARKS
_V3_CALL = partial(_json_call, f"{_V3.call}function{_V3.separator}NAME\n```json\n", f"\n```{_V3.call_end}")
_V31_CALL = partial(_json_call, f"{_V3.call}NAME{_V3.separator}", _V3.call_end)
_HARMONY_CALL = partial(_json_call, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "")
_HERMES_CALL = partial(_json_call, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
_LLAMA3_CALL = partial(_json_call, '{"name": "NAME", "parameters": ', "}")
_MISTRAL_CALL = partial(_json_call, '{"name": "NAME", "arguments": ', "}")

_FORMS = {
    "deepseek_v3": _CallForm(_V3_CALL, _V3.opening, "\n", _V3.closing),
    "deepseek_v31": _CallForm(_V31_CALL, _V3.opening, "", _V3.closing),
    "deepseek_v32": _section(DEEPSEEK_V3_2_TAGS),
    "deepseek_v4": _section(DEEPSEEK_V4_TAGS),
    "glm45": _CallForm(partial(_tagged_call, GLM45_TAGS), separator="\n"),
    "harmony": _CallForm(_HARMONY_CALL, max_calls=1),  # a call ends the answer
    "hermes": _CallForm(_HERMES_CALL, separator="\n"),
    "kimi_k2": _CallForm(_kimi_k2_call, KIMI_K2_MARKS.opening, "", KIMI_K2_MARKS.closing),
    "llama3_json": _CallForm(_LLAMA3_CALL, separator="; "),
    "minimax_m2": _section(MINIMAX_M2_TAGS),
    "mistral": _CallForm(_MISTRAL_CALL, "[TOOL_CALLS][", ", ", "]"),
    "pythonic": _CallForm(_pythonic_call, "[", ", ", "]"),
    "qwen3_coder": _CallForm(partial(_wrapped_call, QWEN3_CODER_TAGS), separator="\n"),
    "seed_oss": _CallForm(partial(_wrapped_call, SEED_OSS_TAGS), separator="\n"),
}
