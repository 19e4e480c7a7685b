"""Durations of an engine's steps, inferred from its streams: from first tokens and gaps between tokens.

Our own workers report every step; other engines do not. Two observations replace the reports:

- *Inter-token time.* While no prompt waits on an engine, the gap between two tokens of a stream is one decode step of
  all its sequences. Each step shows in every stream, so one gap per engine and `GAP_INTERVAL_S` is enough.
- *Time to first token.* Engines compute prompts in order of arrival. So the work on a prompt lasts from its arrival,
  or from the first token of the previous prompt if that came later, to its own first token: the service time of a
  queue. Prompts whose first tokens come together were in the same steps: their work is added up over one span.

Both feed the model of our own workers' steps (`StepModel`), which is linear in its features: a span of several steps is
learned as its mean step. The network's delay becomes part of a step's base cost; clients wait for it as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.protocol.messages import StepStats
from tandem.router.engines.dispatcher import GAP_INTERVAL_S
from tandem.scheduling.cost_model import prefill_attention

SAME_STEP_S = 0.004  # first tokens this close come from one step
_MIN_GAP_S = 0.0005  # a shorter gap is a burst of the network, not a step


@dataclass(slots=True)
class _PrefillSpan:
    """Prompts computed in one stretch of time."""

    started_s: float
    ended_s: float
    num_new_tokens: int
    attention: float
    num_decode_seqs: int
    num_kv_tokens: int
    has_load: bool  # it includes loads from a tier, so it says nothing about steps


class StepTiming:
    """Infers one engine's steps. Pure: the time is passed in, in seconds of one clock."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._chunk_tokens = max_num_batched_tokens
        self._last_first_token_s = -math.inf
        self._open: _PrefillSpan | None = None
        self._last_gap_s = -math.inf

    def first_token(
        self,
        *,
        sent_s: float,
        now: float,
        num_new_tokens: int,
        num_cached_tokens: int,
        num_decode_seqs: int,
        num_kv_tokens: int,
        has_load: bool = False,
    ) -> StepStats | None:
        """A prompt's first token came. Returns the mean step of the previous span, which is complete now.

        `has_load`: KV of the prompt was loaded meanwhile.
        """
        attention = prefill_attention(num_new_tokens, num_cached_tokens)
        span = self._open
        if span is not None and now - span.ended_s < SAME_STEP_S:
            span.num_new_tokens += num_new_tokens
            span.attention += attention
            span.has_load |= has_load
            self._last_first_token_s = now
            return None
        started_s = max(sent_s, self._last_first_token_s)
        self._last_first_token_s = now
        self._open = _PrefillSpan(started_s, now, num_new_tokens, attention, num_decode_seqs, num_kv_tokens, has_load)
        return None if span is None or span.has_load else self._mean_step(span)

    def service_s(self, sent_s: float, now: float) -> float | None:
        """Seconds that a prompt took whose first token came now; None if it came with that of another prompt."""
        if now - self._last_first_token_s < SAME_STEP_S:
            return None
        return now - max(sent_s, self._last_first_token_s)

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now. Cheap, because it is asked at every token."""
        return now - self._last_gap_s >= GAP_INTERVAL_S

    def gap(self, *, duration_s: float, now: float, num_decode_seqs: int, num_kv_tokens: int) -> StepStats | None:
        """Two tokens of a stream came this far apart while no prompt waited."""
        if not self.is_gap_due(now) or duration_s < _MIN_GAP_S:
            return None
        self._last_gap_s = now
        return StepStats(
            duration_s=duration_s, num_decode_seqs=max(num_decode_seqs, 1), num_decode_kv_tokens=num_kv_tokens
        )

    def _mean_step(self, span: _PrefillSpan) -> StepStats:
        num_steps = max(1, math.ceil(span.num_new_tokens / self._chunk_tokens))
        return StepStats(
            duration_s=(span.ended_s - span.started_s) / num_steps,
            num_prefill_tokens=round(span.num_new_tokens / num_steps),
            prefill_attention=span.attention / num_steps,
            num_decode_seqs=span.num_decode_seqs,
            num_decode_kv_tokens=span.num_kv_tokens,
        )
