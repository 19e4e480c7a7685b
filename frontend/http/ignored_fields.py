"""Names what a request had and its answer is without: hints, neutral values, and fields that nobody here knows.

They never refuse a request. The response header `x-tandem-ignored` names them, and the log does so once.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-tandem-ignored"
MAX_HEADER_CHARS = 1024
MAX_NAME_CHARS = 64
MAX_LOGGED_NAMES = 100  # of this process: clients choose the names

_ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)  # of the request of this task
_logged: set[str] = set()


def begin_ignored() -> list[str]:
    """The list of what is ignored from here on in the request that the current task answers."""
    ignored: list[str] = []
    _ignored.set(ignored)
    return ignored


def note_ignored(name: str, remark: str = "") -> None:
    """Note a field that has no effect, such as `temprature` with the remark `did you mean temperature?`."""
    name = _printable(name)
    shown = f"{name} ({_printable(remark)})" if remark else name
    ignored = _ignored.get()
    if ignored is not None and shown not in ignored:
        ignored.append(shown)
    if name not in _logged and len(_logged) < MAX_LOGGED_NAMES:
        _logged.add(name)
        logger.info("Requests have %s, which is ignored; each response says so in %s.", shown, IGNORED_HEADER)


def ignored_headers(ignored: list[str]) -> list[tuple[bytes, bytes]]:
    """The response header that names what was ignored; none if nothing was. Too long a list is cut."""
    if not ignored:
        return []
    value = ", ".join(ignored)
    if len(value) > MAX_HEADER_CHARS:
        value = value[:MAX_HEADER_CHARS].rpartition(",")[0] + ", ..."
    return [(IGNORED_HEADER.encode(), value.encode())]


def _printable(text: str) -> str:
    """A text as it may stand in a header: a client's name could hold a line break."""
    cut = text if len(text) <= MAX_NAME_CHARS else text[:MAX_NAME_CHARS] + "..."
    return "".join(char if " " <= char <= "~" and char not in ',"' else "?" for char in cut)
