"""The routes of the Responses API."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import RequestError
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
)
from tandem.router.responses.format import ResponsesFormat
from tandem.router.responses.schema import ResponsesRequest
from tandem.router.responses.store import ResponseStore

__all__ = ["add_responses_routes"]


def add_responses_routes(app: RouterApp, context: ServingContext, *, num_processes: int) -> None:
    """Add the routes. Responses are kept in this process, so with several nobody could refer to one."""
    store = ResponseStore() if num_processes == 1 else None

    async def responses(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as OpenAI's Responses API, at once or as a stream of events."""
        response = await _create(context, store, Request(scope, receive))
        await response(scope, receive, send)

    app.add_raw_route("/v1/responses", responses)
    if store is not None:
        _add_store_routes(app, store)


def _add_store_routes(app: FastAPI, store: ResponseStore) -> None:
    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        stored = store.get(response_id, tenant_of(request), param="response_id")
        return Response(stored.body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response."""
        store.delete(response_id, tenant_of(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def _create(context: ServingContext, store: ResponseStore | None, request: Request) -> Response:
    arrived_s = time.perf_counter()
    body, asked = await read_body(request, ResponsesRequest)
    refuse_unserved(asked)
    tenant = tenant_of(request)
    messages, conversation_id = input_messages(asked.input), None
    if asked.previous_response_id is not None:
        if store is None:
            raise RequestError(
                "'previous_response_id' needs a server of one router process (--router-processes 1); send the whole "
                "conversation as input.",
                param="previous_response_id",
                code="unsupported_parameter",
            )
        previous = store.get(asked.previous_response_id, tenant, param="previous_response_id")
        messages, conversation_id = [*previous.conversation(), *messages], previous.conversation_id
    fields = chat_request(asked, messages, conversation_id)

    def keep(response: dict[str, Any]) -> None:
        if store is not None and asked.store is not False:
            conversation = [*messages, *output_messages(response["output"])]
            store.put(tenant, response, conversation, fields.conversation_id or response["id"])

    answer_format = ResponsesFormat(asked, keep)
    num_bytes = len(body) + sum(len(str(message.content)) for message in messages)
    with renamed_fields(FIELD_NAMES):
        answer = await plan_conversation(
            context, request, fields, answer_format, num_bytes=num_bytes, arrived_s=arrived_s
        )
    return await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)
