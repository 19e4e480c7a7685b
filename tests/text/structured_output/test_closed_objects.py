from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from tandem.text.structured_output.closed_objects import closed_objects
from tandem.text.structured_output.compile_process import make_grammar
from tandem.text.structured_output.lark_rules import LarkRules

NAME = {"name": {"type": "string"}}
OPEN = {"type": "object", "properties": NAME}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"properties": NAME}, {"properties": NAME, "additionalProperties": False}),
        ({**OPEN, "required": ["name"]}, {**OPEN, "required": ["name"], "additionalProperties": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": OPEN}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
        ({"prefixItems": [OPEN, True]}, {"prefixItems": [CLOSED, True]}),
        (
            {"type": "object", "properties": {"properties": OPEN, "allOf": {"type": "string"}}},
            {
                "type": "object",
                "properties": {"properties": CLOSED, "allOf": {"type": "string"}},
                "additionalProperties": False,
            },
        ),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
    ],
)
def test_objects_that_name_properties_are_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert (closed_objects(schema), json.dumps(schema)) == (expected, before)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "integer"}},
        {**OPEN, "patternProperties": {"^x": True}},
        {**OPEN, "required": ["other"]},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {**OPEN, "anyOf": [{"properties": {"b": {}}}, {"required": ["name"]}]},
        {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": OPEN}},
        {**OPEN, "if": {"properties": NAME}, "then": {"properties": {"b": {}}}},
        {"items": {**OPEN, "oneOf": [OPEN]}, "properties": NAME},
        {"properties": 3, "required": "x", "anyOf": {}, "items": [1]},
    ],
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert closed_objects(schema) == schema


class Address(pydantic.BaseModel):
    street: str
    number: int | None = None


class Person(pydantic.BaseModel):
    """As instructor and LangChain send it: without `additionalProperties`."""

    name: str
    homes: list[Address]
    tags: dict[str, str] = {}


def test_schemas_that_pydantic_makes_are_closed() -> None:
    schema = closed_objects(Person.model_json_schema())
    assert (schema["additionalProperties"], schema["$defs"]["Address"]["additionalProperties"]) == (False, False)
    assert schema["properties"]["tags"]["additionalProperties"] == {"type": "string"}


@pytest.mark.parametrize("schema", [OPEN, {"items": OPEN}])
def test_response_formats_and_parts_of_grammars_have_closed_objects(schema: Any) -> None:
    assert '"additionalProperties":false' in make_grammar("json", json.dumps(schema)).replace(" ", "")
    rules = LarkRules({})
    rules.json(schema)
    assert '"additionalProperties":false' in rules.grammar("r0").replace(" ", "")
