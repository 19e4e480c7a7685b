"""A circuit breaker: when to stop sending to an engine that fails, and when to try it again.

    closed --failures in a row, or one that shows nobody is there--> open
    open --its time is over--> half-open: one request is let through
    half-open --it succeeds--> closed        half-open --it fails--> open, for twice the time

A pure state machine: no clock, no I/O. Refusals (429) and clients that leave are no failures: an engine that is busy
works, and a breaker that opens under a burst makes it worse.
"""

from __future__ import annotations

import enum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(enum.StrEnum):
    """What the breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one request


class Breaker:
    """The circuit to one engine. Who was let through tells how it ended, with the number of its trial.

    Requests from before an opening end late; only the trial's end decides what follows, except that any success closes.
    """

    def __init__(self, *, max_failures: int, open_s: float, max_open_s: float) -> None:
        self._max_failures = max_failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._open_s = open_s
        self._num_failures = 0  # in a row
        self._opened_until_s: float | None = None
        self._trial = 0  # the one that runs, 0 = none
        self._num_trials = 0
        self._is_absent = False
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        """What it lets through now."""
        if self._opened_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_until_s else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent; ask before `begin`."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    @property
    def may_be_passed(self) -> bool:
        """Whether a request may be sent all the same where no other engine is left: somebody listens there.

        Else requests of one client that every engine fails on would shut all others out.
        """
        return not self._is_absent

    def retry_in_s(self, now: float) -> float:
        """Seconds until a request may be sent; 0 when one may now."""
        return 0.0 if self._opened_until_s is None else max(self._opened_until_s - now, 0.0)

    def begin(self, now: float) -> int:
        """A request goes out. The first in half-open state is a trial, whose number is returned; all others get 0."""
        assert self.allows(now) or self.may_be_passed, f"the breaker is {self.state(now)}"
        if self.state(now) is not BreakerState.HALF_OPEN or self._trial:
            return 0
        self._num_trials += 1
        self._trial = self._num_trials
        return self._trial

    def succeeded(self) -> None:
        """The engine answered: all is well again."""
        self._num_failures = 0
        self._is_absent = False
        self._opened_until_s = None
        self._open_s = self._first_open_s
        self._trial = 0

    def failed(self, now: float, *, trial: int, is_absent: bool = False) -> None:
        """The engine did not answer as it should. `is_absent` = nobody was there at all, which opens at once."""
        self._num_failures += 1
        self._is_absent = is_absent
        if trial and trial == self._trial:
            self._open_s = min(2 * self._open_s, self._max_open_s)
            self._open(now)
        elif self._opened_until_s is None and (is_absent or self._num_failures >= self._max_failures):
            self._open(now)

    def abandoned(self, *, trial: int) -> None:
        """A request that was let through ended without showing anything: its client left, or it was refused."""
        if trial == self._trial:
            self._trial = 0

    def _open(self, now: float) -> None:
        self._opened_until_s = now + self._open_s
        self._trial = 0
        self.num_opened += 1
