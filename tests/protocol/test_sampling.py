from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages import decode_message
from tandem.protocol.sampling import MAX_COUNT, SamplingParams

AT_THE_BOUNDS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": MAX_COUNT, "min_tokens": MAX_COUNT},
    {"seed": 2**64 - 1},
    {"temperature": 0.0, "top_p": 0.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 2.0, "top_p": 1.0, "top_k": MAX_COUNT, "min_p": 1.0},
    {"temperature": 1e-300, "top_p": 1e-30, "min_p": 1e-300},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 0.01},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 100.0},
    {"logit_bias": dict.fromkeys(range(1024), -100.0), "stop_token_ids": tuple(range(1024))},
    {"logit_bias": {0: 100.0}, "num_logprobs": 20},
]
BEYOND = [
    ("max_tokens", -1),
    ("max_tokens", MAX_COUNT + 1),
    ("seed", -1),
    ("seed", 2**64),
    ("temperature", -1e-9),
    ("temperature", 2.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", MAX_COUNT + 1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("min_tokens", -1),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -math.inf),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("repetition_penalty", math.nan),
    ("num_logprobs", -1),
    ("num_logprobs", 1_000_000),
    ("stop_token_ids", tuple(range(1025))),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {1: 1.0, 2: math.nan, 3: -1.0}),
    ("logit_bias", {1: math.inf, 2: -math.inf}),
]


def as_message(sampling: dict[str, Any]) -> bytes:
    """A `Generate` message as a sender without checks would encode it."""
    return msgspec.msgpack.encode({"type": "Generate", "request_id": "r", "token_ids": [1], "sampling": sampling})


@pytest.mark.parametrize("fields", AT_THE_BOUNDS, ids=str)
def test_values_at_their_bounds_are_accepted(fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 1} | fields
    assert decode_message(as_message(fields)).sampling == SamplingParams(**fields)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "value"), BEYOND, ids=lambda value: str(value)[:30])
def test_a_value_beyond_its_bounds_is_refused_here_and_in_a_message(name: str, value: Any) -> None:
    fields = {"max_tokens": 1, name: value}
    with pytest.raises(ValueError, match=name):
        SamplingParams(**fields)
    if name == "seed" and value == 2**64:
        return  # no message can carry it
    with pytest.raises(msgspec.ValidationError, match=name):
        decode_message(as_message(fields))
