"""Server-sent events of an engine, parsed no further than needed: they are forwarded as they came.

Most events contain a piece of text and nothing else. `leading_pieces` recognises them by their bytes, at a tenth of the
cost of parsing them; only the other events are parsed. `ChunkEvents` are those of chats and completions; other routes
have formats of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Protocol

from typing_extensions import override

from tandem.frontend.relay.usage import chat_pair_usage
from tandem.router.engines.bounded_json import NotJson, dumps, loads

MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_EVENT_LINES = 4096
PORTION_BYTES = 1024  # of events that may have to be parsed; those after them wait for a time slice
_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: its bytes, the JSON in it, if any, and what it means."""

    raw: bytes
    body: dict[str, Any] | None
    is_done: bool = False  # it ends the stream
    is_opaque: bool = False  # its data is not a JSON object: it is forwarded, as it may be a part of the answer
    is_piece: bool = False  # it contains a part of the answer
    is_opening: bool = False  # that part is the role alone, no token
    usage: dict[str, Any] | None = None  # tokens used, in the shape of chat completions
    is_total: bool = False  # the usage is that of the whole answer
    is_usage_only: bool = False  # it has only usage: clients get it only if they asked for that
    error: dict[str, Any] | None = None  # what the engine sent instead of an answer

    @property
    def has_data(self) -> bool:
        """Whether it is more than a comment."""
        return self.body is not None or self.is_done or self.is_opaque


class EventFormat(Protocol):
    """How a route writes its events."""

    def leading_pieces(self, events: bytes) -> tuple[int, int]:
        """Number of leading events that contain a piece of the answer and nothing else, and the offset of their end."""

    def parse(self, raw: bytes) -> SseEvent:
        """One whole event."""

    def corrected(self, event: SseEvent, prefill_usage: dict[str, Any]) -> SseEvent:
        """An event that has usage, with the usage of a pair."""

    def error(self, error: dict[str, Any]) -> bytes:
        """The event that ends a stream after a failure."""


class ChunkEvents(EventFormat):
    """Events of `/v1/chat/completions` and `/v1/completions`. The last one is `data: [DONE]`."""

    @override
    def leading_pieces(self, events: bytes) -> tuple[int, int]:
        if count := _count_pieces(events):
            return count, len(events)
        # The last two events are usually usage and `[DONE]`.
        end = len(events)
        for _ in range(3):
            end = events.rfind(b"\n\n", 0, end)
            if end < 0:
                return 0, 0
        end += 2
        count = _count_pieces(events[:end])
        return count, end if count else 0

    @override
    def parse(self, raw: bytes) -> SseEvent:
        data = data_of(raw)
        if data == b"[DONE]":
            return SseEvent(raw, None, is_done=True)
        try:
            body = loads(data) if data else None
        except NotJson:
            body = None
        if not isinstance(body, dict):
            return SseEvent(raw, None, is_opaque=bool(data), is_piece=b'"choices"' in data)
        error, usage, is_piece = body.get("error"), body.get("usage"), bool(body.get("choices"))
        has_usage = isinstance(usage, dict)
        return SseEvent(
            raw,
            body,
            is_piece=is_piece,
            is_opening=is_piece and _is_opening(body["choices"]),
            usage=usage if has_usage else None,
            is_total=has_usage and not is_piece,
            is_usage_only=has_usage and not is_piece,
            error=None if not error else error if isinstance(error, dict) else {"message": str(error)},
        )

    @override
    def corrected(self, event: SseEvent, prefill_usage: dict[str, Any]) -> SseEvent:
        usage = chat_pair_usage(event.usage or {}, prefill_usage)
        body = (event.body or {}) | {"usage": usage}
        return replace(event, raw=b"data: " + dumps(body) + b"\n\n", body=body, usage=usage)

    @override
    def error(self, error: dict[str, Any]) -> bytes:
        return b"data: " + dumps({"error": error}) + b"\n\n"


def _is_opening(choices: Any) -> bool:
    """Whether each choice of a chat has only its role."""
    return isinstance(choices, list) and all(
        isinstance(choice, dict)
        and isinstance(delta := choice.get("delta"), dict)
        and bool(delta.get("role"))
        and not any(value for name, value in delta.items() if name != "role")
        and choice.get("finish_reason") is None
        and not choice.get("token_ids")
        for choice in choices
    )


class EventSplitter:
    """Cuts a byte stream into whole events. Each byte is looked at and copied a bounded number of times."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an event whose end has not come
        self.num_bytes = 0  # of this event
        self._num_lines = 0

    def push(self, data: bytes) -> bytes:
        """The bytes of the events that are complete now. Raises `ValueError` for an event that is too long."""
        if not self._parts and data.endswith(b"\n\n"):
            return data  # the usual case: engines write whole events
        before = b"".join(self._parts[-3:])[-3:]  # a separator may be cut
        end = 0
        for found in _END.finditer(before + data):
            end = found.end()
        if not end:
            self._keep(data)
            return b""
        end -= len(before)
        events = b"".join((*self._parts, data[:end]))
        self._parts, self.num_bytes, self._num_lines = [], 0, 0
        self._keep(data[end:])
        return events

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._parts.append(data)
        self.num_bytes += len(data)
        self._num_lines += data.count(b"\n") + data.count(b"\r")
        if self.num_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        if self._num_lines > MAX_EVENT_LINES:
            raise ValueError(f"an event of more than {MAX_EVENT_LINES} lines")


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


def first_event(events: bytes, event_format: EventFormat) -> SseEvent | None:
    """The first event that is more than a comment."""
    for raw in split_events(events):
        if b"data:" in raw and (event := event_format.parse(raw)).has_data:
            return event
    return None


def end_of_event(events: bytes, start: int) -> int:
    """The offset of the first end of an event behind `start`, or that of the last event."""
    # `find` takes a tenth of a regular expression's time.
    found = [(events.find(gap, start), len(gap)) for gap in (b"\n\n", b"\n\r\n")]
    return min((at + length for at, length in found if at >= 0), default=len(events))


def split_events(events: bytes) -> list[bytes]:
    """Whole events, one by one."""
    if b"\r" not in events:
        return [part + b"\n\n" for part in events.split(b"\n\n")[:-1]]  # the same as below in a fifth of the time
    parts, start = [], 0
    for found in _END.finditer(events):
        parts.append(events[start : found.end()])
        start = found.end()
    return parts


def data_of(raw: bytes) -> bytes:
    """The data of one whole event."""
    return b"\n".join(line.removeprefix(b"data:").strip() for line in raw.splitlines() if line.startswith(b"data:"))
