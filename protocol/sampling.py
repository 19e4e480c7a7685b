"""Sampling parameters and their ranges, shared by router and engine."""

from __future__ import annotations

import math

import msgspec

MAX_COUNT = 2**31 - 1  # the largest number of tokens, and the largest token id
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_GRAMMAR_CHARS = 1 << 17
MAX_PREDICTION = 1 << 24  # tokens, as of a prompt
# Logits are divided by it: a value near 0 would make them infinite.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, MAX_COUNT),
    "seed": (0, 2**64 - 1),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, MAX_COUNT),
    "min_p": (0.0, 1.0),
    "min_tokens": (0, MAX_COUNT),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
_MAX_BIAS = 100.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one sequence. A value out of range raises `ValueError`, also when a message is decoded.

    `seed` is always set: the router draws one if the client gave none, so that every worker that touches the request
    makes the same draw for the same token position.
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
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: str = ""  # grammar that the output must match, in llguidance's form; empty = any output
    prediction: tuple[int, ...] = ()  # what the output probably is, or is like; it changes its speed alone

    @property
    def depends_on_output(self) -> bool:
        """Whether earlier output affects the next token in other ways than through the model."""
        has_penalty = self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return bool(has_penalty or self.grammar)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _check_within(name, getattr(self, name), low, high)
        if self.num_logprobs is not None:
            _check_within("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            _check_within("num_prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS)
        if self.prediction:
            _check_within("tokens of prediction", len(self.prediction), 0, MAX_PREDICTION)
        if self.grammar:
            _check_within("characters of grammar", len(self.grammar), 0, MAX_GRAMMAR_CHARS)
        if self.stop_token_ids:
            _check_within("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        if self.logit_bias:
            _check_within("number of logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
            _check_within("sum of logit_bias values", sum(self.logit_bias.values()), -math.inf, math.inf)  # refuses nan
            _check_within("logit_bias value", min(self.logit_bias.values()), -_MAX_BIAS, _MAX_BIAS)
            _check_within("logit_bias value", max(self.logit_bias.values()), -_MAX_BIAS, _MAX_BIAS)


def _check_within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses nan
        raise ValueError(f"{name}={value} must be from {low} to {high}")
