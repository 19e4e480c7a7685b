"""Where requests wait in the router: the event loop's side of `Admission`.

A request that enters gets a booked placement or an error. Every way out frees its place in the queue and its booking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tandem.protocol.errors import NoWorker, ServingError
from tandem.protocol.fault_boundary import noted_on_error, undone_on_error
from tandem.protocol.messages import WorkerPriority
from tandem.scheduling.admission.admission import Admission, Drop
from tandem.scheduling.admission.queued_request import QueuedRequest
from tandem.scheduling.decisions import DecisionLog, RoutingDecision
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.registry import Registry

_NUM_OTHERS = 4  # candidates shown beside the chosen one if an explanation is requested
_TIMER_SLACK_S = 1e-3  # a timer may fire a little early


class Booked(Protocol):
    """What an admitted request has reserved."""

    def prefill_done(self) -> None:
        """The first token of the request came. Later calls change nothing."""

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""


B = TypeVar("B", bound=Booked)
B_co = TypeVar("B_co", bound=Booked, covariant=True)


class Bookable(Protocol[B_co]):
    """A request, as far as the queue needs to know it."""

    @property
    def request_id(self) -> str:
        """Its id in the log of decisions."""

    @property
    def explains(self) -> bool:
        """Whether the decision should name the candidates that were not chosen."""

    def book(self, placed: PlacementRequest, placement: Placement, priority: WorkerPriority) -> B_co:
        """Book a placement that was decided just now."""


@dataclass(eq=False, slots=True)
class AdmittedRequest(Generic[B]):
    """A request that may run now. The holder ends it on every path.

    It calls `end`, or releases `booking` itself where that tells the registry of progress, which wakes the queue.
    """

    placement: Placement
    booking: B
    decision: RoutingDecision
    worker_priority: WorkerPriority  # the order of its prompt at the worker that computes it
    _queue: AdmissionQueue[B]

    def first_token(self) -> None:
        """The request's first token came, or the first one after a move."""
        self.booking.prefill_done()
        if self.decision.actual_ttft_s is None:
            self.decision.actual_ttft_s = self._queue.now() - self.decision.arrived_s
        self._queue.wake()

    def explain(self) -> dict[str, Any]:
        """The decision as JSON."""
        return self.decision.to_json(self._queue.now())

    def end(self) -> None:
        """The request has ended, in whatever way."""
        self.booking.release()
        self._queue.wake()


@dataclass(eq=False, slots=True)
class _Waiter(Generic[B]):
    """A request that waits, in the queue as its payload or for lack of a worker."""

    request: Bookable[B]
    placement_request: PlacementRequest
    decision: RoutingDecision  # of a request that goes on elsewhere: the one about its former place
    admitted: asyncio.Future[AdmittedRequest[B]]

    def drop(self, error: ServingError) -> None:
        self.decision.outcome, self.decision.error = "dropped", error
        self.admitted.set_exception(error)


