"""`/v1/route/*`: why requests go where they go."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request

from tandem.router.openai.chat import plan_chat
from tandem.router.openai.completions import plan_completion
from tandem.router.openai.serving_context import ServingContext, read_body
from tandem.router.openai.visibility import visible_decisions

__all__ = ["explain_route", "list_decisions"]


class _Kind(msgspec.Struct):
    """What tells the two kinds of body apart."""

    messages: msgspec.Raw = msgspec.Raw(b"null")


async def explain_route(context: ServingContext, request: Request) -> dict[str, Any]:
    """Body of `POST /v1/route/explain`: what would be decided now for each prompt of a chat or completion body.

    Nothing is sent to a worker or booked. Raises a `ServingError`.
    """
    _, kind = await read_body(request, _Kind)
    plan = plan_completion if bytes(kind.messages) == b"null" else plan_chat
    answer = await plan(context, request, time.perf_counter())
    requests = [choice.request for choice in answer.choices if choice.is_first_sibling]
    return {"object": "list", "data": [await context.backend.explain(one) for one in requests]}


async def list_decisions(context: ServingContext, request: Request) -> dict[str, Any]:
    """Body of `GET /v1/route/decisions`: the latest, newest first."""
    return {"object": "list", "data": visible_decisions(await context.backend.decisions(), request)}
