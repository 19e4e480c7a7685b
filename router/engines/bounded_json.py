"""JSON of an engine, read in a time that its content cannot stretch.

orjson takes up to 150 ms for a megabyte of tiny lists, and the whole process waits meanwhile, its other threads too. So
a large text with many values is only outlined: msgspec skips what is not asked for in 3 ms for a megabyte, whatever it
contains. The router forwards answers as bytes, so it misses nothing but the inside of the largest fields.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson

__all__ = ["LARGE", "Outline", "loads"]

WHOLE_BYTES = 64 * 1024  # a text up to here is always read whole, in a millisecond or two
OUTLINED_BYTES = 8 * 1024 * 1024  # a text from here on is never read whole
MAX_BRACKETS = 1 << 15  # lists and objects of others that are read whole, brackets within strings included
MAX_COMMAS = 1 << 20  # the ids of a prompt of a million tokens


class _LargeValue:
    """A value of an outline that was not read."""

    def __repr__(self) -> str:
        return "a value too large to be read"


LARGE: Final = _LargeValue()


class Outline(dict[str, Any]):
    """The known fields of a large object. Those that are large themselves are `LARGE`. It cannot be encoded again."""


class _Fields(msgspec.Struct):
    """Every field by which the router judges an answer or an event."""

    id: msgspec.Raw = msgspec.Raw()
    type: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()
    status: msgspec.Raw = msgspec.Raw()
    stop_reason: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    choices: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    results: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input_tokens: msgspec.Raw = msgspec.Raw()


_NESTED = ("response", "message")  # objects of events, with usage and id in them
_fields_of = msgspec.json.Decoder(_Fields)


def loads(text: bytes) -> Any:
    """As `orjson.loads`, but an `Outline` of a large text of many values. Raises `orjson.JSONDecodeError`."""
    return orjson.loads(text) if _is_light(text) else _outline(text)


def _is_light(text: bytes) -> bool:
    if len(text) <= WHOLE_BYTES or len(text) >= OUTLINED_BYTES:
        return len(text) <= WHOLE_BYTES
    return text.count(b"[") + text.count(b"{") <= MAX_BRACKETS and text.count(b",") <= MAX_COMMAS


def _outline(text: bytes) -> Outline:
    try:
        fields = _fields_of.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise orjson.JSONDecodeError(str(exc), "", 0) from exc
    found = {name: getattr(fields, name) for name in fields.__struct_fields__}
    return Outline({name: _value(name, raw) for name, raw in found.items() if len(raw)})


def _value(name: str, raw: msgspec.Raw) -> Any:
    if len(raw) <= WHOLE_BYTES:
        return orjson.loads(bytes(raw))
    is_object = name in _NESTED and bytes(memoryview(raw)[:1]) == b"{"
    return _outline(bytes(raw)) if is_object else LARGE
