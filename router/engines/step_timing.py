"""Engine steps as they can be told from outside, where only first tokens and gaps between tokens are seen.

Our own workers report every step; other engines do not. Two observations stand for them:

- *Inter-token time.* While no prompt waits on an engine, the gap between two tokens of a stream is one decode step of
  all sequences on it. Each step shows in every stream, so one gap of an engine in `GAP_INTERVAL_S` is taken.
- *Time to first token.* Engines compute prompts in order of arrival. So the work of a prompt lasts from its arrival,
  or from the first token of the prompt before it if that came later, to its own first token: the service time of a
  queue. Prompts whose first tokens come together were in the same steps: their work is added up over one span.

Both are given to the model of our own workers' steps (`StepModel`), which is linear in its features: a span of several
steps is taught as its mean step. What the network adds ends up in the base of a step: it is waited for as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.protocol.messages import StepStats
from tandem.scheduling.cost_model import prefill_attention

__all__ = ["StepTiming"]

GAP_INTERVAL_S = 0.1
TOGETHER_S = 0.004  # first tokens this close are of one step
_MIN_GAP_S = 0.0005  # less is a burst of the network, no step


@dataclass(slots=True)
class _Span:
    """Prompts computed in one stretch of time."""

    started_s: float
    ended_s: float
    num_new_tokens: int
    attention: float
    num_decode_seqs: int
    num_kv_tokens: int


class StepTiming:
    """Turns what is seen of one engine into steps. Pure; all times are of the same clock, in seconds."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._chunk_tokens = max_num_batched_tokens
        self._last_first_token_s = -math.inf
        self._open: _Span | None = None
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
    ) -> StepStats | None:
        """A prompt's first token came. Returns the mean step of the span before this one, once it is complete."""
        attention = prefill_attention(num_new_tokens, num_cached_tokens)
        span = self._open
        if span is not None and now - span.ended_s < TOGETHER_S:
            span.num_new_tokens += num_new_tokens
            span.attention += attention
            self._last_first_token_s = now
            return None
        started_s = max(sent_s, self._last_first_token_s)
        self._last_first_token_s = now
        self._open = _Span(started_s, now, num_new_tokens, attention, num_decode_seqs, num_kv_tokens)
        return None if span is None else self._mean_step(span)

    def is_gap_due(self, now: float) -> bool:
        """Whether a gap would be taken now: cheap to ask, as it is at every token."""
        return now - self._last_gap_s >= GAP_INTERVAL_S

    def gap(self, *, duration_s: float, now: float, num_decode_seqs: int, num_kv_tokens: int) -> StepStats | None:
        """Two tokens of a stream came this far apart, and no prompt waited meanwhile."""
        if not self.is_gap_due(now) or duration_s < _MIN_GAP_S:
            return None
        self._last_gap_s = now
        return StepStats(
            duration_s=duration_s, num_decode_seqs=max(num_decode_seqs, 1), num_decode_kv_tokens=num_kv_tokens
        )

    def _mean_step(self, span: _Span) -> StepStats:
        num_steps = max(1, math.ceil(span.num_new_tokens / self._chunk_tokens))
        return StepStats(
            duration_s=(span.ended_s - span.started_s) / num_steps,
            num_prefill_tokens=round(span.num_new_tokens / num_steps),
            prefill_attention=span.attention / num_steps,
            num_decode_seqs=span.num_decode_seqs,
            num_decode_kv_tokens=span.num_kv_tokens,
        )
