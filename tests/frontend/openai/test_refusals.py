"""What is refused: the answer names the field, and the backend is not asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_backend import Client, FakeBackend

USER = {"role": "user", "content": "hello world"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
Rows = list[tuple[Any, ...]]  # fields, the one that is named, and part of the message


def talk(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content, **fields}]}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [function(name=name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def forced(parameters: Any) -> dict[str, Any]:
    return {"tools": [function(name="f", parameters=parameters)], "tool_choice": "required"}


WEATHER, NOW = function(name="weather", parameters=SCHEMA), function(name="now")
OF_CHAT: Rows = [
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"top_p": -0.1}, "top_p"),
    ({"repetition_penalty": 1e-40, "min_p": 0.5}, "repetition_penalty"),
    ({"repetition_penalty": 1e6}, "repetition_penalty"),
    ({"logit_bias": {str(i): -100 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"structured_outputs": {"regex": "((("}}, "structured_outputs.regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
]
OF_TOOLS: Rows = [
    ({"tools": [{"type": "funktion", "function": {"name": "f"}}]}, "tools[0].type", "expected 'function'"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", "Missing"),
    ({"tools": [{"type": 7}]}, "tools[0].type", "type"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice", "no 'tools'"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name", "'a b'"),
    ({"tools": [function(name="")]}, "tools[0].function.name", "1 to 256"),
    ({"tools": [NOW, NOW]}, "tools", "same name"),
    ({"tools": [function(name="f", description="x" * (1 << 21))]}, "tools", "limit is 2097152"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "no 'tools'"),
    ({"tool_choice": function(name="other")}, "tool_choice", "'other'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "Missing"),
    ({"tool_choice": allowed("weather", "other")}, "tool_choice.allowed_tools.tools", "'other'"),
    ({"tool_choice": allowed(mode="required")}, "tool_choice", "no 'tools'"),
    (forced({"type": "array"}), "tools", "must be a schema of an object"),
    (forced({"properties": {"a": {"type": 7}}}), "tools", "Invalid value for 'tools'"),
    ({"functions": [{"name": "f"}]}, "functions", "exclude each other"),
]
OF_CONTINUED: list[Any] = [
    talk("a") | {"continue_final_message": True, "add_generation_prompt": True},
    CONTINUED,
    talk("a", tool_calls=[{"id": "c"} | function(name="f", arguments="{}")]) | CONTINUED,
    talk("a", function_call={"name": "f", "arguments": "{}"}) | CONTINUED,
]
OF_COMPLETIONS: Rows = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"use_beam_search": 0}, "use_beam_search"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"structured_outputs": {"json": {"type": 7}}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * 100_000]}, "n": 100}, "structured_outputs.choice"),
]
OF_PINS: Rows = [
    ({}, "messages", "exactly one of"),
    ({"prompt": "a", "conversation_id": "b"}, "messages", "exactly one of"),
    ({"prompt": "a", "ttl_s": "soon"}, "ttl_s", 'got "soon"'),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [10**6]}, "prompt", "outside the vocabulary"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"conversation_id": "x" * 257}, "conversation_id", "256"),
    ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt", "has 257 characters; at most 256 are allowed"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function", "Missing required"),
]
TABLE: list[tuple[str, dict[str, Any], Rows]] = [
    ("/v1/chat/completions", {"messages": [USER]}, OF_CHAT),
    ("/v1/chat/completions", {"messages": [USER], "tools": [WEATHER, NOW]}, OF_TOOLS),
    ("/v1/chat/completions", {"messages": [USER]}, [(fields, "continue_final_message") for fields in OF_CONTINUED]),
    ("/v1/completions", {"prompt": "hi"}, OF_COMPLETIONS),
    ("/v1/cache/pin", {}, OF_PINS),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [(path, base | fields, param, "".join(part)) for path, base, rows in TABLE for fields, param, *part in rows],
)
async def test_a_bad_field_is_named(
    backend: FakeBackend, client: Client, path: str, body: dict[str, Any], param: str, part: str
) -> None:
    backend.max_model_len = 4096
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert part in error["message"]
    assert 10 < len(error["message"]) < (400 if param == "tools" else 300)
    assert backend.requests == backend.cache.requests == []
