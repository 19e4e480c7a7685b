"""What every route of the HTTP edge works with, and the steps they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ModelNotFound, RequestError
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import Backend, GenerateRequest
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.origin_checks import check_content_type
from tandem.router.http.request_options import RequestOptions, tenant_of
from tandem.router.openai.answer import Answer, new_answer_id
from tandem.router.openai.formats import AnswerFormat
from tandem.router.openai.generation import ChoicePlan
from tandem.router.openai.request_limits import check_held_logprobs, check_prompt_tokens
from tandem.router.openai.sampling import (
    UNKNOWN_CONTEXT_TOKENS,
    max_tokens_for,
    other_prompt,
    sampling_params,
    sibling_seed,
    stop_strings,
)
from tandem.router.openai.schema import MAX_CONVERSATION_ID_CHARS, GenerationFields, decode_body
from tandem.router.text.stop_strings import StopStrings
from tandem.router.text.token_lengths import PromptLimit
from tandem.router.text.tokenizer import Tokenizer, TokenizerPool
from tandem.scheduling.tenants import CacheScopes

__all__ = ["Prompt", "ServingContext", "conversation_of", "plan_answer", "read_body"]

CONVERSATION_HEADER = "x-tandem-conversation"

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The parts of one app."""

    backend: Backend
    tokenizer: Tokenizer
    pool: TokenizerPool
    metrics: EdgeMetrics
    started_at_s: int  # Unix time
    scopes: CacheScopes

    def cache_scope(self, request: Request, cache_salt: str | None) -> CacheScope:
        """Whose cached blocks a request may use. Raises `RequestError`."""
        return self.scopes.of(tenant_of(request), cache_salt or "")

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` unless this model (or none in particular) is asked for."""
        if name and name != self.backend.model:
            raise ModelNotFound(f"The model '{name[:200]}' does not exist.", param="model")

    def prompt_limit(self, param: str) -> PromptLimit:
        """The longest prompt that a request may have, in this field of it."""
        return PromptLimit(self.backend.max_model_len or UNKNOWN_CONTEXT_TOKENS, param)


class Prompt(NamedTuple):
    """A tokenized prompt, with the text to repeat before the answer."""

    token_ids: list[int]
    echo: str = ""


async def read_body(request: Request, request_type: type[R]) -> tuple[bytes, R]:
    """The body of a request, raw and decoded. Raises `RequestError`."""
    check_content_type(request)
    body = await request.body()
    return body, decode_body(body, request_type)


def conversation_of(request: Request, fields: GenerationFields) -> str:
    """The conversation a request belongs to, by its body or its header; "" = none. Raises `RequestError`."""
    conversation_id = fields.conversation_id or request.headers.get(CONVERSATION_HEADER, "")
    if len(conversation_id) > MAX_CONVERSATION_ID_CHARS:
        raise RequestError(
            f"The header {CONVERSATION_HEADER} has {len(conversation_id)} characters, over the limit of "
            f"{MAX_CONVERSATION_ID_CHARS}."
        )
    return conversation_id


def plan_answer(
    context: ServingContext,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    answer_format: AnswerFormat,
    *,
    requested_tokens: int | None,
    default_tokens: int | None,
    num_logprobs: int | None,
    arrived_s: float,
    conversation_id: str,
    options: RequestOptions,
    cache_scope: CacheScope,
) -> Answer:
    """The answer to generate for these prompts, `n` choices each. Raises `RequestError` for what cannot be served."""
    stream_options = fields.stream_options
    if stream_options is not None and not fields.stream:
        raise RequestError("'stream_options' is only allowed with 'stream'.", param="stream_options")
    num_siblings = fields.n or 1
    check_prompt_tokens((len(prompt.token_ids) for prompt in prompts), num_siblings)
    answer_id = new_answer_id(answer_format.id_prefix)
    stops = stop_strings(fields)
    choices: list[ChoicePlan] = []
    params: SamplingParams | None = None
    for prompt in prompts:
        max_tokens = max_tokens_for(
            len(prompt.token_ids),
            requested_tokens,
            default_tokens,
            context.backend.max_model_len,
            prompt_field=answer_format.prompt_field,
        )
        if params is None:
            params = sampling_params(
                fields, max_tokens=max_tokens, num_logprobs=num_logprobs, vocab_size=context.tokenizer.vocab_size
            )
        else:
            params = other_prompt(params, fields, max_tokens)
        for sibling in range(num_siblings):
            # Of several answers the conversation goes on with the first.
            conversation = "" if choices else conversation_id
            choices.append(
                _choice(
                    len(choices), answer_id, prompt, params, sibling, stops, fields, conversation, options, cache_scope
                )
            )
    if num_logprobs is not None and not fields.stream and context.backend.max_model_len is not None:
        num_tokens = sum(choice.request.sampling.max_tokens for choice in choices)
        check_held_logprobs(num_tokens, num_logprobs)
    return Answer(
        answer_id=answer_id,
        model=fields.model or context.backend.model,
        arrived_s=arrived_s,
        format=answer_format,
        choices=choices,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        is_stream=bool(fields.stream),
        has_usage=bool(stream_options and stream_options.include_usage),
        has_running_usage=bool(
            stream_options and stream_options.include_usage and stream_options.continuous_usage_stats
        ),
    )


def _choice(
    index: int,
    answer_id: str,
    prompt: Prompt,
    params: SamplingParams,
    sibling: int,
    stops: StopStrings | None,
    fields: GenerationFields,
    conversation_id: str,
    options: RequestOptions,
    cache_scope: CacheScope,
) -> ChoicePlan:
    service_class = options.service_class
    if sibling:  # they start behind the first token of the answer, which is what the SLO is about
        service_class = msgspec.structs.replace(service_class, ttft_slo_s=math.inf)
    request = GenerateRequest(
        request_id=f"{answer_id}-{index}",
        token_ids=prompt.token_ids,
        sampling=sibling_seed(params, sibling),
        cache_scope=cache_scope,
        conversation_id=conversation_id,
        service_class=service_class,
        explains=options.explains and index == 0,
    )
    return ChoicePlan(
        index=index,
        request=request,
        stops=stops,
        skip_special_tokens=fields.skip_special_tokens is not False,
        is_first_sibling=sibling == 0,
    )
