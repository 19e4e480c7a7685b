"""Server-sent events of an engine, parsed no further than needed: they are forwarded as they came.

Most events contain a piece of text and nothing else. `leading_pieces` recognises them by their bytes, at a tenth of the
cost of parsing them; only the other events are parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

__all__ = ["Event", "EventSplitter", "first_event", "leading_pieces", "parse_event", "split_events"]

MAX_EVENT_BYTES = 16 * 1024 * 1024
_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its bytes, and the JSON in it, if any."""

    raw: bytes
    body: dict[str, Any] | None
    is_done: bool = False  # `data: [DONE]`

    @property
    def has_data(self) -> bool:
        """Whether it is more than a comment."""
        return self.body is not None or self.is_done

    @property
    def has_choices(self) -> bool:
        """Whether it contains a part of the answer."""
        return bool(self.body and self.body.get("choices"))

    @property
    def usage(self) -> dict[str, Any] | None:
        """Tokens used so far, if the event reports them."""
        usage = self.body.get("usage") if self.body else None
        return usage if isinstance(usage, dict) else None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error the engine sent instead of an answer."""
        error = self.body.get("error") if self.body else None
        return None if not error else error if isinstance(error, dict) else {"message": str(error)}

    def with_body(self, body: dict[str, Any]) -> Event:
        """The same event with another body."""
        return Event(b"data: " + orjson.dumps(body) + b"\n\n", body)


class EventSplitter:
    """Cuts a byte stream into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        """The bytes of the events that are complete now. Raises `ValueError` for an event that is too long."""
        if not self._rest and data.endswith(b"\n\n"):
            return data  # engines usually write whole events
        start = max(0, len(self._rest) - 3)  # a separator may be cut
        data = self._rest + data
        end = 0
        for found in _END.finditer(data, start):
            end = found.end()
        self._rest = data[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return data[:end]


def leading_pieces(events: bytes) -> tuple[int, int]:
    """Number of leading events that contain a piece of the answer and nothing else, and the offset at which they end.

    Tries all events, then all but the last two, which are usually usage and `[DONE]`.
    """
    if count := _count_pieces(events):
        return count, len(events)
    end = len(events)
    for _ in range(3):
        end = events.rfind(b"\n\n", 0, end)
        if end < 0:
            return 0, 0
    end += 2
    count = _count_pieces(events[:end])
    return count, end if count else 0


def _count_pieces(events: bytes) -> int:
    """Number of events if each of them is a piece, else 0.

    NOTE: quotes and line ends are escaped in JSON strings, so the text of an answer cannot contain these patterns.
    """
    count = 1 + events.count(b"\n\ndata: {")
    if (
        not events.startswith(b"data: {")
        or not events.endswith(b"\n\n")
        or events.count(b"\n") != 2 * count  # no event but those that were counted
        or b"\r" in events
        or events.count(b'"choices"') != count
        or b'"error"' in events
        or (b'"usage"' in events and events.count(b'"usage"') != events.count(b'"usage":null'))
    ):
        return 0
    return count


def first_event(events: bytes) -> Event | None:
    """The first event that is more than a comment."""
    start = 0
    for found in _END.finditer(events):
        event = parse_event(events[start : found.end()])
        if event.has_data:
            return event
        start = found.end()
    return None


def split_events(events: bytes) -> list[bytes]:
    """Whole events, one by one."""
    if b"\r" not in events:
        return [part + b"\n\n" for part in events.split(b"\n\n")[:-1]]  # the same as below in a fifth of the time
    parts, start = [], 0
    for found in _END.finditer(events):
        parts.append(events[start : found.end()])
        start = found.end()
    return parts


def parse_event(raw: bytes) -> Event:
    """One whole event."""
    lines = [line.removeprefix(b"data:").strip() for line in raw.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data == b"[DONE]":
        return Event(raw, None, is_done=True)
    try:
        body = orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        body = None
    return Event(raw, body if isinstance(body, dict) else None)
