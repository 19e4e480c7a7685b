"""A running request that leaves its decode worker for another one, where its place is booked.

If copying its KV takes long, it is copied while the present worker goes on decoding. Only then does the request leave:
the present worker keeps the KV in its cache, from where the rest is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tandem.router.admission_queue import AdmittedRequest
from tandem.router.streams import Interrupted
from tandem.runtime.background import task_error
from tandem.scheduling.workers.bookings import Booking


class LeavesWorkers(Interrupted):
    """Raised when a request leaves its workers for others, where its place is booked. Its text is the cause."""


class Departure:
    """One departure, until the request goes on at `place` or the departure is given up."""

    def __init__(self, place: AdmittedRequest[Booking], cause: str) -> None:
        self.place = place
        self.cause = cause
        self._copying: asyncio.Future[None] | None = None
        self._limit: asyncio.TimerHandle | None = None

    def copy_first(self, copy: Callable[[], Awaitable[None]], then: Callable[[Exception | None], None]) -> None:
        """Begin to copy the KV to the place. `then` is called at the end, with the error if there was one."""

        def ended(copying: asyncio.Future[None]) -> None:
            if self._copying is copying:  # not stopped meanwhile
                self._copying = None
                then(task_error(copying))

        self._copying = asyncio.ensure_future(copy())
        self._copying.add_done_callback(ended)

    def limit(self, timeout_s: float, fail: Callable[[Exception], None]) -> None:
        """End the wait for the present worker's last token after this time."""
        leave = LeavesWorkers(self.cause)
        self._limit = asyncio.get_running_loop().call_later(max(timeout_s, 0.0), fail, leave)

    def stop(self) -> None:
        """Nothing more happens by itself. The place stays booked."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.cancel()
        if self._limit is not None:
            self._limit.cancel()

    def give_up(self) -> None:
        """Stop, and give the place back."""
        self.stop()
        self.place.end()
