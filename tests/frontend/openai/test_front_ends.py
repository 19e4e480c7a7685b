"""What front ends and older clients send to chat and completions, by client and field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.frontend.openai import other_fields
from tandem.protocol.messages import TokenLogprobs
from tandem.router.backend import GenerateRequest
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, Step, closing, delta_of, events
from tests.support.toy_tokenizer import build_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
# Settings that ask for nothing, as front ends send them whether their user changed them or not.
NEUTRAL: dict[str, dict[str, Any]] = {
    "SillyTavern": {
        "min_p": 0, "typical_p": 1, "typical": 1, "tfs": 1, "top_a": 0, "top_k": 0, "top_p": 1, "mirostat_mode": 0,
        "mirostat_tau": 5, "mirostat_eta": 0.1, "repetition_penalty": 1, "rep_pen": 1, "rep_pen_range": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": "[]", "xtc_probability": 0,
        "xtc_threshold": 0.1, "skew": 0, "nsigma": 0, "smoothing_factor": 0, "dynatemp_range": 0,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5], "custom_token_bans": "", "banned_strings": [], "json_schema": {},
        "grammar_string": "", "grammar": "", "add_bos_token": True, "ban_eos_token": False,
        "skip_special_tokens": True, "guidance_scale": 1, "negative_prompt": "", "speculative_ngram": False,
        "include_reasoning": True, "stop": [], "seed": -1, "n": 1, "max_tokens": None, "truncation_length": 4096,
    },
    "text-generation-webui": {
        "top_k": 0, "tfs": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "early_stopping": False, "length_penalty": 1,
        "num_beams": 1, "penalty_alpha": 0, "do_sample": True, "auto_max_new_tokens": False,
        "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "preset": None, "stop": "", "seed": None,
    },
    "open-webui": {
        "user": "", "metadata": {}, "features": {}, "temperature": None, "top_p": None, "max_tokens": None,
        "stream_options": {"include_usage": True}, "logit_bias": {}, "frequency_penalty": 0, "seed": None,
        "reasoning_effort": None, "tool_ids": [], "filter_ids": [], "background_tasks": {}, "stop": [],
    },
    "llama.cpp": {
        "top_k": -1, "typ_p": 1, "repeat_last_n": 0, "repeat_penalty": 1, "presence_penalty": 0, "mirostat": 0,
        "dry_multiplier": 0, "dry_allowed_length": 2, "xtc_probability": 0, "samplers": ["top_k"], "n_predict": -1,
        "cache_prompt": True, "timings_per_token": False, "max_tokens": -1, "grammar": "", "n_probs": 0,
        "return_progress": False, "reasoning_format": "none",
    },
    "koboldcpp": {
        "rep_pen": 1, "rep_pen_slope": 0, "adaptive_target": -1, "xtc_probability": 0, "banned_tokens": [],
        "logit_bias": {}, "memory": "", "images": [], "render_special": False, "logprobs": False, "quiet": True,
    },
    "vLLM": {
        "n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "min_tokens": 0, "min_p": 0.0,
        "guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None,
        "guided_decoding_backend": None, "guided_whitespace_pattern": None, "structured_outputs": None,
        "spaces_between_special_tokens": True, "truncate_prompt_tokens": -1, "include_stop_str_in_output": False,
        "allowed_token_ids": None, "bad_words": [], "prompt_logprobs": None, "detokenize": True,
        "stop_token_ids": [], "ignore_eos": False, "repetition_penalty": 1.0, "priority": 0, "logits_processors": None,
    },
    "SGLang": {
        "regex": None, "ebnf": None, "json_schema": None, "stop_regex": None, "no_stop_trim": False,
        "separate_reasoning": True, "stream_reasoning": True, "continue_final_message": False, "lora_path": None,
        "session_params": None, "return_hidden_states": False, "custom_params": None,
    },
    "OpenAI": {
        "logprobs": None, "top_logprobs": None, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "auto", "store": False,
        "modalities": ["text"], "audio": None, "prediction": None, "service_tier": "auto", "verbosity": "medium",
        "stream_options": {"include_usage": False}, "metadata": {}, "user": "", "suffix": None, "echo": False,
        "web_search_options": {}, "prompt_cache_key": "", "safety_identifier": "", "temperature": 1, "top_p": 1,
    },
}  # fmt: skip
NULL = "max_tokens n stream stop seed temperature top_p logit_bias tools response_format logprobs top_logprobs"
NEUTRAL["null"] = dict.fromkeys(NULL.split())
OF_CHAT: dict[str, Any] = {"max_tokens": 0, "max_completion_tokens": -1, "logprobs": 0, "top_logprobs": 0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("client_name", NEUTRAL)
async def test_neutral_settings_pass(backend: FakeBackend, client: Client, path: str, client_name: str) -> None:
    fields = NEUTRAL[client_name]
    sets = [{name: value} for name, value in fields.items()] + [fields]
    for one in [{}, *sets]:
        response = await client.post(path, json=BODIES[path] | one)
        assert response.status_code == 200, f"{one}: {response.text}"
    plain, *others = [request.sampling for request in backend.requests]
    for sampling, given in zip(others, sets, strict=True):
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.grammar) == (
            *(plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.grammar),
        )
        assert sampling.num_logprobs is None
        assert path == COMPLETIONS or sampling.max_tokens == plain.max_tokens, given


async def test_all_neutral_settings_together(backend: FakeBackend, client: Client) -> None:
    together = {name: value for fields in NEUTRAL.values() for name, value in fields.items()} | OF_CHAT
    for one in ({}, *({name: value} for name, value in OF_CHAT.items()), together):
        response = await client.post(CHAT, json=BODIES[CHAT] | one)
        assert response.status_code == 200, f"{one}: {response.text}"
    assert "dry_multiplier" in response.headers["x-tandem-ignored"]
    assert len({request.sampling.max_tokens for request in backend.requests}) == 1


async def test_max_tokens_are_the_rest_of_the_context(backend: FakeBackend, client: Client) -> None:
    for path, fields in ((CHAT, {}), (CHAT, {"max_tokens": -1}), (COMPLETIONS, {"max_tokens": -1})):
        await client.post(path, json=BODIES[path] | fields)
    assert [request.sampling.max_tokens + len(request.token_ids) for request in backend.requests] == [512] * 3


# -- continue buttons


@pytest.fixture(scope="module")
def trimming(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its template closes messages, trims them, shows reasoning, and opens an answer with reasoning."""
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    return Tokenizer(build_tokenizer(tmp_path_factory.mktemp("trimming"), template))


CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def talk(content: str | None, **fields: Any) -> dict[str, Any]:
    last = {"role": "assistant", "content": content, **fields}
    return {"messages": [{"role": "user", "content": "Hi"}, last]}


@pytest.mark.parametrize("fields", [CONTINUED, {"continue_final_message": True}])
async def test_open_webui_continues_the_last_message(trimming: Tokenizer, fields: dict[str, Any]) -> None:
    backend = FakeBackend(trimming, "world")
    async with closing(backend) as client:
        answer = (await client.post(CHAT, json=talk("Hello, ") | fields)).json()
        tokens = (await client.post("/tokenize", json=talk("Hello, ") | fields)).json()["tokens"]
    assert trimming.decode(backend.requests[0].token_ids) == "<user>Hi</s><assistant>Hello,"
    assert (tokens, answer["choices"][0]["message"]["content"]) == (backend.requests[0].token_ids, "world")


@pytest.mark.parametrize(
    ("last", "reply", "content", "reasoning"),
    [
        (talk("<think>so"), " is it</think>Yes", "Yes", "is it"),
        (talk("<think>so</think>Ye"), "s", "s", None),
        (talk("", reasoning_content="so"), " is it</think>Yes", "Yes", "is it"),
        (talk(None, reasoning="so"), " is it</think>Yes", "Yes", "is it"),
        (talk("Ye"), " s", " s", None),
    ],
)
async def test_a_message_is_continued_within_its_reasoning(
    trimming: Tokenizer, last: dict[str, Any], reply: str, content: str, reasoning: str | None
) -> None:
    backend = FakeBackend(trimming, reply)
    async with closing(backend, reasoning_parser="think") as client:
        answer = (await client.post(CHAT, json=last | CONTINUED)).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert trimming.decode(backend.requests[0].token_ids).endswith(("so", "Ye"))


async def test_a_continued_message_may_end_with_a_call(backend: FakeBackend, client: Client) -> None:
    backend.reply = ' it.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    backend.max_model_len = 4096
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = (await client.post(CHAT, json=talk("I do") | CONTINUED | {"tools": tools})).json()
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" it.", "tool_calls")


# -- reasoning effort


async def test_reasoning_effort_goes_to_the_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ messages[0].content }}"
    tokenizer = Tokenizer(build_tokenizer(tmp_path_factory.mktemp("effort"), template))
    backend = FakeBackend(tokenizer)
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    async with closing(backend) as client:
        for fields in ({"reasoning_effort": "low"}, {"reasoning_effort": "none"}, {"reasoning_effort": "low"} | kwargs):
            await client.post(CHAT, json=BODIES[CHAT] | fields)
    shown = [tokenizer.decode(request.token_ids) for request in backend.requests]
    assert shown == ["low||Hi", "none|False|Hi", "high||Hi"]


# -- functions, as OpenAI had them before tools

FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def with_room(tokenizer: Tokenizer, reply: str) -> FakeBackend:
    backend = FakeBackend(tokenizer, reply, run=3)
    backend.max_model_len = 4096
    return backend


