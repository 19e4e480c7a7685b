"""A limit on JSON bodies that is checked before they are decoded."""

from __future__ import annotations

from tandem.protocol.errors import RequestError

__all__ = ["check_brackets"]

MAX_BRACKETS = 1 << 19  # in a body, and in the arguments of a tool call, which are JSON too


def check_brackets(json: bytes | str, param: str | None = None) -> None:
    """Raise `RequestError` if undecoded JSON may hold too many arrays and objects.

    Decoding millions of them, and the garbage collector that walks them, would block the event loop. Brackets inside
    strings count too: telling them apart takes as long as decoding.
    """
    if len(json) <= MAX_BRACKETS:
        return
    number = json.count(b"[") + json.count(b"{") if isinstance(json, bytes) else json.count("[") + json.count("{")
    if number > MAX_BRACKETS:
        raise RequestError(
            f"The request has {number} opening brackets in its JSON; the limit is {MAX_BRACKETS}. "
            "Ask for less, or send several requests.",
            param=param,
        )
