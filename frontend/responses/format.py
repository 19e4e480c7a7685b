"""The answers of `/v1/responses`: the response object, and the events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from tandem.frontend.http.answer_shapes import Error
from tandem.frontend.openai.choice_text import ChoiceDelta
from tandem.frontend.openai.planned_answer import AnswerEvents, FinishedChoice, PlannedAnswer, TokensUsed
from tandem.frontend.responses import answer_shapes as shapes
from tandem.frontend.responses.conversation import wants_opaque_reasoning
from tandem.frontend.responses.output import OutputItems
from tandem.frontend.responses.schema import ResponsesRequest
from tandem.frontend.responses.tools import ResponseTools

_encode = msgspec.json.Encoder().encode


class ResponsesFormat:
    """Answers one request. `keep(body)` is awaited with a streamed response before its client hears that it is done."""

    id_prefix = "resp_"
    prompt_field = "input"

    def __init__(
        self, request: ResponsesRequest, tools: ResponseTools, keep: Callable[[shapes.ResponseObject], Awaitable[None]]
    ) -> None:
        self._request = request
        self._tools = tools
        self.keep = keep
        self.plain_body: shapes.ResponseObject | None = None  # the answer's body if it was not streamed

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> shapes.ResponseObject:
        """The response object of a plain answer."""
        choice, items = choices[0], self.new_items(answer, itertools.count())
        is_cut = choice.finish_reason == "length"
        for event in choice.parts:
            list(items.add(event))  # nobody needs the events of a stream
        list(items.close(is_cut=is_cut))
        status: Literal["completed", "incomplete"] = "incomplete" if is_cut else "completed"
        self.plain_body = self.response(answer, int(time.time()), status, items.items, usage)
        return self.plain_body

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """Events from `response.created` to `response.completed` or `response.incomplete`."""
        return _ResponseEvents(self, answer)

    def new_items(self, answer: PlannedAnswer, numbers: itertools.count[int]) -> OutputItems:
        """The items of an answer, none yet. `numbers` are those of the stream's events."""
        has_opaque_reasoning = wants_opaque_reasoning(self._request)
        return OutputItems(answer.answer_id, self._tools, numbers, has_opaque_reasoning=has_opaque_reasoning)

    def response(
        self,
        answer: PlannedAnswer,
        created_at: int,
        status: Literal["in_progress", "completed", "incomplete"],
        output: list[shapes.OutputItem],
        usage: TokensUsed | None,
    ) -> shapes.ResponseObject:
        """The response object."""
        request = self._request
        text = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
        return shapes.ResponseObject(
            id=answer.answer_id,
            object="response",
            created_at=created_at,
            status=status,
            background=False,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=answer.model,
            output=output,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning={"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            store=request.store is not False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": text},
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            usage=None if usage is None else _usage(usage),
            user=request.user,
        )


class _ResponseEvents:
    """The events of one stream, numbered from 0."""

    def __init__(self, format: ResponsesFormat, answer: PlannedAnswer) -> None:
        self._format = format
        self._answer = answer
        self._created_at = int(time.time())
        self._usage = answer.new_usage()
        self._numbers = itertools.count()
        self._items = format.new_items(answer, self._numbers)
        self._has_begun = False
        self._is_cut = False

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta. Events that announce the response come before the first one."""
        data = b"" if self._has_begun else self._begin()
        self._usage.add(delta)
        self._is_cut = delta.finish_reason == "length"
        return data + b"".join([_event(one) for event in delta.parts for one in self._items.add(event)])

    async def ending(self) -> bytes:
        """The end of the open item, and of the response."""
        data = b"".join(map(_event, self._items.close(is_cut=self._is_cut)))
        status: Literal["completed", "incomplete"] = "incomplete" if self._is_cut else "completed"
        body = self._format.response(self._answer, self._created_at, status, self._items.items, self._usage)
        await self._format.keep(body)
        number = next(self._numbers)
        return data + _event(
            shapes.ResponseIncomplete(body, sequence_number=number)
            if self._is_cut
            else shapes.ResponseCompleted(body, sequence_number=number)
        )

    def error(self, body: Error) -> bytes:
        """The error as an event of its own; clients raise it."""
        error = body.error
        return _event(shapes.ErrorEvent(error.code, error.message, error.param, sequence_number=next(self._numbers)))

    def _begin(self) -> bytes:
        self._has_begun = True
        body = self._format.response(self._answer, self._created_at, "in_progress", [], None)
        created = _event(shapes.ResponseCreated(body, sequence_number=next(self._numbers)))
        return created + _event(shapes.ResponseInProgress(body, sequence_number=next(self._numbers)))


def _event(event: shapes.ResponseEvent) -> bytes:
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _usage(usage: TokensUsed) -> shapes.ResponseUsage:
    return shapes.ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=shapes.InputTokensDetails(
            usage.num_cached_tokens, usage.cached_by_tier, cache_write_tokens=0
        ),
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=shapes.OutputTokensDetails(usage.num_reasoning_tokens),
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
    )
