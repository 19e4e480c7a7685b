"""Constraints on the output of a request: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.frontend.http.wrong_value import shown
from tandem.frontend.openai.schema import ABSENT, GenerationFields, ResponseFormat, StructuredOutputs
from tandem.protocol.errors import RequestError, missing_parameter
from tandem.text.structured_output.constraint import ANY_OBJECT, Constraint

# Fields of other servers -> what they constrain the answer to. Front ends send them empty if their user set nothing.
_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_NEUTRAL: tuple[Any, ...] = (None, "", [], ABSENT, msgspec.Raw(b'""'), msgspec.Raw(b"{}"))


def constraint_of(fields: GenerationFields) -> Constraint | None:
    """The constraint that a request's fields ask for, if any. Raises `RequestError`."""
    asked = (_of_format(fields.response_format), *_of_outputs(fields.structured_outputs), *_of_other_names(fields))
    found = [one for one in asked if one is not None]
    if len(found) > 1:
        raise RequestError(
            f"Only one of '{found[0].param}' and '{found[1].param}' can constrain the output.", param=found[1].param
        )
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json", ANY_OBJECT, "response_format")
    if wanted.type == "structural_tag":
        return Constraint("structural_tag", _structural_tag(wanted), "response_format")
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise missing_parameter(param)
    schema = wanted.json_schema.schema
    if schema == ABSENT:
        param = f"{param}.schema"
        raise missing_parameter(param)
    return Constraint("json", _schema_text(schema, f"{param}.schema"), f"{param}.schema")


def _of_outputs(wanted: StructuredOutputs | None) -> list[Constraint | None]:
    if wanted is None:
        return []
    at = "structured_outputs."
    return [
        None if wanted.json == ABSENT else Constraint("json", _schema_text(wanted.json, at + "json"), at + "json"),
        Constraint("json", ANY_OBJECT, at + "json_object") if wanted.json_object else None,
        None if wanted.regex is None else Constraint("regex", wanted.regex, at + "regex"),
        None if wanted.choice is None else Constraint("choice", _choice_text(wanted.choice), at + "choice"),
        None if wanted.grammar is None else Constraint("grammar", wanted.grammar, at + "grammar"),
        None
        if wanted.structural_tag == ABSENT
        else Constraint("structural_tag", _object_text(wanted.structural_tag), at + "structural_tag"),
    ]


def _of_other_names(fields: GenerationFields) -> list[Constraint]:
    return [
        Constraint(kind, _text_of(kind, value, name), name)
        for name, kind in _OTHER_NAMES.items()
        if (value := getattr(fields, name)) not in _NEUTRAL
    ]


def _text_of(kind: str, value: Any, param: str) -> str:
    if kind == "json":
        return _schema_text(value, param)
    return _choice_text(value) if kind == "choice" else str(value)


def _structural_tag(wanted: ResponseFormat) -> str:
    if wanted.format != ABSENT:
        return msgspec.json.encode({"format": wanted.format}).decode()
    return msgspec.json.encode({"structures": wanted.structures, "triggers": wanted.triggers}).decode()


def _schema_text(raw: msgspec.Raw, param: str) -> str:
    """The JSON of a schema, which may also be given as a string of JSON."""
    text = _object_text(raw)
    if text[:1] not in ("{", "t", "f"):
        raise RequestError(
            f"Invalid value for '{param}': expected a JSON schema, which is an object, got {shown(bytes(raw))}.",
            param=param,
        )
    return text


def _object_text(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode()
    return str(msgspec.json.decode(text)).strip() if text.startswith('"') else text


def _choice_text(choices: list[str]) -> str:
    return msgspec.json.encode(choices).decode()
