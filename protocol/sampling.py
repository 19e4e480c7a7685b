"""How the next token is chosen: the one definition shared by router and engine."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one sequence, already validated and complete.

    `seed` is always set: the router draws one where the client gave none, so that every worker which
    touches the request makes the same draw for the same token position.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None  # None = off; 0 = only the chosen token's
