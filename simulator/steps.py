"""A run of engine steps of one composition, advanced in closed form: no event per step.

While a batch keeps its sequences and one prompt fills the rest of each step, step j of a run takes

    base + a * chunk + b * chunk * (context + j * chunk + chunk / 2) + c * seqs + d * (kv + j * seqs)      j = 0, 1, ...

(the coefficients of `StepCosts`), so the first j steps take alpha * j + beta * j^2 together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.messages import StepStats
from tandem.scheduling.cost_model import StepCosts, prefill_attention


class Chunk(NamedTuple):
    """New tokens of one prompt in a step, after `num_context` tokens whose KV is computed."""

    num_tokens: int
    num_context: int


@dataclass(slots=True)
class Run:
    """`num_steps` steps from `start_s` on. Several steps have no chunk, or one chunk of equal size each."""

    costs: StepCosts
    start_s: float
    num_steps: int
    num_seqs: int  # decoding sequences
    kv_tokens: int  # their KV tokens in the first step
    chunks: Sequence[Chunk]
    num_joined: int = 0  # sequences among them that were handed over and get their first token here
    _tokens: int = field(init=False)
    _alpha: float = field(init=False)
    _beta: float = field(init=False)

    def __post_init__(self) -> None:
        assert self.num_steps == 1 or len(self.chunks) <= 1, f"{len(self.chunks)} prompts in {self.num_steps} steps"
        costs = self.costs
        self._tokens = sum(chunk.num_tokens for chunk in self.chunks)
        attention = sum(chunk.num_tokens * chunk.num_context for chunk in self.chunks)
        square = sum(chunk.num_tokens**2 for chunk in self.chunks) / 2
        self._alpha = (
            costs.base_s
            + costs.prefill_token_s * self._tokens
            + costs.attention_s * attention
            + costs.decode_seq_s * self.num_seqs
            + costs.kv_token_s * (self.kv_tokens - self.num_seqs / 2)
        )
        self._beta = costs.attention_s * square + costs.kv_token_s * self.num_seqs / 2

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self.start_s + self.duration_s(self.num_steps)

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens computed in each step."""
        return self._tokens

    def duration_s(self, num_steps: int) -> float:
        """Duration of the first `num_steps` steps."""
        return num_steps * (self._alpha + self._beta * num_steps)

    def num_done(self, now: float) -> int:
        """Steps that have ended."""
        elapsed_s = max(now - self.start_s, 0.0)
        # The root of beta j^2 + alpha j = elapsed, in the form that is exact for beta = 0; rounding is corrected below.
        root = 2 * elapsed_s / (self._alpha + math.sqrt(self._alpha**2 + 4 * self._beta * elapsed_s))
        num_steps = min(int(root), self.num_steps)
        if num_steps < self.num_steps and self.start_s + self.duration_s(num_steps + 1) <= now:
            num_steps += 1
        if num_steps and self.start_s + self.duration_s(num_steps) > now:
            num_steps -= 1
        return num_steps

    def cut(self, now: float) -> bool:
        """End the run with the step in progress, or the one that ends now. Returns whether that shortens it."""
        num_done = self.num_done(now)
        is_boundary = num_done > 0 and self.start_s + self.duration_s(num_done) >= now
        num_steps = num_done if is_boundary else num_done + 1
        if num_steps >= self.num_steps:
            return False
        self.num_steps = num_steps
        return True

    def mean_stats(self) -> StepStats:
        """The mean step of the run, as a worker would report it."""
        count = self.num_steps
        attention = sum(prefill_attention(count * new, context) for new, context in self.chunks) / count
        if count == 1:
            attention = sum(prefill_attention(new, context) for new, context in self.chunks)
        return StepStats(
            duration_s=self.duration_s(count) / count,
            num_prefill_tokens=self._tokens,
            prefill_attention=attention,
            num_decode_seqs=self.num_seqs,
            num_decode_kv_tokens=round(self.kv_tokens + self.num_seqs * (count - 1) / 2),
        )
