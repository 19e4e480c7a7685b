"""The load that a decision puts on its workers, from the decision to the end of the request."""

from __future__ import annotations

from bisect import insort

from tandem.protocol.messages import WorkerPriority
from tandem.scheduling.cost_model import prefill_attention
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.workers import BookedPrompt, RegisteredWorker, TenantLoad


class Booking:
    """The load of one request on one or two workers. The holder releases it on every path."""

    def __init__(
        self,
        open_bookings: set[Booking],
        changed_workers: set[RegisteredWorker],
        prefill: RegisteredWorker,
        decode: RegisteredWorker,
        load: RequestLoad,
        priority: WorkerPriority,
        number: int,
    ) -> None:
        """`number` counts the bookings of the registry."""
        self.order = priority.order
        self._tenant = priority.tenant
        self.step_tokens = priority.max_step_tokens or prefill.card.max_num_batched_tokens
        self._open_bookings = open_bookings
        self._changed_workers = changed_workers
        self._prefill: RegisteredWorker | None = prefill
        self._decode: RegisteredWorker | None = decode
        self.num_new_tokens = load.num_new_tokens
        self._attention = prefill_attention(load.num_new_tokens, load.num_context_tokens)
        self._num_kv_tokens = load.num_kv_tokens
        open_bookings.add(self)
        prefill.queued_prompt_tokens += load.num_new_tokens
        prefill.queued_attention += self._attention
        insort(prefill.prompts, self, key=_order)
        prefill.num_placed_tokens += load.num_new_tokens
        decode.num_booked_seqs += 1
        decode.num_awaited_seqs += 1
        decode.booked_kv_tokens += load.num_kv_tokens
        if priority.tenant:  # otherwise its engine knows no tenants
            held = decode.tenants.setdefault(priority.tenant, TenantLoad(priority.weight))
            held.num_seqs += 1
            held.kv_tokens += load.num_kv_tokens
        decode.awaited_kv_tokens += load.num_kv_tokens
        decode.num_incoming_seqs += prefill is not decode
        decode.num_placed_tokens += load.num_kv_tokens
        prefill.last_booking = decode.last_booking = number
        changed_workers |= {prefill, decode}

    def prefill_done(self) -> None:
        """The first token came, so the prompt no longer waits. Later calls change nothing."""
        worker, self._prefill = self._prefill, None
        if worker is None:
            return
        worker.prompts.remove(self)
        worker.queued_prompt_tokens -= self.num_new_tokens
        worker.queued_attention -= self._attention
        if worker.queued_prompt_tokens == 0:
            worker.queued_attention = 0.0  # sheds rounding errors
        computed = worker.computed_prompt_tokens - self.num_new_tokens
        worker.computed_prompt_tokens = min(max(computed, 0), worker.queued_prompt_tokens)
        self._changed_workers.add(worker)
        if self._decode is not None:
            self._decode.num_awaited_seqs -= 1
            self._decode.awaited_kv_tokens -= self._num_kv_tokens
            self._decode.num_incoming_seqs -= worker is not self._decode
            self._changed_workers.add(self._decode)

    def release(self) -> None:
        """Take the whole load off again. Later calls change nothing."""
        self.prefill_done()
        worker, self._decode = self._decode, None
        if worker is None:
            return
        worker.num_booked_seqs -= 1
        worker.booked_kv_tokens -= self._num_kv_tokens
        if (held := worker.tenants.get(self._tenant)) is not None:
            held.num_seqs -= 1
            held.kv_tokens -= self._num_kv_tokens
            if not held.num_seqs:
                del worker.tenants[self._tenant]
        self._changed_workers.add(worker)
        self._open_bookings.discard(self)


def _order(prompt: BookedPrompt) -> float:
    return prompt.order
