"""A finished span as a plain value, with those inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.protocol.errors import ServingError

Attributes = dict[str, str | bool | int | float | Sequence[str]]


@dataclass(slots=True)
class SpanNode:
    """A span between two times of `time.monotonic`."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # code or class of the error that ended it; "" = none
    message: str = ""  # message of that error, if it may be shown
    events: list[tuple[str, float]] = field(default_factory=list)  # name and time
    children: list[SpanNode] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """It ended with this error."""
        self.error, self.message = error_type(error), error_message(error)

    def child(
        self, name: str, start_s: float | None, end_s: float | None, attributes: Attributes | None = None
    ) -> SpanNode | None:
        """Add a span within this one, if both times are known. Times outside are moved to the nearest time inside.

        Times from workers are off by the time that their messages took.
        """
        if start_s is None or end_s is None:
            return None
        start_s = min(max(start_s, self.start_s), self.end_s)
        node = SpanNode(name, start_s, min(max(end_s, start_s), self.end_s), attributes or {})
        self.children.append(node)
        return node


def error_type(error: BaseException) -> str:
    """The code of one of our errors, or the name of the exception's class."""
    return getattr(error, "code", None) or type(error).__name__


def error_message(error: BaseException) -> str:
    """The message of an error that quotes no client; "" for others. No part of a prompt must get into a trace."""
    return str(error)[:500] if isinstance(error, ServingError) and not error.may_quote else ""
