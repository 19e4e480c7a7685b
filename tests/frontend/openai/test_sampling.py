"""Every request that the schema accepts gives sampling parameters or a 400, never an internal error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.http.json_body import decode_body
from tandem.frontend.openai.sampling import sampling_params
from tandem.frontend.openai.schema import CompletionRequest
from tandem.protocol.errors import RequestError
from tandem.protocol.sampling import SamplingParams

VOCAB = 64
NUMBERS = (0, 1, 2, -1, -2, 20, 21, 100, 101, 1024, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30)
FLOATS = (0.0, 1e-300, 1e-40, 0.01, 0.5, 1.0, 2.0, 2.0001, 100.0, 1e6, 1e300, -0.1, -2.0, -100.0, -1e300)
number = st.sampled_from(NUMBERS) | st.sampled_from(FLOATS)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("max_tokens", "min_tokens", "seed", "top_k", "logprobs"), number),
            **dict.fromkeys(("temperature", "top_p", "min_p"), number),
            **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), number),
            "stop_token_ids": st.lists(st.sampled_from(NUMBERS), max_size=3),
            "logit_bias": st.dictionaries(st.sampled_from(("0", "63", "64", "-1", "x", "9" * 30)), number, max_size=3),
        },
    )
)
def test_any_body_gives_parameters_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        request = decode_body(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)
        params = sampling_params(
            request, max_tokens=request.max_tokens or 0, num_logprobs=request.logprobs, vocab_size=VOCAB
        )
    except RequestError:
        return
    assert isinstance(params, SamplingParams)


def test_as_many_biases_and_stop_tokens_as_the_schema_allows_are_accepted() -> None:
    body = {"prompt": "a", "logit_bias": {str(i): -100 for i in range(1024)}, "stop_token_ids": list(range(1024))}
    request = decode_body(msgspec.json.encode(body), CompletionRequest)
    params = sampling_params(request, max_tokens=1, num_logprobs=None, vocab_size=2000)
    assert (len(params.logit_bias), len(params.stop_token_ids)) == (1024, 1024)
    for field in ("logit_bias", "stop_token_ids"):
        more = {str(i): 1 for i in range(1025)} if field == "logit_bias" else list(range(1025))
        with pytest.raises(RequestError, match=field):
            decode_body(msgspec.json.encode(body | {field: more}), CompletionRequest)
