"""What a request asks of the sampler for all its tokens, made once."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tandem.protocol.sampling import SamplingParams

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6


class RequestPlan(NamedTuple):
    """What a request asks for all its tokens, made safe to compute with: tensors' part of sampling raises for no value.

    It is made at the first token. After that a row of the batch costs a look-up.
    """

    sampling: SamplingParams  # of which this was made
    temperature: float  # 0 = greedy
    top_k: int  # 0 = all
    top_p: float
    min_p: float
    numbers: bytes  # these four, as float64: a step joins those of its rows
    num_logprobs: int | None
    is_edited: bool  # whether a penalty, a bias or a grammar changes its logits
    is_plain_greedy: bool  # the most likely token and no more, once there are `min_tokens`


def plan_request(sampling: SamplingParams) -> RequestPlan:
    """The plan of a request with these parameters."""
    temperature, num_logprobs = sampling.temperature, sampling.num_logprobs
    if temperature != 0:  # near 0 it means greedy, while 1e-40 would give inf - inf
        temperature = 0.0 if math.isnan(temperature) else min(max(temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
    top_k, is_edited = max(sampling.top_k, 0), bool(sampling.logit_bias) or sampling.depends_on_output
    return RequestPlan(
        sampling=sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        numbers=np.array([temperature, top_k, sampling.top_p, sampling.min_p]).tobytes(),
        num_logprobs=None if num_logprobs is None else max(num_logprobs, 0),
        is_edited=is_edited,
        is_plain_greedy=sampling.temperature == 0 and num_logprobs is None and not is_edited,
    )
