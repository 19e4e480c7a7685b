from __future__ import annotations

from typing import Any

import pytest

from tandem.frontend.relay.apis import CHAT
from tandem.frontend.relay.prompt_forms import chat_form
from tandem.frontend.relay.prompts import PromptReader, ReadPrompt
from tandem.protocol.digest import EVERYONE
from tandem.text.tokenizer import Tokenizer


def read(reader: PromptReader, body: dict[str, Any], max_tokens: int = 1000) -> list[int]:
    return read_whole(reader, body, max_tokens).token_ids


def read_whole(reader: PromptReader, body: dict[str, Any], max_tokens: int = 1000) -> ReadPrompt:
    return reader.read(chat_form(body), EVERYONE, max_tokens)


def turn(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages} | fields


def test_without_a_tokenizer_a_longer_conversation_keeps_its_prefix() -> None:
    first = read(PromptReader(), turn("hello " * 20))
    second = read(PromptReader(), turn("hello " * 20, "hi", "more"))
    assert second[: len(first) - 1] == first[:-1]
    assert read(PromptReader(), turn("hello " * 20, tools=[{"type": "function"}]))[:4] != first[:4]
    assert len(read(PromptReader(), {"prompt": "x" * 41})) == 11


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2, 3], [1, 2, 3]), ([[4, 5], [6]], [4, 5]), ([1, -2], []), ([], []), (None, []), (["ab"], [0x6261])],
)
def test_prompts_of_token_ids_are_used_unchanged(prompt: Any, expected: list[int]) -> None:
    assert read(PromptReader(), {"prompt": prompt}) == expected


def test_with_the_tokenizer_prompts_are_the_tokens_the_engine_computes(tokenizer: Tokenizer) -> None:
    reader = PromptReader(tokenizer)
    assert read(reader, {"prompt": "hello"}, 1000) == tokenizer.encode("hello")
    assert read(reader, {"prompt": [7, 8]}, 1000) == [7, 8]
    messages = [{"role": "user", "content": "hello"}]
    expected = tokenizer.encode_chat(messages, {"add_generation_prompt": True}, "")
    assert read(reader, {"messages": messages}, 1000) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "forbidden"}]},
        {"messages": "what"},
        {"messages": None},
        {"prompt": {"a": 1}},
        {"prompt": 3},
        {},
    ],
)
def test_what_cannot_be_rendered_is_left_to_the_engine(body: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert read(PromptReader(tokenizer), body) == read(PromptReader(), body)


def test_the_limit_of_an_answer() -> None:
    assert CHAT.max_tokens({"max_tokens": 5}) == 5
    assert CHAT.max_tokens({"max_tokens": 5, "max_completion_tokens": 7}) == 7
    assert [CHAT.max_tokens({"max_tokens": value}) for value in (None, True, "3", -1)] == [None] * 4


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "日" * 1_000_000},
        {"prompt": [1] * 1_000_000},
        {"prompt": [[1] * 1_000_000, [2]]},
        {"messages": [{"role": "user", "content": "x" * 100_000}] * 3},
        {"messages": [{"role": "user", "content": ""}] * 100_000},
    ],
)
def test_a_prompt_too_long_for_any_engine_is_read_in_part(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    for reader in (PromptReader(), PromptReader(tokenizer)):
        assert (len(read(reader, body, 1000)), read(reader, body, 1000)) == (1001, read(reader, body, 2000)[:1001])
