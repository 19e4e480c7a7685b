from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from tandem.protocol.errors import ConfigError
from tandem.text.tool_calls.events import Content
from tandem.text.tool_calls.response_template import MAX_HELD_CHARS, ResponseTemplateParser, load_template
from tests.text.tool_calls.answers import ANSWERS, Joined, joined, parsed, seeded
from tests.text.tool_calls.test_parser import FRAGMENTS, cut

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
PROMPT = "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n"


def split(pieces: Iterable[str], *, prompt_end: str = PROMPT, has_tools: bool = True) -> Joined:
    ids = map(str, itertools.count())
    tools = [{"type": "function", "function": {"name": "f"}}] if has_tools else None
    parser = ResponseTemplateParser(load_template(HERMES), tools, prompt_end=prompt_end, new_id=lambda: next(ids))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "</b>"]}}\n</tool_call>'


def test_an_answer_is_split_as_the_template_says() -> None:
    answer = split([f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"])
    assert (answer.reasoning, answer.content) == ("Hm.", "I look.")
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("f", {"a": [1, "</b>"]})] * 2
    assert split(["Hm.</think>Yes"], prompt_end=f"{PROMPT}<think>\n") == Joined("Yes", "Hm.")
    assert split(["Yes"], prompt_end="the anchor is <think> further ahead") == Joined("Yes")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f"',
        "a <tool_call>{bad}</tool_call> b",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "a b"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_not_a_call_is_content(text: str) -> None:
    assert split([text]) == split(text) == joined([Content(text)])


def test_without_tools_calls_are_content() -> None:
    assert split([CALL], has_tools=False).content == CALL


def test_what_is_held_back_is_bounded() -> None:
    text = " " * (3 * MAX_HELD_CHARS) + "x"
    assert split([text]) == split(text)
    assert split([text]).content.endswith(" " * MAX_HELD_CHARS + "x")


def test_pieces_of_any_size_give_the_same_result() -> None:
    rng = seeded()
    for _ in range(300):
        text = "".join(rng.choices([*FRAGMENTS, CALL, "<tool_call>", "</tool_call>"], k=rng.randint(0, 20)))
        assert split(cut(text, rng)) == split([text]), text


def test_our_own_parser_agrees_with_the_template_on_well_formed_answers() -> None:
    texts = [answer.text for answer in ANSWERS if answer.format == "hermes" and not answer.prompt_end]
    num_compared = 0
    for text in [*texts, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", "Hello"]:
        try:
            message = parse_response(text, HERMES, prefix="")
            functions = [call["function"] for call in message.get("tool_calls", [])]
            theirs = [(function["name"], function.get("arguments") or {}) for function in functions]
        except (TypeError, ValueError):
            continue  # a list of calls, or one without its closing marker: this template knows neither
        num_compared += 1
        ours = parsed([text], "hermes", "think")
        arguments = [(name, value if isinstance(value, dict) else json.loads(value)) for name, value in theirs]
        assert [(name, json.loads(value)) for name, value in ours.calls] == arguments
        # The template drops all outer white space, we keep it where there is nothing but content.
        assert (ours.content.strip(), ours.reasoning) == (
            message.get("content", ""),
            message.get("reasoning_content", ""),
        )
    assert num_compared >= 8


def test_a_template_that_is_wrong_is_refused() -> None:
    templates: list[Any] = [[], {"fields": {}}, HERMES | {"fields": {"a": {"open_pattern": "("}}}]
    for wrong in templates:
        with pytest.raises(ConfigError, match="response_template cannot be used"):
            load_template(wrong)
