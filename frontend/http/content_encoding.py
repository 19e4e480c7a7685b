"""Request bodies that the client has compressed: gzip and deflate are inflated, other encodings are refused.

A body is inflated when all of it is here. Until then its compressed bytes are what the server keeps and counts, so a
small body that inflates to a large one takes no memory that is not counted.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from tandem.frontend.http.errors import BodyTooLarge, UnsupportedEncoding
from tandem.protocol.errors import RequestError

_GZIP, _DEFLATE = ("gzip", "x-gzip"), ("deflate",)
_WBITS_GZIP, _WBITS_ZLIB, _WBITS_RAW = 31, 15, -15  # zlib's names for the forms
_MAX_RATIO = 100  # JSON of conversations inflates 3 to 20 times: a running request keeps its body in memory
_ANY_RATIO_BYTES = 256 * 1024  # up to this size a body may be as repetitive as it likes
_INLINE_BYTES = 64 * 1024  # inflated in the event loop, in 0.2 ms; what is larger is inflated in a thread


def inflating(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """`receive` that gives the body inflated, if it is compressed.

    It raises `UnsupportedEncoding`, `BodyTooLarge` for more than `max_bytes`, and `RequestError` for a broken body.
    """
    names = _encodings(scope)
    if not names or scope["method"] == "GET":
        return receive
    has_body = False

    async def receive_inflated() -> Message:
        nonlocal has_body
        if has_body:
            return await receive()
        if len(names) > 1 or names[0] not in (*_GZIP, *_DEFLATE):
            raise UnsupportedEncoding(
                f"Content-Encoding '{', '.join(names)[:100]}' is not read here; send the body as gzip or deflate, "
                "or uncompressed."
            )
        body = await _whole_body(receive)
        has_body = True
        inflated = await _inflated(names[0], body, max_bytes) if body else body
        return {"type": "http.request", "body": inflated, "more_body": False}

    return receive_inflated


def _encodings(scope: Scope) -> list[str]:
    """The encodings of a request's body, without those that change nothing."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
    names = [name.strip().lower() for name in ",".join(values).split(",")]
    return [name for name in names if name not in ("", "identity")]


async def _whole_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _inflated(name: str, body: bytes, max_bytes: int) -> bytes:
    """The body, inflated. Raises a `RequestError` for one that is broken or too large."""
    max_bytes = min(max_bytes, max(_ANY_RATIO_BYTES, _MAX_RATIO * len(body)))
    inflater = zlib.decompressobj(_wbits(name, body))
    try:
        inflated = inflater.decompress(body, min(_INLINE_BYTES, max_bytes + 1))
        if not inflater.eof and _INLINE_BYTES == len(inflated) <= max_bytes:
            room = max_bytes + 1 - len(inflated)  # zlib stops there, whatever is still to come
            inflated += await asyncio.to_thread(inflater.decompress, inflater.unconsumed_tail, room)
    except zlib.error as exc:
        raise _broken(name, str(exc)) from exc
    if len(inflated) > max_bytes:
        raise BodyTooLarge(
            f"The request body is larger than {max_bytes} bytes once it is inflated, which is the limit for one of "
            f"{len(body)} bytes."
        )
    if not inflater.eof:
        raise _broken(name, "it is cut off")
    if inflater.unused_data:
        raise _broken(name, "more follows after its end")
    return inflated


def _wbits(name: str, body: bytes) -> int:
    """How zlib is to read it. What is called deflate has zlib's header by the standard, and often has none."""
    if name in _GZIP:
        return _WBITS_GZIP
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return _WBITS_ZLIB if has_header else _WBITS_RAW


def _broken(name: str, why: str) -> RequestError:
    return RequestError(f"The request body is not valid {name}, which its Content-Encoding names: {why}.")
