"""What the router decides about every request alike, whether our own workers serve it or other engines.

A request may run unless workers died of one like it, and may go on elsewhere until several died while they had it.
`Generation` carries requests to our workers over ZeroMQ, the relaying side those of `LocalReservation` over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from tandem.protocol.errors import NoWorker, PoisonedRequest
from tandem.router.admission_queue import AdmittedRequest, Bookable, Booked
from tandem.router.move_log import MoveLog
from tandem.router.poisoned_requests import MAX_DEATHS, PoisonedRequests

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing

__all__ = ["SHUTTING_DOWN", "Reservation", "ReservationContext"]

SHUTTING_DOWN = "the server is shutting down; send the request again"

R = TypeVar("R", bound=Bookable)
B = TypeVar("B", bound=Booked)


class ReservationContext:
    """What all reservations of a router share."""

    def __init__(self, workers: str, now: Callable[[], float], tracing: Tracing | None) -> None:
        """`workers`: what errors call them."""
        self.now = now
        self.tracing = tracing
        self.moves = MoveLog()
        self.poisoned = PoisonedRequests(workers)
        self.is_shut_down = False

    def check_open(self, text: str = SHUTTING_DOWN) -> None:
        """Raise `NoWorker` with this text once the server shuts down."""
        if self.is_shut_down:
            raise NoWorker(text)


class Reservation(Generic[R, B]):
    """What one request holds in the router."""

    def __init__(self, context: ReservationContext, fingerprint: Callable[[], bytes]) -> None:
        """`fingerprint` is what `PoisonedRequests` knows the request by."""
        self.context = context
        self._fingerprint = fingerprint
        self.admitted: AdmittedRequest[R, B]  # its latest booking and decision, once it is placed
        self._lost: list[str] = []  # workers that died while they had the request, since its last token
        self._verdict: PoisonedRequest | None = None  # set once several have

    def check(self) -> None:
        """Raise `PoisonedRequest` if workers died of such a request a short time ago."""
        self.context.poisoned.check(self._fingerprint, self.context.now())

    def note_death(self, worker: str) -> None:
        """A worker died while it had the request. Once several did, `check_may_go_on` raises."""
        self._lost.append(worker)
        if len(self._lost) == MAX_DEATHS:
            self._verdict = self.context.poisoned.add(self._fingerprint(), self._lost, self.context.now())

    def check_may_go_on(self, closed: str = SHUTTING_DOWN) -> None:
        """Raise `PoisonedRequest` if several workers died of it, or `NoWorker(closed)` once the server shuts down."""
        if self._verdict is not None:
            raise self._verdict
        self.context.check_open(closed)

    def note_first_token(self) -> None:
        """Its first token came, or the first one after a move."""
        self._lost.clear()  # a request that kills its workers gets no further than it did the first time
        self.admitted.first_token()
