"""Sampling parameters from the fields of a request, complete and checked."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

import msgspec

from tandem.frontend.openai.request_limits import check_stops
from tandem.frontend.openai.schema import GenerationFields
from tandem.protocol.errors import ContextLengthExceeded, RequestError
from tandem.protocol.sampling import MAX_COUNT, SamplingParams
from tandem.text.stop_strings import StopStrings

MIN_TOP_P = 1e-6  # top_p 0 is allowed and means that only the most likely token counts
UNKNOWN_CONTEXT_TOKENS = 1 << 20  # while no worker has reported its context; the worker enforces the real one


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    vocab_size: int,
    grammar: str = "",
    prediction: tuple[int, ...] = (),
) -> SamplingParams:
    """Sampling parameters of a request's first choice. Draws a seed if the client gave none."""
    min_tokens = _min_tokens(fields, max_tokens)
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, param="stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=_seed(fields),
        temperature=_given(fields.temperature, 1.0),
        top_p=max(MIN_TOP_P, _given(fields.top_p, 1.0)),
        top_k=min(MAX_COUNT, max(0, fields.top_k or 0)),
        min_p=fields.min_p or 0.0,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        num_logprobs=num_logprobs,
        grammar=grammar,
        prediction=prediction,
    )


def other_prompt(params: SamplingParams, fields: GenerationFields, max_tokens: int) -> SamplingParams:
    """Parameters for another prompt of the same request, with its own length and seed."""
    _min_tokens(fields, max_tokens)
    return msgspec.structs.replace(params, max_tokens=max_tokens, seed=_seed(fields))


def sibling_seed(params: SamplingParams, sibling: int) -> SamplingParams:
    """Parameters of one of `n` choices: each has its own seed; sibling 0 keeps the request's."""
    if sibling == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}:{sibling}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest, "little") >> 1)


def max_tokens_for(
    num_prompt_tokens: int, requested: int | None, default: int | None, max_model_len: int | None, *, prompt_field: str
) -> int:
    """The most tokens of the answer. Raises `ContextLengthExceeded` if the request does not fit.

    If the client did not request a number, it is the default, at most the rest of the context; a default of None means
    the whole rest.
    """
    wanted = default if requested is None else requested
    if max_model_len is None:
        return UNKNOWN_CONTEXT_TOKENS if wanted is None else wanted
    left = max_model_len - num_prompt_tokens
    if left < (1 if requested is None else requested):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but the request has {num_prompt_tokens} "
            f"tokens in the prompt and asks for {1 if requested is None else requested} more.",
            param="max_tokens" if left > 0 else prompt_field,
            num_tokens=num_prompt_tokens,
            max_tokens=max_model_len - 1,
        )
    return left if wanted is None else min(wanted, left)


def stop_strings(fields: GenerationFields) -> StopStrings | None:
    """Stop strings of a request, if it has any. Raises `RequestError` for too many, or too long ones."""
    if not fields.stop:
        return None
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    check_stops(stops)
    return StopStrings(stops)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise `RequestError` for an id outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise RequestError(f"Token id {largest} in '{param}' is outside the vocabulary of {vocab_size}.", param=param)


def _logit_bias(by_name: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in by_name.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise RequestError(f"'{name[:20]}' in 'logit_bias' is not a token id.", param="logit_bias")
        bias[int(name)] = value
    check_token_ids(bias, vocab_size, param="logit_bias")
    return bias


def _min_tokens(fields: GenerationFields, max_tokens: int) -> int:
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens={min_tokens} is greater than max_tokens={max_tokens}.", param="min_tokens")
    return min_tokens


def _seed(fields: GenerationFields) -> int:
    # Clients send -1 for a random seed, as they do to vLLM and llama.cpp.
    return secrets.randbits(63) if fields.seed in (None, -1) else fields.seed % 2**63


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
