"""A client's request as the router reads it, and the bodies that engines are sent for it.

A pair of vLLM engines hands KV over with NIXL: the prefill engine computes the prompt with `max_tokens=1` and keeps the
KV; it returns where the KV is, and the decode engine reads the blocks from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import DispatchRequest
from tandem.router.engines.errors import EngineFailed

__all__ = ["ClientRequest", "decode_body", "prefill_body"]

_KINDS_WITH_STREAM_USAGE = {"vllm", "sglang", "llamacpp"}  # they know stream_options.include_usage
_KEEP_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request. Engines get its body unchanged, except for `cache_salt` and `stream_options`."""

    path: str
    body: dict[str, Any]
    routing: DispatchRequest
    arrived_s: float  # time.perf_counter()

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for usage in its stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def body_for(self, engine: EngineSpec) -> dict[str, Any]:
        """The body for an engine. It always asks for usage, which says how many tokens were cached.

        The salt is our name of the scope, never the client's own: an engine shares blocks among requests of one salt.
        """
        body = self.body
        if scope := self.routing.cache_scope:
            body = body | {"cache_salt": scope}
            if not engine.cache_salt:
                del body["cache_salt"]
        options = body.get("stream_options") or {}
        if not self.routing.is_stream or engine.kind not in _KINDS_WITH_STREAM_USAGE or not isinstance(options, dict):
            return body
        return body | {"stream_options": options | {"include_usage": True}}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body that makes a prefill engine compute the prompt and keep its KV."""
    prefill = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": _KEEP_KV}
    if "max_completion_tokens" in body:
        prefill["max_completion_tokens"] = 1
    for name in ("stream_options", "min_tokens"):
        prefill.pop(name, None)
    return prefill


def decode_body(body: dict[str, Any], prefill_answer: dict[str, Any], prefill_engine: str) -> dict[str, Any]:
    """The body that makes a decode engine read the KV and go on. Raises `EngineFailed` if no KV was kept."""
    params = prefill_answer.get("kv_transfer_params")
    if isinstance(params, dict):
        return body | {"kv_transfer_params": params}
    if prefill_answer["choices"][0].get("finish_reason") == "stop":
        return body  # the first token ends the answer: vLLM keeps no KV then, and the decode engine finds the same
    raise EngineFailed(
        prefill_engine,
        "returned no kv_transfer_params; start it with --kv-transfer-config "
        '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', or give it role both',
    )
