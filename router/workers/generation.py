"""The life of a request: it is admitted, served by its workers, moved to others when one dies, and gives all back.

The ledger of a stream is the request and the tokens that were passed on. Whatever else an answer depends on (the draw
of each token, penalties, the grammar, stop strings) follows from these two. So an answer whose worker died goes on
elsewhere as if nothing had happened: the next attempt gets the tokens as known output, and computes what KV is gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tandem.protocol.errors import ServingError, TransferError, WorkerError, WorkerLost
from tandem.protocol.messages import FinishReason, Fork, SequenceDelta, TurnEnd, WorkerState
from tandem.router.backend import GenerateRequest
from tandem.router.streams import DeltaQueue, Interrupted, QueueStream
from tandem.router.workers.attempt import Attempt
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.copy_ahead import StandbyCopies, copy_ahead, copy_kv, is_worthwhile
from tandem.router.workers.departure import Departure, LeavesWorkers
from tandem.router.workers.fork_line import ForkLine
from tandem.router.workers.generation_trace import GenerationTrace
from tandem.router.workers.link import Stopped
from tandem.router.workers.worker_reservation import WorkerReservation, WorkerReservationContext
from tandem.runtime.idle_timeout import IdleTimeout
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class GenerationContext(WorkerReservationContext):
    """What all generations of a router share."""

    workers: WorkerClient
    running: set[Generation] = field(default_factory=set)  # requests that were dispatched
    forks: ForkLine[Generation] = field(default_factory=ForkLine)
    num_handoffs: int = 0  # requests for which both workers of a pair sent tokens


class Generation(QueueStream[SequenceDelta]):
    """The tokens of one request."""

    def __init__(
        self, context: GenerationContext, request: GenerateRequest, make_queue: Callable[[], DeltaQueue[SequenceDelta]]
    ) -> None:
        super().__init__(make_queue())
        self._context = context
        self._request = request
        self._make_queue = make_queue
        self._now = context.now
        self._reservation = WorkerReservation(context, request)
        self._attempt: Attempt | None = None
        self._error: ServingError | None = None  # set if it ends with this error, whatever its workers do
        self._departure: Departure | None = None  # if it is about to go on elsewhere
        self._copies = StandbyCopies(context.config.copy_kv_tokens, request.request_id)
        self._latest_s = self._step_s = 0.0  # when its latest tokens came, and how long after those before them
        self._num_attempts = 0
        self._num_failures = 0  # failed attempts that others followed
        self._output: list[int] = []
        self._num_cached_tokens = 0
        self._is_complete = False  # its last token has come
        is_traced = context.tracing is not None and bool(request.traceparent)
        self._trace = GenerationTrace(request, self._now()) if is_traced else None

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
        """Move if its worker should no longer decode: there it would get one token for each chunk of a prompt."""
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
        self._copies.stop()
        place = self._reservation.place_elsewhere(self._output, {worker.worker_id, *excluded})
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
            lambda: self._reservation.digests(self._output),
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
        late_s = self._latest_s + 2 * self._step_s - self._now()
        departure.limit(late_s, self._queue.fail)

    def close(self) -> None:
        """Release the booking and cancel the sub-requests that still run."""
        self._end_trace()
        self._context.forks.let_go(self.request_id)
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
            tail = self._reservation.record_answer(self._output, self._num_cached_tokens)
            if self._is_complete and tail and (self._request.call_ids or self._request.is_demoted):
                self._tell_end(attempt, tail)

    def _tell_end(self, attempt: Attempt, tail: list[bytes]) -> None:
        """Tell the workers that hold its KV whether the answer calls a tool: the next turn then comes soon."""
        has_calls = not self._request.call_ids.isdisjoint(self._output)
        end = TurnEnd(digests=tail, has_calls=has_calls, is_demoted=self._request.is_demoted)
        best = attempt.placement.best
        for worker_id in {best.prefill.worker_id, best.decode.worker_id}:
            self._context.workers.send(worker_id, end)

    async def _begin(self) -> None:
        context, reservation = self._context, self._reservation
        reservation.check()
        is_forked = bool(self._request.fork_of) and await self._await_leader()
        if not is_forked:
            await reservation.hash_prompt()
            context.check_open()
            if self._trace is not None:
                self._trace.entered(self._now())
            await reservation.place()
            self._attempt = self._new_attempt()
        if self._trace is not None:
            self._trace.dispatched(reservation.admitted.decision, self._now())
        self._idle = IdleTimeout(context.config.request_timeout_s, lambda: self.fail(reservation.idle_error()))
        context.check_open()
        reservation.record_turn(reservation.digests([]))
        context.running.add(self)
        if not is_forked:
            self._send(self._fork())

    async def _await_leader(self) -> bool:
        """Whether the first answer to the prompt took this one along. If not, its prompt is now in a cache."""
        timeout_s = 2 * self._context.config.request_timeout_s  # of the leader: for a worker, and for its first token
        try:
            return await self._context.forks.wait(self._request.fork_of, self, timeout_s)
        except TimeoutError:
            raise self._reservation.idle_error() from None

    def _fork(self) -> list[Fork]:
        """Take the other answers to the prompt along, as many as its decode worker has room for."""
        forks: list[Fork] = []
        for one in self._context.forks.waiting(self.request_id)[: self._reservation.num_forks]:
            one._reservation.fork(self._reservation)
            attempt = one._attempt = one._new_attempt()
            try:
                attempt.join(one.request_id)
                forks.append(Fork(one.request_id, one._request.sampling.seed))
            except WorkerError as exc:
                one._queue.fail(exc)
            self._context.forks.take(self.request_id, one)
        return forks

    def _new_attempt(self) -> Attempt:
        number, self._num_attempts = self._num_attempts, self._num_attempts + 1
        admitted, output = self._reservation.admitted, list(self._output)
        return Attempt(admitted, self._context.workers, self._queue, number=number, output=output)

    def _send(self, forks: list[Fork]) -> None:
        """Begin the attempt. If its workers died just now, that is reported like any later death."""
        assert self._attempt is not None
        try:
            self._attempt.begin(self._request, is_traced=self._trace is not None, forks=forks)
        except WorkerError as exc:
            self._queue.fail(exc)

    async def _recover(self, error: ServingError | Interrupted) -> None:
        """Go on with another attempt, after the tokens that were passed on. Raises the error if that cannot help."""
        if isinstance(error, ServingError) and error.grammar_s:
            self._reservation.note_grammar(error.grammar_s)
        former = self._attempt
        if former is None or self._error is not None:
            raise self._error or error
        lost_s = self._now()
        self._copies.stop()
        departure, self._departure = self._departure, None
        place = None
        if departure is not None and isinstance(error, Stopped | LeavesWorkers):
            departure.stop()
            error, place = LeavesWorkers(departure.cause), departure.place
            self._context.moves.num_moves[departure.cause] += 1
        else:
            if departure is not None:  # the worker was lost on the way out
                departure.give_up()
            self._note_failure(error)
        former.end()
        self._queue = self._make_queue()
        if place is not None:
            self._reservation.admitted = place
        else:
            await self._reservation.place_again(self._output, can_hand_over=not isinstance(error, TransferError))
        self._attempt = self._new_attempt()
        if self._trace is not None:
            self._trace.moved(lost_s, error, self._reservation.admitted.decision)
        self._send([])

    def _keep_copied(self, attempt: Attempt) -> None:
        """Begin to copy the KV to another worker, if configured and if enough tokens have come since the last copy."""
        num_tokens = len(self._request.token_ids) + len(self._output)
        may_copy = attempt.is_decoding and self._departure is None and not self._has_ended
        if self._copies.is_due(num_tokens) and may_copy:
            self._copies.begin(num_tokens, partial(self._copy_to_cheapest, attempt, num_tokens))

    async def _copy_to_cheapest(self, attempt: Attempt, num_tokens: int) -> None:
        """Copy the KV to the cheapest worker: usually the one with the last copy, because it has least to read."""
        here = attempt.placement.best.decode
        await copy_kv(
            self._context.workers,
            self._reservation.digests(self._output),
            source=here.card.address,
            worker_id=self._reservation.next_worker(self._output, {here.worker_id}),
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
        self._context.moves.add(error.code or "", str(error))

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
                    self._trace.worker_told(delta.timeline, self._now(), offset=delta.offset)
        due = attempt.in_order(deltas)
        tokens = [self._recorded(_merged(due), attempt)] if due else []
        if due and due[-1].grammar_s:
            self._reservation.note_grammar(due[-1].grammar_s)
        self._keep_copied(attempt)
        if is_new:
            self.leave_pool()  # its worker's role may have changed since it was placed
        return tokens

    def _recorded(self, delta: SequenceDelta, attempt: Attempt) -> SequenceDelta:
        if not attempt.has_spoken:
            attempt.has_spoken = True
            self._context.forks.let_go(self.request_id)
            self._reservation.note_first_token()
            if self._request.explains and not self._output:
                delta = msgspec.structs.replace(delta, decision=attempt.admitted.explain())
        now = self._now()
        self._latest_s, self._step_s = now, now - self._latest_s if self._latest_s else 0.0
        self._output += delta.token_ids
        self._num_cached_tokens += delta.num_cached_tokens or 0
        if self._trace is not None:
            self._trace.tokens(len(delta.token_ids), delta.num_cached_tokens, delta.finish_reason, now)
        if delta.finish_reason is not None:
            self._has_ended = self._is_complete = True
            self._reservation.note_complete(attempt.num_tokens)
        return delta

    def _note_error(self, error: BaseException) -> None:
        if self._trace is not None:
            self._trace.failed(error)

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None and self._context.tracing is not None:
            self._context.tracing.record(self._request.traceparent, trace.finish(self._now()))


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
        num_accepted_tokens=sum(delta.num_accepted_tokens for delta in due),
        num_rejected_tokens=sum(delta.num_rejected_tokens for delta in due),
    )
