"""What an engine's answer means: an answer for the client, the engine's failure, or its refusal. Pure functions."""

from __future__ import annotations

import email.utils
import math
import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from tandem.protocol.sampling import MAX_COUNT
from tandem.router.engines.bounded_json import NotJson, loads
from tandem.router.engines.errors import EngineBusy, EngineFailed

DEFAULT_RETRY_AFTER_S = 1.0
MAX_ERROR_CHARS = 500  # how much of an engine's own message is shown
MAX_DATE_CHARS = 64
_SHOWN = reprlib.Repr()  # the beginning of any object, however large or deep it is
_SHOWN.maxdict = _SHOWN.maxlist = 8
_SHOWN.maxstring = _SHOWN.maxlong = MAX_ERROR_CHARS


def parse_answer(
    engine: str,
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    is_answer: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """The JSON of an answer that the client may get: the engine's, or the client's own error (4xx, 501).

    Raises `EngineBusy` for a refusal, and `EngineFailed` for everything else that is not an answer.
    """
    _check_status(engine, status, headers, content)
    try:
        answer = loads(content)
    except NotJson as exc:
        raise EngineFailed(engine, f"answered {status} with something that is not JSON") from exc
    if not isinstance(answer, dict) or (status == 200 and not is_answer(answer)):
        raise EngineFailed(engine, f"answered {status} with something other than an answer")
    return answer


def error_text(error: Any) -> str:
    """The message of an error object that an engine sent, shortened."""
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    if not text:
        return "no message"
    return (text if isinstance(text, str) else _SHOWN.repr(text))[:MAX_ERROR_CHARS]


def as_dict(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else an empty one: engines may send anything."""
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int:
    """`value` if it is a plausible number of tokens, a positive integer; else 0. `True` is not one."""
    return value if type(value) is int and 0 < value <= MAX_COUNT else 0


def _check_status(engine: str, status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Raise for a status that shows the engine's fault or load; 200 and the client's own errors pass.

    501 is one of them: this kind of model cannot answer the route, on any engine.
    """
    if status == 429 or (status == 503 and "retry-after" in headers):
        retry_after_s = _retry_after_s(headers.get("retry-after", ""))
        raise EngineBusy(f"engine {engine} is busy: {_message(content)}", retry_after_s=retry_after_s, engine=engine)
    if status in (401, 403):
        raise EngineFailed(engine, f"refused our key ({status}); check its api_key_env")
    if status >= 500 and status != 501:
        raise EngineFailed(engine, f"answered {status}: {_message(content)}")
    if status not in (200, 501) and not 400 <= status < 500:
        raise EngineFailed(engine, f"answered with the unexpected status {status}")


def _retry_after_s(header: str) -> float:
    """Seconds of a Retry-After header, which is a number or a date."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header[:MAX_DATE_CHARS]).timestamp() - time.time()
        except (ValueError, OverflowError):
            return DEFAULT_RETRY_AFTER_S
    return max(seconds, 0.0) if math.isfinite(seconds) else DEFAULT_RETRY_AFTER_S


def _message(content: bytes) -> str:
    """The error message in an answer's body."""
    try:
        body = loads(content)
    except NotJson:
        return error_text(content[: 4 * MAX_ERROR_CHARS].decode(errors="replace"))
    return error_text(body.get("error", body) if isinstance(body, dict) else body)
