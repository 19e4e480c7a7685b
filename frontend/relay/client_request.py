"""A client's request as the router reads it, and the body that an engine is sent for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.frontend.http.sessions import CONVERSATION_HEADER
from tandem.frontend.keys.limiter import KeyUse
from tandem.frontend.relay.apis import Api
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import DispatchRequest

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import LiveSpan

_PROMPT_FIELDS = ("messages", "input", "prompt", "tools")
_KINDS_WITH_STREAM_USAGE = {"vllm", "sglang", "llamacpp"}  # they know stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request. Engines get its body unchanged, except for `cache_salt`, `stream_options` and adapters."""

    api: Api
    body: dict[str, Any]
    routing: DispatchRequest
    arrived_s: float  # time.perf_counter()
    span: LiveSpan | None = None  # None = it is not traced
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # sent to engines if it is not traced
    conversation_id: str = ""  # as a header or the client's session names it; "" = none
    key_use: KeyUse | None = None  # counts it against the limits of its API key; None = nothing limits it

    @property
    def conversation_headers(self) -> dict[str, str]:
        """Headers that tell an engine the conversation."""
        return {CONVERSATION_HEADER: self.conversation_id} if self.conversation_id else {}

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for usage in its stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def pack(self) -> None:
        """From now on the prompt is only sent: keep it as JSON. As objects it may take ten times the memory."""
        for name in _PROMPT_FIELDS:
            if isinstance(value := self.body.get(name), (list, dict)):
                self.body[name] = msgspec.Raw(msgspec.json.encode(value))

    def body_for(self, engine: EngineSpec) -> dict[str, Any]:
        """The body for an engine. It always asks for usage, which says how many tokens were cached.

        The salt is our name of the scope, never the client's own: an engine shares blocks among requests of one salt.
        """
        body = self.body
        if self.api.is_salted and (scope := self.routing.cache_scope):
            body = body | {"cache_salt": scope}
            if not engine.cache_salt:
                del body["cache_salt"]
        if engine.kind == "sglang" and (adapter := self.routing.adapter):
            # With the adapter's name alone, SGLang would answer with its base model.
            body = body | {"model": f"{self.routing.model}:{adapter}", "lora_path": adapter}
        if not self.api.has_stream_options or not self.routing.is_stream:
            return body
        options = body.get("stream_options") or {}
        if engine.kind not in _KINDS_WITH_STREAM_USAGE or not isinstance(options, dict):
            return body
        return body | {"stream_options": options | {"include_usage": True}}
