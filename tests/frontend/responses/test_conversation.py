from __future__ import annotations

from typing import Any

import pytest

from tandem.frontend.openai.request_limits import MAX_MESSAGE_PARTS
from tandem.frontend.openai.schema import ChatMessage
from tandem.frontend.responses.conversation import input_messages as messages_of
from tandem.protocol.errors import RequestError


def input_messages(items: list[dict[str, Any]]) -> list[ChatMessage]:
    return messages_of([], items)


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def call_as_chat(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_calls_of_one_turn_are_one_message_with_the_text_before_them() -> None:
    text = {"role": "assistant", "content": "I look."}
    output = {"type": "function_call_output", "call_id": "a", "output": "1"}
    assert input_messages([text, call("a"), call("b"), call("c"), output, call("d"), call("e")]) == [
        ChatMessage(role="assistant", content="I look.", tool_calls=[call_as_chat(name) for name in "abc"]),
        ChatMessage(role="tool", content="1", tool_call_id="a"),
        ChatMessage(role="assistant", tool_calls=[call_as_chat("d"), call_as_chat("e")]),
    ]


def test_too_many_items_are_refused_before_they_are_converted() -> None:
    (message,) = input_messages([call("a")] * MAX_MESSAGE_PARTS)
    assert len(message.tool_calls or ()) == MAX_MESSAGE_PARTS
    with pytest.raises(RequestError, match="the limit is") as raised:
        input_messages([call("a")] * (MAX_MESSAGE_PARTS + 1))
    assert raised.value.param == "input"
