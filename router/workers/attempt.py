"""One attempt to serve a request on its workers: what is booked there, and the parts of the request that run there."""

from __future__ import annotations

from typing import Any

from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import Decode, Fork, Generate, KvHolder, Prefill, SequenceDelta, prompt_fields
from tandem.router.admission_queue import AdmittedRequest
from tandem.router.backend import GenerateRequest
from tandem.router.streams import DeltaQueue
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.link import SubRequest
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.workers.bookings import Booking


class Attempt:
    """One try to serve a request: a sub-request for each of its workers (prefill and decode, or one that does both).

    `output` is the beginning of the answer, from earlier attempts. Workers know the attempt by a name of its own, so
    remains of an earlier one on the same worker are not in its way.
    """

    def __init__(
        self,
        admitted: AdmittedRequest[Booking],
        workers: WorkerClient,
        queue: DeltaQueue[SequenceDelta],
        *,
        number: int,
        output: list[int],
    ) -> None:
        self.admitted = admitted
        self.has_spoken = False  # whether tokens of it were passed on
        self._workers = workers
        self._queue = queue
        self._number = number
        self._output = output
        self._sub_requests: list[SubRequest] = []
        self._awaits_handoff = False
        self._order = DeltaOrder(len(output))

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        return self.admitted.placement

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._order.num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether tokens come from the worker that decodes."""
        return self.has_spoken and not self._awaits_handoff

    def begin(self, request: GenerateRequest, *, is_traced: bool, forks: list[Fork]) -> None:
        """Send each worker its part, and that of the forks. Raises `WorkerError` if one is gone.

        NOTE: `end` cancels what was sent. The forks have attempts of their own, which joined before.
        """
        best = self.placement.best
        prefill, decode = best.prefill.card.address, best.decode.card.address
        common: dict[str, Any] = {
            "request_id": f"{request.request_id}/{self._number}" if self._number else request.request_id,
            **prompt_fields(request.token_ids),
            "output_ids": self._output,
            "sampling": request.sampling,
            "cache_salt": request.cache_scope,
            "is_traced": is_traced,
            "priority": self.admitted.worker_priority,
            "forks": forks,
        }
        holder = kv_holder(self.placement)
        if not best.is_pair:
            self._open_sub_request(decode.worker_id, Generate(**common, kv_holder=holder))
            return
        self._open_sub_request(prefill.worker_id, Prefill(**common, kv_holder=holder, decode_worker=decode))
        self._open_sub_request(decode.worker_id, Decode(**common, prefill_worker=prefill))
        self._awaits_handoff = True

    def join(self, request_id: str) -> None:
        """Expect the tokens of a fork from each worker, before its leader begins. Raises as `begin`."""
        best = self.placement.best
        for worker in dict.fromkeys((best.prefill.worker_id, best.decode.worker_id)):
            self._sub_requests.append(self._workers.join_sub_request(worker, request_id, self._queue))
        self._awaits_handoff = best.is_pair

    def take_handoff(self) -> bool:
        """Whether both workers of a pair have sent tokens. Returns true only once."""
        if not self._awaits_handoff or not all(sub_request.has_delivered for sub_request in self._sub_requests):
            return False
        self._awaits_handoff = False
        self._sub_requests[0].close()  # the prefill worker has done its part: its death no longer matters
        return True

    def in_order(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """The deltas that are due now. Raises `WorkerError` when tokens arrive twice."""
        return [due for delta in deltas for due in self._order.push(delta)]

    def stop(self) -> None:
        """Let its workers stop after the current step; `Stopped` follows their last tokens."""
        for sub_request in self._sub_requests:
            sub_request.stop()

    def end(self) -> None:
        """Give the booking back and cancel the sub-requests that still run."""
        self.admitted.end()
        for sub_request in self._sub_requests:
            sub_request.cancel()

    def _open_sub_request(self, worker_id: str, part: Generate | Prefill | Decode) -> None:
        self._sub_requests.append(self._workers.open_sub_request(worker_id, part, self._queue))


class DeltaOrder:
    """Puts the deltas of one request in order of their offsets; both sub-requests may be ahead of each other."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens  # passed on so far
        self._early: dict[int, SequenceDelta] = {}

    def push(self, delta: SequenceDelta) -> list[SequenceDelta]:
        """Return the deltas that are due now. Raises `WorkerError` when tokens arrive twice."""
        if delta.offset < self.num_tokens or delta.offset in self._early:
            raise WorkerError(
                f"request {delta.request_id} got output token {delta.offset} twice; {self.num_tokens} were passed on"
            )
        self._early[delta.offset] = delta
        due: list[SequenceDelta] = []
        while (next_delta := self._early.pop(self.num_tokens, None)) is not None:
            due.append(next_delta)
            self.num_tokens += len(next_delta.token_ids)
        return due


def kv_holder(placement: Placement) -> KvHolder | None:
    """The worker to read KV from, if that is worthwhile."""
    holder = placement.best.holder
    return None if holder is None else KvHolder(holder.worker.card.address, holder.num_blocks)
