"""What one attempt reports to metrics and reservation: times of tokens, usage and the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tandem.frontend.http.metrics import FrontendMetrics, RequestClock
from tandem.frontend.relay.answers import as_count, as_dict
from tandem.frontend.relay.attempt_trace import AttemptTrace
from tandem.frontend.relay.client_request import ClientRequest
from tandem.router.engines.dispatcher import EngineReservation


class AttemptObserver:
    """Follows one attempt to its end. The attempt calls `close` on every path."""

    def __init__(
        self,
        reservation: EngineReservation,
        request: ClientRequest,
        metrics: FrontendMetrics,
        now: Callable[[], float],
        trace: AttemptTrace | None = None,
        former: AttemptObserver | None = None,
    ) -> None:
        """`now` is the clock of the reservation. `former` saw the answer's beginning, which is not counted again."""
        self._trace = trace
        self._reservation = reservation
        self._request = request
        self._metrics = metrics
        self._now = now
        self._clock: RequestClock
        self._num_tokens: int  # tokens of the whole answer
        if former is None:
            self._clock, self._num_tokens = RequestClock(metrics, request.arrived_s, request.key_use), 0
        else:
            self._clock, self._num_tokens = former._clock, former._num_tokens
        self._has_token = False  # whether this attempt has shown a token
        self._last_token_s = 0.0
        self._usage: dict[str, Any] = {}

    def close(self) -> None:
        """Count the tokens that are not counted yet."""
        self._clock.flush()

    def saw_tokens(self, count: int) -> None:
        """Tokens came just now. Called once per read."""
        now = self._now()
        if not self._has_token:
            self._has_token = True
            self._reservation.first_token(now)
        elif self._reservation.is_gap_due(now):
            self._reservation.gap(now - self._last_token_s, now)
        self._num_tokens += count
        self._last_token_s = now
        self._clock.record(count)
        if self._trace is not None:
            self._trace.tokens(count)

    def held(self, *, is_held: bool) -> None:
        """The client has stopped reading its stream, or reads it again."""
        self._reservation.held(is_held=is_held)

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        """The engine reported usage. `is_total`: of the whole answer, which counts in the metrics."""
        self._usage = usage
        if not is_total:
            return
        details = as_dict(usage.get("prompt_tokens_details"))
        self._metrics.prompt_tokens.inc(as_count(usage.get("prompt_tokens")))
        self._metrics.cached_tokens.inc(as_count(details.get("cached_tokens")))
        num_tokens = as_count(usage.get("completion_tokens"))
        self._metrics.generation_tokens.inc(max(num_tokens - self._num_tokens, 0))
        if self._trace is not None:
            prompt_tokens, cached_tokens = as_count(usage.get("prompt_tokens")), as_count(details.get("cached_tokens"))
            self._trace.usage(prompt_tokens, cached_tokens, num_tokens)
        if (use := self._request.key_use) is not None:  # the clock has counted events, or will do so
            use.num_prompt_tokens = as_count(usage.get("prompt_tokens")) or use.num_prompt_tokens
            use.num_output_tokens += num_tokens - self._num_tokens if num_tokens else 0

    def ended(self) -> None:
        """The answer is complete. Lengths are learned from answers that were generated and whose length is known."""
        num_prompt_tokens = as_count(self._usage.get("prompt_tokens")) or self._request.routing.num_prompt_tokens
        num_output_tokens = as_count(self._usage.get("completion_tokens")) or self._num_tokens
        if self._request.api.generates and num_output_tokens:
            self._reservation.ended(num_prompt_tokens, num_output_tokens)
        self._metrics.duration_s.observe(time.perf_counter() - self._request.arrived_s)
