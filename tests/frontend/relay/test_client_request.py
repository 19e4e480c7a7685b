"""What engines get of a client's request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tandem.frontend.relay.apis import APIS
from tandem.frontend.relay.client_request import ClientRequest
from tandem.router.engines.config import spec_from

ENGINE = spec_from({"name": "a", "url": "http://127.0.0.1:1", "kind": "vllm"}, "test")
BODY: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "h\u00e9"}]}],
    "input": [{"role": "user", "content": "x"}],
    "prompt": [[1, 2], [3]],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "stream_options": {"include_usage": False},
}


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_a_packed_prompt_is_sent_as_it_was_and_kept_as_bytes(api: Any) -> None:
    routing = SimpleNamespace(cache_scope="tenant", adapter="", model="m", is_stream=True)
    request = ClientRequest(api=api, body=dict(BODY), routing=cast(Any, routing), arrived_s=0.0)
    sent = msgspec.json.encode(request.body_for(ENGINE))
    request.pack()
    assert msgspec.json.encode(request.body_for(ENGINE)) == sent
    assert msgspec.json.decode(msgspec.json.encode(api.prefill_body(request.body)))["messages"] == BODY["messages"]
    assert [name for name, value in request.body.items() if isinstance(value, (list, dict))] == ["stream_options"]
