"""When things happened to one traced request on a worker.

Workers export no spans. With a request's first tokens they tell the router how long ago things happened. Ages need no
common clock. They are off by the time that the message took, which is far less than a step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(max_length=64)]
_Age = Annotated[float, Meta(ge=0, lt=1e9)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Ages(msgspec.Struct, frozen=True, array_like=True):
    """A timeline in the form in which it is sent."""

    ages_s: Annotated[dict[_Name, _Age], Meta(max_length=16)]  # seconds before the message was sent, by mark
    counts: Annotated[dict[_Name, _Count], Meta(max_length=16)]


class Timeline:
    """The marks and counts of one request. Times are of the worker's clock."""

    def __init__(self, now: float) -> None:
        self._marks = {"received": now}
        self._counts: dict[str, int] = {}

    def mark(self, name: str, now: float) -> None:
        """Note that this happened. Only the first time counts."""
        self._marks.setdefault(name, now)

    def count(self, name: str, number: int) -> None:
        """Add to a count."""
        self._counts[name] = self._counts.get(name, 0) + number

    def step(self, start_s: float, end_s: float, num_tokens: int, *, samples: bool) -> None:
        """A step has computed this many tokens, and the next one if it samples."""
        self.mark("computing", start_s)
        self.mark("first_chunk", end_s)
        self.count("steps", 1)
        self.count("computed_tokens", num_tokens)
        if samples:
            self.mark("sampled", end_s)

    def ages(self, now: float) -> Ages:
        """As it is sent now."""
        return Ages({name: max(now - at, 0.0) for name, at in self._marks.items()}, self._counts)
