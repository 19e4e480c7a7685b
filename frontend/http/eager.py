"""An awaitable that starts at once, like the eager tasks of Python 3.12."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any

__all__ = ["EagerAwaitable"]


class EagerAwaitable:
    """Runs up to its first wait at construction, with or without a task; awaiting it does the rest.

    The owner awaits or closes it, unless it is done.
    """

    def __init__(self, work: Awaitable[None]) -> None:
        """Raises what `work` raises before its first wait."""
        self.is_done = False
        self._steps = work.__await__()
        self._advance(self._steps.send, None)

    def __await__(self) -> Generator[Any, Any, None]:
        """Do the rest in the awaiting task."""
        while not self.is_done:
            try:
                result = yield self._pending
            except BaseException as exc:  # thrown into the work, as `yield from` does: a cancellation, say
                self._advance(self._steps.throw, exc)
            else:
                self._advance(self._steps.send, result)

    def close(self) -> None:
        """End it where it waits."""
        self.is_done = True
        self._steps.close()

    def _advance(self, step: Callable[[Any], Any], value: Any) -> None:
        self.is_done = True  # unless it waits again
        with suppress(StopIteration):
            self._pending = step(value)
            self.is_done = False
