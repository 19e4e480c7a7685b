"""The routes of the Responses API."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.answer_shapes import Deleted
from tandem.frontend.http.app import RouterApp, json_response
from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.request_options import tenant_of
from tandem.frontend.openai.answer import answer_request
from tandem.frontend.openai.chat import count_prompt_tokens, plan_conversation
from tandem.frontend.openai.other_fields import unsupported
from tandem.frontend.openai.planned_answer import PlannedAnswer
from tandem.frontend.openai.schema import ChatMessage, ChatRequest
from tandem.frontend.openai.serving_context import ServingContext, read_body, renamed_fields
from tandem.frontend.response_store import StoredResponse
from tandem.frontend.responses.answer_shapes import InputTokens, ResponseObject
from tandem.frontend.responses.conversation import (
    FIELD_NAMES,
    chat_request,
    input_messages,
    refuse_unserved,
    turn_starts,
)
from tandem.frontend.responses.format import ResponsesFormat
from tandem.frontend.responses.items import as_items, check_kept_bytes, check_nesting, input_page, resolved, with_ids
from tandem.frontend.responses.schema import ResponsesRequest
from tandem.frontend.responses.tools import ResponseTools, response_tools
from tandem.protocol.errors import ContextLengthExceeded, ServingError

Json = dict[str, Any]

_NESTED = ("input", "tools", "tool_choice", "conversation", "prompt")  # fields of any JSON

logger = logging.getLogger(__name__)


def add_responses_routes(app: RouterApp, context: ServingContext) -> None:
    """Add the routes."""
    summary = "Answer as OpenAI's Responses API, at once or as a stream of events."
    app.add_answers("/v1/responses", summary, partial(_create, context))

    @app.post("/v1/responses/input_tokens")
    async def count_input_tokens(request: Request) -> Response:
        """Number of tokens of a response's prompt."""
        return json_response(await _count_input_tokens(context, request))

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        if request.query_params.get("stream") == "true":  # the SDK would read no event, and raise no error
            raise unsupported("stream", b"true")
        stored = await context.responses.get(response_id, tenant_of(request), "response_id")
        return Response(stored.body, media_type="application/json")

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        """The items that a response was made from."""
        stored = await context.responses.get(response_id, tenant_of(request), "response_id")
        return json_response(input_page(stored.input, request.query_params))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response."""
        await context.responses.delete(response_id, tenant_of(request), "response_id")
        return json_response(Deleted(response_id, "response", deleted=True))


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a request is about: its input, behind what is kept of earlier responses."""

    asked: ResponsesRequest
    earlier: list[Json]
    given: list[Json]
    kept_id: str | None  # of the conversation that it continues
    tools: ResponseTools
    num_bytes: int  # of the request and of what is kept

    @property
    def messages(self) -> list[ChatMessage]:
        """All of it."""
        return input_messages(self.earlier, self.given)

    def chat_request(self, messages: Sequence[ChatMessage]) -> ChatRequest:
        """The request with these messages, as chat has it."""
        return chat_request(self.asked, messages, self.tools, self.kept_id)

    @property
    def field_names(self) -> Mapping[str, str]:
        """Names of fields in chat's checks -> the client's."""
        return FIELD_NAMES | self.tools.field_names


async def _read(context: ServingContext, request: Request) -> _Conversation:
    """Raises a `ServingError` for a body that is wrong, and for responses that are not kept."""
    body, asked = await read_body(request, ResponsesRequest)
    for name in _NESTED:
        check_nesting(getattr(asked, name), name)
    refuse_unserved(asked)
    tenant = tenant_of(request)
    given, num_kept_bytes = await resolved(as_items(asked.input), context.responses, tenant)
    earlier, kept_id = [], None
    if asked.previous_response_id is not None:
        previous = await context.responses.get(asked.previous_response_id, tenant, "previous_response_id")
        num_kept_bytes += len(previous.items)
        check_kept_bytes(len(body) + num_kept_bytes, "previous_response_id")
        earlier, kept_id = previous.conversation, previous.conversation_id
    tools = response_tools(asked.tools or (), given, asked.tool_choice)
    return _Conversation(asked, earlier, given, kept_id, tools, len(body) + num_kept_bytes)


async def _count_input_tokens(context: ServingContext, request: Request) -> InputTokens:
    conversation = await _read(context, request)
    with renamed_fields(conversation.field_names):
        fields = conversation.chat_request(conversation.messages)
        num_tokens = await count_prompt_tokens(context, request, fields, conversation.num_bytes)
    return InputTokens("response.input_tokens", num_tokens)


async def _create(context: ServingContext, request: Request) -> Response:
    arrived_s = time.perf_counter()
    conversation = await _read(context, request)
    asked, messages = conversation.asked, conversation.messages

    async def keep(response: ResponseObject) -> None:
        if asked.store is not False:
            items = [*conversation.earlier, *with_ids(conversation.given), *response.output]
            name = answer.choices[0].request.conversation_id or response.id
            body, kept = msgspec.json.encode(response), msgspec.json.encode(items)
            await _keep(context, StoredResponse(response.id, tenant_of(request), body, kept, name))

    answer_format = ResponsesFormat(asked, conversation.tools, keep)

    async def plan(messages: Sequence[ChatMessage]) -> PlannedAnswer:
        fields = conversation.chat_request(messages)
        with renamed_fields(conversation.field_names):
            return await plan_conversation(
                context, request, fields, answer_format, num_bytes=conversation.num_bytes, arrived_s=arrived_s
            )

    answer = await (_plan_truncated(plan, messages) if asked.truncation == "auto" else plan(messages))
    response = await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)
    if answer_format.plain_body is not None:
        await keep(answer_format.plain_body)
    return response


async def _plan_truncated(
    plan: Callable[[Sequence[ChatMessage]], Awaitable[PlannedAnswer]], messages: Sequence[ChatMessage]
) -> PlannedAnswer:
    """The plan without the oldest turns that do not fit. Raises `ContextLengthExceeded` if the last one does not.

    What system messages say stays. A binary search: each attempt renders and tokenizes the conversation.
    """
    try:
        return await plan(messages)
    except ContextLengthExceeded as exc:
        error = exc
    answer: PlannedAnswer | None = None
    starts = turn_starts(messages)
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        left_out = [message for message in messages[: starts[middle]] if message.role in ("system", "developer")]
        try:
            answer, high = await plan([*left_out, *messages[starts[middle] :]]), middle
        except ContextLengthExceeded:
            low = middle + 1
    if answer is None:
        raise error
    note_ignored("input", f"the oldest {low + 1} of {len(starts) + 1} turns do not fit")
    return answer


async def _keep(context: ServingContext, stored: StoredResponse) -> None:
    """Store a response. The client gets its answer even if it cannot be stored."""
    try:
        await context.responses.put(stored)
    except ServingError as exc:
        logger.warning("Response %s is not kept: %s", stored.response_id, exc)
