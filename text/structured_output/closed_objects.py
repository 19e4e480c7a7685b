"""Objects without `additionalProperties` take only the properties that they name, as in vLLM and SGLang with xgrammar.

By JSON Schema's rules any others are allowed too, and a model that may go on with more properties does. Left as they
are: objects that name none, and schemas that put an object together from several parts, of which none knows it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties"}  # say what else is allowed
_COMBINING = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Schema = Mapping[str, Any]


def closed_objects(schema: Schema) -> Schema:
    """The schema with its objects closed. One that is malformed stays so."""
    return schema if any(map(_is_part, _with_subschemas(schema))) else _closed(schema)


def _is_part(schema: Schema) -> bool:
    """Whether a schema adds to an object that others describe too."""
    parts = schema.get("allOf")
    names_properties = "properties" in schema or "unevaluatedProperties" in schema
    return (names_properties and bool(_COMBINING & schema.keys())) or (isinstance(parts, list) and len(parts) > 1)


def _with_subschemas(schema: Schema) -> Iterator[Schema]:
    yield schema
    for one in _subschemas(schema):
        yield from _with_subschemas(one)


def _subschemas(schema: Schema) -> Iterator[Schema]:
    groups: list[Any] = [[schema.get(name)] for name in _ONE]
    groups += [schema.get(name) for name in _MANY]
    groups += [list(value.values()) for name in _NAMED if isinstance(value := schema.get(name), dict)]
    for group in groups:
        if isinstance(group, list):
            yield from (one for one in group if isinstance(one, dict))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in _ONE:
        if name in closed:
            closed[name] = _closed(closed[name])
    for name in _MANY:
        if isinstance(closed.get(name), list):
            closed[name] = [_closed(one) for one in closed[name]]
    for name in _NAMED:
        if isinstance(closed.get(name), dict):
            closed[name] = {key: _closed(one) for key, one in closed[name].items()}
    if _may_close(closed):
        closed["additionalProperties"] = False
    return closed


def _may_close(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    return not _OPENING & schema.keys() and all(isinstance(name, str) and name in properties for name in required)
