"""From a tokenized request to the sequences to generate for it: sampling, lengths, seeds and stop strings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.request_options import RequestOptions
from tandem.frontend.http.sessions import conversation_named, routing_session
from tandem.frontend.openai.answer_formats import AnswerParsing
from tandem.frontend.openai.cache_hints import Hints, is_demoted, read_hints
from tandem.frontend.openai.choice_text import ChoicePlan
from tandem.frontend.openai.logprobs import ScoredPrompt
from tandem.frontend.openai.planned_answer import AnswerFormat, PlannedAnswer
from tandem.frontend.openai.prompt_roles import RoleSpan
from tandem.frontend.openai.request_limits import check_held_logprobs, check_prompt_tokens
from tandem.frontend.openai.sampling import max_tokens_for, other_prompt, sampling_params, sibling_seed, stop_strings
from tandem.frontend.openai.schema import GenerationFields
from tandem.frontend.openai.serving_context import ServingContext
from tandem.protocol.digest import CacheScope
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest


class Prompt(NamedTuple):
    """A tokenized prompt, with the text to repeat before the answer, and its log probabilities."""

    token_ids: list[int]
    echo: str = ""
    scored: ScoredPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked and tokenized request, in the form that chat and completions share."""

    fields: GenerationFields
    prompts: Sequence[Prompt]
    format: AnswerFormat
    requested_tokens: int | None
    default_tokens: int | None  # None = the rest of the context
    num_logprobs: int | None
    arrived_s: float
    conversation_id: str
    options: RequestOptions
    cache_scope: CacheScope
    parsing: AnswerParsing | None = None
    grammar: str = ""  # grammar that every choice must match; "" = none
    call_ids: frozenset[int] = frozenset()  # tokens that only calls of tools have
    prediction: tuple[int, ...] = ()  # what the answer is like, in tokens
    roles: Sequence[RoleSpan] = ()  # of the prompt, if usage tells them


def conversation_of(options: RequestOptions, fields: GenerationFields) -> str:
    """The conversation that a request names; "" = none. Raises `RequestError`."""
    return conversation_named(options.headers, fields.conversation_id, fields.prompt_cache_key)


def plan_answer(context: ServingContext, request: PreparedRequest) -> PlannedAnswer:
    """The answer to generate, with `n` choices for each prompt. Raises `RequestError` for what cannot be served."""
    fields = request.fields
    stream_options = fields.stream_options
    if stream_options is not None and not fields.stream:
        note_ignored("stream_options", "the answer is not streamed")
    check_prompt_tokens((len(prompt.token_ids) for prompt in request.prompts), fields.n or 1)
    hints = read_hints(fields.cache_hints)
    choices = _choices(context, request, hints)
    if request.num_logprobs is not None and not fields.stream and context.backend.max_model_len is not None:
        num_tokens = sum(choice.request.sampling.max_tokens for choice in choices)
        check_held_logprobs(num_tokens, request.num_logprobs)
    has_usage = bool(stream_options and stream_options.include_usage)
    return PlannedAnswer(
        request_id=request.options.request_id.shown,
        answer_id=request.options.request_id.answer_id(request.format.id_prefix),
        model=fields.model or context.backend.model,
        arrived_s=request.arrived_s,
        format=request.format,
        choices=choices,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in request.prompts),
        is_stream=bool(fields.stream),
        has_usage=has_usage,
        has_running_usage=bool(has_usage and stream_options and stream_options.continuous_usage_stats),
        hints=hints,
        roles=request.roles,
    )


def _choices(context: ServingContext, request: PreparedRequest, hints: Hints) -> list[ChoicePlan]:
    """`n` choices for each prompt; the first of them computes it, and its siblings are forks of it."""
    stops = stop_strings(request.fields)
    has_limit = request.requested_tokens is not None or request.default_tokens is not None
    choices: list[ChoicePlan] = []
    for prompt, params in zip(request.prompts, _sampling(context, request), strict=True):
        for sibling in range(request.fields.n or 1):
            index = len(choices)
            choices.append(
                ChoicePlan(
                    index=index,
                    request=_generate_request(request, prompt, params, index, sibling, hints),
                    stops=stops,
                    skip_special_tokens=request.fields.skip_special_tokens is not False,
                    shows_stop=bool(request.fields.include_stop_str_in_output),
                    parsing=request.parsing,
                    is_first_sibling=sibling == 0,
                    scored_prompt=prompt.scored,
                    is_prompt_only=has_limit and request.fields.max_tokens == 0 and params.max_tokens > 0,
                    shows_token_ids=request.fields.return_token_ids is True,
                )
            )
    return choices


def _sampling(context: ServingContext, request: PreparedRequest) -> Iterator[SamplingParams]:
    """Sampling parameters of each prompt's first choice."""
    params: SamplingParams | None = None
    for prompt in request.prompts:
        max_tokens = max_tokens_for(
            len(prompt.token_ids),
            request.requested_tokens,
            request.default_tokens,
            context.backend.max_model_len,
            prompt_field=request.format.prompt_field,
        )
        if params is None:
            vocab_size = context.tokenizer.vocab_size
            params = sampling_params(
                request.fields,
                max_tokens=max_tokens,
                num_logprobs=request.num_logprobs,
                vocab_size=vocab_size,
                grammar=request.grammar,
                prediction=request.prediction,
            )
        else:
            params = other_prompt(params, request.fields, max_tokens)
        yield params


def _generate_request(
    request: PreparedRequest, prompt: Prompt, params: SamplingParams, index: int, sibling: int, hints: Hints
) -> GenerateRequest:
    session = routing_session(request.conversation_id, request.fields.user)
    service_class = msgspec.structs.replace(request.options.service_class, session=session)
    sampling = sibling_seed(params, sibling)
    if prompt.scored is not None and not sibling:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=request.num_logprobs)
    if sibling:  # the SLO is about the answer's first token; those without room start after it
        service_class = msgspec.structs.replace(service_class, ttft_slo_s=math.inf)
    return GenerateRequest(
        request_id=f"{request.options.request_id.unique}-{index}",
        token_ids=prompt.token_ids,
        sampling=sampling,
        cache_scope=request.cache_scope,
        conversation_id="" if index else request.conversation_id,  # the conversation goes on with the first choice
        service_class=service_class,
        explains=request.options.explains and index == 0,
        is_later_choice=index > 0,
        fork_of=f"{request.options.request_id.unique}-{index - sibling}" if sibling else "",
        traceparent=request.options.traceparent,
        call_ids=request.call_ids,
        is_demoted=is_demoted(hints),
    )
