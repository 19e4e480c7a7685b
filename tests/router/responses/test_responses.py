"""`/v1/responses` through the app, with the SDK and by hand."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tandem.router.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, closing, make_app

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
        assert head == f"event: {parsed[-1]['type']}"
        assert parsed[-1]["sequence_number"] == number
    return parsed


def sdk(backend: FakeBackend, **config: Any) -> openai.AsyncOpenAI:
    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(backend, **config)))
    return openai.AsyncOpenAI(api_key="any", base_url="http://localhost/v1", http_client=http_client, max_retries=0)


def backend_of(tokenizer: Tokenizer, text: str, run: int = 1) -> FakeBackend:
    """One with room for tools in its prompts, whose tokens are bytes."""
    backend = FakeBackend(tokenizer, text, run=run)
    backend.max_model_len = 4096
    return backend


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "output": output}


async def test_plain_answer(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
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


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("text", ["héllo 🎉 world", CALL, "<think>so\nso</think>well", "<tool_call>{bro", ""])
async def test_a_stream_ends_with_the_plain_answer(tokenizer: Tokenizer, text: str, run: int) -> None:
    body = {"input": "hi", "tools": [TOOL], "store": False}
    config = {"tool_parser": "hermes", "reasoning_parser": "think"}
    async with closing(backend_of(tokenizer, text, run), **config) as client:
        plain = (await client.post(PATH, json=body)).json()
        streamed = events(await client.post(PATH, json={**body, "stream": True}))
    kinds = [event["type"] for event in streamed]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
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
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[item["id"]] == text


async def test_a_limit_makes_the_response_incomplete(tokenizer: Tokenizer) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    async with closing(FakeBackend(tokenizer)) as client:
        plain = (await client.post(PATH, json=body)).json()
        streamed = events(await client.post(PATH, json={**body, "stream": True}))
    for answer in (plain, streamed[-1]["response"]):
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][-1]["status"] == "incomplete"
    assert streamed[-1]["type"] == "response.incomplete"


async def test_the_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    client = sdk(backend_of(tokenizer, CALL, 2), tool_parser="hermes")
    plain = await client.responses.create(model="org/toy", input="hi", tools=[TOOL])  # type: ignore[list-item]
    assert plain.output_text == "I look."
    call = plain.output[-1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    async with client.responses.stream(model="org/toy", input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == ["message", "function_call"]


async def test_items_become_the_messages_of_a_chat(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
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
    async with closing(backend) as client:
        await client.post(PATH, json={"input": items, "instructions": "Be brief."})
        await client.post("/v1/chat/completions", json={"messages": messages})
    assert backend.requests[0].token_ids == backend.requests[1].token_ids


async def test_a_response_goes_on_from_one_that_is_kept(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
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
    assert [request.conversation_id for request in backend.requests[1:3]] == [first["id"]] * 2
    assert kept == third
    assert (deleted.json()["deleted"], gone.status_code) == (True, 404)


async def test_what_is_not_kept_cannot_be_gone_on_from(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
        first = (await client.post(PATH, json={"input": "one", "store": False})).json()
        second = await client.post(PATH, json={"input": "two", "previous_response_id": first["id"]})
        other = await client.get(f"{PATH}/resp_0", headers={"x-tandem-tenant": "other"})
    assert (second.status_code, second.json()["error"]["param"]) == (404, "previous_response_id")
    assert other.status_code == 404


async def test_a_tenant_does_not_reach_anothers_response(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
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
async def test_a_wrong_field_is_named(tokenizer: Tokenizer, body: dict[str, Any], param: str) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        response = await client.post(PATH, json=body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
    assert backend.requests == []


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
    assert body["text"]["format"]["schema"] == text["format"]["schema"]
    assert kept == body
