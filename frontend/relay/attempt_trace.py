"""The span of one attempt to have a request answered by an engine, or by a pair of engines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.runtime.tracing.itl import ItlSummary
from tandem.runtime.tracing.span_node import Attributes, SpanNode

if TYPE_CHECKING:
    from tandem.frontend.relay.client_request import ClientRequest
    from tandem.router.engines.dispatcher import EngineTarget
    from tandem.runtime.tracing.tracing import LiveSpan

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


class Loss(NamedTuple):
    """A stream's engine was lost after tokens of it were shown."""

    at_s: float  # time.monotonic()
    cause: str  # NOTE: not the error's message, which may quote the request
    num_tokens: int  # tokens before it


class AttemptTrace:
    """Its owner calls `end` on every path."""

    def __init__(
        self,
        request_span: LiveSpan,
        request: ClientRequest,
        target: EngineTarget,
        number: int,
        loss: Loss | None = None,
    ) -> None:
        """`number` counts the request's attempts from 0. `loss`: the attempt goes on with a stream."""
        operation = _OPERATIONS.get(request.api.path, request.api.path.removeprefix("/").replace("/", "."))
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": request.routing.adapter or request.routing.model,
            "gen_ai.request.stream": request.routing.is_stream,
            "http.request.resend_count": number,
            "tandem.engine": target.decode,
            "tandem.expected_cached_tokens": target.num_expected_cached_tokens,
        }
        if target.is_pair:
            attributes["tandem.engine.prefill"] = target.prefill
        self._loss = loss
        self._request_span = request_span
        self._arrived_s = request.arrived_s
        self._start_s = time.monotonic()
        self._span = request_span.child(f"{operation} {request.routing.model}", attributes)
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._itl = ItlSummary()

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the engine's own spans."""
        return self._span.headers

    def prefilled(self) -> None:
        """The prefill engine of a pair returned."""
        self._span.record(SpanNode("prefill", self._start_s, time.monotonic()))

    def tokens(self, count: int) -> None:
        """Tokens came."""
        now = time.monotonic()
        if self._num_tokens:
            self._itl.add(now - self._last_s)
        else:
            self._first_s = now
            self._span.event("first_token")
            if self._loss is None:
                self._request_span.set({"gen_ai.response.time_to_first_chunk": now - self._arrived_s})
            else:
                self._end_move(now)
        self._num_tokens += count
        self._last_s = now

    def _end_move(self, now: float) -> None:
        loss = self._loss
        assert loss is not None, "the attempt goes on with a stream"
        attributes: Attributes = {"tandem.output_tokens": loss.num_tokens, "tandem.move.reason": loss.cause}
        self._request_span.record(SpanNode("move", loss.at_s, now, attributes))

    def usage(self, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> None:
        """The engine reported usage of the whole answer."""
        attributes: Attributes = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
        }
        self._span.set(attributes)
        self._request_span.set(attributes)

    def failed(self, error: BaseException) -> None:
        """The attempt ends with this error."""
        self._span.fail(error)

    def end(self, status: int) -> None:
        """The attempt is over. `status` is the engine's; 0 = it has not answered."""
        attributes: dict[str, Any] = {"http.response.status_code": status} if status else {}
        self._span.set(attributes)
        if self._num_tokens > 1:
            decoded = {"tandem.output_tokens": self._num_tokens - 1} | self._itl.attributes()
            self._span.record(SpanNode("decode", self._first_s, self._last_s, decoded))
        self._span.end()