class AdmissionQueue(Generic[B]):
    """Lets requests run as `Admission` decides. Each is booked at once with the decision."""

    def __init__(
        self,
        admission: Admission,
        registry: Registry,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.log = DecisionLog()
        self.now = clock
        self._admission = admission
        self._timeout_s = timeout_s
        self._is_woken = False
        self._displaced: dict[_Waiter[B], None] = {}  # in order: their answers have begun, and there is no worker
        registry.listen(lambda _: self.wake())
        registry.listen_steps(self.wake)

    async def enter(self, request: Bookable[B], placement_request: PlacementRequest) -> AdmittedRequest[B]:
        """Wait until the request may run. Raises a `ServingError`; cancelling it frees its place.

        A request whose answer has begun waits where no worker can take it. Raises `TimeoutError` if none comes.
        """
        now = self.now()
        decision = RoutingDecision(request.request_id, placement_request.service_class, now)
        self.log.add(decision)
        try:
            num_others = _NUM_OTHERS * request.explains
            decision.forecast = self._admission.forecast(placement_request, now, num_others=num_others)
            future = asyncio.get_running_loop().create_future()
            waiter: _Waiter[B] = _Waiter(request, placement_request, decision, future)
            queued = self._admission.enter(placement_request, decision.forecast, now, waiter)
        except ServingError as exc:
            if isinstance(exc, NoWorker):
                if placement_request.is_resumed:
                    return await self._await_worker(request, placement_request, decision)
                self._admission.reject(placement_request.tenant, exc)
            decision.outcome, decision.error = "rejected", exc
            raise
        with noted_on_error(partial(self._leave, queued, waiter)):  # whatever ends the wait frees the place
            self._decide()
            await self._wait(queued, waiter)
            return waiter.admitted.result()

    async def enter_again(
        self, request: Bookable[B], placement_request: PlacementRequest, former: RoutingDecision
    ) -> AdmittedRequest[B]:
        """Place a request that has lost its worker, before all that wait. Its `former` place is given back.

        Waits while no worker can take it. Raises `TimeoutError` or the error of `close`. Cancelling it frees its place.
        """
        displaced: _Waiter[B] = _Waiter(request, placement_request, former, asyncio.get_running_loop().create_future())
        self._displaced[displaced] = None
        with undone_on_error(partial(self._give_up, displaced)):
            self._decide()
            async with asyncio.timeout(self._timeout_s):
                return await displaced.admitted

    def fork(
        self, request: Bookable[B], placement_request: PlacementRequest, leader: AdmittedRequest[B]
    ) -> AdmittedRequest[B]:
        """Book a further answer to the prompt of a request that was admitted just now, on the same workers."""
        now = self.now()
        placement = self._admission.fork(placement_request, leader.placement)
        decision = RoutingDecision(request.request_id, placement_request.service_class, leader.decision.arrived_s)
        decision.outcome, decision.wait_s = "dispatched", leader.decision.wait_s
        decision.forecast, decision.placement = leader.decision.forecast, placement
        booking = request.book(placement_request, placement, leader.worker_priority)
        decision.decided_s, decision.booked_s = now, self.now()
        self.log.add(decision)
        return AdmittedRequest(placement, booking, decision, leader.worker_priority, self)

    def place_elsewhere(
        self,
        request: Bookable[B],
        placement_request: PlacementRequest,
        former: RoutingDecision,
        *,
        excluded: Collection[str] = (),
    ) -> AdmittedRequest[B] | None:
        """Book another placement, on none of the workers `excluded`, for an admitted request; None if there is none."""
        now = self.now()
        try:
            placement = self._admission.place_again(placement_request, now, excluded=excluded)
        except NoWorker:
            return None
        priority = self._admission.priority_again(placement_request, placement)
        booking = request.book(placement_request, placement, priority)
        moved = self.moved(request, placement_request, placement, former, booking, priority)
        moved.decision.decided_s = now
        return moved

    def moved(
        self,
        request: Bookable[B],
        placement_request: PlacementRequest,
        placement: Placement,
        former: RoutingDecision,
        booking: B,
        priority: WorkerPriority,
    ) -> AdmittedRequest[B]:
        """The admission of a request at a placement that was booked just now: it goes on there, or begins there."""
        now = self.now()
        if former.outcome == "waiting":
            decision = former  # the request had no worker yet
            decision.outcome, decision.wait_s = "dispatched", now - former.arrived_s
        else:
            decision = RoutingDecision(request.request_id, placement_request.service_class, former.arrived_s)
            decision.outcome, decision.actual_ttft_s = "moved", former.actual_ttft_s
            self.log.add(decision)
        decision.placement, decision.decided_s, decision.booked_s = placement, now, now
        return AdmittedRequest(placement, booking, decision, priority, self)

    def explain(self, request: PlacementRequest) -> dict[str, Any]:
        """The decision that would be taken now, as JSON. Nothing is sent or booked. Raises a `ServingError`."""
        now = self.now()
        forecast = self._admission.forecast(request, now, num_others=_NUM_OTHERS)
        outcome = "rejected" if forecast.error else "admitted"
        return RoutingDecision("", request.service_class, now, forecast, outcome, error=forecast.error).to_json(now)

    def wake(self) -> None:
        """Decide again, because the load has changed: once for all changes in this iteration of the event loop."""
        if (self._displaced or len(self._admission)) and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._decide)

    def close(self, error: Callable[[], ServingError]) -> None:
        """Fail all waiting requests."""
        for queued in self._admission.clear():
            waiter: _Waiter[B] = queued.payload
            waiter.drop(error())
        for displaced in self._displaced:
            if not displaced.admitted.done():
                displaced.admitted.set_exception(error())

    async def _await_worker(
        self, request: Bookable[B], placement_request: PlacementRequest, decision: RoutingDecision
    ) -> AdmittedRequest[B]:
        """Wait for a worker in the line of those that have lost theirs."""
        with undone_on_error(partial(setattr, decision, "outcome", "dropped")):
            admitted = await self.enter_again(request, placement_request, decision)
        self._admission.note_admitted(placement_request.tenant, self.now() - decision.arrived_s)
        return admitted

    async def _wait(self, queued: QueuedRequest, waiter: _Waiter[B]) -> None:
        """Return once the request is decided. Deadline and timeout do not wait for a change of load."""
        give_up_s = queued.arrived_s + self._timeout_s
        while not waiter.admitted.done():
            timeout_s = min(queued.latest_start_s, give_up_s) - self.now()
            await asyncio.wait({waiter.admitted}, timeout=max(timeout_s, 0.0) + _TIMER_SLACK_S)
            if waiter.admitted.done():
                return
            if (now := self.now()) >= give_up_s:
                raise self._admission.timeout_error(queued, now)
            self._decide()

    def _decide(self) -> None:
        """Take all decisions that can be taken now. NOTE: no `await` between a decision and its booking."""
        self._is_woken = False
        for displaced in list(self._displaced):
            self._place_again(displaced)
        while (decided := self._admission.next(now := self.now())) is not None:
            waiter: _Waiter[B] = decided.queued.payload
            decided.queued.payload = None  # breaks a reference cycle, which costs garbage collection
            if isinstance(decided, Drop):
                waiter.drop(decided.error)
                continue
            decision, priority = waiter.decision, decided.worker_priority
            booking = waiter.request.book(decided.queued.request, decided.placement, priority)
            decision.outcome, decision.placement, decision.wait_s = "dispatched", decided.placement, decided.wait_s
            decision.decided_s, decision.booked_s = now, self.now()
            waiter.admitted.set_result(AdmittedRequest(decided.placement, booking, decision, priority, self))

    def _place_again(self, displaced: _Waiter[B]) -> None:
        """Book a placement for a displaced request, if there is a worker for it."""
        if displaced.admitted.done():  # it was cancelled or failed just now, and is about to leave
            return
        admitted = self.place_elsewhere(displaced.request, displaced.placement_request, displaced.decision)
        if admitted is not None:
            del self._displaced[displaced]
            displaced.admitted.set_result(admitted)

    def _give_up(self, displaced: _Waiter[B]) -> None:
        """Free what the displaced request has, whatever was decided meanwhile."""
        self._displaced.pop(displaced, None)
        admitted = displaced.admitted
        if admitted.done() and not admitted.cancelled() and not admitted.exception():
            admitted.result().end()

    def _leave(self, queued: QueuedRequest, waiter: _Waiter[B], exc: BaseException) -> None:
        """Free what the request has, whatever was decided meanwhile."""
        if waiter.admitted.done():
            if waiter.admitted.exception() is None:
                waiter.admitted.result().end()
                waiter.decision.outcome = "dropped"
            return
        error = exc if isinstance(exc, ServingError) else None
        self._admission.leave(queued, (error and error.code) or "client_gone")
        waiter.decision.outcome, waiter.decision.error = "dropped", error
        self.wake()
