from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tandem.protocol.digest import cache_scope
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, closing, events
from tests.support.openai_sdk import openai_sdk

CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "org/toy", "messages": [{"role": "user", "content": "hi"}], **fields}


async def test_plain_answer_has_openais_shape(tokenizer: Tokenizer, client: Client) -> None:
    response = await client.post(CHAT, json=chat())
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    num_prompt = len(tokenizer.encode_chat([{"role": "user", "content": "hi"}], {"add_generation_prompt": True}, ""))
    num_output = len(tokenizer.encode("hello world", add_special_tokens=False)) + 1  # and the end
    assert answer == {
        "object": "chat.completion",
        "model": "org/toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 3, "cached_tokens_by_tier": {"pool": 3}},
        },
    }


@pytest.mark.parametrize("run", [1, 3, 100])
async def test_joined_stream_is_the_plain_answer(tokenizer: Tokenizer, run: int) -> None:
    async with closing(FakeBackend(tokenizer, "héllo 🎉 world", run=run)) as client:
        plain = (await client.post(CHAT, json=chat())).json()
        chunks = events(await client.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True})))
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert len({(c["id"], c["object"], c["model"], c["created"]) for c in [last, *chunks]}) == 1
    assert last["object"] == "chat.completion.chunk"
    assert all(c["usage"] is None for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in choices) == "héllo 🎉 world"
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_usage_of_a_stream_is_absent_or_counts_up(backend: FakeBackend, client: Client) -> None:
    backend.reply = "abc"
    chunks = events(await client.post(CHAT, json=chat(stream=True)))
    assert all("usage" not in c and c["choices"] for c in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await client.post(CHAT, json=chat(stream=True, stream_options=options)))
    assert [c["usage"]["completion_tokens"] for c in chunks[:-1]] == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [1, 2])
async def test_max_tokens_is_exact(tokenizer: Tokenizer, name: str, limit: int) -> None:
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        answer = (await client.post(CHAT, json=chat(**{name: limit}))).json()
        chunks = events(await client.post(CHAT, json=chat(stream=True, **{name: limit})))
    assert answer["choices"][0]["message"]["content"] == "abc"[:limit]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "abc"[:limit]


async def test_sampling_fields_reach_the_backend(backend: FakeBackend, client: Client) -> None:
    fields = {
        "seed": -2, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True,
        "frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1.2, "logit_bias": {"5": -100},
        "stop_token_ids": [7], "logprobs": True, "top_logprobs": 3, "cache_salt": "tenant",
    }  # fmt: skip
    response = await client.post(CHAT, json=chat(**fields))
    assert response.status_code == 200, response.text
    (request,) = backend.requests
    sampling = request.sampling
    assert request.cache_scope == cache_scope("tenant")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (7,))
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.2)
    assert (sampling.logit_bias, sampling.num_logprobs, sampling.seed) == ({5: -100.0}, 3, 2**63 - 2)


async def test_seed_is_drawn_when_absent_and_kept_when_given(backend: FakeBackend, client: Client) -> None:
    random = {"seed": -1}  # as llama.cpp has it
    for fields in ({"seed": 7, "n": 3}, {"seed": 7, "n": 3}, {}, {}, random, random):
        await client.post(CHAT, json=chat(**fields))
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds[6:])) == 4
    assert seeds[2] == 7  # of the first choice, which is served last
    assert (len(set(seeds[:3])), sorted(seeds[:3])) == (3, sorted(seeds[3:6]))


async def test_siblings_are_forks_of_the_first_and_share_the_prompt_count(backend: FakeBackend, client: Client) -> None:
    backend.reply = "abc"
    one = (await client.post(CHAT, json=chat())).json()
    many = (await client.post(CHAT, json=chat(n=3))).json()
    *siblings, first = backend.requests[1:]  # the first one is served last: the others are there by then
    assert (first.fork_of, [sibling.fork_of for sibling in siblings]) == ("", 2 * [first.request_id])
    assert len({request.sampling.seed for request in backend.requests[1:]}) == 3
    assert [c["index"] for c in many["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in many["choices"]] == ["abc"] * 3
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert many["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert many["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "cached_tokens_by_tier": {"pool": 3}}
    assert len({request.request_id for request in backend.requests}) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "run", "fields", "text", "stop", "num_steps"),
    [
        ("abcdefghijklmnop", 1, {"stop": ["zz", "def"]}, "abc", "def", 6),
        ("abcde", 1, {"stop": "defg"}, "abcde", None, 6),  # what is held back comes at the end
        ("abcabc", 4, {"stop": "b", "min_tokens": 3}, "abca", "b", 2),
    ],
)
async def test_stop_string_ends_the_answer_and_the_generation(
    tokenizer: Tokenizer, stream: bool, reply: str, run: int, fields: Any, text: str, stop: str | None, num_steps: int
) -> None:
    backend = FakeBackend(tokenizer, reply, run=run)
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(stream=stream, **fields))
    choices = [c["choices"][0] for c in events(response)[:-1]] if stream else response.json()["choices"]
    parts = [choice["delta" if stream else "message"].get("content", "") for choice in choices]
    assert ("".join(parts), choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (text, "stop", stop)
    assert backend.num_steps == num_steps


async def test_a_stop_token_is_reported_and_not_shown(
    tokenizer: Tokenizer, backend: FakeBackend, client: Client
) -> None:
    backend.reply = "abc"
    eos = tokenizer.encode("</s>", add_special_tokens=False)[0]
    answer = (await client.post(CHAT, json=chat(stop_token_ids=[eos], skip_special_tokens=False))).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["stop_reason"]) == ("abc", eos)


