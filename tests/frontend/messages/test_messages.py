from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pydantic
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.messages.context_edits import CLEARED
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import cache_scope
from tandem.protocol.errors import NoWorker, WorkerError
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, backend_of, closing, make_app
from tests.support.keys import api_keys_of
from tests.support.toy_tokenizer import build_tokenizer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
USED: Any = {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Rome"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c0", "content": "sunny"}
ANY_JSON: Any = {"type": "json_schema", "schema": {}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🎉"}}\n</tool_call>'
TWO_CALLS = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>'
THINKING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant><think>\n"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "org/toy", "max_tokens": 200, "messages": [USER], **fields}


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    return backend_of(tokenizer)


async def both_of(backend: FakeBackend, **fields: Any) -> list[dict[str, Any]]:
    return [await plain_of(backend, **fields), joined(await stream_of(backend, **fields))]


async def plain_of(backend: FakeBackend, **fields: Any) -> dict[str, Any]:
    async with closing(backend) as client:
        response = await client.post(MESSAGES, json=body(**fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


async def stream_of(backend: FakeBackend, **fields: Any) -> list[dict[str, Any]]:
    async with closing(backend) as client:
        response = await client.post(MESSAGES, json=body(stream=True, **fields))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    return events(response.text)


def events(text: str) -> list[dict[str, Any]]:
    *parts, rest = text.split("\n\n")
    assert rest == ""
    parsed = []
    for part in parts:
        name, data = part.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes; checks the order of its events."""
    message: dict[str, Any] = stream[0]["message"]
    assert (stream[0]["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    assert stream[-1] == {"type": "message_stop"}
    is_open, arguments = False, ""
    for event in stream[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open, arguments = True, ""
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
                block, delta = message["content"][-1], event["delta"]
                match delta.pop("type"):
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
                is_open = False
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
    assert not is_open
    assert stream[-2]["type"] == "message_delta"
    return message | stream[-2]["delta"] | {"usage": stream[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


async def test_plain_answer_has_anthropics_shape(tokenizer: Tokenizer) -> None:
    message = await plain_of(backend_of(tokenizer))
    assert message.pop("id").startswith("msg_")
    num_prompt = len(tokenizer.encode_chat([USER], {"add_generation_prompt": True}, cache_scope("")))
    num_output = len(tokenizer.encode("hello world", add_special_tokens=False)) + 1  # and the end
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "org/toy",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "cache_read_input_tokens_by_tier": {"pool": 3},
            "output_tokens": num_output,
        },
    }


@pytest.mark.parametrize("run", [1, 4, 1000])
@pytest.mark.parametrize("reply", ["", "héllo 🎉 world", CALL, TWO_CALLS])
async def test_a_stream_joins_to_the_plain_answer(tokenizer: Tokenizer, reply: str, run: int) -> None:
    plain = await plain_of(backend_of(tokenizer, reply), tools=[WEATHER, NOW])
    stream = await stream_of(backend_of(tokenizer, reply, run=run), tools=[WEATHER, NOW])
    first = stream[0]["message"]["usage"]
    assert first | {"output_tokens": 0} == plain["usage"] | {"output_tokens": 0}
    assert without_ids(joined(stream)) == without_ids(plain)


@pytest.mark.parametrize(
    ("max_tokens", "left", "reason"),
    [(5, 5, "max_tokens"), (6, 5, "model_context_window_exceeded"), (4, 5, "max_tokens")],
)
async def test_max_tokens_end_with_the_context(tokenizer: Tokenizer, max_tokens: int, left: int, reason: str) -> None:
    backend = backend_of(tokenizer, "x" * 100)
    backend.max_model_len = left + len(tokenizer.encode_chat([USER], {"add_generation_prompt": True}, cache_scope("")))
    for message in await both_of(backend, max_tokens=max_tokens):
        assert message["stop_reason"] == reason
        assert message["content"] == [{"type": "text", "text": "x" * min(max_tokens, left)}]


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_prompt_that_does_not_fit_is_reported_as_claude_code_reads_it(
    tokenizer: Tokenizer, backend: FakeBackend, client: Client, path: str
) -> None:
    backend.max_model_len = 64
    long = [{"role": "user", "content": "x" * 80}]
    num_tokens = len(tokenizer.encode_chat(long, {"add_generation_prompt": True}, cache_scope("")))
    told = (await client.post(path, json=body(messages=long))).json()
    assert (told["error"]["type"], told["error"]["code"]) == ("invalid_request_error", "context_length_exceeded")
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum\.", told["error"]["message"])
    assert found is not None
    assert int(found[2]) == 64
    assert 64 < int(found[1]) <= num_tokens, "refused before it is encoded, by the fewest tokens that it can have"


async def test_max_tokens_zero_computes_only_the_prompt(backend: FakeBackend) -> None:
    for message in await both_of(backend, max_tokens=0):
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert (message["usage"]["output_tokens"], message["usage"]["cache_read_input_tokens"]) == (0, 3)
    assert [request.sampling.max_tokens for request in backend.requests] == [1, 1]


# -- the end of the conversation


@pytest.mark.parametrize(
    "content", ["The answer is", [{"type": "text", "text": "The answer is"}], "Ends with a space "]
)
async def test_the_answer_continues_the_assistants_message(tokenizer: Tokenizer, content: Any) -> None:
    backend = backend_of(tokenizer, " 42.")
    message = await plain_of(backend, messages=[USER, {"role": "assistant", "content": content}], tools=[WEATHER])
    assert message["content"] == [{"type": "text", "text": " 42."}]
    written = content if isinstance(content, str) else content[0]["text"]
    assert tokenizer.decode(backend.requests[0].token_ids).endswith(f"hi<assistant>{written}")


@pytest.mark.parametrize("stops", [["\n"], [" "], ["\n\n", "\t"]])
async def test_stop_sequences_of_white_space(tokenizer: Tokenizer, stops: list[str]) -> None:
    message = await plain_of(backend_of(tokenizer, "ab \n\n\tcd"), stop_sequences=stops)
    assert (message["stop_reason"], message["content"][0]["text"].strip()) == ("stop_sequence", "ab")


# -- programs


CLAUDE_CODE: Any = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "run", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Available agent types for the Agent tool: none."},
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [RESULT | {"is_error": False, "cache_control": {"type": "ephemeral"}}]},
    ],
    "tools": [
        WEATHER
        | {"input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **WEATHER["input_schema"]}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,brand-new-2031-01-01",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "sk-fake",
    "x-app": "cli",
    "X-Claude-Code-Session-Id": "7f3c",
}


async def test_claude_code_gets_an_answer(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, "All done.")
    async with closing(backend) as client:
        path = f"{MESSAGES}?beta=true"
        plain = await client.post(path, json=body(**CLAUDE_CODE), headers=CLAUDE_CODE_HEADERS)
        streamed = await client.post(path, json=body(**CLAUDE_CODE, stream=True), headers=CLAUDE_CODE_HEADERS)
        counted = await client.post(f"{COUNT}?beta=true", json={**CLAUDE_CODE}, headers=CLAUDE_CODE_HEADERS)
    for response in (plain, streamed):
        assert response.headers["x-tandem-ignored"] == ("metadata, tools.web_search_20250305 (not run by this server)")
    assert plain.json()["context_management"] == {"applied_edits": []}
    assert plain.json()["stop_reason"] == "end_turn", "although the context ends before its max_tokens"
    *_, end, _ = events(streamed.text)
    assert (end["type"], end["context_management"]) == ("message_delta", {"applied_edits": []})
    num_tokens = len(backend.requests[0].token_ids)
    assert counted.json() == {"input_tokens": num_tokens, "context_management": {"original_input_tokens": num_tokens}}


REFUSES_LATER_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
DROPS_LATER_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}<assistant>"
)


@pytest.mark.parametrize("template", [REFUSES_LATER_SYSTEM, DROPS_LATER_SYSTEM])
async def test_a_system_message_that_comes_later_is_shown_by_every_template(tmp_path: Path, template: str) -> None:
    """Claude Code's second message is one. Qwen3.5's template refuses it, for example."""
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)))
    later = {"role": "system", "content": "Now rhyme."}
    said = {"role": "assistant", "content": "Yes?"}
    await plain_of(backend, system="S", messages=[USER, later, said, later, USER, USER])
    prompt = backend.tokenizer.decode(backend.requests[0].token_ids)
    assert prompt == "<system>S<user>hi\n\nNow rhyme.<assistant>Yes?<user>Now rhyme.\n\nhi<user>hi<assistant>"


async def test_a_later_system_message_stays_if_it_is_shown(tokenizer: Tokenizer, backend: FakeBackend) -> None:
    await plain_of(backend, messages=[USER, {"role": "system", "content": "Now rhyme."}])
    assert tokenizer.decode(backend.requests[0].token_ids) == "<s><user>hi<system>Now rhyme.<assistant>"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", {"id": "c", "skills": []}),
        ("mcp_servers", [{"type": "url", "url": "https://x", "name": "x"}]),
        ("speed", "fast"),
        ("service_tier", "auto"),
        ("metadata", {"user_id": "u"}),
        ("inference_geo", "eu"),
        ("diagnostics", {"previous_message_id": None}),
        ("fallbacks", "default"),
        ("fallback_credit_token", "t"),
        ("billing_policy", {"type": "billing_policy", "bill_to": "self"}),
        ("cache_control", {"type": "ephemeral", "ttl": "1h"}),
        ("thinking.budget_tokens", 1024),
        ("thinking.display", "omitted"),
        ("output_config.task_budget", {"type": "tokens", "total": 9}),
        ("brand_new", 1),
    ],
)
async def test_a_hint_is_named_and_ignored(backend: FakeBackend, client: Client, field: str, value: Any) -> None:
    parent, _, name = field.rpartition(".")
    given = {parent: {"type": "enabled", name: value}} if parent == "thinking" else {parent: {name: value}}
    response = await client.post(MESSAGES, json=body(**(given if parent else {field: value})))
    without = {"thinking": {"type": "enabled"}} if parent == "thinking" else {}
    plain = await client.post(MESSAGES, json=body(**without))
    assert response.status_code == 200, response.text
    assert response.headers["x-tandem-ignored"] == field
    assert "x-tandem-ignored" not in plain.headers
    assert backend.requests[0].token_ids == backend.requests[1].token_ids


@pytest.mark.parametrize("version", ["", "2023-01-01", "2099-12-31", "vertex-2023-10-16"])
async def test_any_version_is_answered(client: Client, version: str) -> None:
    response = await client.post(MESSAGES, json=body(), headers={"anthropic-version": version})
    assert response.status_code == 200


async def test_a_thousand_tools_are_shown(tokenizer: Tokenizer, backend: FakeBackend) -> None:
    backend.max_model_len = 1 << 20
    await plain_of(backend, tools=[WEATHER | {"name": f"mcp__many__tool_{i}"} for i in range(1000)])
    prompt = tokenizer.decode(backend.requests[0].token_ids)
    assert all(f'"mcp__many__tool_{i}"' in prompt for i in range(1000))


LONG_LOOP = [USER, *(one for i in range(5) for one in (
    {"role": "assistant", "content": [USED | {"id": f"c{i}"}]},
    {"role": "user", "content": [RESULT | {"tool_use_id": f"c{i}", "content": "sunny " * 20}]},
))]  # fmt: skip


@pytest.mark.parametrize(("context", "trigger", "clears"), [(4096, 500, True), (4096, 3000, False), (1200, 3000, True)])
async def test_old_results_are_cleared_if_the_prompt_is_long_or_does_not_fit(
    tokenizer: Tokenizer, backend: FakeBackend, client: Client, context: int, trigger: int, clears: bool
) -> None:
    backend.max_model_len = context
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": trigger}}
    asked = {"messages": LONG_LOOP, "context_management": {"edits": [edit]}}
    message = (await client.post(MESSAGES, json=body(**asked))).json()
    counted = (await client.post(COUNT, json=asked)).json()
    prompt = tokenizer.decode(backend.requests[0].token_ids)
    assert prompt.count(CLEARED) == (2 if clears else 0)
    num_cleared = len(tokenizer.encode("\n".join(["sunny " * 20] * 2), add_special_tokens=False))
    told = {"type": edit["type"], "cleared_tool_uses": 2, "cleared_input_tokens": num_cleared}
    assert message["context_management"]["applied_edits"] == ([told] if clears else [])
    original = counted["input_tokens"] + (num_cleared if clears else 0)
    assert counted == {
        "input_tokens": len(backend.requests[0].token_ids),
        "context_management": {"original_input_tokens": original},
    }


async def test_thoughts_are_a_block_before_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, THINKING))
    reply = "Let me see.\n</think>\n\nYes."
    for message in await both_of(backend_of(tokenizer, reply)):
        thought, said = message["content"]
        assert thought == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
        assert said == {"type": "text", "text": "Yes."}


@pytest.mark.parametrize(
    ("fields", "reply", "reason", "sequence", "text"),
    [({}, "abc", "end_turn", None, "abc"), ({"stop_sequences": ["x", "c"]}, "abcd", "stop_sequence", "c", "ab")],
)
async def test_stop_reasons(
    tokenizer: Tokenizer, fields: dict[str, Any], reply: str, reason: str, sequence: str | None, text: str
) -> None:
    for message in await both_of(backend_of(tokenizer, reply), **fields):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert message["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("arguments", "max_tokens", "expected"),
    [
        ('{"city": "Rome", "days": 123456789012345678901234567890}', 200, None),
        ('{"city": "Rome", "country": "Italy"}', 70, {"city": "Rome"}),
    ],
)
async def test_input_of_large_integers_and_of_a_call_cut_short(
    tokenizer: Tokenizer, arguments: str, max_tokens: int, expected: Any
) -> None:
    reply = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    message = await plain_of(backend_of(tokenizer, reply), tools=[WEATHER], max_tokens=max_tokens)
    (block,) = message["content"]
    assert block["input"] == (json.loads(arguments) if expected is None else expected)
    assert message["stop_reason"] == ("tool_use" if expected is None else "max_tokens")


async def test_results_of_tools_go_back_to_the_model(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, TWO_CALLS)
    message = await plain_of(backend, tools=[WEATHER, NOW])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"result {i}"}
        for i, block in enumerate(message["content"][1:])
    ]
    history = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    await plain_of(backend, tools=[WEATHER, NOW], messages=history, system="Be brief.")
    prompt = tokenizer.decode(backend.requests[-1].token_ids)
    assert prompt.startswith("<s><system>Be brief.\n\nYou can call")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🎉"}}\n</tool_call>'
    assert f"<user>hi<assistant>I look.\n{call}\n<tool_call>" in prompt
    assert prompt.endswith(
        "<user><tool_response>\nresult 0\n</tool_response>\n<tool_response>\nresult 1\n</tool_response><assistant>"
    )


async def test_fields_reach_the_backend(backend: FakeBackend) -> None:
    await plain_of(backend, temperature=0, top_p=0.5, top_k=4, seed=7, cache_salt="s", conversation_id="c", priority=2)
    (request,) = backend.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 4, 7)
    assert (sampling.max_tokens, request.cache_scope, request.conversation_id) == (200, cache_scope("s"), "c")
    assert request.service_class.priority == 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER], "system": "Be brief."},
        {"tool_choice": {"type": "none"}},
        {"messages": [USER, {"role": "assistant", "content": "The answer is"}]},  # it is continued
    ],
)
async def test_counted_tokens_are_the_prompts(backend: FakeBackend, client: Client, fields: dict[str, Any]) -> None:
    counted = await client.post(COUNT, json={"model": "org/toy", "messages": [USER], **fields})
    await client.post(MESSAGES, json=body(**fields))
    assert counted.json() == {"input_tokens": len(backend.requests[0].token_ids)}


# -- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ({"system": 3}, "system"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": 1}}, "thinking.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": [USED]}]}, "messages"),
        ({"stop_sequences": ["a"] * 1025}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format.schema"),
    ],
)
async def test_a_bad_field_is_named(backend: FakeBackend, client: Client, fields: dict[str, Any], param: str) -> None:
    response = await client.post(MESSAGES, json=body(**fields))
    told = response.json()
    assert response.status_code == 400
    assert (told["type"], told["error"]["type"], told["error"]["param"]) == ("error", "invalid_request_error", param)
    assert 10 < len(told["error"]["message"]) < 300
    assert "response_format" not in told["error"]["message"]
    assert backend.requests == []


async def test_a_bad_field_is_named_where_tokens_are_counted(client: Client) -> None:
    response = await client.post(COUNT, json=body(tools=[{"name": "a b", "input_schema": {}}]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].name")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_the_type_of_an_error_follows_from_its_status(tokenizer: Tokenizer, path: str) -> None:
    async with closing(backend_of(tokenizer), max_body_bytes=1000) as client:
        answers = [
            await client.post(path, json=body(model="other")),
            await client.post(path, json=body(system="x" * 1000)),
            await client.post(path, content=b"{", headers={"content-type": "application/json"}),
            await client.get(path),
        ]
    told = [(answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) for answer in answers]
    assert told == [
        (404, "error", "not_found_error"),
        (413, "error", "request_too_large"),
        (400, "error", "invalid_request_error"),
        (405, "error", "invalid_request_error"),
    ]


@pytest.mark.parametrize(
    ("exc", "status", "kind"),
    [
        (NoWorker("no worker is ready"), 503, "overloaded_error"),
        (WorkerError("it died"), 502, "api_error"),
        (ValueError("secret"), 500, "api_error"),
    ],
)
async def test_failures_are_told(backend: FakeBackend, client: Client, exc: Exception, status: int, kind: str) -> None:
    backend.script = lambda request: [exc]
    response = await client.post(MESSAGES, json=body())
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "secret" not in response.text
    backend.script = lambda request: [*backend.reply_steps(request)[:2], exc]
    last = events((await client.post(MESSAGES, json=body(stream=True))).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


# -- the SDK


def sdk(backend: FakeBackend, **options: Any) -> anthropic.AsyncAnthropic:
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app(backend)))
    return anthropic.AsyncAnthropic(
        api_key="any", base_url="http://localhost", http_client=http_client, max_retries=0, **options
    )


async def test_the_anthropic_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, TWO_CALLS)
    question: Any = body(tools=[WEATHER, NOW])
    async with sdk(backend) as client:
        plain = await client.messages.create(**question)
        async with client.messages.stream(**question) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_message()
        follow_up = [USER, plain.to_param(), {"role": "user", "content": "thanks"}]
        again = await client.messages.create(**question | {"messages": follow_up})
        counted = await client.messages.count_tokens(model="org/toy", messages=question["messages"], tools=[WEATHER])
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= set(seen)
    for message in (plain, final):
        said, weather, now = message.content
        assert (said.type, said.text) == ("text", "I look.")
        assert (weather.type, now.type, message.stop_reason) == ("tool_use", "tool_use", "tool_use")
        assert weather.type == now.type == "tool_use"
        assert (weather.input, now.input) == ({"city": "Zürich 🎉"}, {})
        assert weather.id != now.id
    assert plain.usage.model_dump() == final.usage.model_dump()
    assert again.usage.input_tokens > plain.usage.input_tokens > 0
    assert counted.input_tokens > 10


async def test_the_anthropic_sdk_lists_the_models(tokenizer: Tokenizer) -> None:
    async with sdk(backend_of(tokenizer)) as client:
        (listed,) = [model async for model in client.models.list()]
        assert await client.models.retrieve("org/toy") == listed
    assert (listed.id, listed.type, listed.display_name) == ("org/toy", "model", "org/toy")
    assert listed.created_at.tzinfo is not None


async def test_the_anthropic_sdks_tool_runner_goes_on_without_threads(tokenizer: Tokenizer) -> None:
    """It asks the server to keep the conversation, and sends it whole if the server has not."""
    backend = backend_of(tokenizer, CALL)
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        ran.append(city)
        return "sunny"

    client = sdk(backend)
    runner = client.beta.messages.tool_runner(
        model="org/toy", max_tokens=200, messages=[{"role": "user", "content": "hi"}], tools=[weather], max_iterations=3
    )
    answers = [message async for message in runner]
    assert ([message.stop_reason for message in answers], ran[:2]) == (["tool_use"] * 3, ["Zürich 🎉"] * 2)
    assert tokenizer.decode(backend.requests[-1].token_ids).count("sunny") == 2


async def test_the_anthropic_sdk_reads_what_was_cleared(backend: FakeBackend) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
    question: Any = body(
        messages=LONG_LOOP,
        context_management={"edits": [edit]},
        betas=["context-management-2025-06-27"],
        mcp_servers=[{"type": "url", "url": "https://x", "name": "x"}],
        tools=[WEATHER, {"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "memory_20250818", "name": "memory"}],
    )
    async with sdk(backend) as client:
        plain = await client.beta.messages.create(**question)
        async with client.beta.messages.stream(**question) as stream:
            final = await stream.get_final_message()
        del question["max_tokens"]
        counted = await client.beta.messages.count_tokens(**question)
    for message in (plain, final):
        assert message.context_management is not None
        (applied,) = message.context_management.applied_edits
        assert applied.type == "clear_tool_uses_20250919"
        assert (applied.cleared_tool_uses, applied.cleared_input_tokens > 100) == (2, True)
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens > counted.input_tokens


class Person(pydantic.BaseModel):
    name: str


async def test_the_anthropic_sdk_parses_text_of_a_model(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, '{"name": "Ada"}')
    question: Any = body(output_format=Person)
    async with sdk(backend) as client:
        message = await client.messages.parse(**question)
    assert message.parsed_output == Person(name="Ada")
    assert '"name"' in backend.requests[0].sampling.grammar


async def test_a_request_needs_a_key_in_either_header(tokenizer: Tokenizer, backend: FakeBackend) -> None:
    config, registry = RouterConfig(), CollectorRegistry()
    app = create_app(backend, tokenizer, config, registry, api_keys=api_keys_of({"ours": "search"}))
    question: Any = body()

    async def ask(**key: str) -> None:
        http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        options: Any = {"base_url": "http://localhost", "http_client": http_client, "max_retries": 0, **key}
        async with anthropic.AsyncAnthropic(**options) as client:
            await client.messages.create(**question)

    await ask(api_key="ours")
    await ask(auth_token="ours")
    with pytest.raises(anthropic.AuthenticationError) as raised:
        await ask(api_key="wrong")
    assert raised.value.type == "authentication_error"
    assert [request.service_class.tenant for request in backend.requests] == ["search", "search"]


@pytest.mark.parametrize("max_tokens", range(50, 80, 5))
async def test_a_call_cut_short_is_what_the_sdk_reads_in_a_stream(tokenizer: Tokenizer, max_tokens: int) -> None:
    reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2], "a": {"b": "c"}}}'
    question: Any = body(tools=[WEATHER], max_tokens=max_tokens)
    async with sdk(backend_of(tokenizer, reply)) as client:
        plain = await client.messages.create(**question)
        async with client.messages.stream(**question) as stream:
            final = await stream.get_final_message()
    (one,), (other,) = plain.content, final.content
    assert (one.type, other.type, plain.stop_reason) == ("tool_use", "tool_use", "max_tokens")
    assert one.type == other.type == "tool_use"
    assert one.input == other.input


async def test_the_anthropic_sdk_raises_its_own_errors(backend: FakeBackend) -> None:
    question: Any = body()
    async with sdk(backend) as client:
        with pytest.raises(anthropic.NotFoundError) as raised:
            await client.messages.create(**question | {"model": "claude"})
        assert raised.value.type == "not_found_error"
        backend.script = lambda request: [*backend.reply_steps(request)[:2], WorkerError("it died")]
        with pytest.raises(anthropic.APIStatusError, match="it died"):
            async with client.messages.stream(**question) as stream:
                await stream.get_final_message()