async def test_openai_functions_are_answered_with_a_function_call(tokenizer: Tokenizer) -> None:
    backend = with_room(tokenizer, f"I look.{CALL}\n{CALL}")
    body = BODIES[CHAT] | {"functions": [FUNCTION], "function_call": "auto"}
    async with closing(backend) as client:
        plain = (await client.post(CHAT, json=body)).json()["choices"][0]
        chunks = events(await client.post(CHAT, json=body | {"stream": True}))[:-1]
        as_tools = BODIES[CHAT] | {"tools": [{"type": "function", "function": FUNCTION}]}
        await client.post(CHAT, json=as_tools)
    call = plain["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    assert (plain["message"]["content"], plain["finish_reason"]) == ("I look.", "function_call")
    assert "tool_calls" not in plain["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Rome"}
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    assert backend.requests[0].token_ids == backend.requests[2].token_ids


async def test_openai_function_call_forces_a_function_or_hides_them(tokenizer: Tokenizer) -> None:
    backend = with_room(tokenizer, "well")
    async with closing(backend) as client:
        for choice in ({"name": "weather"}, "none"):
            response = await client.post(
                CHAT, json=BODIES[CHAT] | {"functions": [FUNCTION], "function_call": choice, "max_tokens": 1}
            )
            assert response.status_code == 200, response.text
    assert "weather" in backend.requests[0].sampling.grammar
    assert "weather" not in tokenizer.decode(backend.requests[1].token_ids)


async def test_openai_messages_of_functions_are_those_of_tools(backend: FakeBackend, client: Client) -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    old = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    new = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "name": "weather", "content": "sunny", "tool_call_id": "call_1"},
    ]
    for messages in (old, new):
        response = await client.post(CHAT, json={"messages": messages})
        assert response.status_code == 200, response.text
    assert backend.requests[0].token_ids == backend.requests[1].token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
        ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "other"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "maybe"}, "function_call"),
        ({"functions": [FUNCTION, {"name": "a b"}]}, "functions[1].name"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions"),
    ],
)
async def test_a_wrong_function_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    response = await client.post(CHAT, json=BODIES[CHAT] | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert "tool_choice" not in error["message"]


# -- best_of


def of_sibling(backend: FakeBackend, logprobs: list[float]) -> Any:
    """A script in which choice i answers `i` twice, with this log probability each."""

    def script(request: GenerateRequest) -> list[Step]:
        index = int(request.request_id.rpartition("-")[2])
        [token] = backend.tokenizer.encode(str(index), add_special_tokens=False)
        assert request.sampling.num_logprobs is not None
        entries = [TokenLogprobs(token, logprobs[index], [])]
        return [delta_of([token], num_cached_tokens=3, logprobs=entries), *backend.reply_steps(request)[-1:]]

    return script


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}, {"echo": True}, {"return_token_ids": True}])
async def test_best_of_is_the_likeliest(backend: FakeBackend, client: Client, fields: dict[str, Any]) -> None:
    backend.reply = ""
    backend.script = of_sibling(backend, [-3.0, -1.0, -2.0, -0.5, -9.0, -0.1])
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "ignore_eos": False, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    echoes = ["a", "a", "b", "b"] if "echo" in fields else [""] * 4
    expected = [echo + text for echo, text in zip(echoes, "1253", strict=True)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] is not None for choice in answer["choices"]] == ["logprobs" in fields] * 4
    assert len(backend.requests) == 6
    assert len({request.sampling.seed for request in backend.requests}) > 1


async def test_best_of_equal_to_n_is_neutral(backend: FakeBackend, client: Client) -> None:
    answer = (await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "best_of": 2})).json()
    streamed = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "best_of": 2, "stream": True})
    assert (len(answer["choices"]), streamed.status_code) == (2, 200)
    assert all(request.sampling.num_logprobs is None for request in backend.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("run", [1, 3])
async def test_vllm_include_stop_str_in_output(tokenizer: Tokenizer, stream: bool, run: int) -> None:
    backend = FakeBackend(tokenizer, "abcdefgh", run=run)
    body = {"prompt": "x", "stop": "de", "include_stop_str_in_output": True, "logprobs": 0, "stream": stream}
    async with closing(backend) as client:
        response = await client.post(COMPLETIONS, json=body)
    choices = [c["choices"][0] for c in events(response)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "abcde"
    assert [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]] == list("abcde")
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "de")


# -- messages


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
async def test_text_parts_by_each_of_their_names(backend: FakeBackend, client: Client, kind: str) -> None:
    part = {"type": kind, "refusal" if kind == "refusal" else "text": "No."}
    user = {"role": "user", "content": "hi"}
    for content in ([part], "No."):
        messages = [user, {"role": "assistant", "content": content}, user]
        response = await client.post(CHAT, json={"messages": messages})
        assert response.status_code == 200, response.text
    missing = await client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": kind}]}]})
    assert (backend.requests[0].token_ids, missing.status_code) == (backend.requests[1].token_ids, 400)


async def test_fields_of_messages_without_effect_are_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of Ollama's API, and the prefix of DeepSeek's: the answer is to another question without them."""
    answered = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "name": "a"}
    user = {"role": "user", "content": "hi", "images": ["x"]}
    named = await client.post(CHAT, json={"messages": [user, {**answered, "prefix": True}, user]})
    known = await client.post(CHAT, json={"messages": [answered, {"role": "user", "content": "hi"}]})
    monkeypatch.setattr(other_fields, "MAX_COLONS", 1)
    long = await client.post(CHAT, json={"messages": [user]})
    assert named.headers["x-tandem-ignored"] == "messages.images, messages.prefix"
    assert "x-tandem-ignored" not in known.headers
    assert (long.status_code, long.headers["x-tandem-ignored"]) == (200, "messages.images")
