"""The life of a request: it is admitted, served by its workers, moved to others when one dies, and gives all back.

The ledger of a stream is the request and the tokens that were passed on. Whatever else an answer depends on (the draw
of each token, penalties, the grammar, stop strings) follows from these two. So an answer whose worker died goes on
elsewhere as if nothing had happened: the next attempt gets the tokens as known output, and computes what KV is gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import token_bytes
from tandem.protocol.errors import ServingError, TransferError, WorkerError, WorkerLost, WorkerTimeout
from tandem.protocol.messages import FinishReason, SequenceDelta, WorkerState
from tandem.router.admission_queue import AdmissionQueue, AdmittedRequest
from tandem.router.backend import GenerateRequest
from tandem.router.poisoned_requests import fingerprint
from tandem.router.reservation import Reservation, ReservationContext
from tandem.router.streams import DeltaQueue, QueueStream
from tandem.router.workers.attempt import Attempt
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.copy_ahead import copy_ahead, copy_kv, is_worthwhile
from tandem.router.workers.departure import Departure, LeavesWorkers
from tandem.router.workers.generation_trace import GenerationTrace
from tandem.router.workers.link import Stopped
from tandem.router.workers.pin_ledger import PinOwner
from tandem.router.workers.pins import PinService
from tandem.router.workers.prompt_hasher import PromptHasher
from tandem.router.workers.standby_copies import StandbyCopies
from tandem.runtime.idle_timeout import IdleTimeout
from tandem.scheduling.admission.admission import Admission
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode

__all__ = ["Generation", "GenerationContext"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class GenerationContext:
    """What all generations of a router share."""

    reservations: ReservationContext
    admission: Admission
    admission_queue: AdmissionQueue[GenerateRequest, Booking]
    hasher: PromptHasher
    workers: WorkerClient
    pins: PinService
    sizing: CacheSizing
    config: RouterConfig
    running: set[Generation] = field(default_factory=set)  # requests that were dispatched
    num_handoffs: int = 0  # requests for which both workers of a pair sent tokens

    def placement_request(
        self, request: GenerateRequest, digests: Sequence[bytes], num_outputs: int = 0
    ) -> PlacementRequest:
        """What admission and placement need to know about a request whose answer has `num_outputs` tokens so far.

        A scored prompt finds nothing cached.
        """
        is_scored = request.sampling.num_prompt_logprobs is not None and not num_outputs
        return self.admission.placement_request(
            request.service_class,
            num_prompt_tokens=len(request.token_ids) + num_outputs,
            digests=CommonDigests([] if is_scored else digests),
            max_tokens=request.sampling.max_tokens - num_outputs,
            adapter=request.adapter,
        )


class Generation(QueueStream[SequenceDelta]):
    """The tokens of one request."""

    def __init__(
        self, context: GenerationContext, request: GenerateRequest, make_queue: Callable[[], DeltaQueue[SequenceDelta]]
    ) -> None:
        super().__init__(make_queue())
        self._context = context
        self._request = request
        self._make_queue = make_queue
        self._reservation: Reservation[GenerateRequest, Booking] = Reservation(
            context.reservations, partial(_fingerprint, request)
        )
        self._digests: list[bytes] = []
        self._attempt: Attempt | None = None
        self._error: ServingError | None = None  # set if it ends with this error, whatever its workers do
        self._departure: Departure | None = None  # if it is about to go on elsewhere
        self._copies = StandbyCopies(context.config.copy_kv_tokens, request.request_id)
        self._latest_s = self._step_s = 0.0  # when its latest tokens came, and how long after those before them
        self._num_attempts = 0
        self._num_failures = 0  # failed attempts that others followed
        self._output: list[int] = []
        self._num_cached_tokens = 0
        is_traced = context.reservations.tracing is not None and bool(request.traceparent)
        self._trace = GenerationTrace(request, context.admission_queue.now()) if is_traced else None

    @property
    def request_id(self) -> str:
        """Its name in logs and on the workers."""
        return self._request.request_id

    def is_of(self, request_id: str) -> bool:
        """Whether it belongs to the request with this id, the one that the client knows. "" = any request.

        A client may give several requests one id, and each answer of a request adds a number to it.
        """
        pattern = rf"{re.escape(request_id)}(\.[0-9a-f]{{16}})?(-[0-9]+)?"
        return not request_id or re.fullmatch(pattern, self.request_id) is not None

    def fail(self, error: ServingError) -> None:
        """End the request with this error, after the tokens that have arrived."""
        self._error = error
        self._queue.fail(error)

    @property
    def decode_worker(self) -> RegisteredWorker | None:
        """The worker that decodes its answer; None before tokens come from there."""
        attempt = self._attempt
        return attempt.placement.best.decode if attempt is not None and attempt.is_decoding else None

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to go on elsewhere."""
        return self._departure is not None

    @property
    def remaining_tokens(self) -> int:
        """The most tokens that its answer may still get."""
        return self._request.sampling.max_tokens - len(self._output)

    def leave_pool(self) -> None:
        """Move if its worker should not decode any more: there it would get one token for each chunk of a prompt."""
        worker = self.decode_worker
        if worker is not None and worker.state is not WorkerState.DEAD and not can_decode(worker):
            self.move("drain" if worker.state is WorkerState.DRAINING else "role_change")

    def move(self, cause: str, *, excluded: Collection[str] = ()) -> bool:
        """Go on with another decode worker, but not with those `excluded`. Returns False if there is no place.

        The place is booked first.
        """
        worker, attempt = self.decode_worker, self._attempt
        if worker is None or attempt is None or self._error is not None or self._departure is not None:
            return False
        rest = msgspec.structs.replace(self._rest(attempt), can_hand_over=False)  # no third worker has more of the KV
        self._copies.stop()
        place = self._context.admission_queue.place_elsewhere(
            self._request, rest, attempt.admitted.decision, excluded={worker.worker_id, *excluded}
        )
        if place is None:
            return False
        departure = self._departure = Departure(place, cause)
        if is_worthwhile(place):
            copy = partial(self._copy_ahead, attempt, departure)
            departure.copy_first(copy, partial(self._copied_ahead, attempt, departure))
        else:
            self._leave(attempt, departure)
        return True

    async def _copy_ahead(self, attempt: Attempt, departure: Departure) -> None:
        await copy_ahead(
            self._context.workers,
            lambda: self._all_digests(attempt.placement),
            self._output,
            source=attempt.placement.best.decode.card.address,
            worker_id=departure.place.placement.best.decode.worker_id,
            make_queue=self._make_queue,
            name=f"{self._request.request_id}/{self._num_attempts}",
        )

    def _copied_ahead(self, attempt: Attempt, departure: Departure, error: Exception | None) -> None:
        if isinstance(error, WorkerError):  # the next worker is gone: stay here, unless there is yet another
            departure.give_up()
            self._departure = None
            self.leave_pool()
            return
        if error is not None:
            logger.warning("the KV of request %s could not be copied ahead: %r", self._request.request_id, error)
        self._leave(attempt, departure)

    def _leave(self, attempt: Attempt, departure: Departure) -> None:
        """Stop the present worker, and go on elsewhere after its last token.

        The token of the current step is computed anyway; a next worker that began now would only compute the same one.
        But the step may be computing a long prompt, so the wait ends once the worker is late by one step.
        """
        attempt.stop()
        late_s = self._latest_s + 2 * self._step_s - self._context.admission_queue.now()
        departure.limit(late_s, self._queue.fail)

    def close(self) -> None:
        """Release the booking and cancel the legs that still run."""
        self._end_trace()
        self._copies.stop()
        departure, self._departure = self._departure, None
        if departure is not None:
            departure.give_up()
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if self._idle is not None:
            self._idle.close()
        self._context.running.discard(self)
        attempt.end()
        if self._output:
            self._record_answer(attempt.placement)

    async def _begin(self) -> None:
        context, request = self._context, self._request
        self._reservation.check()
        self._digests = await context.hasher.digests(request.token_ids, request.cache_scope, request.adapter)
        context.reservations.check_open()
        if self._trace is not None:
            self._trace.entered(context.admission_queue.now())
        admitted = await self._enter()
        attempt = self._attempt = self._new_attempt(admitted)
        if self._trace is not None:
            self._trace.dispatched(admitted.decision, context.admission_queue.now())
        self._idle = IdleTimeout(context.config.request_timeout_s, self._fail_idle)
        context.reservations.check_open()
        self._record_turn(self._digests)
        context.running.add(self)
        self._send(attempt)

    async def _enter(self) -> AdmittedRequest[GenerateRequest, Booking]:
        """Wait until it may run. A choice of an answer that may have begun does not fail for lack of a worker."""
        context, request = self._context, self._request
        placement_request = msgspec.structs.replace(
            context.placement_request(request, self._digests),
            may_cover=True,
            may_fall_back=True,
            is_resumed=request.is_later_choice,
            is_admitted=request.is_sibling,
        )
        try:
            return await context.admission_queue.enter(request, placement_request)
        except TimeoutError:
            raise self._idle_error() from None

    def _new_attempt(self, admitted: AdmittedRequest[GenerateRequest, Booking]) -> Attempt:
        self._reservation.admitted = admitted
        number, self._num_attempts = self._num_attempts, self._num_attempts + 1
        return Attempt(admitted, self._context.workers, self._queue, number=number, output=list(self._output))

    def _send(self, attempt: Attempt) -> None:
        """Begin an attempt. If its workers died just now, that is reported like any later death."""
        try:
            attempt.begin(self._request, is_traced=self._trace is not None)
        except WorkerError as exc:
            self._queue.fail(exc)

    async def _recover(self, error: Exception) -> None:
        """Go on with another attempt, after the tokens that were passed on. Raises the error if that cannot help."""
        if isinstance(error, ServingError) and error.grammar_s:
            self._note_grammar(error.grammar_s)
        former = self._attempt
        if former is None or self._error is not None:
            raise self._error or error
        lost_s = self._context.admission_queue.now()
        self._copies.stop()
        departure, self._departure = self._departure, None
        admitted = None
        if departure is not None and isinstance(error, Stopped | LeavesWorkers):
            departure.stop()
            error, admitted = LeavesWorkers(departure.cause), departure.place
            self._context.reservations.moves.num_moves[departure.cause] += 1
        else:
            if departure is not None:  # the worker was lost on the way out
                departure.give_up()
            self._note_failure(error)
        former.end()
        self._queue = self._make_queue()
        if admitted is None:
            admitted = await self._place_again(former, can_hand_over=not isinstance(error, TransferError))
        attempt = self._attempt = self._new_attempt(admitted)
        if self._trace is not None:
            self._trace.moved(lost_s, error, admitted.decision)
        self._send(attempt)

    def _keep_copied(self, attempt: Attempt) -> None:
        """Begin to copy the KV to another worker, if configured and if enough tokens have come since the last copy."""
        num_tokens = len(self._request.token_ids) + len(self._output)
        may_copy = attempt.is_decoding and self._departure is None and not self._has_ended
        if self._copies.is_due(num_tokens) and may_copy:
            self._copies.begin(num_tokens, partial(self._copy_to_cheapest, attempt, num_tokens))

    async def _copy_to_cheapest(self, attempt: Attempt, num_tokens: int) -> None:
        """Copy the KV to the cheapest worker: usually the one with the last copy, because it has least to read."""
        context, here = self._context, attempt.placement.best.decode
        rest = msgspec.structs.replace(self._rest(attempt), can_hand_over=False)
        placement = context.admission.place_again(rest, context.admission_queue.now(), excluded={here.worker_id})
        await copy_kv(
            context.workers,
            list(rest.digests.of(here.card)),
            source=here.card.address,
            worker_id=placement.best.decode.worker_id,
            make_queue=self._make_queue,
            name=f"{self._request.request_id}/{self._num_attempts}.{num_tokens}",
        )

    def _note_failure(self, error: Exception) -> None:
        """An attempt failed. Raises the error, or one that blames the request, if no other attempt may follow."""
        if not isinstance(error, WorkerError | TransferError):
            raise error
        if isinstance(error, WorkerLost) and error.may_have_read:
            self._reservation.note_death(error.worker_id)
            self._reservation.check_may_go_on()
        if self._num_failures >= self._context.config.max_moves:
            raise error
        self._num_failures += 1
        name, num_tokens = self._request.request_id, len(self._output)
        logger.debug("request %s goes on elsewhere behind %d tokens: %s", name, num_tokens, error)
        self._context.reservations.moves.add(error.code or "", str(error))

    async def _place_again(self, former: Attempt, *, can_hand_over: bool) -> AdmittedRequest[GenerateRequest, Booking]:
        """Wait for a worker that can go on, `request_timeout_s` at most."""
        context = self._context
        placement_request = msgspec.structs.replace(
            self._rest(former), is_resumed=True, may_fall_back=True, can_hand_over=can_hand_over
        )
        try:
            return await context.admission_queue.enter_again(self._request, placement_request, former.admitted.decision)
        except TimeoutError:
            raise self._idle_error() from None

    def _rest(self, attempt: Attempt) -> PlacementRequest:
        """What placement needs to know about the rest of the request, after the answer so far."""
        digests = self._all_digests(attempt.placement)
        return self._context.placement_request(self._request, digests, len(self._output))

    def _all_digests(self, placement: Placement) -> list[bytes]:
        """Digests of the full blocks of the prompt and of the answer so far."""
        return [*self._digests, *self._answer_digests(placement)]

    def _answer_digests(self, placement: Placement) -> list[bytes]:
        """Digests of the full blocks that the answer so far adds to the prompt's."""
        hasher, card = self._context.hasher, placement.best.decode.card
        return hasher.answer_digests(self._request, self._digests, self._output, card.namespace, card.block_size)

    def _convert(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        attempt = self._attempt
        if attempt is None:  # the reader has closed the stream
            return []
        is_new = not attempt.has_spoken
        if attempt.take_handoff():
            self._context.num_handoffs += 1
            is_new = True
        if self._trace is not None:
            for delta in deltas:
                if delta.timeline is not None:
                    self._trace.worker_told(delta.timeline, self._context.admission_queue.now(), offset=delta.offset)
        due = attempt.in_order(deltas)
        tokens = [self._recorded(_merged(due), attempt)] if due else []
        if due and due[-1].grammar_s:
            self._note_grammar(due[-1].grammar_s)
        self._keep_copied(attempt)
        if is_new:
            self.leave_pool()  # its worker's role may have changed since it was placed
        return tokens

    def _recorded(self, delta: SequenceDelta, attempt: Attempt) -> SequenceDelta:
        if not attempt.has_spoken:
            attempt.has_spoken = True
            self._reservation.note_first_token()
            if self._request.explains and not self._output:
                delta = msgspec.structs.replace(delta, decision=attempt.admitted.explain())
        now = self._context.admission_queue.now()
        self._latest_s, self._step_s = now, now - self._latest_s if self._latest_s else 0.0
        self._output += delta.token_ids
        self._num_cached_tokens += delta.num_cached_tokens or 0
        if self._trace is not None:
            self._trace.tokens(len(delta.token_ids), delta.num_cached_tokens, delta.finish_reason, now)
        if delta.finish_reason is not None:
            self._has_ended = True
            self._context.admission.note_answer(self._request.service_class.tenant, attempt.num_tokens)
        return delta

    def _note_grammar(self, grammar_s: float) -> None:
        self._context.admission.note_grammar(self._request.service_class.tenant, grammar_s)

    def _note_error(self, error: BaseException) -> None:
        if self._trace is not None:
            self._trace.failed(error)

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        tracing = self._context.reservations.tracing
        if trace is not None and tracing is not None:
            tracing.record(self._request.traceparent, trace.finish(self._context.admission_queue.now()))

    def _record_turn(self, digests: list[bytes]) -> None:
        """Tell the pins that the conversation consists of these blocks now."""
        request = self._request
        if request.conversation_id:
            owner = PinOwner(request.service_class.tenant, request.cache_scope)
            self._context.pins.record_turn(owner, request.conversation_id, digests)

    def _record_answer(self, placement: Placement) -> None:
        """Tell pins and cache sizing about the answer: the conversation's next turn will ask for its blocks too.

        Prompts shorter than a block do not count for the sizing, as no cache can hold them: the readiness probe is one.
        Scored prompts do not either, because they use no cache.
        """
        request, digests, card = self._request, self._digests, placement.best.decode.card
        answer = self._answer_digests(placement)
        self._record_turn([*digests, *answer])
        if digests and request.sampling.num_prompt_logprobs is None:
            self._context.sizing.observe(
                digests,
                answer,
                block_size=card.block_size,
                num_prompt_tokens=len(request.token_ids),
                num_cached_tokens=self._num_cached_tokens,
                tenant=request.service_class.tenant,
            )

    def _fail_idle(self) -> None:
        self.fail(self._idle_error())

    def _idle_error(self) -> WorkerTimeout:
        name, timeout_s = self._request.request_id, self._context.config.request_timeout_s
        return WorkerTimeout(
            f"request {name} got no token within request_timeout_s={timeout_s}; send fewer or shorter prompts at once, "
            "add workers, or raise it"
        )


def _fingerprint(request: GenerateRequest) -> bytes:
    """The fingerprint of a request for `PoisonedRequests`. It leaves the seed out, which is drawn anew each time."""
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    return fingerprint(token_bytes(request.token_ids), sampling, request.adapter)


def _merged(due: list[SequenceDelta]) -> SequenceDelta:
    """Merge deltas that arrived together into one."""
    first, last = due[0], due[-1]
    if last.finish_reason is FinishReason.ABORT:
        raise WorkerError(f"request {last.request_id} was aborted by its worker")
    if len(due) == 1:
        return first
    return msgspec.structs.replace(
        first,
        token_ids=[token for delta in due for token in delta.token_ids],
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=None if first.logprobs is None else [p for delta in due for p in delta.logprobs or ()],
        grammar_s=last.grammar_s,
    )
