"""JSON of an engine, read in a time that its content cannot stretch.

Reading a megabyte of tiny lists takes up to 150 ms, and the whole process waits meanwhile, its other threads too. So a
large text with many values is only outlined: msgspec skips what is not asked for in 3 ms for a megabyte, whatever it
contains. The router forwards answers as bytes, so it misses nothing but the inside of the largest fields.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

WHOLE_BYTES = 64 * 1024  # a text up to here is always read whole, in a millisecond or two
OUTLINED_BYTES = 8 * 1024 * 1024  # a text from here on is never read whole
MAX_BRACKETS = 1 << 15  # lists and objects of others that are read whole, brackets within strings included
MAX_COMMAS = 1 << 20  # the ids of a prompt of a million tokens
MAX_DEPTH = 254  # levels of lists and objects that are sent on


class NotJson(ValueError):
    """It cannot be read as JSON, or not be written as JSON again."""


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
    """The value of a text; an `Outline` if it is large and has many values. Raises `NotJson`."""
    return _whole(text) if _is_light(text) else _outline(text)


def dumps(value: Any) -> bytes:
    """The text of a value that is sent on. Raises `NotJson` for an outline, and for what is nested too deeply."""
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise NotJson(str(exc)) from exc
    if is_too_deep(value, text):
        raise NotJson(f"it is nested more than {MAX_DEPTH} levels deep")
    return text


def is_too_deep(value: Any, text: bytes) -> bool:
    """Whether the lists and objects of a value have more than `MAX_DEPTH` levels. `text` is its JSON."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            one
            for each in level
            for one in (each.values() if isinstance(each, dict) else each)
            if type(one) is dict or type(one) is list  # half of the time of `isinstance`
        ]
        if not level:
            return False
    return True


def _is_light(text: bytes) -> bool:
    if len(text) <= WHOLE_BYTES or len(text) >= OUTLINED_BYTES:
        return len(text) <= WHOLE_BYTES
    return text.count(b"[") + text.count(b"{") <= MAX_BRACKETS and text.count(b",") <= MAX_COMMAS


def _whole(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotJson(str(exc)) from exc


def _outline(text: bytes) -> Outline:
    try:
        fields = _fields_of.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotJson(str(exc)) from exc
    found = {name: getattr(fields, name) for name in fields.__struct_fields__}
    return Outline({name: _value(name, raw) for name, raw in found.items() if len(raw)})


def _value(name: str, raw: msgspec.Raw) -> Any:
    if len(raw) <= WHOLE_BYTES:
        return _whole(bytes(raw))
    is_object = name in _NESTED and bytes(memoryview(raw)[:1]) == b"{"
    return _outline(bytes(raw)) if is_object else LARGE
