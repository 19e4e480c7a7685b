"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.app import RouterApp, json_response
from tandem.frontend.messages.answer_shapes import CountedTokens, UneditedTokens
from tandem.frontend.messages.context_edits import Edited, edited, known_edits, least_trigger
from tandem.frontend.messages.conversation import FIELD_NAMES, chat_prompt, chat_request
from tandem.frontend.messages.format import MessagesFormat
from tandem.frontend.messages.schema import CountTokensRequest, MessagesRequest
from tandem.frontend.openai.answer import answer_request
from tandem.frontend.openai.chat import count_prompt_tokens, plan_conversation
from tandem.frontend.openai.serving_context import ServingContext, read_body, renamed_fields
from tandem.protocol.errors import ContextLengthExceeded

R = TypeVar("R", bound=CountTokensRequest)


def add_messages_routes(app: RouterApp, context: ServingContext) -> None:
    """Add both routes."""
    summary = "Answer as Anthropic's Messages API, at once or as a stream of events."
    app.add_answers("/v1/messages", summary, partial(_create_message, context))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Number of tokens of a message's prompt."""
        return json_response(await _count_tokens(context, request))


async def _create_message(context: ServingContext, request: Request) -> Response:
    arrived_s = time.perf_counter()
    body, fields = await read_body(request, MessagesRequest)
    num_bytes = len(body)
    with _anthropic_errors():
        context.check_model(fields.model)
        fields, edits = await _edited(context, request, fields, num_bytes)
        applied = None if edits is None else edits.applied
        answer_format = MessagesFormat(fields.max_tokens, applied)
        answer = await plan_conversation(
            context,
            request,
            chat_request(fields),
            answer_format,
            num_bytes=num_bytes,
            arrived_s=arrived_s,
            fits_context=True,
        )
    return await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)


async def _count_tokens(context: ServingContext, request: Request) -> CountedTokens:
    body, fields = await read_body(request, CountTokensRequest)
    with _anthropic_errors():
        context.check_model(fields.model)
        fields, edits = await _edited(context, request, fields, len(body))
        num_tokens = await count_prompt_tokens(context, request, chat_prompt(fields), len(body))
    original = UNSET if edits is None else UneditedTokens(num_tokens + edits.num_cleared_tokens)
    return CountedTokens(num_tokens, original)


@contextmanager
def _anthropic_errors() -> Iterator[None]:
    """Errors about the fields of this API. Of a prompt that is too long, clients read the numbers."""
    try:
        with renamed_fields(FIELD_NAMES):
            yield
    except ContextLengthExceeded as exc:
        if exc.num_tokens is not None:
            exc.message = f"prompt is too long: {exc.num_tokens} tokens > {exc.max_tokens} maximum. {exc.message}"
        raise


# -- context management


async def _edited(context: ServingContext, request: Request, fields: R, num_bytes: int) -> tuple[R, Edited | None]:
    """The request with its conversation edited as it asks for, and what was done; None if it asks for nothing."""
    if fields.context_management is None:
        return fields, None
    edits = known_edits(fields)
    least = least_trigger(edits)
    num_tokens = 0.0 if least is None else await _tokens_for_trigger(context, request, fields, num_bytes, least)
    done = await context.work_on_text(
        request,
        lambda: edited(fields.messages, edits, num_tokens, lambda text: _num_text_tokens(context, text)),
        num_bytes,
    )
    return msgspec.structs.replace(fields, messages=list(done.messages)), done


async def _tokens_for_trigger(
    context: ServingContext, request: Request, fields: CountTokensRequest, num_bytes: int, least: int
) -> float:
    """Tokens of the prompt before any edit. If it does not fit, clearing is its only chance, so any trigger is met."""
    limit = context.prompt_limit("messages").max_tokens
    if num_bytes < min(least, limit):  # no token is shorter than a byte
        return 0.0
    try:
        return await count_prompt_tokens(context, request, chat_prompt(fields), num_bytes)
    except ContextLengthExceeded:
        return math.inf


def _num_text_tokens(context: ServingContext, text: str) -> int:
    """Tokens of a text; those of a whole context if it is longer."""
    limit = context.prompt_limit("messages")
    try:
        return len(context.tokenizer.encode(text, add_special_tokens=False, limit=limit))
    except ContextLengthExceeded:
        return limit.max_tokens
