"""The prompts of other routes, read as the chat that the engine makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.frontend.relay.prompt_forms import (
    PromptForm,
    chat_form,
    input_form,
    messages_form,
    no_form,
    pairs_form,
    responses_form,
)
from tandem.frontend.relay.prompts import MEDIA_TOKENS, PromptReader
from tandem.protocol.digest import EVERYONE
from tandem.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city":"Rome"}'}}
TURN = {"role": "assistant", "content": "let me see", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": SCHEMA, "strict": None}}
TEXT = [{"type": "text", "text": "hello"}]


def messages_of(form: PromptForm) -> Any:
    assert form.is_exact
    return form.body["messages"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "hello"}, [USER]),
        ({"input": "hello", "instructions": "be kind"}, [SYSTEM, USER]),
        ({"input": [{"role": "user", "content": "hello"}]}, [USER]),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
            [{"role": "user", "content": TEXT}],
        ),
        (
            {
                "instructions": "be kind",
                "input": [
                    {"role": "user", "content": "hello"},
                    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "x", "text": "hm"}]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "let me see"}],
                    },
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city":"Rome"}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                ],
            },
            [SYSTEM, USER, TURN | {"reasoning": "hm"}, RESULT],
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city":"Rome"}'}] * 2},
            [{"role": "assistant", "tool_calls": [CALL, CALL]}],
        ),
        (
            {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
    ],
)
def test_a_response_is_read_as_the_chat_that_the_engine_makes_of_it(body: dict[str, Any], expected: list[Any]) -> None:
    assert messages_of(responses_form(body)) == expected


def test_many_calls_of_one_turn_take_linear_time() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    [message] = messages_of(responses_form({"input": [call] * 200_000}))
    assert len(message["tool_calls"]) == 200_000


def test_tools_and_effort_of_a_response() -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA}
    form = responses_form({"input": "hello", "tools": [tool], "reasoning": {"effort": "low"}})
    assert (form.is_exact, form.body["tools"], form.body["reasoning_effort"]) == (True, [TOOL], "low")


@pytest.mark.parametrize(
    "fields",
    [
        *({"previous_response_id": "resp_1"}, {"previous_input_messages": [{}]}, {"prompt": {"id": "p"}}),
        *({"truncation": "auto"}, {"tools": [{"type": "mcp"}]}, {"tools": [3]}),
        *({"tools": [{"type": "function", "name": "f"}]}, {"input": [{"type": "item_reference", "id": "x"}]}),
        *({"input": [{"role": "assistant", "content": "be", "status": "incomplete"}]}, {"input": [3]}),
        {"input": None},
        {"input": {"a": 1}},
        {"input": [{"role": "user"}]},
        {"input": [{"type": "reasoning", "summary": []}]},
    ],
)
def test_a_response_whose_prompt_is_not_known_here_is_an_estimate(fields: dict[str, Any]) -> None:
    form = responses_form({"input": "hello"} | fields)
    # Nothing given is an empty conversation, which the engine refuses.
    assert not form.is_exact or fields == {"input": None}
    PromptReader().read(form, EVERYONE, 100)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER], "system": "be kind"}, [SYSTEM, USER]),
        (
            {
                "messages": [{"role": "user", "content": TEXT}],
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: 1"},
                    {"type": "text", "text": "be "},
                    {"type": "text", "text": "kind"},
                ],
            },
            [SYSTEM, USER],
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "let me see"},
                            {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Rome"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c1",
                                "content": [{"type": "text", "text": "sunny"}],
                            },
                            {"type": "text", "text": "hello"},
                        ],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
                ]
            },
            [USER, TURN | {"reasoning": "hm"}, RESULT, USER, RESULT],
        ),
    ],
)
def test_a_message_is_read_as_the_chat_that_the_engine_makes_of_it(body: dict[str, Any], expected: list[Any]) -> None:
    assert messages_of(messages_form(body)) == expected


def test_tools_and_effort_of_a_message() -> None:
    tools = [{"name": "f", "input_schema": SCHEMA}]
    form = messages_form({"messages": [USER], "tools": tools, "output_config": {"effort": "low"}})
    assert (form.is_exact, form.body["tools"], form.body["reasoning_effort"]) == (True, [TOOL], "low")


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "disabled"}},
        {"messages": [USER, SYSTEM]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": "hello"},
        {"tools": [{"name": "f"}]},
        {"system": 3},
    ],
)
def test_a_message_whose_prompt_is_not_known_here_is_an_estimate(fields: dict[str, Any]) -> None:
    form = messages_form({"messages": [USER]} | fields)
    assert not form.is_exact
    PromptReader().read(form, EVERYONE, 100)


def test_other_routes() -> None:
    assert input_form({"input": "a"}) == ({"prompt": "a"}, True)
    assert input_form({"input": [1, 2]}) == ({"prompt": [1, 2]}, True)
    assert not input_form({"input": ["a", "b"]}).is_exact
    assert not input_form({"messages": [USER]}).is_exact
    long = {"query": "q" * 400, "documents": ["d" * 400, "e" * 400]}
    assert 300 < len(PromptReader().read(pairs_form(long), EVERYONE, 1000).token_ids) < 320
    assert PromptReader().read(no_form(long), EVERYONE, 1000) == ([], False)


def test_all_routes_have_the_tokens_of_the_same_chat(tokenizer: Tokenizer) -> None:
    reader = PromptReader(tokenizer)
    chat = reader.read(chat_form({"messages": [SYSTEM, USER]}), EVERYONE, 1000)
    assert (chat.is_exact, len(chat.token_ids) > 8) == (True, True)
    assert reader.read(responses_form({"input": "hello", "instructions": "be kind"}), EVERYONE, 1000) == chat
    assert reader.read(messages_form({"messages": [USER], "system": "be kind"}), EVERYONE, 1000) == chat


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"documents": [{"text": "d"}]},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"truncate_prompt_tokens": 5},
        {"prompt_embeds": "base64"},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"tools": [{"type": "web_search"}]},
    ],
)
def test_fields_that_change_the_prompt_make_it_an_estimate(fields: dict[str, Any], tokenizer: Tokenizer) -> None:
    prompt = PromptReader(tokenizer).read(chat_form({"messages": [USER]} | fields), EVERYONE, 1000)
    assert not prompt.is_exact


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def with_image(data: str) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": [*TEXT, image(data)]}]}


@pytest.mark.parametrize(
    "part",
    [
        image("x"),
        {"type": "input_audio", "input_audio": {"data": "x"}},
        {"type": "video_url", "video_url": {"url": "https://host/x"}},
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "input_image", "image_url": "https://host/x"},
        {"type": "image", "source": {"type": "base64", "data": "x"}},
    ],
)
def test_a_prompt_with_an_image_is_an_estimate_on_each_route(part: dict[str, Any], tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hello"}, part]}
    for form in (
        chat_form({"messages": [message]}),
        messages_form({"messages": [message]}),
        responses_form({"input": [message]}),
    ):
        prompt = PromptReader(tokenizer).read(form, EVERYONE, 5000)
        assert not prompt.is_exact
        assert MEDIA_TOKENS < len(prompt.token_ids) < MEDIA_TOKENS + 50


def test_the_size_of_an_image_file_is_not_its_length_in_tokens() -> None:
    forms = [chat_form(with_image(data)) for data in ("a", "a" * 1_000_000)]
    small, large = (PromptReader().read(form, EVERYONE, 100_000) for form in forms)
    assert len(small.token_ids) == len(large.token_ids)
    assert small.token_ids != large.token_ids
