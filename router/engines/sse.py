"""Server-sent events of an engine, taken apart no further than needed: they are passed on as they came."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

__all__ = ["Event", "EventSplitter"]

MAX_EVENT_BYTES = 16 * 1024 * 1024
_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its bytes, and the JSON in it, if any."""

    raw: bytes
    body: dict[str, Any] | None
    is_done: bool = False  # `data: [DONE]`

    @property
    def has_choices(self) -> bool:
        """Whether it brings part of an answer."""
        return bool(self.body and self.body.get("choices"))

    @property
    def usage(self) -> dict[str, Any] | None:
        """Tokens used so far, where the event tells."""
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
    """Bytes as they come from the network in, whole events out."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._rest.strip())

    def push(self, data: bytes) -> list[Event]:
        """Events that are complete now. Raises `ValueError` for one without end."""
        self._rest += data
        events, start = [], 0
        for end in _END.finditer(self._rest):
            events.append(_event(self._rest[start : end.end()]))
            start = end.end()
        self._rest = self._rest[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def _event(raw: bytes) -> Event:
    lines = [line.removeprefix(b"data:").strip() for line in raw.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data == b"[DONE]":
        return Event(raw, None, is_done=True)
    try:
        body = orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        body = None
    return Event(raw, body if isinstance(body, dict) else None)
