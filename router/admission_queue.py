"""Where requests wait for their turn: the event loop's side of `Admission`.

Whoever enters gets a booked placement or an error. Every way out gives the place in the queue and the booking back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tandem.protocol.errors import NoWorker, ServingError
from tandem.protocol.messages import PrefillPriority
from tandem.scheduling.admission import Admission, Dispatch, Drop, Waiting
from tandem.scheduling.decisions import Decision, DecisionLog
from tandem.scheduling.placement import Placement
from tandem.scheduling.registry import Registry
from tandem.scheduling.request import PlacementRequest

__all__ = ["AdmissionQueue", "AdmittedRequest", "Asking", "Booked"]

NUM_OTHERS = 4  # candidates shown beside the one taken, where they are asked for
_TIMER_SLACK_S = 1e-3  # a timer may fire a little early


class Asking(Protocol):
    """A request, as far as the gate knows it."""

    @property
    def request_id(self) -> str:
        """Its name in the log of decisions."""

    @property
    def explains(self) -> bool:
        """Whether the candidates it was not placed on are wanted too."""


class Booked(Protocol):
    """What a request whose turn it is has taken."""

    def prefill_done(self) -> None:
        """Its first token came. Later calls change nothing."""

    def release(self) -> None:
        """Give all of it back. Later calls change nothing."""


R = TypeVar("R", bound=Asking)
B = TypeVar("B", bound=Booked)


@dataclass(eq=False, slots=True)
class AdmittedRequest(Generic[R, B]):
    """A request whose turn it is. Whoever holds it gives its place back, on every path.

    That is by `end`, or by releasing `booking` itself where that tells the registry of progress, which wakes the gate.
    """

    placement: Placement
    booking: B
    decision: Decision
    _gate: AdmissionQueue[R, B]
    _dispatch: Dispatch

    @property
    def turn(self) -> PrefillPriority:
        """Of its prompt, at the worker that computes it."""
        return self._dispatch.turn

    def first_token(self) -> None:
        """The first token came."""
        if self.decision.actual_ttft_s is None:
            self.booking.prefill_done()
            self.decision.actual_ttft_s = self._gate.now() - self._dispatch.waiting.arrived_s
            self._gate.wake()

    def explain(self) -> dict[str, Any]:
        """The decision as JSON."""
        return self.decision.to_json(self._gate.now())

    def end(self) -> None:
        """The request has ended, however that came."""
        self.booking.release()
        self._gate.wake()


@dataclass(eq=False, slots=True)
class _Guest(Generic[R, B]):
    """What the gate knows of a waiting request."""

    request: R
    decision: Decision
    turn: asyncio.Future[AdmittedRequest[R, B]]


class AdmissionQueue(Generic[R, B]):
    """Lets requests through as `Admission` decides. `book` is called at once with each decision."""

    def __init__(
        self,
        admission: Admission,
        registry: Registry,
        book: Callable[[R, Dispatch], B],
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.log = DecisionLog()
        self.now = clock
        self._admission = admission
        self._book = book
        self._timeout_s = timeout_s
        self._is_woken = False
        registry.listen(lambda _: self.wake())
        registry.listen_steps(self.wake)

    async def enter(self, request: R, placement_request: PlacementRequest) -> AdmittedRequest[R, B]:
        """Wait for the request's turn, if it must. Raises a `ServingError`; cancelling it gives the place back."""
        now = self.now()
        decision = Decision(request.request_id, placement_request.service_class, now)
        self.log.add(decision)
        try:
            num_others = NUM_OTHERS * request.explains
            decision.forecast = self._admission.forecast(placement_request, now, num_others=num_others)
            guest: _Guest[R, B] = _Guest(request, decision, asyncio.get_running_loop().create_future())
            waiting = self._admission.enter(placement_request, decision.forecast, now, guest)
        except ServingError as exc:
            if isinstance(exc, NoWorker):
                self._admission.reject(placement_request.tenant, exc)
            decision.outcome, decision.error = "rejected", exc
            raise
        try:
            self._decide()
            await self._turn_of(waiting, guest)
            return guest.turn.result()
        except BaseException as exc:
            self._leave(waiting, guest, exc)
            raise

    def wake(self) -> None:
        """The load has changed: decide again, once for all changes of this turn of the event loop."""
        if len(self._admission) and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._decide)

    def close(self, error: Callable[[], ServingError]) -> None:
        """Send everyone who waits away."""
        for waiting in self._admission.clear():
            guest: _Guest[R, B] = waiting.payload
            _drop(guest, error())

    async def _turn_of(self, waiting: Waiting, guest: _Guest[R, B]) -> None:
        """Return when it is decided. Neither deadline nor timeout wait for a change of load."""
        give_up_s = waiting.arrived_s + self._timeout_s
        while not guest.turn.done():
            timeout_s = min(waiting.latest_start_s, give_up_s) - self.now()
            await asyncio.wait({guest.turn}, timeout=max(timeout_s, 0.0) + _TIMER_SLACK_S)
            if guest.turn.done():
                return
            if (now := self.now()) >= give_up_s:
                raise self._admission.overtime(waiting, now)
            self._decide()

    def _decide(self) -> None:
        """Take all decisions that can be taken now. NOTE: no `await` between a decision and its booking."""
        self._is_woken = False
        while (decided := self._admission.next(self.now())) is not None:
            guest: _Guest[R, B] = decided.waiting.payload
            decided.waiting.payload = None  # the guest's turn leads back here: no work for the garbage collector
            if isinstance(decided, Drop):
                _drop(guest, decided.error)
                continue
            booking = self._book(guest.request, decided)
            decision = guest.decision
            decision.outcome, decision.placement, decision.wait_s = "dispatched", decided.placement, decided.wait_s
            guest.turn.set_result(AdmittedRequest(decided.placement, booking, decision, self, decided))

    def _leave(self, waiting: Waiting, guest: _Guest[R, B], exc: BaseException) -> None:
        """Give back what the guest has, whatever was decided meanwhile."""
        if guest.turn.done():
            if guest.turn.exception() is None:
                guest.turn.result().end()
                guest.decision.outcome = "dropped"
            return
        error = exc if isinstance(exc, ServingError) else None
        self._admission.leave(waiting, (error and error.code) or "client_gone")
        guest.decision.outcome, guest.decision.error = "dropped", error
        self.wake()


def _drop(guest: _Guest[Any, Any], error: ServingError) -> None:
    guest.decision.outcome, guest.decision.error = "dropped", error
    guest.turn.set_exception(error)