async def test_logprobs_have_an_entry_for_every_token(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "a🎉b")) as client:
        plain = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2))).json()
        none = (await client.post(CHAT, json=chat(logprobs=True))).json()
        chunks = events(await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2, stream=True)))
    entries = plain["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in entries] == ["a", "", "", "", "🎉", "b"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == "a🎉b"
    assert entries[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    assert all(e["top_logprobs"] == [] for e in none["choices"][0]["logprobs"]["content"])
    streamed = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
    assert [e for logprobs in streamed if logprobs for e in logprobs["content"]] == entries


@pytest.mark.parametrize(
    ("reply", "fields", "text"), [("abcdef", {"stop": "cd"}, "ab"), ("a🎉", {"max_tokens": 3}, "a\ufffd")]
)
async def test_logprobs_end_with_the_text(tokenizer: Tokenizer, reply: str, fields: Any, text: str) -> None:
    async with closing(FakeBackend(tokenizer, reply, run=2)) as client:
        [choice] = (await client.post(CHAT, json=chat(logprobs=True, **fields))).json()["choices"]
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"] == text


async def test_messages_reach_the_template(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    response = await client.post(CHAT, json=chat(messages=messages))
    assert response.status_code == 200, response.text
    assert tokenizer.decode(backend.requests[0].token_ids) == (
        '<s><system>be brief<user>one\ntwo<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call><user><tool_response>\nsunny\n</tool_response><assistant>"
    )


async def test_context_length_is_checked_first(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:
    num_prompt = len(tokenizer.encode_chat([{"role": "user", "content": "hi"}], {"add_generation_prompt": True}, ""))
    backend.max_model_len = num_prompt + 2
    fits = await client.post(CHAT, json=chat(max_tokens=2))
    over = await client.post(CHAT, json=chat(max_tokens=3, stream=True))
    backend.max_model_len = num_prompt
    full = await client.post(CHAT, json=chat())
    assert fits.status_code == 200
    for response, param in ((over, "max_tokens"), (full, "messages")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "context" in error["message"]
        assert str(num_prompt) in error["message"]


async def test_the_openai_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai_sdk(backend) as client:
        answer = await client.chat.completions.create(model="org/toy", messages=messages, logprobs=True)
        assert answer.choices[0].message.content == "hello world"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        async with client.chat.completions.stream(
            model="org/toy", messages=messages, stream_options={"include_usage": True}, n=2
        ) as stream:
            texts = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert len(texts) > 2
        told = [(choice.message.role, choice.message.content, choice.finish_reason) for choice in final.choices]
        assert told == [("assistant", "hello world", "stop")] * 2
        assert final.usage is not None
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="org/toy", messages=messages, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
    assert backend.num_open == 0


@pytest.mark.parametrize("depth", [200, 900, 1000, 1020, 3000])
async def test_deep_nesting_is_the_clients_fault(client: Client, depth: int) -> None:
    def body_of(arguments: Any = None, **fields: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "a"}]
        deep = "[" * depth + "]" * depth
        return json.dumps({"messages": said} | fields).replace('"DEEP"', deep).replace("DEEP", deep)

    bodies = [
        body_of('{"city": DEEP}'),
        body_of({"city": "DEEP"}),
        *(body_of(**{name: "DEEP"}) for name in ("chat_template_kwargs", "tools", "unknown")),
        body_of(tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": "DEEP"}}}]),
        body_of(chat_template_kwargs={"x": "DEEP"}),
        body_of(tools="DEEP", tool_choice="none"),
    ]
    for path in ("/v1/chat/completions", "/v1/route/explain", "/tokenize", "/v1/cache/pin"):
        for body in bodies:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400), (path, body[:80], response.text)
