"""What the router learns from one attempt: step and transfer costs, lengths, metrics, and whether the engine works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tandem.router.engines.answers import as_count, as_dict
from tandem.router.engines.client_request import ClientRequest
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.fleet import EngineFleet, Placed
from tandem.router.http.metrics import EdgeMetrics, RequestClock
from tandem.router.processes.siblings import SharedBooking
from tandem.scheduling.cost_model import StepModel

__all__ = ["AttemptObserver"]

MIN_TRANSFER_S = 1e-4


class AttemptObserver:
    """Follows one attempt from its booking to its end. The attempt calls `close` on every path."""

    def __init__(
        self,
        fleet: EngineFleet,
        placed: Placed,
        booking: SharedBooking,
        request: ClientRequest,
        metrics: EdgeMetrics,
        on_end: Callable[[int], None],
    ) -> None:
        """`on_end` is called with the length of a complete answer, in tokens."""
        self.on_first_token: Callable[[], None] = _ignore
        self.lengths = (0, 0)  # tokens of prompt and answer, once the answer is complete
        self._fleet = fleet
        self._placed = placed
        self._engine = placed.decode
        self._booking = booking
        self._request = request
        self._metrics = metrics
        self._clock = RequestClock(metrics, request.arrived_s)
        self._on_end = on_end
        self._sent_s = now = fleet.clock()
        self._trials = {engine: engine.breaker.begin(now) for engine in placed.engines}
        self._num_tokens = 0
        self._last_token_s = 0.0
        self._usage: dict[str, Any] = {}

    # -- does the engine work?

    def answered(self) -> None:
        """The first byte of the answer came: its engines work."""
        for engine in self._trials:
            engine.breaker.succeeded()
        self._trials.clear()

    def failed(self, engine: RemoteEngine, *, is_absent: bool = False) -> None:
        """The engine failed the request. `is_absent`: nobody listens there."""
        engine.num_failures += 1
        trial = self._trials.pop(engine, 0)
        engine.breaker.failed(self._fleet.clock(), trial=trial, is_absent=is_absent)

    def close(self) -> None:
        """Count the tokens that are not counted yet; a trial whose outcome is unknown was abandoned."""
        self._clock.tell()
        for engine, trial in self._trials.items():
            engine.breaker.abandoned(trial=trial)
        self._trials.clear()
        self.on_first_token = _ignore  # its owner holds this: no cycle is left to the garbage collector

    # -- how long do its steps take?

    def prefilled(self, engine: RemoteEngine) -> None:
        """The prefill engine of a pair returned; the request goes to the decode engine next."""
        now = self._fleet.clock()
        self._learn_prefill(engine, now)
        self._sent_s = now

    def saw_tokens(self, count: int) -> None:
        """Tokens came just now. Called once for what one read brought."""
        now = self._fleet.clock()
        if self._num_tokens == 0:
            self._saw_first_token(now)
        elif self._engine.step_timing.is_gap_due(now):
            self._learn_decode_step(now)
        self._num_tokens += count
        self._last_token_s = now
        self._clock.record(count, None)

    def _saw_first_token(self, now: float) -> None:
        if self._placed.is_pair:
            self._learn_transfer(now)
        else:
            self._learn_prefill(self._engine, now)
        self.on_first_token()  # NOTE: last; what is learned counts the prompt as waiting still

    def _learn_prefill(self, engine: RemoteEngine, now: float) -> None:
        placement = self._placed.placement
        self._fleet.learn_first_token(
            engine,
            placement.best.prefill,
            sent_s=self._sent_s,
            num_new_tokens=placement.num_new_tokens,
            num_cached_tokens=placement.best.num_cached_tokens,
        )
        self._booking.prefill_done(now - self._sent_s)

    def _learn_decode_step(self, now: float) -> None:
        engine, worker = self._engine, self._placed.placement.best.decode
        if worker.queued_prompt_tokens:
            return  # the engine's steps compute a prompt too
        stats = engine.step_timing.gap(
            duration_s=now - self._last_token_s,
            now=now,
            num_decode_seqs=worker.num_booked_seqs,
            num_kv_tokens=worker.booked_kv_tokens,
        )
        if stats is not None:
            self._steps_of(engine).observe(stats)

    def _learn_transfer(self, now: float) -> None:
        """From the end of prefill to the decode engine's first token: the KV transfer, and one decode step."""
        placement, engine = self._placed.placement, self._engine
        worker = placement.best.decode
        step_s = self._steps_of(engine).costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
        num_bytes = placement.num_prompt_tokens * engine.spec.kv_bytes_per_token
        kinds = self._placed.prefill.spec.cost_kind, engine.spec.cost_kind
        self._fleet.costs.transfer(*kinds).observe(num_bytes, max(now - self._sent_s - step_s, MIN_TRANSFER_S))

    def _steps_of(self, engine: RemoteEngine) -> StepModel:
        return self._fleet.costs.steps(engine.spec.cost_kind)

    # -- how long are prompt and answer?

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        """The engine reported usage. `is_total`: it is that of the whole answer, and counts in the metrics."""
        self._usage = usage
        if not is_total:
            return
        details = as_dict(usage.get("prompt_tokens_details"))
        self._metrics.prompt_tokens.inc(as_count(usage.get("prompt_tokens")))
        self._metrics.cached_tokens.inc(as_count(details.get("cached_tokens")))
        num_unseen = as_count(usage.get("completion_tokens")) - self._num_tokens
        self._metrics.generation_tokens.inc(max(num_unseen, 0))

    def ended(self) -> None:
        """The answer is complete."""
        num_prompt_tokens = as_count(self._usage.get("prompt_tokens")) or len(self._request.token_ids)
        self.lengths = num_prompt_tokens, as_count(self._usage.get("completion_tokens")) or self._num_tokens
        self._fleet.note_lengths(*self.lengths)
        self._on_end(self.lengths[1])
        self._metrics.duration_s.observe(time.perf_counter() - self._request.arrived_s)


def _ignore() -> None:
    """Nobody listens yet."""
