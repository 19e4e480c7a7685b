"""What the router decides about every request alike, whether our own workers serve it or other engines.

A request may run unless workers died of one like it, and may go on elsewhere until several died while they had it.
`Generation` carries requests to our workers over ZeroMQ, the relaying side those to other engines over HTTP.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from tandem.protocol.errors import PoisonedRequest, ShuttingDown
from tandem.router.admission_queue import AdmittedRequest, Booked
from tandem.router.move_log import MoveLog

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing

MAX_DEATHS = 3  # workers that may die while they have the same request
REFUSED_S = 600.0
MAX_REMEMBERED = 256
SHUTTING_DOWN = "the server is shutting down; send the request again"

B = TypeVar("B", bound=Booked)


class PoisonedRequests:
    """Refuses requests equal to those that killed several workers, for `REFUSED_S`.

    Clients resend failed requests by themselves, which would kill the next workers too. Requests with the same
    fingerprint do the same to a worker. Fingerprints are computed only if needed.
    """

    def __init__(self, workers: str = "workers") -> None:
        """`workers`: what errors call them."""
        self._workers = workers
        self.num_added = 0
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # by fingerprint, oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, fingerprint: bytes, lost_workers: Sequence[str], now: float) -> PoisonedRequest:
        """Refuse such requests from now on. Returns the error for this one."""
        self.num_added += 1
        self._until_s[fingerprint] = now + REFUSED_S
        self._until_s.move_to_end(fingerprint)
        if len(self._until_s) > MAX_REMEMBERED:
            self._until_s.popitem(last=False)
        names = ", ".join(lost_workers)
        return PoisonedRequest(
            f"{len(lost_workers)} {self._workers} ended while they had this request ({names}), so it is given up. "
            f"Requests like it are refused for {REFUSED_S:.0f} s. The logs of the {self._workers} say why they ended."
        )

    def check(self, fingerprint: Callable[[], bytes], now: float) -> None:
        """Raise `PoisonedRequest` for a request like one that was given up a short time ago."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(fingerprint())) is not None:
            raise PoisonedRequest(
                f"Several {self._workers} ended while they had a request like this one. It is refused for "
                f"{until_s - now:.0f} s more. The logs of the {self._workers} say why they ended."
            )


def fingerprint_of(prompt: bytes, *others: Any) -> bytes:
    """The fingerprint of a request: its prompt, and whatever else its computation depends on."""
    return hashlib.blake2b(prompt + msgspec.msgpack.encode(others), digest_size=16).digest()


@dataclass(eq=False, slots=True, kw_only=True)
class ReservationContext:
    """What all reservations of a router share."""

    now: Callable[[], float]
    tracing: Tracing | None = None
    poisoned: PoisonedRequests = field(default_factory=PoisonedRequests)
    moves: MoveLog = field(default_factory=MoveLog)
    is_shut_down: bool = False

    def check_open(self, text: str = SHUTTING_DOWN) -> None:
        """Raise `ShuttingDown` with this text once the server shuts down."""
        if self.is_shut_down:
            raise ShuttingDown(text)


class Reservation(ABC, Generic[B]):
    """What one request holds in the router: its place in the queue, then its booking."""

    def __init__(self, context: ReservationContext, request_id: str, *, explains: bool) -> None:
        self.context = context
        self.request_id = request_id
        self.explains = explains
        self.admitted: AdmittedRequest[B]  # its latest booking and decision, once it is placed
        self._lost: list[str] = []  # workers that died while they had the request, since its last token
        self._verdict: PoisonedRequest | None = None  # set once several have

    @abstractmethod
    def fingerprint(self) -> bytes:
        """What `PoisonedRequests` knows the request by."""

    def check(self) -> None:
        """Raise `PoisonedRequest` if workers died of such a request a short time ago."""
        self.context.poisoned.check(self.fingerprint, self.context.now())

    def note_death(self, worker: str) -> None:
        """A worker died while it had the request. Once several did, `check_may_go_on` raises."""
        self._lost.append(worker)
        if len(self._lost) == MAX_DEATHS:
            self._verdict = self.context.poisoned.add(self.fingerprint(), self._lost, self.context.now())

    def check_may_go_on(self, closed: str = SHUTTING_DOWN) -> None:
        """Raise `PoisonedRequest` if several workers died of it, or `ShuttingDown(closed)` once the server stops."""
        if self._verdict is not None:
            raise self._verdict
        self.context.check_open(closed)

    def note_first_token(self) -> None:
        """Its first token came, or the first one after a move."""
        self._lost.clear()  # a request that kills its workers gets no further than it did the first time
        self.admitted.first_token()
