"""Bodies that do not fit: the error names the field, the value as it was sent, and what is expected."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from tandem.frontend.http.json_body import decode_body
from tandem.frontend.messages.schema import MessagesRequest
from tandem.frontend.openai.schema import ChatRequest, CompletionRequest, PinFields
from tandem.frontend.responses.schema import ResponsesRequest
from tandem.protocol.errors import RequestError

TURNS = {"messages": [{"role": "user", "content": "hi"}]}
CHOICES = "'json_object', 'json_schema', 'structural_tag' or 'text'"


def error_of(body: Any, request_type: type[msgspec.Struct] = ChatRequest) -> RequestError:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(RequestError) as raised:
        decode_body(raw, request_type)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "param", "expected", "got"),
    [
        ({"temperature": 9}, "temperature", "a number from 0 to 2", "9"),
        ({"temperature": "hot"}, "temperature", "a number from 0 to 2", '"hot"'),
        ({"temperature": [1, None]}, "temperature", "a number from 0 to 2", "[1,null]"),
        ({"n": 1.5}, "n", "an integer from 1 to 128", "1.5"),
        ({"top_k": -2}, "top_k", "an integer of at least -1", "-2"),
        ({"seed": 2**70}, "seed", "an integer of 64 bits", str(2**70)),
        ({"stream": "yes"}, "stream", "true or false", '"yes"'),
        ({"logit_bias": {"7": 1, "8": 300}}, "logit_bias", "a number from -100 to 100", '300 for "8"'),
        ({"stop": ["a", ""]}, "stop[1]", "a string that is not empty", '""'),
        ({"messages": []}, "messages", "a list that is not empty", "[]"),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, "messages[0].content[0].type", "a string", "3"),
        ({"response_format": {"type": "xml"}}, "response_format.type", CHOICES, '"xml"'),
        ({"tool_choice": 7}, "tool_choice", "a string or an object", "7"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]", "an integer from 0 to 2147483647", "-1"),
    ],
)
def test_an_error_names_field_bounds_and_value(fields: dict[str, Any], param: str, expected: str, got: str) -> None:
    error = error_of(TURNS | fields)
    assert (error.param, error.message) == (param, f"Invalid value for '{param}': expected {expected}, got {got}.")


@pytest.mark.parametrize(
    ("request_type", "body", "message"),
    [
        (CompletionRequest, {"prompt": 3}, "'prompt': expected a string or a list, got 3."),
        (PinFields, {"prompt": "a", "ttl_s": 0}, "'ttl_s': expected a number above 0, got 0."),
        (
            PinFields,
            {"prompt": "a", "prefetch": "moon"},
            "'prefetch': expected 'host', 'none' or 'pool', got \"moon\".",
        ),
        (ResponsesRequest, {"input": "a", "metadata": {"k": 1}}, "'metadata': expected a string, got 1 for \"k\"."),
        (
            MessagesRequest,
            TURNS | {"max_tokens": -1},
            "'max_tokens': expected an integer from 0 to 2147483647, got -1.",
        ),
        (ChatRequest, [1], "Invalid request body: expected an object, got [1]."),
    ],
)
def test_every_kind_of_body_names_the_value(request_type: type[msgspec.Struct], body: Any, message: str) -> None:
    assert error_of(body, request_type).message.endswith(message)


@pytest.mark.parametrize(
    ("value", "size"),
    [("x" * 5000, "5000 characters"), ([1] * 3000, "3000 items"), ({str(i): i for i in range(400)}, "400 fields")],
)
def test_a_long_value_is_shortened_and_its_size_named(value: Any, size: str) -> None:
    message = error_of(TURNS | {"temperature": value}).message
    assert message.endswith(f"... ({size}).")
    assert len(message) < 170


def test_a_wrong_value_among_millions_takes_no_memory_for_them() -> None:
    body = b'{"temperature": 9, "messages": [], "x": {' + b'"a":1,' * 500_000 + b'"a":1}}'
    ids = b'{"prompt": [' + b"1," * 1_000_000 + b"-1]}"
    tracemalloc.start()
    try:
        first = error_of(body)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
        second = error_of(ids, CompletionRequest)
    finally:
        tracemalloc.stop()
    assert first.message == "Invalid value for 'temperature': expected a number from 0 to 2, got 9."
    assert second.message == "Invalid value for 'prompt[1000000]': expected 'int' >= 0."


def test_the_field_is_named_where_the_rest_of_the_body_is_not_json() -> None:
    assert error_of(b'{"temperature": 9, ').message == "Invalid value for 'temperature': expected 'float' <= 2.0."


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (rb'{"prompt": "\ud800"}', "a string ends with half of a surrogate pair"),
        (rb'{"prompt": ["a\uDBFF"] }', "a string ends with half of a surrogate pair"),
        (rb'{"prompt": "\ud83d\ude00', "Input data was truncated"),
        (rb'{"prompt": "a', "Input data was truncated"),
    ],
)
def test_half_a_surrogate_pair_is_told_from_half_a_body(body: bytes, reason: str) -> None:
    assert error_of(body, CompletionRequest).message == f"The request body is not valid JSON: {reason}"
