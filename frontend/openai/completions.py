"""`POST /v1/completions`: continues prompts of text or token ids, one or many."""

from __future__ import annotations

import time
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.request_options import request_options
from tandem.frontend.openai.answer import answer_request
from tandem.frontend.openai.formats import BestOfFormat, CompletionFormat
from tandem.frontend.openai.logprobs import ScoredPrompt
from tandem.frontend.openai.planned_answer import PlannedAnswer
from tandem.frontend.openai.planning import PreparedRequest, Prompt, conversation_of, plan_answer
from tandem.frontend.openai.request_limits import check_echo, check_fields, check_scored_prompts
from tandem.frontend.openai.sampling import check_token_ids
from tandem.frontend.openai.schema import CompletionRequest, check_cache_salt
from tandem.frontend.openai.serving_context import ServingContext, read_body
from tandem.protocol.errors import RequestError
from tandem.text.token_lengths import PromptLimit
from tandem.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def create_completion(context: ServingContext, request: Request) -> Response:
    """Continue each prompt. Raises a `ServingError`."""
    answer = await plan_completion(context, request, time.perf_counter())
    return await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)


async def plan_completion(context: ServingContext, request: Request, arrived_s: float) -> PlannedAnswer:
    """The answer to generate for each prompt. Raises a `ServingError`."""
    body, given_fields = await read_body(request, CompletionRequest)
    fields, num_best = _all_choices(given_fields)
    context.check_model(fields.model)
    check_cache_salt(fields.cache_salt)
    if fields.max_tokens == 0 and not fields.echo:
        raise RequestError(
            "Invalid value for 'max_tokens': expected at least 1 without 'echo', got 0.", param="max_tokens"
        )
    options = request_options(request, fields.priority)
    limit = context.prompt_limit("prompt")
    given = _separate_prompts(fields, limit)
    check_fields(fields, len(given), fields.logprobs)
    grammar = await context.grammar_of(fields, request, len(given))
    for prompt in given:
        check_prompt(prompt, context.tokenizer, limit)
    prompts = await context.work_on_text(
        request, lambda: [_tokenize(prompt, fields, context.tokenizer, limit) for prompt in given], len(body)
    )
    if fields.echo:
        check_echo((prompt.echo for prompt in prompts), fields.n or 1)
    if fields.echo and fields.logprobs is not None:
        check_scored_prompts((len(prompt.token_ids) for prompt in prompts), fields.n or 1, fields.logprobs)
        prompts = [
            prompt._replace(scored=ScoredPrompt(*prompt[:2], fields.logprobs, context.tokenizer)) for prompt in prompts
        ]
    prepared = PreparedRequest(
        fields=fields,
        prompts=prompts,
        format=_format(fields, prompts, num_best),
        requested_tokens=_requested_tokens(fields),
        default_tokens=DEFAULT_MAX_TOKENS if fields.max_tokens is None else None,
        num_logprobs=0 if fields.logprobs is None and num_best is not None else fields.logprobs,
        arrived_s=arrived_s,
        conversation_id=conversation_of(options, fields),
        options=options,
        cache_scope=context.scopes.of(options.service_class.tenant, fields.cache_salt or ""),
        grammar=grammar,
    )
    return plan_answer(context, prepared)


def _all_choices(fields: CompletionRequest) -> tuple[CompletionRequest, int | None]:
    """The request with all choices that are generated as its `n`, and how many of each prompt's are returned.

    None = all of them. `logprobs` is a number or null. Raises `RequestError`.
    """
    if isinstance(fields.logprobs, bool):
        fields = msgspec.structs.replace(fields, logprobs=1 if fields.logprobs else None)
    num_best, num_choices = fields.n or 1, fields.best_of or fields.n or 1
    if num_choices < num_best:
        raise RequestError(f"'best_of' is {num_choices}, but 'n' is {num_best}; it cannot be less.", param="best_of")
    if num_choices == num_best:
        return fields, None
    if fields.stream:
        raise RequestError(
            f"'best_of' is {num_choices}, more than 'n': the best ones are known only when all have ended, so they "
            "cannot be streamed.",
            param="best_of",
        )
    return msgspec.structs.replace(fields, n=num_choices), num_best


def _requested_tokens(fields: CompletionRequest) -> int | None:
    """The most tokens to generate; None = the default."""
    if fields.max_tokens == 0 and fields.logprobs is not None:
        return 1  # an engine generates at least one token; it is not shown
    return None if fields.max_tokens == -1 else fields.max_tokens


def _format(fields: CompletionRequest, prompts: list[Prompt], num_best: int | None) -> CompletionFormat:
    by_choice = [prompt for prompt in prompts for _ in range(fields.n or 1)] if fields.echo else []
    scored = [prompt.scored for prompt in by_choice if prompt.scored is not None]
    echoes = [prompt.echo for prompt in by_choice]
    if num_best is not None:
        return BestOfFormat(fields.logprobs, echoes, scored, num_choices=fields.n or 1, num_best=num_best)
    return CompletionFormat(fields.logprobs, echoes, scored)


def _separate_prompts(fields: CompletionRequest, limit: PromptLimit) -> list[str | list[int]]:
    """The prompts of a request: a flat list of token ids is one prompt, any other list holds several."""
    prompt = fields.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("'prompt' must not be an empty list.", param="prompt")
    if isinstance(prompt[0], int):  # NOTE: checked first, because looking at millions of ids or prompts takes long
        limit.check(len(prompt))
    else:
        check_fields(fields, len(prompt), fields.logprobs)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if int in kinds:
        raise RequestError(
            "'prompt' mixes token ids with prompts; send one list of token ids, or a list of prompts.", param="prompt"
        )
    return cast(list[str | list[int]], prompt)


def _tokenize(prompt: str | list[int], fields: CompletionRequest, tokenizer: Tokenizer, limit: PromptLimit) -> Prompt:
    add_special_tokens = fields.add_special_tokens is not False
    token_ids = tokenize_prompt(prompt, tokenizer, limit, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        return Prompt(token_ids, prompt)
    return Prompt(token_ids, tokenizer.decode(prompt, skip_special_tokens=True) if fields.echo else "")


def check_prompt(prompt: str | list[int], tokenizer: Tokenizer, limit: PromptLimit) -> None:
    """Raise `ContextLengthExceeded` if the prompt is too long by its characters or ids. Does not encode it."""
    if isinstance(prompt, str):
        tokenizer.check_length(prompt, limit)
    else:
        limit.check(len(prompt))


def tokenize_prompt(
    prompt: str | list[int], tokenizer: Tokenizer, limit: PromptLimit, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a prompt, at least one. Raises `RequestError`."""
    if isinstance(prompt, list):
        limit.check(len(prompt))
        if not prompt:
            raise RequestError("A prompt of token ids must not be empty.", param="prompt")
        check_token_ids(prompt, tokenizer.vocab_size, param="prompt")
        return prompt
    token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens, limit=limit)
    if not token_ids:  # as in OpenAI's API: an empty text is continued from the token that starts texts
        if tokenizer.start_id is None:
            raise RequestError("'prompt' must not be empty.", param="prompt")
        token_ids = [tokenizer.start_id]
    return token_ids
