from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tandem.protocol.digest import cache_scope
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, closing, events, make_app

CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "org/toy", "messages": [{"role": "user", "content": "hi"}], **fields}


def sdk(backend: FakeBackend) -> openai.AsyncOpenAI:
    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(backend)))
    return openai.AsyncOpenAI(api_key="any", base_url="http://localhost/v1", http_client=http_client, max_retries=0)


async def test_plain_answer_has_openais_shape(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
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


async def test_usage_is_absent_unless_asked_for(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer)) as client:
        chunks = events(await client.post(CHAT, json=chat(stream=True)))
    assert chunks.pop() == "[DONE]"
    assert all("usage" not in c and c["choices"] for c in chunks)


async def test_continuous_usage_counts_up(tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        chunks = events(await client.post(CHAT, json=chat(stream=True, stream_options=options)))
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [1, 2])
async def test_max_tokens_is_exact(tokenizer: Tokenizer, name: str, limit: int) -> None:
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        answer = (await client.post(CHAT, json=chat(**{name: limit}))).json()
        chunks = events(await client.post(CHAT, json=chat(stream=True, **{name: limit})))
    assert answer["choices"][0]["message"]["content"] == "abc"[:limit]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "abc"[:limit]


async def test_default_max_tokens_is_what_is_left_of_the_context(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        await client.post(CHAT, json=chat())
    (request,) = backend.requests
    assert request.sampling.max_tokens == 512 - len(request.token_ids)


async def test_null_fields_and_unknown_fields_are_tolerated(tokenizer: Tokenizer) -> None:
    optional = "max_tokens n stream stop seed temperature top_p logit_bias tools response_format logprobs top_logprobs"
    nulls = dict.fromkeys(optional.split())
    extras = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "brand_new": [1]}
    async with closing(FakeBackend(tokenizer)) as client:
        response = await client.post(CHAT, json=chat(**nulls, **extras))
    assert response.status_code == 200, response.text


async def test_sampling_fields_reach_the_backend(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    fields = {
        "seed": -2, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True,
        "frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1.2, "logit_bias": {"5": -100},
        "stop_token_ids": [7], "logprobs": True, "top_logprobs": 3, "cache_salt": "tenant",
    }  # fmt: skip
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(**fields))
    assert response.status_code == 200, response.text
    (request,) = backend.requests
    sampling = request.sampling
    assert request.cache_scope == cache_scope("tenant")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (7,))
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.2)
    assert (sampling.logit_bias, sampling.num_logprobs, sampling.seed) == ({5: -100.0}, 3, 2**63 - 2)


async def test_seed_is_drawn_when_absent_and_kept_when_given(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        for fields in ({}, {}, {"seed": 7, "n": 3}, {"seed": 7, "n": 3}):
            await client.post(CHAT, json=chat(**fields))
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    assert len(set(seeds[2:5])) == 3
    assert sorted(seeds[2:5]) == sorted(seeds[5:8])


async def test_siblings_start_after_the_first_token_and_share_the_prompt_count(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, "abc")
    open_at_start: list[int] = []
    plain_script = backend.script
    backend.script = lambda request: open_at_start.append(backend.num_steps) or plain_script(request)  # type: ignore[func-returns-value]
    async with closing(backend) as client:
        one = (await client.post(CHAT, json=chat())).json()
        open_at_start.clear()
        backend.num_steps = 0
        many = (await client.post(CHAT, json=chat(n=3))).json()
    assert open_at_start[0] == 0
    assert min(open_at_start[1:]) >= 1
    assert [c["index"] for c in many["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in many["choices"]] == ["abc"] * 3
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert many["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert many["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "cached_tokens_by_tier": {"pool": 3}}
    assert len({request.request_id for request in backend.requests}) == 4


async def test_streamed_siblings_are_told_apart_by_index(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "abc")) as client:
        chunks = events(await client.post(CHAT, json=chat(n=2, stream=True)))
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in choices) == "abc"
        assert [c["finish_reason"] for c in choices].count("stop") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_and_the_generation(tokenizer: Tokenizer, stream: bool) -> None:
    backend = FakeBackend(tokenizer, "abcdefghijklmnop")
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(stop=["zz", "def"], stream=stream))
    if stream:
        choices = [c["choices"][0] for c in events(response)[:-1]]
        text, choice = "".join(c["delta"].get("content", "") for c in choices), choices[-1]
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "def")
    assert backend.num_steps == 6


