from __future__ import annotations

import typing
from typing import Any

import anthropic.types.beta as anthropic_beta
import msgspec
import pytest

from tandem.frontend.http.ignored_fields import begin_ignored
from tandem.frontend.http.json_body import decode_body
from tandem.frontend.messages.conversation import chat_prompt, chat_request
from tandem.frontend.messages.schema import CountTokensRequest, MessagesRequest
from tandem.frontend.openai.chat import template_messages
from tandem.frontend.openai.request_limits import MAX_MESSAGE_PARTS, MAX_MESSAGES
from tandem.protocol.errors import RequestError

WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}


def request_of(**fields: Any) -> MessagesRequest:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_body(msgspec.json.encode(body), MessagesRequest)


def rendered(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return template_messages(chat_prompt(request_of(messages=messages, **fields)).messages)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}, "citations": None}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


EDITING = {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"}
HI = user("hi")
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}  # as Claude Code sends it
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
ANY_JSON = {"type": "json_schema", "schema": {}}
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
        ([HI, {"role": "system", "output_config": {"effort": "low"}}], {}, [HI]),
        ([user([result("c1", content="a")] * 2)], {}, [{"role": "tool", "content": "a", "tool_call_id": "c1"}] * 2),
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
        ({"messages": [user([])]}, "messages[0].content", "needs content"),
        ({"messages": [HI, user([text("a"), {"type": "image"}])]}, "messages[1].content[1].type", "'image'"),
        ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0].type", "'document'"),
        ({"messages": [user([PDF])]}, "messages[0].content[0].type", "'document'"),
        (
            {"messages": [user([{"type": "video", "source": {"type": "url"}}])]},
            "messages[0].content[0].type",
            "'video'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
        (
            {"messages": [user([result("c", content={"type": "x"})])]},
            "messages[0].content[0].content",
            "list of blocks",
        ),
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
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "does not run the tool 'web_search'"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "Missing"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "Missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no 'tools'"),
        ({"tools": [], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "no 'tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "needs 'name'"),
        ({"compaction": {"type": "summarize"}}, "compaction", "not supported"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread", "No threads are kept"),
        ({"messages": [HI, assistant("{")], "output_format": ANY_JSON}, "output_config.format", "continues"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    request = request_of(**fields)
    with pytest.raises(RequestError) as raised:
        chat_request(request)
    assert raised.value.param == param
    assert message in raised.value.message


# What the SDK declares for a conversation with tools that Anthropic runs. None of it is for another model.
FOREIGN: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "title": "t"}]},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"type": "e", "error_code": "unavailable"}},
    {"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {"type": "web_fetch_result", "url": "u"}},
    {"type": "code_execution_tool_result", "tool_use_id": "s1", "content": {"type": "r", "stdout": "", "content": []}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s1", "content": {"type": "r", "return_code": 0}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "s1", "content": {"type": "r"}},
    {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": {"type": "r", "tool_references": []}},
    {"type": "advisor_tool_result", "tool_use_id": "s1", "content": {"type": "advisor_result", "text": "t"}},
    {"type": "mcp_tool_use", "id": "m1", "name": "f", "input": {}, "server_name": "s"},
    {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [{"type": "text", "text": "x"}]},
    {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []},
    {"type": "container_upload", "file_id": "f"},
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "compaction", "content": None},
    {"type": "browser_state", "tabs": []},
    {"type": "brand_new", "anything": [1]},
]


@pytest.mark.parametrize("block", FOREIGN, ids=[f"{i}-{block['type']}" for i, block in enumerate(FOREIGN)])
def test_foreign_blocks_are_skipped_and_named(block: dict[str, Any]) -> None:
    ignored = begin_ignored()
    assert rendered(HI, assistant([block, text("a"), block]), user([text("b"), block])) == [
        HI,
        assistant("a"),
        user("b"),
    ]
    assert rendered(HI, {"role": "system", "content": [block]}, user([result("c", content=[block])])) == [
        HI,
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    assert rendered(user([block])) == [user("")]
    assert ignored == ([] if block["type"] == "compaction" else [f"content.{block['type']}"])


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "text", "text": ""}, ""),
        ({"type": "compaction", "content": "So far: a and b."}, "So far: a and b."),
        ({"type": "tool_reference", "tool_name": "mcp__x__f"}, "The tool mcp__x__f is available."),
        (
            {"type": "search_result", "title": "T", "source": "https://x", "content": [text("a"), text("b")]},
            "T\nhttps://x\na\nb",
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}, "D"),
        ({"type": "document", "title": "T", "source": {"type": "content", "content": "D"}}, "T\nD"),
    ],
)
def test_a_block_that_carries_text_is_text(block: dict[str, Any], expected: str) -> None:
    assert rendered(user([text("a"), block])) == [user(f"a\n{expected}" if expected else "a")]
    (shown,) = rendered(user([result("c", content=[block])]))
    assert shown == {"role": "tool", "content": expected, "tool_call_id": "c"}


