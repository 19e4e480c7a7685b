"""What an error says about a value that does not fit its field: the shortened value, and what is expected.

msgspec names the field and one broken bound. The value is looked up in the body, and all bounds in the field's type.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

_MAX_SHOWN = 50  # characters of a value
_MAX_READ_BYTES = 1 << 20  # in a list or an object: reading the millions of items of a larger one takes too long
_STEP = re.compile(r"\[(\.\.\.|\d+)\]|([^.\[\]]+)")
T = TypeVar("T", bound=inspect.Type)
L = TypeVar("L", list[msgspec.Raw], dict[str, msgspec.Raw])
_RAW_DICT, _RAW_LIST = dict[str, msgspec.Raw], list[msgspec.Raw]


def wrong_value(body: bytes, request_type: type[msgspec.Struct], path: str) -> str:
    """`expected X, got Y` for the value at msgspec's `path` in a body that it has refused.

    The path of an entry of an object ends with `[...]`: the first entry that does not fit is named. Raises
    `LookupError` for what is too large to look at.
    """
    kind, raw, where = _type_info(request_type), msgspec.Raw(body.strip()), ""
    for entry, name in _STEP.findall(path):
        if entry == "...":
            key, raw = _first_wrong(raw, request_type, path)
            kind, where = _member(kind, inspect.DictType).value_type, f" for {shown(msgspec.json.encode(key))}"
        elif entry:
            raw = _read(raw, _RAW_LIST)[int(entry)]
            kind = _member(kind, inspect.ListType).item_type
        else:
            raw = msgspec.json.decode(raw, type=_only_field(name)).value
            kind = _field(_member(kind, inspect.StructType), name)
    return f"expected {_described(kind)}, got {shown(bytes(raw))}{where}"


def shown(json: bytes) -> str:
    """JSON of a value as it was sent, at most some fifty characters of it, with its size if it is longer."""
    text = json.decode(errors="replace")
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... ({_size(json)})"


def _size(json: bytes) -> str:
    if len(json) > _MAX_READ_BYTES:
        return f"{len(json)} bytes"
    if json.startswith(b'"'):
        return f"{len(msgspec.json.decode(json, type=str))} characters"
    if json.startswith(b"["):
        return f"{len(msgspec.json.decode(json, type=_RAW_LIST))} items"
    if json.startswith(b"{"):
        return f"{len(msgspec.json.decode(json, type=_RAW_DICT))} fields"
    return f"{len(json)} characters"


def _read(raw: msgspec.Raw, wanted: type[L]) -> L:
    if len(raw) > _MAX_READ_BYTES:
        raise LookupError("too large")
    return msgspec.json.decode(raw, type=wanted)


@functools.cache
def _only_field(name: str) -> type[Any]:
    """A struct of this field, which is read as it is. Other fields are passed over, however many there are."""
    return msgspec.defstruct("OnlyField", [("value", msgspec.Raw)], rename={"value": name})


@functools.cache
def _type_info(request_type: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(request_type)


def _first_wrong(raw: msgspec.Raw, request_type: type[msgspec.Struct], path: str) -> tuple[str, msgspec.Raw]:
    """The first entry of an object that is a field of the request itself, as all objects of checked values are."""
    field = typing.get_type_hints(request_type, include_extras=True)[path.removesuffix("[...]")]
    for key, value in _read(raw, _RAW_DICT).items():
        try:
            msgspec.json.decode(b'{"":%b}' % bytes(value), type=field)
        except msgspec.ValidationError:
            return key, value
    raise LookupError(path)


# -- types


def members(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a value may have, without null."""
    if isinstance(kind, inspect.Metadata):
        yield from members(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from members(one)
    elif not isinstance(kind, inspect.NoneType):
        yield kind


def _member(kind: inspect.Type, wanted: type[T]) -> T:
    return next(one for one in members(kind) if isinstance(one, wanted))


def _field(struct: inspect.StructType, name: str) -> inspect.Type:
    return next(field.type for field in struct.fields if field.encode_name == name)


def _described(kind: inspect.Type) -> str:
    return " or ".join(dict.fromkeys(_described_member(one) for one in members(kind)))


def _described_member(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _range(kind.ge, kind.gt, kind.le)
        case inspect.FloatType():
            return "a number" + _range(kind.ge, kind.gt, kind.le)
        case inspect.LiteralType():
            return _choices(kind.values)
        case inspect.StrType():
            return "a string" + _length(kind.min_length, kind.max_length, "characters")
        case inspect.ListType():
            return "a list" + _length(kind.min_length, kind.max_length, "items")
        case _:
            limits = (kind.min_length, kind.max_length) if isinstance(kind, inspect.DictType) else (None, None)
            return "an object" + _length(*limits, "entries")


def _choices(values: Sequence[object]) -> str:
    names = [f"'{value}'" for value in values]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _range(least: float | None, above: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:.15g} to {most:.15g}" if max(abs(least), abs(most)) < 1e15 else " of 64 bits"
    if least is not None:
        return f" of at least {least:.15g}"
    if above is not None:
        return f" above {above:.15g}"
    return "" if most is None else f" of at most {most:.15g}"


def _length(least: int | None, most: int | None, what: str) -> str:
    if least and most:
        return f" of {least} to {most} {what}"
    if least:
        return " that is not empty" if least == 1 else f" of at least {least} {what}"
    return f" of at most {most} {what}" if most else ""