async def test_text_held_back_is_delivered_at_the_end(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "abcde")) as client:
        chunks = events(await client.post(CHAT, json=chat(stop="defg", stream=True)))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "abcde"


async def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "abcabc", run=4)) as client:
        answer = (await client.post(CHAT, json=chat(stop="b", min_tokens=3))).json()
    assert answer["choices"][0]["message"]["content"] == "abca"


async def test_stop_token_is_told_and_not_shown(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, "abc")
    eos = tokenizer.encode("</s>", add_special_tokens=False)[0]
    async with closing(backend) as client:
        answer = (await client.post(CHAT, json=chat(stop_token_ids=[eos], skip_special_tokens=False))).json()
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["stop_reason"] == eos


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


async def test_logprobs_end_with_the_text_at_a_stop_string(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "abcdef", run=2)) as client:
        answer = (await client.post(CHAT, json=chat(logprobs=True, stop="cd"))).json()
    assert [e["token"] for e in answer["choices"][0]["logprobs"]["content"]] == ["a", "b"]


async def test_logprobs_cover_a_character_cut_short(tokenizer: Tokenizer) -> None:
    async with closing(FakeBackend(tokenizer, "a🎉")) as client:
        answer = (await client.post(CHAT, json=chat(logprobs=True, max_tokens=3))).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "a\ufffd"
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == "a\ufffd"


async def test_messages_reach_the_template(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(messages=messages))
    assert response.status_code == 200, response.text
    assert tokenizer.decode(backend.requests[0].token_ids) == (
        '<s><system>be brief<user>one\ntwo<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call><user><tool_response>\nsunny\n</tool_response><assistant>"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 1e-40, "min_p": 0.5}, "repetition_penalty"),
        ({"repetition_penalty": 1e6}, "repetition_penalty"),
        ({"logit_bias": {str(i): -100 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs.regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
)
async def test_a_bad_field_is_named(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(**fields))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert 10 < len(error["message"]) < 300
    assert backend.requests == []


async def test_context_length_is_checked_before_the_backend(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    num_prompt = len(tokenizer.encode_chat([{"role": "user", "content": "hi"}], {"add_generation_prompt": True}, ""))
    async with closing(backend) as client:
        backend.max_model_len = num_prompt + 2
        fits = await client.post(CHAT, json=chat(max_tokens=2))
        over = await client.post(CHAT, json=chat(max_tokens=3, stream=True))
        backend.max_model_len = num_prompt
        full = await client.post(CHAT, json=chat())
    assert fits.status_code == 200
    for response, param in ((over, "max_tokens"), (full, "messages")):
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "context" in error["message"]
        assert str(num_prompt) in error["message"]


async def test_the_openai_sdk_reads_plain_and_streamed_answers(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    messages: Any = [{"role": "user", "content": "hi"}]
    async with sdk(backend) as client:
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
        assert [choice.message.content for choice in final.choices] == ["hello world"] * 2
        assert final.usage is not None
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="org/toy", messages=messages, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
    assert backend.num_open == 0


@pytest.mark.parametrize("depth", [200, 900, 1000, 1020, 3000])
async def test_deep_nesting_is_the_clients_fault(tokenizer: Tokenizer, depth: int) -> None:
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
    async with closing(FakeBackend(tokenizer)) as client:
        for path in ("/v1/chat/completions", "/v1/route/explain", "/tokenize", "/v1/cache/pin"):
            for body in bodies:
                response = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code in (200, 400), (path, body[:80], response.text)
