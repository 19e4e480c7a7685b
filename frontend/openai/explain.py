"""`POST /v1/route/explain`: where a request would go now, and why."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request

from tandem.frontend.openai.chat import plan_chat
from tandem.frontend.openai.completions import plan_completion
from tandem.frontend.openai.serving_context import ServingContext, read_body

__all__ = ["explain"]


class _Kind(msgspec.Struct):
    """The field by which a chat body differs from a completion body."""

    messages: msgspec.Raw = msgspec.Raw(b"null")


async def explain(context: ServingContext, request: Request) -> list[dict[str, Any]]:
    """The decision that would be made now for each prompt. Nothing is sent or booked. Raises a `ServingError`."""
    _, kind = await read_body(request, _Kind)
    plan = plan_completion if bytes(kind.messages) == b"null" else plan_chat
    answer = await plan(context, request, time.perf_counter())
    requests = [choice.request for choice in answer.choices if choice.is_first_sibling]
    return [await context.backend.explain(one) for one in requests]
