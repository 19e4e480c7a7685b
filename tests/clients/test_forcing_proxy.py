"""The proxy of the agents' tests: what it changes in a request of each API, once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.forcing_proxy import ForcedCall, ForcingProxy

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
ONLY = {"type": "object", "properties": {"path": {"const": "a"}}, "required": ["path"], "additionalProperties": False}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "chat": (
        {"type": "function", "function": {"name": "read", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "read", "parameters": ONLY}},
        {"type": "function", "function": {"name": "read"}},
    ),
    "Responses": (
        {"type": "function", "name": "read", "parameters": SCHEMA},
        {"type": "function", "name": "read", "parameters": ONLY},
        {"type": "function", "name": "read"},
    ),
    "Messages": (
        {"name": "read", "input_schema": SCHEMA},
        {"name": "read", "input_schema": ONLY},
        {"type": "tool", "name": "read"},
    ),
}


@pytest.mark.parametrize(("tool", "forced_tool", "choice"), REQUESTS.values(), ids=REQUESTS.keys())
def test_the_first_request_with_the_tool_must_call_it(
    tool: dict[str, Any], forced_tool: dict[str, Any], choice: dict[str, Any]
) -> None:
    proxy = ForcingProxy("http://127.0.0.1:1", ForcedCall("read", {"path": "a"}))
    request = {"model": "m", "tools": [{"type": "web_search"}, tool], "max_tokens": 7}
    assert proxy.forced(json.dumps({"model": "m", "tools": []}).encode()) is None
    forced = proxy.forced(json.dumps(request).encode())
    assert forced is not None
    assert json.loads(forced) == request | {"tools": [{"type": "web_search"}, forced_tool], "tool_choice": choice}
    assert proxy.forced(json.dumps(request).encode()) is None
