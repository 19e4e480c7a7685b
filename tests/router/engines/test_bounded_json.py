from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.frontend.relay.answers import error_text
from tandem.frontend.relay.apis import CHAT
from tandem.frontend.relay.typed_events import ResponseEvents
from tandem.router.engines import bounded_json
from tandem.router.engines.bounded_json import (
    LARGE,
    MAX_BRACKETS,
    MAX_COMMAS,
    OUTLINED_BYTES,
    WHOLE_BYTES,
    NotJson,
    Outline,
    loads,
)

LISTS: list[Any] = [[]] * (MAX_BRACKETS + 1)


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the texts that are read whole."""
    sizes: list[int] = []

    def recorded(text: bytes) -> Any:
        sizes.append(len(text))
        return whole_loads(text)

    whole_loads = bounded_json._whole
    monkeypatch.setattr(bounded_json, "_whole", recorded)
    return sizes


@pytest.mark.parametrize(
    "value",
    [{"choices": [{"text": "a"}]}, [1, None], {"text": "[{," * 100}, {"data": [0.5] * 100_000}, {"a": "x" * 10**6}],
    ids=["small", "list", "brackets in text", "numbers", "long text"],
)
def test_usual_answers_are_read_whole(value: Any) -> None:
    found = loads(msgspec.json.encode(value))
    assert (found, isinstance(found, Outline)) == (value, False)


@pytest.mark.parametrize(
    "more", [LISTS, [0] * (MAX_COMMAS + 2), "x" * OUTLINED_BYTES], ids=["lists", "numbers", "text"]
)
def test_of_many_values_only_the_small_known_fields_are_read(more: Any, read_whole: list[int]) -> None:
    usage, kept = {"prompt_tokens": 3}, {"remote_block_ids": [1]}
    text = msgspec.json.encode(
        {"id": "r", "choices": more, "usage": usage, "kv_transfer_params": kept, "x": more, "error": None}
    )
    expected = {"id": "r", "choices": LARGE, "usage": usage, "kv_transfer_params": kept, "error": None}
    assert loads(text) == expected
    assert max(read_whole) < WHOLE_BYTES
    assert CHAT.is_answer(expected)
    assert not CHAT.is_stopped(expected)


def test_what_is_large_within_usage_or_an_error_is_not_shown(read_whole: list[int]) -> None:
    found = loads(msgspec.json.encode({"error": {"message": LISTS}, "usage": {"x": LISTS}}))
    assert found == {"error": LARGE, "usage": LARGE}
    assert error_text(found["error"]) == "a value too large to be read"
    assert not read_whole


def test_the_last_event_of_a_large_response_has_its_usage() -> None:
    usage = {"input_tokens": 5, "output_tokens": 2}
    body = {"type": "response.completed", "response": {"id": "resp_1", "output": LISTS, "usage": usage}}
    event = ResponseEvents().parse(b"event: response.completed\ndata: " + msgspec.json.encode(body) + b"\n\n")
    assert event.is_done
    assert event.usage is not None
    assert (event.usage["prompt_tokens"], event.usage["completion_tokens"]) == (5, 2)
    assert (event.body or {})["response"]["id"] == "resp_1"


@pytest.mark.parametrize(
    "text",
    [b'{"a":[' + b"[]," * 40_000, b"[" + b"[]," * 40_000 + b"0]", b'{"a":' * 40_000 + b"0" + b"}" * 40_000],
    ids=["no end", "no object", "deep"],
)
def test_large_texts_that_are_not_objects_are_not_json(text: bytes) -> None:
    with pytest.raises(NotJson):
        loads(text)


def test_an_error_message_of_any_shape_is_shown_in_part() -> None:
    assert error_text({"detail": [{"loc": ["body"], "msg": "no"}]}) == "[{'loc': ['body'], 'msg': 'no'}]"
    assert len(error_text({"message": [["x" * 10_000] * 1000] * 1000})) <= 500
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert len(error_text(deep)) <= 500
