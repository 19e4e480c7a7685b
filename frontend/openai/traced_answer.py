"""What the span of a request says about its answer, without any text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from typing_extensions import override

from tandem.router.streams import Stream
from tandem.runtime.tracing.span_node import Attributes, SpanNode

if TYPE_CHECKING:
    from tandem.frontend.openai.choice_text import ChoiceDelta
    from tandem.frontend.openai.planned_answer import PlannedAnswer
    from tandem.runtime.tracing.tracing import LiveSpan


class TracedAnswer(Stream["ChoiceDelta"]):
    """The deltas of an answer, whose numbers are added to the request's span when they end."""

    def __init__(self, deltas: Stream[ChoiceDelta], answer: PlannedAnswer, span: LiveSpan) -> None:
        """The request has now been read, checked and tokenized."""
        self._deltas = deltas
        self._answer = answer
        self._span = span
        self._usage = answer.new_usage()
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._ttft_s: float | None = None
        self._has_ended = False
        span.record(SpanNode("prepare", answer.arrived_s, time.monotonic()))
        span.set(self._request_attributes())

    @override
    async def read_into(self, sink: Callable[[list[ChoiceDelta]], bool]) -> bool:
        def note(deltas: list[ChoiceDelta]) -> bool:
            self._note(deltas)
            return sink(deltas)

        return await self._deltas.read_into(note)

    async def aclose(self) -> None:
        """End the answer, complete or not."""
        await self._deltas.aclose()
        if not self._has_ended:
            self._has_ended = True
            self._span.set(self._answer_attributes())

    def _note(self, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            self._usage.add(delta)
            if delta.num_tokens and self._ttft_s is None:
                self._ttft_s = time.monotonic() - self._answer.arrived_s
            if delta.finish_reason is not None:
                self._finish_reasons[delta.index] = delta.finish_reason

    def _request_attributes(self) -> Attributes:
        answer, sampling = self._answer, self._answer.choices[0].request.sampling
        return {
            "gen_ai.operation.name": "text_completion" if answer.format.prompt_field == "prompt" else "chat",
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": answer.model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": len(answer.choices),
            "gen_ai.request.stream": answer.is_stream,
            "gen_ai.response.id": answer.answer_id,
            "gen_ai.response.model": answer.model,
        }

    def _answer_attributes(self) -> Attributes:
        usage, reasons = self._usage, self._finish_reasons
        attributes: Attributes = {
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
            "gen_ai.response.finish_reasons": [reasons[index] for index in sorted(reasons)],
            "tandem.is_complete": len(reasons) == len(self._answer.choices),  # else the client left, or it failed
        }
        if self._ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self._ttft_s
        return attributes
