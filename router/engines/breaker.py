"""A circuit breaker: decides when to stop sending to a failing engine, and when to try it again.

    closed --failures in a row, or one that shows that nothing listens there--> open
    closed --it stalled--> open
    open --its time is over--> half-open: one request, the trial, is let through
    half-open --the trial succeeds--> closed        half-open --it fails--> open, for twice the time

A pure state machine: no clock, no I/O. Refusals (429) and clients that disconnect are not failures: a busy engine
works, and a breaker that opens under a burst makes the burst worse.
"""

from __future__ import annotations

import enum

from tandem.runtime.backoff import Backoff


class BreakerState(enum.StrEnum):
    """Which requests the breaker lets through."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "half_open"  # one


class Breaker:
    """The breaker of one engine. Each request that was let through reports its outcome, with its trial number.

    Requests that were sent before the breaker opened may end while it is open. Any success closes it; of failures, only
    that of the trial opens it again.
    """

    def __init__(self, *, max_failures: int, open_s: float, max_open_s: float) -> None:
        self._max_failures = max_failures
        self._backoff = Backoff(open_s, max_open_s)
        self._num_openings = 0  # in a row, without a success between them
        self._num_failures = 0  # in a row
        self._opened_until_s: float | None = None
        self._trial = 0  # number of the running trial; 0 = none
        self._num_trials = 0
        self._is_absent = False
        self.has_stalled = False  # whether it has stalled and not succeeded since
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        """Which requests it lets through now."""
        if self._opened_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_until_s else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Call it before `begin`."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    @property
    def may_be_bypassed(self) -> bool:
        """Whether requests may be sent in spite of an open breaker if no other engine is left: the engine would answer.

        Otherwise one client's requests that make every engine fail would shut out all other clients.
        """
        return not self._is_absent and not self.has_stalled

    def retry_in_s(self, now: float) -> float:
        """Seconds until a request may be sent; 0 when one may now."""
        return 0.0 if self._opened_until_s is None else max(self._opened_until_s - now, 0.0)

    def begin(self, now: float) -> int:
        """A request is sent. The first one in half-open state is a trial and gets its number; all others get 0."""
        assert self.allows(now) or self.may_be_bypassed, f"the breaker is {self.state(now)}"
        if self.state(now) is not BreakerState.HALF_OPEN or self._trial:
            return 0
        self._num_trials += 1
        self._trial = self._num_trials
        return self._trial

    def succeeded(self) -> None:
        """The engine answered: close."""
        self._num_failures = 0
        self._is_absent = False
        self.has_stalled = False
        self._opened_until_s = None
        self._num_openings = 0
        self._trial = 0

    def failed(self, now: float, *, trial: int, is_absent: bool = False) -> None:
        """The engine failed a request. `is_absent`: nothing listens there, which opens the breaker at once."""
        self._num_failures += 1
        self._is_absent = is_absent
        has_failed_trial = bool(trial) and trial == self._trial
        is_closed = self._opened_until_s is None
        if has_failed_trial or (is_closed and (is_absent or self._num_failures >= self._max_failures)):
            self._open(now)

    def stalled(self, now: float) -> None:
        """The engine answers but computes nothing: open at once. A trial under way has failed."""
        self.has_stalled = True
        self._open(now)

    def abandoned(self, *, trial: int) -> None:
        """A request ended without an outcome: its client disconnected, or the engine refused it."""
        if trial == self._trial:
            self._trial = 0

    def _open(self, now: float) -> None:
        self._num_openings += 1
        self._opened_until_s = now + self._backoff.pause_s(self._num_openings)
        self._trial = 0
        self.num_opened += 1
