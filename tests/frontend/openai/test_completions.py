from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, closing, events
from tests.support.openai_sdk import openai_sdk

COMPLETIONS = "/v1/completions"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


async def test_plain_answer_has_openais_shape(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:
    backend.reply = "abc"
    answer = (await client.post(COMPLETIONS, json={"model": "org/toy", "prompt": "hi"})).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    choice = {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert answer == {
        "object": "text_completion",
        "model": "org/toy",
        "choices": [choice],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3, "cached_tokens_by_tier": {"pool": 3}}},
    }
    assert backend.requests[0].token_ids == tokenizer.encode("hi")


async def test_max_tokens_defaults_to_16_or_what_is_left(backend: FakeBackend, client: Client) -> None:
    backend.reply = "x" * 100
    for max_model_len in (512, 10, None):
        backend.max_model_len = max_model_len
        await client.post(COMPLETIONS, json={"prompt": "hi"})
    assert [request.sampling.max_tokens for request in backend.requests] == [16, 7, 16]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["<s>hi"]),
        (["hi", "ho"], ["<s>hi", "<s>ho"]),
        ([70], ["e"]),
        ([70, 71], ["ef"]),
        ([[70], [71, 72]], ["e", "fg"]),
        ("", ["<s>"]),
    ],
)
async def test_every_form_of_prompt(
    tokenizer: Tokenizer, backend: FakeBackend, client: Client, prompt: Any, expected: list[str]
) -> None:
    backend.reply = "abc"
    shift = ids_of(tokenizer, "e")[0] - 70
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        prompt = [[i + shift for i in p] if isinstance(p, list) else p + shift for p in prompt]
    answer = (await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2})).json()
    assert sorted(tokenizer.decode(request.token_ids) for request in backend.requests) == sorted(expected)
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(len(r.token_ids) for r in backend.requests)
    assert answer["usage"]["completion_tokens"] == 2 * len(expected)


async def test_choices_come_in_prompt_order(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        body = {"prompt": ["one", "two"], "n": 2, "echo": True}
        plain = (await client.post(COMPLETIONS, json=body)).json()
        chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    expected = ["oneabc", "oneabc", "twoabc", "twoabc"]
    assert [c["text"] for c in plain["choices"]] == expected
    choices = [c["choices"][0] for c in chunks[:-1]]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(4)] == expected


async def test_one_prompt_gives_the_same_seeds_alone_and_in_a_batch(backend: FakeBackend, client: Client) -> None:
    backend.reply = "abc"
    await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "seed": 5})
    await client.post(COMPLETIONS, json={"prompt": ["a", "a"]})
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds[:2] == [5, 5]
    assert seeds[2] != seeds[3]


async def test_echo_alone_generates_nothing(backend: FakeBackend, client: Client) -> None:
    backend.reply = "abc"
    body = {"prompt": "hi there", "echo": True, "max_tokens": 0}
    plain = (await client.post(COMPLETIONS, json=body)).json()
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    assert (plain["choices"][0]["text"], plain["usage"]["completion_tokens"]) == ("hi there", 0)
    assert ("".join(c["choices"][0]["text"] for c in chunks[:-1]), backend.requests) == ("hi there", [])


async def test_logprobs_join_to_the_text_with_right_offsets(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "hello é w")) as client:
        plain = (await client.post(COMPLETIONS, json={"prompt": "hi", "logprobs": 2})).json()["choices"][0]
        zero = (await client.post(COMPLETIONS, json={"prompt": "hi", "logprobs": 0})).json()["choices"][0]
        chunks = events(await client.post(COMPLETIONS, json={"prompt": "hi", "logprobs": 2, "stream": True}))
    logprobs = plain["logprobs"]
    assert "".join(logprobs["tokens"]) == plain["text"] == "hello é w"
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert plain["text"][offset:].startswith(token)
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    assert logprobs["top_logprobs"][0] == {"hell": -0.5, tokenizer.token_text(0): -2.5}
    assert zero["logprobs"]["top_logprobs"][0] == {"hell": -0.5}
    streamed = [c["choices"][0]["logprobs"] for c in chunks[:-1] if c["choices"][0]["logprobs"]]
    for key, values in logprobs.items():
        assert [value for piece in streamed for value in piece[key]] == values


