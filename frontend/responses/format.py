"""The JSON shapes of `/v1/responses`: the response object, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import orjson

from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed
from tandem.frontend.responses.conversation import wants_opaque_reasoning
from tandem.frontend.responses.output import OutputItems
from tandem.frontend.responses.schema import ResponsesRequest
from tandem.frontend.responses.tools import ResponseTools

__all__ = ["ResponsesFormat"]

Json = dict[str, Any]


class ResponsesFormat:
    """Answers one request. `keep(body)` is awaited with a streamed response before its client hears that it is done."""

    id_prefix = "resp_"
    prompt_field = "input"

    def __init__(
        self, request: ResponsesRequest, tools: ResponseTools, keep: Callable[[Json], Awaitable[None]]
    ) -> None:
        self._request = request
        self._tools = tools
        self.keep = keep
        self.plain_body: Json | None = None  # the answer's body if it was not streamed

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> Json:
        """The response object of a plain answer."""
        choice, items = choices[0], self.new_items(answer)
        for event in choice.parts:
            _exhaust(items.add(event))
        status = _status(choice.finish_reason)
        _exhaust(items.close(status))
        self.plain_body = self.response(answer, int(time.time()), status, items.items, usage)
        return self.plain_body

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Events from `response.created` to `response.completed` or `response.incomplete`."""
        return _ResponseEvents(self, answer)

    def new_items(self, answer: PlannedAnswer) -> OutputItems:
        """The items of an answer, none yet."""
        return OutputItems(answer.answer_id, self._tools, has_opaque_reasoning=wants_opaque_reasoning(self._request))

    def response(
        self, answer: PlannedAnswer, created_at: int, status: str, output: list[Json], usage: TokensUsed | None
    ) -> Json:
        """The response object."""
        request = self._request
        text = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
        return {
            "id": answer.answer_id,
            "object": "response",
            "created_at": created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": answer.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _as_sent(text)},
            "tool_choice": _as_sent(request.tool_choice or "auto"),
            "tools": _as_sent(request.tools or []),
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }


class _ResponseEvents:
    """The events of one stream, numbered from 0."""

    def __init__(self, format: ResponsesFormat, answer: PlannedAnswer) -> None:
        self._format = format
        self._answer = answer
        self._created_at = int(time.time())
        self._usage = answer.new_usage()
        self._items = format.new_items(answer)
        self._number = 0
        self._finish_reason: str | None = None

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta. Events that announce the response come before the first one."""
        data = b"" if self._number else self._begin()
        self._usage.add(delta)
        self._finish_reason = delta.finish_reason
        return data + b"".join(self._event(one) for event in delta.parts for one in self._items.add(event))

    async def ending(self) -> bytes:
        """The end of the open item, and of the response."""
        status = _status(self._finish_reason)
        data = b"".join(map(self._event, self._items.close(status)))
        body = self._format.response(self._answer, self._created_at, status, self._items.items, self._usage)
        await self._format.keep(body)
        return data + self._event({"type": f"response.{status}", "response": body})

    def error(self, body: Json) -> bytes:
        """The error as an event of its own; clients raise it."""
        error = body["error"]
        return self._event({"type": "error", **{name: error[name] for name in ("code", "message", "param")}})

    def _begin(self) -> bytes:
        body = self._format.response(self._answer, self._created_at, "in_progress", [], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": body}) for kind in kinds)

    def _event(self, event: Json) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _as_sent(value: object) -> orjson.Fragment:
    """A client's value as JSON: orjson refuses integers above 64 bits."""
    return orjson.Fragment(msgspec.json.encode(value))


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: TokensUsed) -> Json:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": usage.cached_details() | {"cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _exhaust(events: Iterable[Json]) -> None:
    for _ in events:
        pass
