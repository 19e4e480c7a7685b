"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.router.http.app import RouterApp, json_response
from tandem.router.messages.conversation import FIELD_NAMES, chat_prompt, chat_request
from tandem.router.messages.format import MessagesFormat
from tandem.router.messages.schema import CountTokensRequest, MessagesRequest
from tandem.router.openai.answer import answer_request
from tandem.router.openai.chat import plan_conversation, tokenize_chat
from tandem.router.openai.field_names import renamed_fields
from tandem.router.openai.serving_context import ServingContext, read_body
from tandem.router.openai.tool_fields import requested_tools

__all__ = ["add_messages_routes"]


def add_messages_routes(app: RouterApp, context: ServingContext) -> None:
    """Add both routes."""

    async def messages(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as Anthropic's Messages API, at once or as a stream of events."""
        response = await _create_message(context, Request(scope, receive))
        await response(scope, receive, send)

    app.add_raw_route("/v1/messages", messages)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Number of tokens of a message's prompt."""
        return json_response(await _count_tokens(context, request))


async def _create_message(context: ServingContext, request: Request) -> Response:
    arrived_s = time.perf_counter()
    body, fields = await read_body(request, MessagesRequest)
    with renamed_fields(FIELD_NAMES):
        answer = await plan_conversation(
            context, request, chat_request(fields), MessagesFormat(), num_bytes=len(body), arrived_s=arrived_s
        )
    return await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)


async def _count_tokens(context: ServingContext, request: Request) -> dict[str, Any]:
    body, fields = await read_body(request, CountTokensRequest)
    with renamed_fields(FIELD_NAMES):
        chat = chat_prompt(fields)
        context.check_model(chat.model)
        tools = requested_tools(chat)
        context.formats.check_tools(tools)
        token_ids = await tokenize_chat(
            context,
            request,
            chat.messages,
            chat.chat_template_kwargs,
            chat.add_generation_prompt,
            context.cache_scope(request, chat.cache_salt),
            tools=tools,
            add_special_tokens=False,
            num_bytes=len(body),
        )
    return {"input_tokens": len(token_ids)}