async def test_a_missing_prompt_is_named(client: Client) -> None:
    error = (await client.post(COMPLETIONS, json={"model": "org/toy"})).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_the_openai_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    async with openai_sdk(backend) as client:
        answer = await client.completions.create(model="org/toy", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == ["hello world"] * 2
        stream = await client.completions.create(model="org/toy", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"
        models = await client.models.list()
        assert [model.id for model in models.data] == ["org/toy"]
        assert (await client.models.retrieve("org/toy")).id == "org/toy"
    assert backend.num_open == 0


@pytest.mark.parametrize("fields", [{"prompt": ["a"] * 300}, {"prompt": ["a"] * 3, "n": 100}])
async def test_many_choices_start_one_by_one(backend: FakeBackend, client: Client, fields: dict[str, Any]) -> None:
    backend.reply = "ab"
    begun: list[int] = []  # how many had, at each turn

    async def count() -> None:
        while True:
            begun.append(len(backend.requests))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    answer = await client.post(COMPLETIONS, json=fields)
    counting.cancel()
    assert len(answer.json()["choices"]) == 300
    assert max(after - before for before, after in itertools.pairwise(begun)) == 1


async def test_token_ids_are_shown_to_those_who_ask(tokenizer: Tokenizer) -> None:
    ids, prompt_ids = ids_of(tokenizer, "abc"), tokenizer.encode("hi")
    body: dict[str, Any] = {"prompt": ["hi", "hi"], "max_tokens": 3, "return_token_ids": True}
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        assert [(one["prompt_token_ids"], one["token_ids"][: len(ids)]) for one in choices] == [(prompt_ids, ids)] * 2
        streamed = [e["choices"][0] for e in events(await client.post(COMPLETIONS, json=body | {"stream": True}))[:-1]]
    for index in (0, 1):
        pieces = [piece for piece in streamed if piece["index"] == index]
        assert [piece.get("prompt_token_ids") for piece in pieces] == [prompt_ids] + [None] * (len(pieces) - 1)
        assert [i for piece in pieces for i in piece["token_ids"]] == choices[index]["token_ids"]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_the_ids_of_a_lone_prompt_are_shown(tokenizer: Tokenizer, client: Client, logprobs: int | None) -> None:
    body = {"prompt": "hi", "echo": True, "max_tokens": 0, "n": 2, "logprobs": logprobs, "return_token_ids": True}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    streamed = [e["choices"][0] for e in events(await client.post(COMPLETIONS, json=body | {"stream": True}))[:-1]]
    assert [(one["prompt_token_ids"], one["token_ids"]) for one in choices] == [(tokenizer.encode("hi"), [])] * 2
    for index in (0, 1):
        pieces = [piece for piece in streamed if piece["index"] == index and "token_ids" in piece]
        assert [(one["prompt_token_ids"], one["token_ids"]) for one in pieces] == [(tokenizer.encode("hi"), [])]


async def test_tokens_without_text_yet_are_pieces_where_their_ids_are_shown(tokenizer: Tokenizer) -> None:
    body = {"prompt": "hi", "max_tokens": 9, "stream": True, "stop": "bcd"}
    async with closing(FakeBackend(tokenizer, "abce")) as client:
        plain = [e["choices"][0] for e in events(await client.post(COMPLETIONS, json=body))[:-1]]
        body |= {"return_token_ids": True}
        shown = [e["choices"][0] for e in events(await client.post(COMPLETIONS, json=body))[:-1]]
    assert [piece["text"] for piece in plain if piece["text"]] == [piece["text"] for piece in shown if piece["text"]]
    assert len(shown) > len(plain)
    assert [i for piece in shown for i in piece["token_ids"]][:4] == ids_of(tokenizer, "abce")


async def test_the_ids_of_a_chat_begin_with_those_of_its_prompt(backend: FakeBackend, client: Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "return_token_ids": True}
    backend.reply = "abc"
    plain = (await client.post("/v1/chat/completions", json=body)).json()
    first, *others, _ = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert plain["prompt_token_ids"] == first["prompt_token_ids"] == backend.requests[0].token_ids
    assert [i for e in others for i in e["choices"][0]["token_ids"]] == plain["choices"][0]["token_ids"]
    assert not any("prompt_token_ids" in e for e in others)
