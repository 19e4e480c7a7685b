"""`/v1/responses` through the app, with the SDK and by hand."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, backend_of, closing
from tests.support.openai_sdk import openai_sdk as sdk
from tests.support.toy_tokenizer import build_tokenizer

PATH = "/v1/responses"
CALL = 'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    parsed = []
    for number, part in enumerate(parts):
        head, _, data = part.partition("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert (head, parsed[-1]["sequence_number"]) == (f"event: {parsed[-1]['type']}", number)
    return parsed


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "output": output}


async def test_plain_answer(client: Client) -> None:
    answer = (await client.post(PATH, json={"input": "hi", "metadata": {"a": "b"}})).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    assert answer["metadata"] == {"a": "b"}
    [message] = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert usage["input_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": [{"role": "user", "content": "hi"}], "instructions": "Be short.", "tools": [TOOL]},
        {"input": "hi", "tools": [TOOL, {**TOOL, "name": "other"}], "tool_choice": "none"},
    ],
)
async def test_counted_tokens_are_those_of_the_prompt(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    client = sdk(backend_of(tokenizer, "x"))
    first = await client.responses.create(**fields)
    for more in ({}, {"previous_response_id": first.id}):
        counted = await client.responses.input_tokens.count(**fields, **more)
        answer = await client.responses.create(**fields, **more)
        assert answer.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        await client.responses.input_tokens.count(input="x", previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.input_tokens.count(input="x", extra_body={"background": True})


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("text", ["héllo 🎉 world", CALL, "<think>so\nso</think>well", "<tool_call>{bro", ""])
async def test_a_stream_ends_with_the_plain_answer(tokenizer: Tokenizer, text: str, run: int) -> None:
    body = {"input": "hi", "tools": [TOOL], "store": False}
    config = {"tool_parser": "hermes", "reasoning_parser": "think"}
    async with closing(backend_of(tokenizer, text, run=run), **config) as client:
        plain = (await client.post(PATH, json=body)).json()
        streamed = events(await client.post(PATH, json={**body, "stream": True}))
    kinds = [event["type"] for event in streamed]
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    last = streamed[-1]["response"]
    assert without_ids(last) == without_ids(plain)
    check_items(streamed, last)


def check_items(streamed: list[dict[str, Any]], response: dict[str, Any]) -> None:
    """Each item is added once, grows by its deltas to what it is at its end, and is done before the next begins."""
    texts: dict[str, str] = {}
    open_items: list[str] = []
    done = []
    for event in streamed:
        if event["type"] == "response.output_item.added":
            assert open_items == []
            open_items.append(event["item"]["id"])
            texts[event["item"]["id"]] = ""
        elif event["type"].endswith(".delta"):
            assert open_items == [event["item_id"]]
            texts[event["item_id"]] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert open_items.pop() == event["item"]["id"]
            done.append(event["item"])
    assert done == response["output"]
    for item in done:
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        text = item[field] if field else item["content"][0]["text"]
        assert texts[item["id"]] == text


async def test_a_limit_makes_the_response_incomplete(client: Client) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    plain = (await client.post(PATH, json=body)).json()
    streamed = events(await client.post(PATH, json={**body, "stream": True}))
    for answer in (plain, streamed[-1]["response"]):
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][-1]["status"] == "incomplete"
    assert streamed[-1]["type"] == "response.incomplete"


async def test_the_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    client = sdk(backend_of(tokenizer, CALL, run=2), tool_parser="hermes")
    plain = await client.responses.create(model="org/toy", input="hi", tools=[TOOL])  # type: ignore[list-item]
    assert plain.output_text == "I look."
    call = plain.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    async with client.responses.stream(model="org/toy", input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert (final.output_text, [item.type for item in final.output]) == ("I look.", ["message", "function_call"])


async def test_items_become_the_messages_of_a_chat(backend: FakeBackend, client: Client) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "it?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]},
        {"role": "user", "content": "Sure?"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\nit?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    await client.post(PATH, json={"input": items, "instructions": "Be brief."})
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert backend.requests[0].token_ids == backend.requests[1].token_ids


async def test_a_response_goes_on_from_one_that_is_kept(backend: FakeBackend, client: Client) -> None:
    first = (await client.post(PATH, json={"input": "one", "instructions": "old"})).json()
    second = (await client.post(PATH, json={"input": "two", "previous_response_id": first["id"]})).json()
    third = (await client.post(PATH, json={"input": "three", "previous_response_id": second["id"]})).json()
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "hello world"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "hello world"},
        {"role": "user", "content": "three"},
    ]
    await client.post("/v1/chat/completions", json={"messages": messages})
    kept = (await client.get(f"{PATH}/{third['id']}")).json()
    deleted = await client.delete(f"{PATH}/{third['id']}")
    gone = await client.get(f"{PATH}/{third['id']}")
    assert third["previous_response_id"] == second["id"]
    assert backend.requests[2].token_ids == backend.requests[3].token_ids
    assert ([request.conversation_id for request in backend.requests[1:3]], kept) == ([first["id"]] * 2, third)
    assert (deleted.json()["deleted"], gone.status_code) == (True, 404)


async def test_a_kept_response_is_not_streamed_again(tokenizer: Tokenizer) -> None:
    """Of a plain answer the SDK would read no event, and say nothing."""
    client = sdk(FakeBackend(tokenizer))
    response = await client.responses.create(model="org/toy", input="hi")
    with pytest.raises(openai.BadRequestError, match="'stream' is not supported"):
        await client.responses.retrieve(response.id, stream=True)


async def test_what_is_not_kept_cannot_be_gone_on_from(client: Client) -> None:
    first = (await client.post(PATH, json={"input": "one", "store": False})).json()
    second = await client.post(PATH, json={"input": "two", "previous_response_id": first["id"]})
    assert (second.status_code, second.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_tenant_does_not_reach_anothers_response(client: Client) -> None:
    first = (await client.post(PATH, json={"input": "one"}, headers={"x-tandem-tenant": "a"})).json()
    read = await client.get(f"{PATH}/{first['id']}", headers={"x-tandem-tenant": "b"})
    deleted = await client.delete(f"{PATH}/{first['id']}", headers={"x-tandem-tenant": "b"})
    gone_on = {"input": "two", "previous_response_id": first["id"]}
    used = await client.post(PATH, json=gone_on, headers={"x-tandem-tenant": "b"})
    own = await client.get(f"{PATH}/{first['id']}", headers={"x-tandem-tenant": "a"})
    assert [read.status_code, deleted.status_code, used.status_code, own.status_code] == [404, 404, 404, 200]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [7]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "tools": [{"type": "funktion", "name": "f", "parameters": {}}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": "x", "tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": 3}]}]},
            "tools[0].tools[0].name",
        ),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "a b"}]}]},
            "tools[0].tools[0].name",
        ),
        (
            {"input": "x", "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax",
        ),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, "input[0].content[0]"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x", "tools": [TOOL, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ],
)
async def test_a_wrong_field_is_named(backend: FakeBackend, client: Client, body: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, json=body)
    assert response.status_code in (400, 404), response.text
    assert (response.json()["error"]["param"], backend.requests) == (param, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_sent_is_returned_as_it_is(tokenizer: Tokenizer, stream: bool) -> None:
    large = 10**30
    tool = {**TOOL, "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": large}}}}
    text = {"format": {"type": "text", "schema": {"const": [large]}}}
    async with closing(backend_of(tokenizer, "hello")) as client:
        response = await client.post(
            PATH,
            content=json.dumps({"input": "x", "tools": [tool], "text": text, "stream": stream}),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 200, response.text
        body = events(response)[-1]["response"] if stream else response.json()
        kept = (await client.get(f"{PATH}/{body['id']}")).json()
    assert body["tools"][0]["parameters"] == tool["parameters"]
    assert (body["text"]["format"]["schema"], kept) == (text["format"]["schema"], body)


# -- what Codex and its kin send and expect

REASONED = "<think>so</think>well"


async def one_of(tokenizer: Tokenizer, reply: str, **fields: Any) -> tuple[FakeBackend, httpx.Response]:
    backend = backend_of(tokenizer, reply, run=3)
    async with closing(backend, tool_parser="hermes", reasoning_parser="think") as client:
        response = await client.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    return backend, response


def call_of(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_codex_include_reasoning_encrypted_content(tokenizer: Tokenizer, stream: bool) -> None:
    include = ["reasoning.encrypted_content"]
    _, response = await one_of(tokenizer, REASONED, include=include, store=False, stream=stream)
    output = (events(response)[-1]["response"] if stream else response.json())["output"]
    reasoning, message = output
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so"}]
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    user = {"role": "user", "content": "hi"}
    shown, _ = await one_of(tokenizer, "x", input=[user, reasoning, message])
    hidden, _ = await one_of(tokenizer, "x", input=[user, opaque, message])
    assert shown.requests[0].token_ids == hidden.requests[0].token_ids
    _, without = await one_of(tokenizer, REASONED)
    assert "encrypted_content" not in without.json()["output"][0]


@pytest.mark.parametrize("opaque", ["gAAAAABo", "tandem1.%%", "tandem1./w==", "", None, 7])
async def test_codex_reasoning_of_another_server_is_skipped(tokenizer: Tokenizer, opaque: Any) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": opaque},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "go on"},
    ]
    with_it, response = await one_of(tokenizer, "x", input=items)
    without, _ = await one_of(tokenizer, "x", input=[items[0], *items[2:]])
    assert with_it.requests[0].token_ids == without.requests[0].token_ids
    assert ("input.reasoning" in response.headers.get("x-tandem-ignored", "")) == bool(opaque)


@pytest.mark.parametrize("stream", [False, True])
async def test_codex_namespace_tools(tokenizer: Tokenizer, stream: bool) -> None:
    group = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**TOOL, "name": "close"}]}
    call = call_of("agents__close", {"city": "x"})
    backend, response = await one_of(tokenizer, call, tools=[TOOL, group], stream=stream)
    body = events(response)[-1]["response"] if stream else response.json()
    [item] = body["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "close")
    assert (json.loads(item["arguments"]), body["tools"]) == ({"city": "x"}, [TOOL, group])
    assert '"name": "agents__close", "description": "Agents."' in tokenizer.decode(backend.requests[0].token_ids)
    if stream:
        check_items(events(response), body)
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    again, _ = await one_of(tokenizer, "x", input=[{"role": "user", "content": "hi"}, item, output])
    assert '{"name": "agents__close", "arguments": {"city": "x"}}' in tokenizer.decode(again.requests[0].token_ids)


PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": 'a "quoted"\nline é'}, 'a "quoted"\nline é'),
        ({"patch": "b"}, "b"),
        ({"a": "b", "c": "d"}, '{"a": "b", "c": "d"}'),
        ({}, "{}"),
        ({"input": 7}, '{"input": 7}'),
    ],
)
async def test_codex_custom_tools(tokenizer: Tokenizer, arguments: Any, text: str, stream: bool) -> None:
    _, response = await one_of(tokenizer, call_of("apply_patch", arguments), tools=[PATCH], stream=stream)
    body = events(response)[-1]["response"] if stream else response.json()
    [item] = body["output"]
    found = [item[name] for name in ("type", "name", "input", "status")]
    assert found == ["custom_tool_call", "apply_patch", text, "completed"]
    assert "arguments" not in item
    if stream:
        check_items(events(response), body)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again, _ = await one_of(tokenizer, "x", input=[{"role": "user", "content": "hi"}, item, output])
    shown = tokenizer.decode(again.requests[0].token_ids)
    assert f'{{"name": "apply_patch", "arguments": {json.dumps({"input": text}, ensure_ascii=False)}}}' in shown
    assert "<tool_response>\ndone" in shown


async def test_a_custom_call_that_a_limit_cuts_has_its_input_so_far(tokenizer: Tokenizer) -> None:
    reply = call_of("apply_patch", {"input": "abcdefgh"})
    _, response = await one_of(tokenizer, reply, tools=[PATCH], max_output_tokens=len(reply) - 22)
    body = response.json()
    assert body["status"] == "incomplete"
    assert body["output"][0]["input"]
    assert "abcdefgh".startswith(body["output"][0]["input"])


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "[a-c]+"), ("lark", "start: /[a-c]+/")])
async def test_codex_custom_tool_grammars(tokenizer: Tokenizer, syntax: str, definition: str) -> None:
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    backend, _ = await one_of(tokenizer, "x", tools=[tool])
    assert definition in tokenizer.decode(backend.requests[0].token_ids)
    backend = backend_of(tokenizer, "x")
    async with closing(backend) as client:
        forced = await client.post(
            PATH, json={"input": "hi", "tools": [tool], "tool_choice": {"type": "custom", "name": "apply_patch"}}
        )
    if syntax == "regex":
        assert forced.status_code == 200, forced.text
        assert "^(?:[a-c]+)$" in backend.requests[0].sampling.grammar
    else:
        assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice")


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation", "size": "auto"},
    {"type": "mcp", "server_label": "x", "server_url": "https://x.example", "allowed_tools": ["a"]},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
]


async def test_codex_hosted_tools_are_not_shown_and_named(tokenizer: Tokenizer) -> None:
    backend, response = await one_of(tokenizer, "x", tools=[*HOSTED, TOOL], tool_choice="auto")
    plain, _ = await one_of(tokenizer, "x", tools=[TOOL])
    assert (backend.requests[0].token_ids, response.json()["tools"]) == (plain.requests[0].token_ids, [*HOSTED, TOOL])
    for tool in HOSTED:
        assert f"tools.{tool['type']}" in response.headers["x-tandem-ignored"]
    alone, _ = await one_of(tokenizer, "x", tools=HOSTED)
    nothing, _ = await one_of(tokenizer, "x")
    assert alone.requests[0].token_ids == nothing.requests[0].token_ids


HOSTED_ITEMS = [
    *("web_search_call", "file_search_call", "code_interpreter_call", "computer_call", "computer_call_output"),
    *("image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "mcp_call"),
    *("mcp_list_tools", "mcp_approval_request", "tool_search_call", "tool_search_output", "compaction"),
]


@pytest.mark.parametrize("kind", HOSTED_ITEMS)
async def test_codex_hosted_items_are_skipped(tokenizer: Tokenizer, kind: str) -> None:
    user = {"role": "user", "content": "hi"}
    hosted = {"type": kind, "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    backend, response = await one_of(tokenizer, "x", input=[hosted, user])
    plain, _ = await one_of(tokenizer, "x", input=[user])
    assert backend.requests[0].token_ids == plain.requests[0].token_ids
    assert f"input.{kind}" in response.headers["x-tandem-ignored"]


async def test_codex_additional_tools_of_the_input(tokenizer: Tokenizer) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [TOOL, {**TOOL, "name": "other"}]}
    user = {"role": "user", "content": "hi"}
    backend, _ = await one_of(tokenizer, "x", input=[added, user], tools=[TOOL])
    plain, _ = await one_of(tokenizer, "x", input=[user], tools=[TOOL, {**TOOL, "name": "other"}])
    assert backend.requests[0].token_ids == plain.requests[0].token_ids


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_agents_sdk_allowed_tools(tokenizer: Tokenizer, mode: str) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_weather"}]}
    backend, response = await one_of(tokenizer, "x", tools=[{**TOOL, "name": "other"}, TOOL], tool_choice=choice)
    assert response.json()["tool_choice"] == choice
    grammar = backend.requests[0].sampling.grammar
    assert ("get_weather" in grammar, "other" in grammar) == (mode == "required", False)


async def test_codex_sends_all_of_it_at_once(tokenizer: Tokenizer) -> None:
    """The body of codex 0.171.0, with shorter texts."""
    body = {
        "model": "org/toy",
        "stream": True,
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be"}]},
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [
            {**TOOL, "strict": False},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [{**TOOL}]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"session_id": "01a2"},
    }
    backend, response = await one_of(tokenizer, CALL, **body)
    assert [item["type"] for item in events(response)[-1]["response"]["output"]] == ["message", "function_call"]
    assert backend.requests[0].conversation_id == "01a2"
    named = response.headers["x-tandem-ignored"].split(", ")
    assert {one.partition(" ")[0] for one in named} == {"client_metadata", "reasoning.summary", "tools.web_search"}


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False},
        {"max_tool_calls": 3},
        {"top_logprobs": 0},
        {"service_tier": "flex"},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed"}},
        {"include": ["file_search_call.results", "web_search_call.action.sources", "new.thing"]},
        {"metadata": {"a": "1"}, "user": "u"},
        {"truncation": "auto"},
        {"conversation": None, "prompt": None},
        {"context_management": [{"type": "compaction"}], "safety_identifier": "x", "stream_options": {}},
    ],
)
async def test_hints_of_responses_clients_pass(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    backend, response = await one_of(tokenizer, "x", **fields)
    plain, _ = await one_of(tokenizer, "x")
    assert backend.requests[0].token_ids == plain.requests[0].token_ids
    hints = fields.keys() & {"max_tool_calls", "service_tier", "context_management", "include"}
    assert all(name in response.headers["x-tandem-ignored"] for name in hints)


async def test_reasoning_effort_goes_to_the_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path_factory.mktemp("effort"), "{{ reasoning_effort }}"))
    backend, response = await one_of(tokenizer, "x", reasoning={"effort": "high"})
    assert (tokenizer.decode(backend.requests[0].token_ids), response.json()["reasoning"]["effort"]) == ("high", "high")


# -- kept responses


async def test_ai_sdk_item_references(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, CALL)
    async with closing(backend, tool_parser="hermes") as client:
        first = (await client.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "sunny"}
        user = {"role": "user", "content": "hi"}
        names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        untyped = [{"id": item["id"]} for item in first["output"]]
        for items in (first["output"], names, untyped):
            response = await client.post(PATH, json={"input": [user, *items, output], "tools": [TOOL]})
            assert response.status_code == 200, response.text
        other = await client.post(PATH, json={"input": names}, headers={"x-tandem-tenant": "other"})
        unknown = await client.post(PATH, json={"input": [user, {"type": "item_reference", "id": "msg_foreign"}]})
        missing = await client.post(PATH, json={"input": [{"type": "item_reference", "id": names[0]["id"][:-1] + "9"}]})
    assert len({tuple(request.token_ids) for request in backend.requests[1:]}) == 1
    for refused, param in ((other, "input[0].id"), (unknown, "input[1].id"), (missing, "input[0].id")):
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, param)


async def test_input_items_are_listed(client: Client) -> None:
    sent = [{"role": "user", "content": f"{i}"} for i in range(30)]
    first = (await client.post(PATH, json={"input": sent})).json()
    second = (await client.post(PATH, json={"input": "last", "previous_response_id": first["id"]})).json()
    path = f"{PATH}/{first['id']}/input_items"
    newest = (await client.get(path)).json()
    rest = (await client.get(path, params={"after": newest["last_id"]})).json()
    ascending = {"order": "asc", "limit": 100}
    all_of_second = (await client.get(f"{PATH}/{second['id']}/input_items", params=ascending)).json()
    other = await client.get(path, headers={"x-tandem-tenant": "other"})
    wrong = [await client.get(path, params=one) for one in ({"limit": "x"}, {"order": "up"}, {"after": "no"})]
    assert [item["content"] for item in newest["data"]] == [f"{i}" for i in range(29, 9, -1)]
    assert [item["content"] for item in rest["data"]] == [f"{i}" for i in range(9, -1, -1)]
    assert (newest["has_more"], rest["has_more"]) == (True, False)
    assert (newest["first_id"], newest["object"]) == (newest["data"][0]["id"], "list")
    assert [item["type"] for item in all_of_second["data"]] == ["message"] * 32
    assert all_of_second["data"][30] == first["output"][0]
    assert (all_of_second["data"][31]["content"], other.status_code) == ([{"type": "input_text", "text": "last"}], 404)
    assert [response.status_code for response in wrong] == [400] * 3


async def test_the_sdk_lists_input_items_and_reads_custom_calls(tokenizer: Tokenizer) -> None:
    client = sdk(backend_of(tokenizer, call_of("apply_patch", {"input": "x"}), run=2), tool_parser="hermes")
    tools: Any = [PATCH, {"type": "web_search"}]
    async with client.responses.stream(model="org/toy", input="hi", tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.custom_tool_call_input.done" in kinds
    [item] = final.output
    assert (item.type, item.input) == ("custom_tool_call", "x")
    listed = await client.responses.input_items.list(final.id)
    assert [one.type for one in listed.data] == ["message"]


async def test_a_conversation_that_is_kept_does_not_grow_without_end(client: Client) -> None:
    """A request of a few bytes would read and keep what many large ones have sent."""
    item = {"type": "web_search_call", "id": "ws_1", "action": {"query": "x" * 5_000_000}}  # the model does not see it
    body: dict[str, Any] = {"input": [item, {"role": "user", "content": "hi"}]}
    first = (await client.post(PATH, json=body)).json()
    more = await client.post(PATH, json={"input": "more", "previous_response_id": first["id"]})
    again = await client.post(PATH, json={**body, "previous_response_id": more.json()["id"]})
    alone = await client.post(PATH, json=body)
    assert (more.status_code, alone.status_code) == (200, 200)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "previous_response_id")


async def test_many_references_to_one_long_item_are_refused(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, "x" * 2000)
    async with closing(backend) as client:
        [item] = (await client.post(PATH, json={"input": "hi"})).json()["output"]
        response = await client.post(PATH, json={"input": [{"id": item["id"]}] * 16_000})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("input[")
    assert "bytes including what is stored" in error["message"]


@pytest.mark.parametrize("values", [[[]] * 300_000, [0] * 300_000])
async def test_items_of_very_many_values_are_refused(client: Client, values: list[Any]) -> None:
    items = [{"type": "web_search_call", "action": values}, {"role": "user", "content": "hi"}]
    response = await client.post(PATH, json={"input": items})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


# -- truncation


def turns_from(first: int) -> list[dict[str, Any]]:
    pairs = (({"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "a"}) for i in range(9))
    return [item for pair in list(pairs)[first:] for item in pair]


async def test_truncation_auto_drops_oldest_turns(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:
    backend.max_model_len = 120
    items = [{"role": "developer", "content": "Be brief."}, *turns_from(0), {"role": "user", "content": "last"}]
    refused = await client.post(PATH, json={"input": items, "max_output_tokens": 10})
    response = await client.post(PATH, json={"input": items, "max_output_tokens": 10, "truncation": "auto"})
    shown = tokenizer.decode(backend.requests[0].token_ids)
    num_left = shown.count("question")
    expected = [items[0], *turns_from(9 - num_left), items[-1]]
    same = await client.post(PATH, json={"input": expected, "max_output_tokens": 10})
    more = [items[0], *turns_from(8 - num_left), items[-1]]
    too_long = await client.post(PATH, json={"input": more, "max_output_tokens": 10})
    alone = await client.post(PATH, json={"input": "x" * 200, "truncation": "auto"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert (response.status_code, same.status_code, too_long.status_code) == (200, 200, 400)
    assert 0 < num_left < 9
    assert (backend.requests[0].token_ids, response.json()["truncation"]) == (backend.requests[1].token_ids, "auto")
    assert f"input (the oldest {9 - num_left} of 10 turns do not fit)" in response.headers["x-tandem-ignored"]
    assert alone.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("depth", [90, 110, 300, 900, 2000])
async def test_deep_nesting_is_the_clients_fault(tokenizer: Tokenizer, depth: int) -> None:
    nest = "[" * depth + "]" * depth
    item = f'{{"type": "web_search_call", "action": {nest}}}'
    tool = f'{{"type": "function", "name": "f", "parameters": {{"enum": {nest}}}}}'
    choice = f'{{"type": "function", "name": "f", "x": {nest}}}'
    bodies = [
        f'{{"input": [{item}, {{"role": "user", "content": "hi"}}]}}',
        f'{{"input": "hi", "tools": [{tool}]}}',
        f'{{"input": "hi", "tools": [{{"type": "namespace", "name": "n", "tools": [{tool}]}}]}}',
        f'{{"input": "hi", "tools": [{{"type": "function", "name": "f"}}], "tool_choice": {choice}, "max_tokens": 2}}',
        f'{{"input": "hi", "conversation": {nest}}}',
        f'{{"input": "hi", "metadata": {{"a": {nest}}}}}',
    ]
    async with closing(backend_of(tokenizer, "x")) as client:
        for body in bodies:
            response = await client.post(PATH, content=body, headers={"content-type": "application/json"})
            assert response.status_code in ({200, 400} if depth < 100 else {400}), (depth, body[:80], response.text)
            if response.status_code == 200:
                listed = await client.get(f"{PATH}/{response.json()['id']}/input_items")
                assert listed.status_code == 200, listed.text
