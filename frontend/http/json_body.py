"""JSON bodies of requests: limits that are checked before they are decoded, and what is wrong with a body."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tandem.frontend.http.errors import UnsupportedMediaType
from tandem.frontend.http.wrong_value import wrong_value
from tandem.protocol.errors import RequestError, missing_parameter

MAX_BRACKETS = 1 << 19  # of a body, and of the arguments of a tool call, which are JSON too
LARGE_BODY_BYTES = 64 * 1024  # their objects are too many for the garbage collector to walk repeatedly
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")

# Where less of the body follows it than the other half would need, msgspec calls it truncated.
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{0,5}\Z")

R = TypeVar("R", bound=msgspec.Struct)


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


def decode_body(body: bytes, request_type: type[R]) -> R:
    """Decode a body. Raises `RequestError` that names the wrong field, its value, and what is expected."""
    try:
        with collector_paused(body):
            return msgspec.json.decode(body, type=request_type)
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc), body, request_type) from exc
    except RecursionError as exc:
        raise RequestError("The request body is nested too deeply.") from exc
    except UnicodeDecodeError as exc:
        raise RequestError("The request body is not valid UTF-8.") from exc
    except msgspec.DecodeError as exc:
        reason = "a string ends with half of a surrogate pair" if _LONE_SURROGATE.search(body) else exc
        raise RequestError(f"The request body is not valid JSON: {reason}") from exc


@contextmanager
def collector_paused(body: bytes) -> Iterator[None]:
    """Pause the garbage collector: it would find nothing among the million lists that are being created."""
    if len(body) < LARGE_BODY_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _field_error(message: str, body: bytes, request_type: type[msgspec.Struct]) -> RequestError:
    """msgspec's `Expected X, got Y - at $.path` in OpenAI's words, with the value."""
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    param = path.removesuffix("[...]") or None
    if missing := _MISSING.match(message):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return missing_parameter(param)
    where = f"Invalid value for '{param}'" if param else "Invalid request body"
    return RequestError(f"{where}: {_reason(message, body, request_type, path)}.", param=param)


def _reason(message: str, body: bytes, request_type: type[msgspec.Struct], path: str) -> str:
    try:
        return wrong_value(body, request_type, path)
    except (LookupError, StopIteration, ValueError, RecursionError, msgspec.MsgspecError):
        pass  # what follows the wrong value is not JSON, or repeats a name
    problem = message.partition(" - at ")[0].replace(" | null", "").replace("`", "'")
    return f"{problem[0].lower()}{problem[1:]}"


def _check_content_type(request: Request) -> None:
    """Raise `UnsupportedMediaType` unless the body is declared as JSON. Web pages cannot do that without CORS."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        found = f"not '{media_type[:100]}'" if media_type else "and there is none"
        raise UnsupportedMediaType(
            f"Content-Type must be application/json, {found}. With curl add: -H 'Content-Type: application/json'"
        )
