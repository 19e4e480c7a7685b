"""`prediction`: what it becomes, what the usage says about it, and that it excludes no client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.router.backend import GenerateRequest
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, Step, closing

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def answer(backend: FakeBackend, **fields: Any) -> dict[str, Any]:
    async with closing(backend) as client:
        response = await client.post(CHAT, json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hello world", "hello world"),
        ([{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}], "hello \nworld"),
        ("", ""),
        ([], ""),
    ],
)
async def test_its_tokens_go_to_the_workers(tokenizer: Tokenizer, content: Any, text: str) -> None:
    backend = FakeBackend(tokenizer)
    await answer(backend, prediction=predicted(content), n=2)
    expected = tuple(tokenizer.encode(text, add_special_tokens=False))
    assert [request.sampling.prediction for request in backend.requests] == [expected, expected]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"tools": [TOOL]},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"max_completion_tokens": 3},
        {"response_format": {"type": "json_object"}},
        {"stream": False, "stop": ["x"], "seed": 1},
    ],
)
async def test_it_goes_with_every_other_field(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    backend = FakeBackend(tokenizer, '{"a": 1}')
    await answer(backend, prediction=predicted('{"a": 1}'), **fields)
    assert all(request.sampling.prediction for request in backend.requests)


async def test_an_enormous_one_is_cut_to_what_an_answer_can_be(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    await answer(backend, prediction=predicted("word " * 200_000))
    most = backend.max_model_len
    assert most is not None
    assert 0 < len(backend.requests[0].sampling.prediction) <= most


@pytest.mark.parametrize("value", [3, "text", [], {"content": 3}, {"content": [3]}])
async def test_a_value_of_another_type_is_named(tokenizer: Tokenizer, value: Any) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
        response = await client.post(CHAT, json={"messages": MESSAGES, "prediction": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "content"},
        predicted([{"type": "text"}]),
        predicted([{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "data:,"}}]),
        {"type": "guess", "content": "hello"},
    ],
)
async def test_one_that_cannot_be_used_is_named_and_goes_to_no_worker(tokenizer: Tokenizer, value: Any) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        response = await client.post(CHAT, json={"messages": MESSAGES, "prediction": value})
        plain = await client.post(CHAT, json={"messages": MESSAGES, "prediction": predicted("")})
    assert (response.status_code, plain.status_code) == (200, 200)
    assert response.headers["x-tandem-ignored"] == "prediction (it is not of type content)"
    assert "x-tandem-ignored" not in plain.headers
    assert [request.sampling.prediction for request in backend.requests] == [(), ()]


def counting(backend: FakeBackend) -> None:
    """Let each step but the first tell of two accepted tokens and a rejected one."""
    steps = backend.reply_steps

    def script(request: GenerateRequest) -> list[Step]:
        first, *rest = steps(request)
        counted = [
            msgspec.structs.replace(one, num_accepted_tokens=2, num_rejected_tokens=1)
            for one in rest
            if isinstance(one, msgspec.Struct)
        ]
        return [first, *counted]

    backend.script = script


async def test_usage_says_how_much_of_it_came(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, "hello world and more", run=3)
    plain = (await answer(backend))["usage"]
    assert "completion_tokens_details" not in plain
    counting(backend)
    usage = (await answer(backend, prediction=predicted("hello world")))["usage"]
    details = usage.pop("completion_tokens_details")
    num_steps = len(backend.reply_steps(backend.requests[-1])) - 1
    assert num_steps > 2
    assert details["rejected_prediction_tokens"] == num_steps
    assert 2 * (num_steps - 1) < details["accepted_prediction_tokens"] <= 2 * num_steps
    assert usage == {**plain, "prompt_tokens_details": usage["prompt_tokens_details"]}


async def test_no_more_is_accepted_than_the_answer_has(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, "hello world and more", run=50)
    counting(backend)
    usage = (await answer(backend, prediction=predicted("hello world"), stop="h"))["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] <= usage["completion_tokens"]
