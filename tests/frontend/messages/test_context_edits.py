from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tandem.frontend.http.ignored_fields import begin_ignored
from tandem.frontend.http.json_body import decode_body
from tandem.frontend.messages.context_edits import CLEARED, Edited, edited, known_edits, least_trigger
from tandem.frontend.messages.schema import MessagesRequest

USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
ALWAYS = {"type": "input_tokens", "value": 0}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def thought(value: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": ""}


def use(i: int, name: str = "f") -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{i}", "name": name, "input": {"a": i}}


def result(i: int, content: Any = "12345") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{i}", "content": content}


LOOP = [user(text("go")), *(one for i in range(5) for one in (assistant(use(i)), user(result(i))))]


def after(messages: list[dict[str, Any]], *edits: dict[str, Any], num_tokens: float = 0) -> Edited:
    body = {"max_tokens": 9, "messages": messages, "context_management": {"edits": edits}}
    request = decode_body(msgspec.json.encode(body), MessagesRequest)
    return edited(request.messages, known_edits(request), num_tokens, len)


def found(done: Edited, kind: str, field: str) -> list[Any]:
    blocks = [block for message in done.messages for block in message.content or () if not isinstance(block, str)]
    return [getattr(block, field) for block in blocks if block.type == kind]


@pytest.mark.parametrize(
    ("edit", "num_tokens", "num_cleared"),
    [
        ({}, 99_999, 0),
        ({}, 100_000, 2),
        ({}, math.inf, 2),
        ({"trigger": {"type": "input_tokens", "value": 50}}, 50, 2),
        ({"trigger": {"type": "tool_uses", "value": 5}}, 0, 2),
        ({"trigger": {"type": "tool_uses", "value": 6}}, math.inf, 0),
        ({"trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 0}}, 0, 5),
        ({"trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 4}}, 0, 1),
        ({"trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 9}}, 0, 0),
        ({"trigger": ALWAYS, "clear_at_least": {"type": "input_tokens", "value": 11}}, 0, 2),
        ({"trigger": ALWAYS, "clear_at_least": {"type": "input_tokens", "value": 12}}, 0, 0),
        ({"trigger": ALWAYS, "clear_at_least": None, "exclude_tools": ["g"]}, 0, 2),
        ({"trigger": ALWAYS, "exclude_tools": ["f"]}, 0, 0),
    ],
)
def test_old_results_are_cleared_from_the_trigger_on(edit: dict[str, Any], num_tokens: float, num_cleared: int) -> None:
    done = after(LOOP, {"type": USES, **edit}, num_tokens=num_tokens)
    assert found(done, "tool_result", "content") == [CLEARED] * num_cleared + ["12345"] * (5 - num_cleared)
    assert found(done, "tool_use", "input") == [{"a": i} for i in range(5)]
    num_chars = 5 * num_cleared + num_cleared - 1  # joined by a line break
    told = {"type": USES, "cleared_tool_uses": num_cleared, "cleared_input_tokens": num_chars}
    assert (done.applied, done.num_cleared_tokens) == ([told] if num_cleared else [], num_chars if num_cleared else 0)


@pytest.mark.parametrize(
    ("inputs", "expected"), [(True, [{}, {}]), (["f"], [{}, {"a": 1}]), ([], [{"a": 0}, {"a": 1}])]
)
def test_inputs_are_cleared_if_asked_for(inputs: Any, expected: list[Any]) -> None:
    messages = [user(text("go")), assistant(use(0), use(1, "g")), user(result(0), result(1, [text("ab")]))]
    keep = {"type": "tool_uses", "value": 0}
    done = after(messages, {"type": USES, "trigger": ALWAYS, "keep": keep, "clear_tool_inputs": inputs})
    assert (found(done, "tool_use", "input"), found(done, "tool_result", "content")) == (expected, [CLEARED, CLEARED])


def test_what_was_cleared_before_is_not_counted_again() -> None:
    messages = [user(text("go")), assistant(use(0), use(1)), user(result(0, CLEARED), result(1, ""))]
    done = after(messages, {"type": USES, "trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 0}})
    assert (found(done, "tool_result", "content"), done.applied) == ([CLEARED, ""], [])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, ["c", "d"]),
        ("all", ["a", "b", "c", "d"]),
        ({"type": "all"}, ["a", "b", "c", "d"]),
        ({"type": "thinking_turns", "value": 0}, []),
        ({"type": "thinking_turns", "value": 2}, ["b", "c", "d"]),
        ({"type": "thinking_turns", "value": 9}, ["a", "b", "c", "d"]),
    ],
)
def test_thoughts_of_old_turns_are_cleared(keep: Any, expected: list[str]) -> None:
    messages = [
        user(text("1")),
        assistant(thought("a"), text("x")),
        {"role": "user", "content": "2"},
        assistant(thought("b"), {"type": "redacted_thinking", "data": "z"}),
        user(text("3")),
        assistant(text("no thought")),
        user(text("4")),
        assistant(thought("c"), use(0)),  # a turn goes on over the results of its tools
        user(result(0), text("hint")),
        assistant(thought("d")),
    ]
    done = after(messages, {"type": THINKING, "keep": keep})
    assert found(done, "thinking", "thinking") == expected
    num_turns = {4: 0, 3: 1, 2: 2, 0: 3}[len(expected)]
    assert [edit["cleared_thinking_turns"] for edit in done.applied] == ([num_turns] if num_turns else [])


def test_edits_are_made_in_their_order_and_others_are_ignored() -> None:
    ignored = begin_ignored()
    messages = [
        user(text("1")),
        assistant(thought("a"), use(0)),
        user(result(0)),
        user(text("2")),
        assistant(thought("b")),
    ]
    keep = {"type": "tool_uses", "value": 0}
    done = after(
        messages,
        {"type": THINKING},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 5}, "instructions": "x"},
        {"type": USES, "trigger": ALWAYS, "keep": keep},
    )
    assert [edit["type"] for edit in done.applied] == [THINKING, USES]
    assert ignored == ["context_management.compact_20260112"]


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([], None),
        ([{"type": THINKING}], None),
        ([{"type": USES}], 100_000),
        ([{"type": USES, "trigger": {"type": "tool_uses", "value": 3}}], None),
        ([{"type": USES}, {"type": USES, "trigger": {"type": "input_tokens", "value": 7}}], 7),
    ],
)
def test_tokens_are_counted_only_for_a_trigger_in_tokens(edits: list[Any], expected: int | None) -> None:
    body = {"max_tokens": 9, "messages": LOOP, "context_management": {"edits": edits}}
    assert least_trigger(known_edits(decode_body(msgspec.json.encode(body), MessagesRequest))) == expected
