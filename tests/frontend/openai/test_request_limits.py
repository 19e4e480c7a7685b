"""Limits on what one request may ask for: a refusal names the value, the limit and the field."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tandem.frontend.http.json_body import LARGE_BODY_BYTES, decode_body
from tandem.frontend.openai import request_limits as limits
from tandem.frontend.openai.schema import CompletionRequest
from tandem.text.stop_strings import StopStrings
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, closing

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "a"}
TEXT_PART = {"type": "text", "text": "a"}


MANY_MESSAGES = {"messages": [USER] * 16385}
MANY_PARTS = {"messages": [{"role": "user", "content": [TEXT_PART] * 40_000}] * 2}
MANY_CALLS = {"messages": [{"role": "assistant", "tool_calls": [{}] * 65537}]}
MANY_OPTIONS = {"messages": [USER], "chat_template_kwargs": {str(i): 1 for i in range(65)}}
MANY_SCORES = {"prompt": [[5] * 400] * 32, "n": 8, "logprobs": 10, "echo": True}
OF_EACH = {"prompt": ["a"] * 16, "n": 128}
BIASED = OF_EACH | {"logit_bias": {str(i): 1 for i in range(33)}}
LONG_STOPS = {"prompt": "a", "stop": ["é" * 4096] * 5}
STOPPED = {"prompt": ["a"] * 66, "stop_token_ids": [1] * 1000}


@pytest.mark.parametrize(
    ("path", "body", "value", "limit", "param"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 17, "n": 128}, 2176, limits.MAX_SEQUENCES, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, 2049, limits.MAX_SEQUENCES, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 2049}, 2049, limits.MAX_SEQUENCES, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 1025}, 1025, limits.MAX_STOPS, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": "a" * 4097}, 4097, limits.MAX_STOP_CHARS, "stop"),
        (COMPLETIONS, LONG_STOPS, 20480, limits.MAX_STOPS_CHARS, "stop"),
        (COMPLETIONS, BIASED, 33 * 2048, limits.MAX_TOKEN_RULES, "logit_bias"),
        (COMPLETIONS, STOPPED, 66_000, limits.MAX_TOKEN_RULES, "stop_token_ids"),
        (COMPLETIONS, OF_EACH | {"logprobs": 2}, 6144, limits.MAX_STEP_LOGPROBS, "logprobs"),
        (COMPLETIONS, MANY_SCORES, (32 * 400) * 8 * 11, limits.MAX_SCORED_LOGPROBS, "logprobs"),
        (CHAT, MANY_PARTS, 80_000, limits.MAX_MESSAGE_PARTS, "messages"),
        (CHAT, MANY_CALLS, 65537, limits.MAX_MESSAGE_PARTS, "messages"),
        (CHAT, MANY_OPTIONS, 65, limits.MAX_TEMPLATE_OPTIONS, "chat_template_kwargs"),
        *(
            (path, MANY_MESSAGES, 16385, limits.MAX_MESSAGES, "messages")
            for path in (CHAT, "/tokenize", "/v1/cache/pin")
        ),
    ],
)
async def test_too_much_is_refused_with_value_limit_and_field(
    client: Client, path: str, body: dict[str, Any], value: int, limit: int, param: str
) -> None:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert f"has {value} " in error["message"]
    assert f"limit is {limit}." in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 16, "n": 128, "logprobs": 1},
        {"stop": [f"{i:04d}" + "x" * 12 for i in range(1024)]},
        {"stop": ["x" * 4096, "y" * 4096]},
        {"logit_bias": {str(i): 1 for i in range(256)}, "n": 128},
        {"stop_token_ids": [1] * 1024, "prompt": ["a"] * 64},
    ],
)
async def test_a_request_at_the_limit_is_served(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    async with closing(FakeBackend(tokenizer, "hi")) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", **fields})
    assert response.status_code == 200, response.text


async def test_prompts_of_all_sequences_are_bounded_together(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 100)
    monkeypatch.setattr(limits, "MAX_ECHO_CHARS", 50)
    fits = await client.post(COMPLETIONS, json={"prompt": "x" * 24, "n": 4})  # and <s>
    longer = await client.post(COMPLETIONS, json={"prompt": "x" * 25, "n": 4})
    echoed = await client.post(COMPLETIONS, json={"prompt": ["x" * 13, "x" * 13], "n": 2, "echo": True})
    assert [fits.status_code, longer.status_code, echoed.status_code] == [200, 400, 400]
    assert (longer.json()["error"]["param"], echoed.json()["error"]["param"]) == ("n", "echo")
    assert "has 52 characters to echo" in echoed.json()["error"]["message"]


async def test_log_probabilities_are_bounded_unless_streamed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_LOGPROBS", 59)
    body = {"messages": [USER], "n": 2, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    plain = await client.post(CHAT, json=body)
    streamed = await client.post(CHAT, json=body | {"stream": True})
    assert (plain.status_code, streamed.status_code) == (400, 200)
    assert "has 60 log prob" in plain.json()["error"]["message"]
    assert plain.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "x" * 100_000]}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 513}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * 513]}, "prompt"),
        (CHAT, {"messages": [USER, {"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
        ("/v1/cache/pin", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/cache/pin", {"prompt": [1] * 513}, "prompt"),
        ("/v1/cache/pin", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/v1/route/explain", {"prompt": "x" * 100_000}, "prompt"),
    ],
)
async def test_a_prompt_that_cannot_fit_is_refused_unencoded(
    tokenizer: Tokenizer, client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} of a prompt that cannot fit")

    monkeypatch.setattr(tokenizer, "_fast", Refusing())
    monkeypatch.setattr(tokenizer._segments, "_fast", Refusing())
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), error
    assert "maximum context length is 512 tokens" in error["message"]


async def test_the_automaton_is_built_once_for_all(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = StopStrings.__init__
    monkeypatch.setattr(StopStrings, "__init__", lambda self, stops: (built.append(self), build(self, stops))[1])
    async with closing(FakeBackend(tokenizer, "hello world")) as client:
        body = {"prompt": ["a", "b"], "n": 3, "stop": [" wor"], "logit_bias": {"1": 1}}
        choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert ([(choice["text"], choice["stop_reason"]) for choice in choices], len(built)) == ([("hello", " wor")] * 6, 1)


async def test_bias_is_made_once_and_seeds_differ_by_prompt(backend: FakeBackend, client: Client) -> None:
    await client.post(COMPLETIONS, json={"prompt": ["a", "bc"], "n": 2, "logit_bias": {"1": 1}})
    sampled = [request.sampling for request in backend.requests]
    assert len({id(sampling.logit_bias) for sampling in sampled}) == 1
    assert len({sampling.seed for sampling in sampled}) == 4


async def test_min_tokens_is_checked_against_each_prompts_room(client: Client) -> None:
    body = {"prompt": ["a", "x" * 505], "min_tokens": 10}  # 512 hold 6 more
    error = (await client.post(COMPLETIONS, json=body)).json()["error"]
    assert error["message"] == "min_tokens=10 is greater than max_tokens=6."


def test_a_body_of_a_million_lists_is_decoded_without_garbage_collection() -> None:
    body = b'{"prompt":[' + b"[1]," * 500_000 + b"[1]]}"
    assert len(body) > LARGE_BODY_BYTES
    collections: list[object] = []
    gc.callbacks.append(lambda phase, _: collections.append(phase) if phase == "start" else None)
    try:
        request = decode_body(body, CompletionRequest)
        num_collections = len(collections)
    finally:
        gc.callbacks.pop()
    assert len(request.prompt) == 500_001
    assert num_collections <= 1  # after decoding; without the pause there are 700, and they take most of the time
    assert gc.isenabled()


async def test_a_long_text_is_encoded_without_blocking_the_event_loop(tokenizer: Tokenizer) -> None:
    """The text is accepted, not refused: the context is as long as the body may be."""
    text = "hello wörld " * 60_000
    num_turns = 0

    async def turning() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)  # a turn as soon as the loop is free
            num_turns += 1

    turner = asyncio.create_task(turning())
    ids = await asyncio.get_running_loop().run_in_executor(None, tokenizer.encode, text)
    turner.cancel()
    assert tokenizer.decode(ids[1:]) == text
    # A call that held the GIL would let the loop run once or twice in all that time.
    assert num_turns > 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/v1/cache/pin", "/v1/route/explain"])
async def test_millions_of_arrays_are_refused_before_they_are_decoded(client: Client, path: str) -> None:
    body = b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"unknown":[' + b"[]," * 600_000 + b"{}]}"
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "has 600005 opening brackets in its JSON; the limit is 524288." in response.json()["error"]["message"]


async def test_arguments_of_a_tool_call_are_bounded_like_a_body(client: Client) -> None:
    arguments = "[" + "\\u005b]," * 600_000 + "1]"  # escaped, so the body shows no brackets
    call = '{"function":{"name":"f","arguments":"' + arguments + '"}}'
    body = '{"messages":[{"role":"assistant","content":"","tool_calls":[' + call + "]}]}"
    response = await client.post(CHAT, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "has 600001 opening brackets" in response.json()["error"]["message"]


async def test_options_that_no_template_can_work_with_are_the_clients_fault(client: Client) -> None:
    for options in ({"padding": True}, {"return_dict": True}, {"continue_final_message": "x"}, {"tokenizer_kwargs": 3}):
        response = await client.post(CHAT, json={"messages": [USER], "chat_template_kwargs": options})
        assert response.status_code in (200, 400), (options, response.text)
