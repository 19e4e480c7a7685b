from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tandem.frontend.openai.constraint_fields import constraint_of
from tandem.frontend.openai.schema import GenerationFields
from tandem.protocol.errors import RequestError
from tandem.text.structured_output.constraint import Constraint


def constraint(response_format: Any = None, structured_outputs: Any = None, **fields: Any) -> Constraint | None:
    body = {"response_format": response_format, "structured_outputs": structured_outputs, **fields}
    return constraint_of(msgspec.json.decode(json.dumps(body), type=GenerationFields))


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "kind", "text", "param"),
    [
        ({"type": "json_object"}, None, "json", {"type": "object"}, "response_format"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "string"}}},
            None,
            "json",
            {"type": "string"},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "structural_tag", "structures": [{"begin": "<", "end": ">", "schema": {}}], "triggers": ["<"]},
            None,
            "structural_tag",
            {"structures": [{"begin": "<", "end": ">", "schema": {}}], "triggers": ["<"]},
            "response_format",
        ),
        (None, {"json": {"type": "array"}}, "json", {"type": "array"}, "structured_outputs.json"),
        (None, {"json": '{"type": "array"}'}, "json", {"type": "array"}, "structured_outputs.json"),
        (None, {"json_object": True}, "json", {"type": "object"}, "structured_outputs.json_object"),
        (None, {"choice": ["a", "é"]}, "choice", ["a", "é"], "structured_outputs.choice"),
    ],
)
def test_fields_constrain(response_format: Any, structured_outputs: Any, kind: str, text: Any, param: str) -> None:
    found = constraint(response_format, structured_outputs)
    assert found is not None
    assert (found.kind, json.loads(found.text), found.param) == (kind, text, param)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_expressions_are_taken_as_they_are(kind: str) -> None:
    assert constraint(None, {kind: 'a "b"\n'}) == Constraint(kind, 'a "b"\n', f"structured_outputs.{kind}")


@pytest.mark.parametrize("asked", [(None, None), ({"type": "text"}, None), (None, {}), (None, {"json_object": False})])
def test_no_constraint(asked: Any) -> None:
    assert constraint(*asked) is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (({"type": "json_schema"}, None), "response_format.json_schema"),
        (({"type": "json_schema", "json_schema": {"name": "x"}}, None), "response_format.json_schema.schema"),
        (({"type": "json_schema", "json_schema": {"schema": [1]}}, None), "response_format.json_schema.schema"),
        ((None, {"json": 7}), "structured_outputs.json"),
        ((None, {"regex": "a", "choice": ["b"]}), "structured_outputs.choice"),
        (({"type": "json_object"}, {"regex": "a"}), "structured_outputs.regex"),
    ],
)
def test_what_asks_for_nothing_that_can_be_kept_is_refused(asked: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        constraint(*asked)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("guided_json", {"type": "array"}, "json", '{"type": "array"}'),
        ("guided_json", '{"type": "array"}', "json", '{"type": "array"}'),
        ("guided_regex", "a+", "regex", "a+"),
        ("guided_choice", ["a", "b"], "choice", '["a","b"]'),
        ("guided_grammar", "root ::= x", "grammar", "root ::= x"),
        ("json_schema", '{"type": "array"}', "json", '{"type": "array"}'),
        ("regex", "a+", "regex", "a+"),
        ("ebnf", "root ::= x", "grammar", "root ::= x"),
        ("grammar", "start: x", "grammar", "start: x"),
    ],
)
def test_fields_of_other_servers_ask_for_the_same(name: str, value: Any, kind: str, text: str) -> None:
    assert constraint(**{name: value}) == Constraint(kind, text, name)
    with pytest.raises(RequestError, match=name):
        constraint({"type": "json_object"}, **{name: value})


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"])
def test_empty_fields_of_front_ends_ask_for_nothing(name: str) -> None:
    empty: dict[str, list[Any]] = {"guided_json": ["", {}], "json_schema": ["", {}], "guided_choice": [[]]}
    for value in (None, *empty.get(name, [""])):
        assert constraint(**{name: value}) is None
