from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.protocol.errors import RequestError
from tandem.router.http.decoding import decode_body
from tandem.router.messages.conversation import chat_prompt, chat_request
from tandem.router.messages.schema import CountTokensRequest, MessagesRequest
from tandem.router.openai.chat import template_messages
from tandem.router.openai.request_limits import MAX_MESSAGE_PARTS, MAX_MESSAGES

WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}


def request_of(**fields: Any) -> MessagesRequest:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_body(msgspec.json.encode(body), MessagesRequest)


def rendered(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages as the chat template gets them."""
    return template_messages(chat_prompt(request_of(messages=messages, **fields)).messages)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}, "citations": None}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


HI = user("hi")
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}}
CALL_AS_CHAT = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([HI], {}, [HI]),
        ([HI], {"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, HI]),
        ([HI], {"system": [text("a"), text("b")]}, [{"role": "system", "content": "a\nb"}, HI]),
        ([HI], {"system": ""}, [HI]),
        (
            [HI],
            {"system": [text("x-anthropic-billing-header: cch=1;"), text("b")]},
            [{"role": "system", "content": "b"}, HI],
        ),
        ([HI], {"system": [text("x-anthropic-billing-header: cch=1;")]}, [HI]),
        ([user([text("a"), text("b")])], {}, [user("a\nb")]),
        (
            [HI, {"role": "system", "content": [text("Now rhyme.")]}],
            {},
            [HI, {"role": "system", "content": "Now rhyme."}],
        ),
        ([HI, assistant([]), HI], {}, [HI, assistant(""), HI]),
        (
            [HI, assistant([{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("a"), CALL])],
            {},
            [HI, {**assistant("a"), "reasoning_content": "Hm.", "reasoning": "Hm.", "tool_calls": [CALL_AS_CHAT]}],
        ),
        ([HI, assistant([{"type": "redacted_thinking", "data": "x"}, text("a")])], {}, [HI, assistant("a")]),
        (
            [user([result("c1", content="sunny"), result("c2", content=[text("a"), text("b")]), text("So?")])],
            {},
            [
                {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
                {"role": "tool", "content": "a\nb", "tool_call_id": "c2"},
                user("So?"),
            ],
        ),
        (
            [user([text("a"), result("c1", is_error=True), text("b"), text("c")])],
            {},
            [user("a"), {"role": "tool", "content": "", "tool_call_id": "c1"}, user("b\nc")],
        ),
    ],
)
def test_messages_as_chat_has_them(
    messages: list[dict[str, Any]], fields: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert rendered(*messages, **fields) == expected


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, True),
    ],
)
def test_tools_as_chat_has_them(choice: Any, expected: Any, parallel: bool) -> None:
    chat = chat_request(request_of(tools=[WEATHER | {"type": "custom"}], tool_choice=choice))
    function = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
    assert msgspec.to_builtins(chat.tools) == [{"type": "function", "function": function}]
    assert (msgspec.to_builtins(chat.tool_choice), chat.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True, "x": 1}},
            {"enable_thinking": False, "thinking": True, "x": 1},
        ),
    ],
)
def test_thinking_sets_variables_of_the_template(fields: dict[str, Any], expected: Any) -> None:
    assert chat_prompt(request_of(**fields)).chat_template_kwargs == expected


def test_the_other_fields_have_the_names_of_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = chat_request(
        request_of(
            model="m",
            stream=True,
            stop_sequences=["a", "b"],
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=3,
            priority=-1,
            cache_salt="s",
            conversation_id="c",
            metadata={"user_id": "u"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    )
    assert (chat.model, chat.max_tokens, chat.stream, chat.stop) == ("m", 9, True, ["a", "b"])
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed) == (0.5, 0.9, 7, 3)
    assert (chat.priority, chat.cache_salt, chat.conversation_id) == (-1, "s", "c")
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert msgspec.json.decode(chat.response_format.json_schema.schema) == schema


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": [HI, assistant("The answer is")]}, "messages[1].role", "end with a user's message"),
        ({"messages": [user([])]}, "messages[0].content", "needs content"),
        ({"messages": [HI, user([text("a"), {"type": "image"}])]}, "messages[1].content[1].type", "'image'"),
        ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0].type", "'document'"),
        ({"messages": [user([CALL])]}, "messages[0].content[0].type", "'tool_use'"),
        ({"messages": [assistant([result("c")]), HI]}, "messages[0].content[0].type", "'tool_result'"),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text", "needs 'text'"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id", "needs 'tool_use_id'"),
        (
            {"messages": [user([result("c", content=[{"type": "image"}])])]},
            "messages[0].content[0].content[0].type",
            "'image'",
        ),
        ({"messages": [assistant([CALL | {"input": None}]), HI]}, "messages[0].content[0].input", "needs 'input'"),
        ({"messages": [assistant([CALL | {"id": None}]), HI]}, "messages[0].content[0].id", "needs 'id'"),
        ({"messages": [assistant([{"type": "thinking"}]), HI]}, "messages[0].content[0].thinking", "needs 'thinking'"),
        ({"system": [{"type": "image"}]}, "system[0].type", "'image'"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type", "'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "Missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no 'tools'"),
        ({"tools": [], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "no 'tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "needs 'name'"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"container": "c"}, "container", "not supported"),
        ({"context_management": {"edits": []}}, "context_management", "not supported"),
        ({"output_format": {"type": "json_schema"}}, "output_format", "not supported"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    request = request_of(**fields)
    with pytest.raises(RequestError) as raised:
        chat_request(request)
    assert raised.value.param == param
    assert message in raised.value.message


def test_values_that_ask_for_nothing_are_accepted() -> None:
    empty = {"container": None, "mcp_servers": [], "context_management": None, "output_format": None}
    assert chat_request(request_of(**empty)) == chat_request(request_of())


def test_counting_needs_no_limit() -> None:
    fields = decode_body(b'{"messages": [{"role": "user", "content": "hi"}]}', CountTokensRequest)
    assert chat_prompt(fields) == chat_prompt(request_of())


BLOCKS = [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HI] * (MAX_MESSAGES + 1)},
        {"messages": [user(BLOCKS * (MAX_MESSAGE_PARTS + 1))]},
        {"messages": [assistant([CALL] * (MAX_MESSAGE_PARTS // 2)), user(BLOCKS * (MAX_MESSAGE_PARTS // 2 + 1))]},
        {"messages": [user([result("c1", content=BLOCKS * MAX_MESSAGE_PARTS)])]},
        {"messages": [HI], "system": BLOCKS * (MAX_MESSAGE_PARTS + 1)},
    ],
    ids=["messages", "blocks", "blocks of two messages", "blocks of a result", "blocks of the system prompt"],
)
def test_too_many_parts_are_refused_before_they_are_converted(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="the limit is") as raised:
        chat_prompt(request_of(**fields))
    assert raised.value.param == "messages"
