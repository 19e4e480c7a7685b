"""JSON bodies of requests: their content type, and a limit that is checked before they are decoded."""

from __future__ import annotations

from starlette.requests import Request

from tandem.frontend.http.errors import UnsupportedMediaType
from tandem.protocol.errors import RequestError

__all__ = ["check_brackets", "read_json"]

MAX_BRACKETS = 1 << 19  # of a body, and of the arguments of a tool call, which are JSON too


async def read_json(request: Request) -> bytes:
    """The undecoded JSON body of a request. Raises `RequestError`."""
    _check_content_type(request)
    body = await request.body()
    check_brackets(body)
    return body


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


def _check_content_type(request: Request) -> None:
    """Raise `UnsupportedMediaType` unless the body is declared as JSON. Web pages cannot do that without CORS."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        found = f"not '{media_type[:100]}'" if media_type else "and there is none"
        raise UnsupportedMediaType(
            f"Content-Type must be application/json, {found}. With curl add: -H 'Content-Type: application/json'"
        )
