"""One attempt of a request on the deciding side: its booking, and what is learned from its engines' behaviour."""

from __future__ import annotations

import asyncio

from tandem.router.engines.dispatcher import Abort
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.scheduling.cost_model import StepModel
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.request import PlacementRequest

MIN_TRANSFER_S = 1e-4


class BookedAttempt:
    """Booked from its construction until `release`, which its owner calls on every path."""

    def __init__(
        self,
        fleet: EngineFleet,
        request: PlacementRequest,
        placement: Placement,
        abort: Abort,
        *,
        is_stream: bool,
        is_exact: bool = True,
    ) -> None:
        """Book the load. `abort` is called when one of its engines is gone. `is_exact`: the digests are.

        NOTE: no `await` between the placement and this, so that the next decision sees the booking.
        """
        self.abort = abort
        self.has_answer = False  # the first byte has come
        self._is_prefilled = False
        self._fleet = fleet
        self._placement = placement
        self._tenant = request.tenant
        best = placement.best
        self._prefill, self._decode = fleet[best.prefill.worker_id], fleet[best.decode.worker_id]
        self._engines = dict.fromkeys((self._prefill, self._decode))  # each once
        self._sent_s = now = fleet.clock()
        self._trials = {engine: engine.breaker.begin(now) for engine in self._engines}
        digests = request.digests.of(best.prefill.card)
        self._load = self._prefill.cache.expected_load(digests)
        for engine in self._engines:
            engine.begin(self, now)
            engine.cache.expect(digests, now, is_exact=is_exact)
        self._booking = fleet.registry.reserve(placement.load)
        self._predicted_first_token: asyncio.TimerHandle | None = None
        if not is_stream and not best.is_pair:
            # A plain answer does not show when its first token was computed, so the prediction is used.
            ttft_s = best.terms.ttft_s
            loop = asyncio.get_running_loop()
            self._predicted_first_token = loop.call_later(ttft_s, self.prefill_done)

    @property
    def engine(self) -> str:
        """Name of the engine that answers."""
        return self._decode.name

    def prefill_done(self) -> None:
        """The first token came. Later calls change nothing."""
        self._booking.prefill_done()
        self._fleet.registry.notify_progress()

    def release(self) -> None:
        """Give the booking back; a trial without a known outcome counts as abandoned. Later calls change nothing."""
        self._booking.release()
        if self._predicted_first_token is not None:
            self._predicted_first_token.cancel()
        for engine in self._engines:
            engine.end(self)
        for engine, trial in self._trials.items():
            engine.breaker.abandoned(trial=trial)
        self._trials.clear()
        self._fleet.registry.notify_progress()

    # -- does the engine work?

    def answered(self) -> None:
        """The first byte of the answer came: its engines work."""
        self.has_answer = True
        for engine in list(self._trials):
            if not engine.progress.is_on_trial:  # on trial, the beginning of an answer shows too little
                engine.breaker.succeeded()
                del self._trials[engine]

    def failed(self, name: str, *, is_absent: bool) -> None:
        """The engine failed the request. `is_absent`: nothing listens there."""
        engine = self._fleet.get(name)
        if engine is None:
            return
        engine.num_failures += 1
        trial = self._trials.pop(engine, 0)
        engine.breaker.failed(self._fleet.clock(), trial=trial, is_absent=is_absent)

    def refused(self, name: str, retry_after_s: float) -> None:
        """The engine is busy: it gets no requests of this tenant for `retry_after_s`."""
        engine = self._fleet.get(name)
        if engine is not None:
            engine.hold_back(retry_after_s, self._fleet.clock(), self._tenant)

    def held(self, *, is_held: bool) -> None:
        """The client of a stream has stopped reading it, or reads it again."""
        self._decode.progress.hold(self, self._fleet.clock(), is_held=is_held)

    def _token(self) -> None:
        self._decode.progress.token(self, self._fleet.clock())
        self._show_trial()

    def _show_trial(self) -> None:
        """An engine that was tried after a stall has shown a step."""
        if self.has_answer and self._trials:
            self.answered()

    # -- how long do its steps take?

    def prefilled(self, now: float) -> None:
        """The prefill engine of a pair returned; the request goes to the decode engine next.

        SGLang's engines both have it from the start: their time for the prompt includes the transfer, and ends once.
        """
        if not self._is_prefilled:
            self._is_prefilled = True
            self._prefill.progress.answer(self, self._fleet.clock())
            self._learn_prefill(self._prefill, now)
            self._sent_s = now

    def first_token(self, now: float) -> None:
        """The first token of a stream came. NOTE: the prompt still counts as waiting while costs are learned."""
        self._token()
        if not self._placement.best.is_pair:
            self._learn_prefill(self._decode, now)
            return
        if self._decode.spec.serves_alone:
            self._learn_transfer(now)
        else:
            self.prefilled(now)
        self._prefill.end(self)  # the decode engine has the KV: the stream goes on without the prefill engine

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now."""
        return self._decode.step_timing.is_gap_due(now)

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart: one decode step, unless the engine computes a prompt too."""
        self._token()
        engine, worker = self._decode, self._placement.best.decode
        if worker.queued_prompt_tokens:
            return
        stats = engine.step_timing.gap(
            duration_s=duration_s,
            now=now,
            num_decode_seqs=worker.num_booked_seqs,
            num_kv_tokens=worker.booked_kv_tokens,
        )
        if stats is not None:
            self._steps_of(engine).observe(stats)

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The answer is complete."""
        self._decode.progress.answer(self, self._fleet.clock())
        self._show_trial()
        self._fleet.lengths.note(num_prompt_tokens, num_output_tokens)

    def _learn_prefill(self, engine: RemoteEngine, now: float) -> None:
        best = self._placement.best
        worker = best.prefill
        self._learn_load(engine, now)
        stats = engine.step_timing.first_token(
            sent_s=self._sent_s,
            now=now,
            num_new_tokens=self._placement.num_new_tokens,
            num_cached_tokens=best.num_cached_tokens,
            num_decode_seqs=worker.num_booked_seqs - worker.num_awaited_seqs,
            num_kv_tokens=worker.booked_kv_tokens - worker.awaited_kv_tokens,
            has_load=self._load is not None,
        )
        if stats is not None:
            self._steps_of(engine).observe(stats)
        self.prefill_done()

    def _learn_load(self, engine: RemoteEngine, now: float) -> None:
        """What the prompt took beyond the predicted time for its rest, if more of it was loaded than computed."""
        load, service_s = self._load, engine.step_timing.service_s(self._sent_s, now)
        if load is None or service_s is None:
            return
        card, num_tokens = self._placement.best.prefill.card, self._placement.num_prompt_tokens
        num_cached = min(load.end_block * card.block_size, num_tokens - 1)
        if num_cached - load.first_block * card.block_size >= num_tokens - num_cached:
            chunk_tokens = card.max_num_batched_tokens
            rest_s = self._steps_of(engine).prefill_s(num_tokens - num_cached, num_cached, chunk_tokens)
            engine.cache.learn_load(load, service_s - rest_s)

    def _learn_transfer(self, now: float) -> None:
        """From the end of prefill to the decode engine's first token: the KV transfer, and one decode step."""
        placement, engine = self._placement, self._decode
        worker = placement.best.decode
        step_s = self._steps_of(engine).costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
        num_bytes = placement.num_prompt_tokens * engine.spec.kv_bytes_per_token
        kinds = self._prefill.spec.cost_kind, engine.spec.cost_kind
        self._fleet.costs.transfer(*kinds).observe(num_bytes, max(now - self._sent_s - step_s, MIN_TRANSFER_S))

    def _steps_of(self, engine: RemoteEngine) -> StepModel:
        return self._fleet.costs.steps(engine.spec.cost_kind)
