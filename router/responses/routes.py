"""The routes of the Responses API."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import ServingError
from tandem.router.http.app import RouterApp, json_response
from tandem.router.http.request_options import tenant_of
from tandem.router.openai.answer import answer_request
from tandem.router.openai.chat import plan_conversation
from tandem.router.openai.field_names import renamed_fields
from tandem.router.openai.serving_context import ServingContext, read_body
from tandem.router.responses.conversation import (
    FIELD_NAMES,
    chat_request,
    input_messages,
    output_messages,
    refuse_unserved,
    stored_messages,
)
from tandem.router.responses.format import ResponsesFormat
from tandem.router.responses.schema import ResponsesRequest
from tandem.router.responses.store import StoredResponse

__all__ = ["add_responses_routes"]

logger = logging.getLogger(__name__)


def add_responses_routes(app: RouterApp, context: ServingContext) -> None:
    """Add the routes."""

    async def responses(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as OpenAI's Responses API, at once or as a stream of events."""
        response = await _create(context, Request(scope, receive))
        await response(scope, receive, send)

    app.add_raw_route("/v1/responses", responses)

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        stored = await context.responses.get(response_id, tenant_of(request), "response_id")
        return Response(stored.body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response."""
        await context.responses.delete(response_id, tenant_of(request), "response_id")
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def _create(context: ServingContext, request: Request) -> Response:
    arrived_s = time.perf_counter()
    body, asked = await read_body(request, ResponsesRequest)
    refuse_unserved(asked)
    tenant = tenant_of(request)
    messages, conversation_id = input_messages(asked.input), None
    if asked.previous_response_id is not None:
        previous = await context.responses.get(asked.previous_response_id, tenant, "previous_response_id")
        messages, conversation_id = [*stored_messages(previous.messages), *messages], previous.conversation_id
    fields = chat_request(asked, messages, conversation_id)

    async def keep(response: dict[str, Any]) -> None:
        if asked.store is not False:
            conversation = msgspec.json.encode([*messages, *output_messages(response["output"])])
            name = fields.conversation_id or response["id"]
            await _keep(context, StoredResponse(response["id"], tenant, orjson.dumps(response), conversation, name))

    answer_format = ResponsesFormat(asked, keep)
    num_bytes = len(body) + sum(len(str(message.content)) for message in messages)
    with renamed_fields(FIELD_NAMES):
        answer = await plan_conversation(
            context, request, fields, answer_format, num_bytes=num_bytes, arrived_s=arrived_s
        )
    response = await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)
    if answer_format.plain_body is not None:
        await keep(answer_format.plain_body)
    return response


async def _keep(context: ServingContext, stored: StoredResponse) -> None:
    """Store a response. The client gets its answer even if it cannot be stored."""
    try:
        await context.responses.put(stored)
    except ServingError as exc:
        logger.warning("Response %s is not kept: %s", stored.response_id, exc)