# -- tools

SERVER_TOOLS = [
    *("web_search_20250305", "web_search_20260318", "web_fetch_20250910", "code_execution_20250825"),
    *("computer_20250124", "tool_search_tool_regex_20251119", "tool_search_tool_bm25_20251119", "advisor_20260301"),
    "brand_new_20300101",
]
TOOLSETS = ["mcp_toolset", "computer_toolset_20260801", "browser_toolset_20260801"]


@pytest.mark.parametrize(
    "tool", [*({"type": kind, "name": "x"} for kind in SERVER_TOOLS), *({"type": kind} for kind in TOOLSETS)]
)
def test_tools_that_the_client_cannot_run_are_not_shown_and_named(tool: dict[str, Any]) -> None:
    ignored = begin_ignored()
    chat = chat_request(request_of(tools=[tool, WEATHER], tool_choice={"type": "auto"}))
    assert [one.function.name for one in chat.tools or ()] == ["weather"]
    assert ignored == [f"tools.{tool['type']} (not run by this server)"]
    assert chat_request(request_of(tools=[tool])).tools == []
    assert chat_request(request_of(tools=[tool, WEATHER], tool_choice={"type": "any"})).tool_choice == "required"
    with pytest.raises(RequestError, match="does not run the tool"):
        chat_request(request_of(tools=[tool], tool_choice={"type": "any"}))


@pytest.mark.parametrize(
    ("kind", "name", "properties"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("bash_20241022", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {*EDITING, "insert_text"}),
        ("text_editor_20250124", "str_replace_editor", EDITING),
        ("memory_20250818", "memory", {*EDITING, "insert_text", "old_path", "new_path"}),
    ],
)
def test_anthropics_tools_that_the_client_runs_have_their_schema(kind: str, name: str, properties: set[str]) -> None:
    chat = chat_request(request_of(tools=[{"type": kind, "name": name}], tool_choice={"type": "tool", "name": name}))
    (tool,) = chat.tools or ()
    assert tool.function.name == name
    assert tool.function.parameters is not None
    assert tool.function.parameters["properties"].keys() == properties
    commands = tool.function.parameters["properties"]["command"].get("enum", [])
    assert ("undo_edit" in commands) == (kind == "text_editor_20250124")


def test_the_schema_of_the_memory_tool_has_the_sdks_commands() -> None:
    chat = chat_request(request_of(tools=[{"type": "memory_20250818", "name": "memory"}]))
    assert chat.tools is not None
    assert chat.tools[0].function.parameters is not None
    properties = chat.tools[0].function.parameters["properties"]
    commands = typing.get_args(typing.get_args(anthropic_beta.BetaMemoryTool20250818Command)[0])
    names = {command.model_fields["command"].annotation.__args__[0] for command in commands}
    assert names == {*properties["command"]["enum"]}
    assert {name for command in commands for name in command.model_fields} == properties.keys()


def test_a_tool_of_another_type_with_a_schema_is_shown() -> None:
    chat = chat_request(request_of(tools=[WEATHER | {"type": "function", "defer_loading": True, "strict": True}]))
    assert [one.function.name for one in chat.tools or ()] == ["weather"]


# -- the form and the length of the answer


def test_the_older_name_of_the_format() -> None:
    older = chat_request(request_of(output_format=ANY_JSON))
    assert older == chat_request(request_of(output_config={"format": ANY_JSON}))
    assert older.response_format is not None


@pytest.mark.parametrize("content", ["The answer is", [text("The answer is")]])
def test_an_assistants_message_at_the_end_is_continued(content: Any) -> None:
    chat = chat_request(request_of(messages=[HI, assistant(content)]))
    assert (chat.continue_final_message, chat.messages[-1].role) == (True, "assistant")
    assert chat_request(request_of()).continue_final_message is None


def test_values_that_ask_for_nothing_are_accepted() -> None:
    empty = {"compaction": None, "thread": None, "context_management": None, "output_format": None}
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
    ids=["messages", "blocks", "blocks of two messages", "blocks of a result", "system prompt"],
)
def test_too_many_parts_are_refused_before_they_are_converted(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="the limit is") as raised:
        chat_prompt(request_of(**fields))
    assert raised.value.param == "messages"
