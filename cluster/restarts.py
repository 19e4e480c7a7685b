"""How often a worker is restarted, and when. Pure: the caller passes seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.runtime.backoff import Backoff

WINDOW_S = 300.0
BACKOFF = Backoff(1.0, 60.0)


@dataclass(eq=False, slots=True)
class RestartBudget:
    """The deaths of one worker. More than `max_restarts` of them within `WINDOW_S` of service use up its budget.

    The window counts only seconds in which the worker served. By the clock, a model that loads for ten minutes and dies
    at once would look healthy, because its deaths lie far apart.
    """

    max_restarts: int
    backoff: Backoff = BACKOFF  # for deaths beyond the budget
    _served_s: float = 0.0  # service of all its processes together
    _deaths: deque[float] = field(default_factory=deque)  # by the seconds served until then

    def renewed(self) -> RestartBudget:
        """The same budget for another worker, with no deaths yet."""
        return RestartBudget(self.max_restarts, self.backoff)

    def died(self, lived_s: float) -> None:
        """Count a death after `lived_s` of service, 0 for a worker that did not start."""
        self._served_s += lived_s
        while self._deaths and self._deaths[0] < self._served_s - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(self._served_s)

    @property
    def num_deaths(self) -> int:
        """Deaths within the window that ends with the latest one."""
        return len(self._deaths)

    @property
    def is_used_up(self) -> bool:
        """Whether the worker died too often. It is then restarted only while others serve, less and less often."""
        return self.num_deaths > self.max_restarts

    @property
    def delay_s(self) -> float:
        """Seconds until the next start."""
        return self.backoff.pause_s(1 + max(self.num_deaths - self.max_restarts, 0))
