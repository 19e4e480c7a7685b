"""Something awaitable that begins before anyone awaits it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

__all__ = ["Started"]


class Started:
    """Runs something up to its first wait, here and now, in a task or not; awaiting it lets it do the rest.

    As eager tasks do from Python 3.12 on. Whoever makes one awaits or closes it, unless it is done.
    """

    def __init__(self, work: Awaitable[None]) -> None:
        """Raises what it raises before its first wait."""
        self.is_done = False
        self._steps = work.__await__()
        self._go_on(self._steps.send, None)

    def __await__(self) -> Generator[Any, Any, None]:
        """The rest of it, in the task that awaits."""
        while not self.is_done:
            try:
                result = yield self._waits_for
            except BaseException as exc:  # for the work: a cancellation, say
                self._go_on(self._steps.throw, exc)
            else:
                self._go_on(self._steps.send, result)

    def close(self) -> None:
        """End it where it waits."""
        self.is_done = True
        self._steps.close()

    def _go_on(self, step: Callable[[Any], Any], value: Any) -> None:
        try:
            self._waits_for = step(value)
        except StopIteration:
            self.is_done = True
        except BaseException:
            self.is_done = True
            raise
