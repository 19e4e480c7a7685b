"""What an answer says of its tokens: those that were cached, by tier, and those that were reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.openai import chat
from tandem.router.backend import GenerateRequest
from tandem.scheduling.admission.key_limits import KeyLimits
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, Step, closing
from tests.support.keys import stored_key
from tests.support.toy_tokenizer import build_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
ROLES = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
# A route, its body, and where its usage has the cached tokens by tier.
ROUTES = [
    ("/v1/chat/completions", {"messages": MESSAGES}, ["prompt_tokens_details", "cached_tokens_by_tier"]),
    ("/v1/completions", {"prompt": "hi"}, ["prompt_tokens_details", "cached_tokens_by_tier"]),
    ("/v1/responses", {"input": "hi"}, ["input_tokens_details", "cached_tokens_by_tier"]),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99}, ["cache_read_input_tokens_by_tier"]),
]


async def usage_of(backend: FakeBackend, path: str, body: dict[str, Any], **config: Any) -> dict[str, Any]:
    async with closing(backend, **config) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


@pytest.mark.parametrize(("path", "body", "place"), ROUTES, ids=[route[0] for route in ROUTES])
async def test_cached_tokens_are_told_by_tier(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], place: list[str]
) -> None:
    backend = FakeBackend(tokenizer)

    def loaded(request: GenerateRequest) -> list[Step]:
        first, *rest = backend.reply_steps(request)
        return [msgspec.structs.replace(first, num_loaded_tokens={"host": 2}), *rest]

    found: Any = await usage_of(backend, path, body)
    backend.script = loaded
    again: Any = await usage_of(backend, path, body)
    for name in place:
        found, again = found[name], again[name]
    assert (found, again) == ({"pool": 3}, {"pool": 1, "host": 2})


async def test_the_choices_of_a_prompt_count_what_it_loaded_once(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    steps = backend.reply_steps
    backend.script = lambda request: [
        msgspec.structs.replace(one, num_loaded_tokens={"disk": 3}) if isinstance(one, msgspec.Struct) else one
        for one in steps(request)
    ]
    usage = await usage_of(backend, "/v1/completions", {"prompt": ["a", "b"], "n": 3})
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6, "cached_tokens_by_tier": {"disk": 6}}


REASONING = "Let me see.\n</think>"


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("is_open", [True, False])
async def test_reasoning_tokens_are_those_up_to_its_closing_marker(tmp_path: Path, run: int, is_open: bool) -> None:
    template = ROLES + ("<assistant><think>\n" if is_open else "{# <think> #}")
    tokenizer = Tokenizer(build_tokenizer(tmp_path, template, ["<think>", "</think>"]))
    reasoning = REASONING if is_open else f"<think>{REASONING}"
    backend = FakeBackend(tokenizer, f"{reasoning}\n\nYes.", run=run)
    num_tokens = len(tokenizer.encode(reasoning, add_special_tokens=False))
    body = {"messages": MESSAGES}
    usage = await usage_of(backend, "/v1/chat/completions", body)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert usage["completion_tokens"] > num_tokens
    usage = await usage_of(backend, "/v1/chat/completions", body | {"n": 2})
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * num_tokens}
    usage = await usage_of(backend, "/v1/responses", {"input": "hi"})
    assert usage["output_tokens_details"] == {"reasoning_tokens": num_tokens}
    usage = await usage_of(backend, "/v1/messages", body | {"max_tokens": 99})
    assert usage["output_tokens_details"] == {"thinking_tokens": num_tokens}
    usage = await usage_of(backend, "/v1/chat/completions", body, reasoning_parser="none")
    assert "completion_tokens_details" not in usage


async def test_an_answer_that_does_not_get_beyond_its_reasoning_is_all_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, ROLES + "<assistant><think>\n"))
    body = {"messages": MESSAGES, "max_tokens": 5}
    usage = await usage_of(FakeBackend(tokenizer, REASONING), "/v1/chat/completions", body)
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (5, {"reasoning_tokens": 5})


@pytest.mark.parametrize("run", [1, 100])
async def test_reasoning_in_harmony_is_the_channel_analysis(tokenizer: Tokenizer, run: int) -> None:
    header, end = "<|channel|>analysis<|message|>", "<|end|>"
    backend = FakeBackend(tokenizer, f"{header}Hm.{end}<|start|>assistant<|channel|>final<|message|>Yes.", run=run)
    config = {"tool_parser": "harmony", "reasoning_parser": "harmony"}
    usage = await usage_of(backend, "/v1/chat/completions", {"messages": MESSAGES}, **config)
    # Of the opening marker, which is many tokens here, the last one; the closing one is seen at its end.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(f">Hm.{end}")}


@pytest.mark.parametrize("run", [2, 5, 100])
@pytest.mark.parametrize(
    ("stop", "reply"), [("world", "hello world and more"), ("re", "hello world and more"), ("lo w", "hello world")]
)
async def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer, run: int, stop: str, reply: str) -> None:
    body = {"prompt": "hi", "stop": stop}
    expected = await usage_of(FakeBackend(tokenizer, reply), "/v1/completions", body)
    assert expected["completion_tokens"] == len(tokenizer.encode(reply[: reply.index(stop) + len(stop)])) - 1
    assert await usage_of(FakeBackend(tokenizer, reply, run=run), "/v1/completions", body) == expected


@pytest.mark.parametrize("run", [1, 100])
async def test_reasoning_ends_for_usage_at_a_stop_string(tmp_path: Path, run: int) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, ROLES + "<assistant><think>\n"))
    backend = FakeBackend(tokenizer, f"{REASONING} Yes.", run=run)
    usage = await usage_of(backend, "/v1/chat/completions", {"messages": MESSAGES, "stop": "</think>"})
    num_tokens = len(tokenizer.encode(REASONING, add_special_tokens=False))
    assert usage["completion_tokens"] == num_tokens
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


async def by_role(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> dict[str, dict[str, int]]:
    body = {"messages": messages, "usage_by_role": True, **fields}
    usage = await usage_of(FakeBackend(tokenizer), "/v1/chat/completions", body)
    found: dict[str, dict[str, int]] = usage["prompt_tokens_details"]["by_role"]
    assert sum(one["tokens"] for one in found.values()) == usage["prompt_tokens"]
    assert sum(one["cached_tokens"] for one in found.values()) == usage["prompt_tokens_details"]["cached_tokens"] == 3
    return found


async def test_prompt_tokens_are_told_by_role(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "é"},
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": "ok "},
        {"role": "user", "content": " so"},
    ]
    found = await by_role(tokenizer, messages)
    # <s><system>é | <user>hello<user>there | <assistant>ok  | <user> so | <assistant>
    texts = {
        "system": ["<system>é"],
        "user": ["<user>hello", "<user>there", "<user> so"],
        "assistant": ["<assistant>ok ", "<assistant>"],
    }
    counts = {
        role: sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in parts)
        for role, parts in texts.items()
    }
    counts["system"] += 1  # <s>
    assert {role: one["tokens"] for role, one in found.items()} == counts
    assert {role: one["cached_tokens"] for role, one in found.items() if one["cached_tokens"]} == {"system": 3}


async def test_a_role_whose_end_cannot_be_told_counts_with_the_next(tmp_path: Path) -> None:
    # The template refuses conversations that end with a system message, and drops all but the last thoughts.
    template = (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('ask something') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% if loop.last %}think {% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(build_tokenizer(tmp_path, template))
    messages = [{"role": role, "content": "word"} for role in ("system", "user", "assistant", "user")]
    assert (await by_role(tokenizer, messages)).keys() == {"user"}


async def test_a_template_that_writes_less_for_more_messages_counts_no_token_twice(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, "{{ messages[-1].content }}"))
    contents = (("user", "abcd"), ("assistant", ""), ("user", "abcdef"))
    found = await by_role(tokenizer, [{"role": role, "content": content} for role, content in contents])
    assert found.keys() == {"user"}


async def test_roles_are_charged_as_the_time_that_they_take(tokenizer: Tokenizer) -> None:
    """Each message renders the conversation once more, but does not count as encoding it."""
    limits = KeyLimits(tokens_per_minute=60_000)
    keys = ApiKeys([stored_key("secret", "a", limits=limits)], is_required=True)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 10} for i in range(190)]
    backend = FakeBackend(tokenizer)
    backend.max_model_len = 100_000
    async with closing(backend, api_keys=keys) as client:
        client.headers["Authorization"] = "Bearer secret"
        for _ in range(4):
            body = {"messages": messages, "usage_by_role": True, "max_tokens": 5}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text


async def test_roles_are_told_only_on_request_and_of_conversations_that_are_not_too_long(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {"messages": MESSAGES}
    usage = await usage_of(FakeBackend(tokenizer), "/v1/chat/completions", body)
    assert "by_role" not in usage["prompt_tokens_details"]
    monkeypatch.setattr(chat, "MAX_MESSAGES", 2)
    body = {"messages": MESSAGES * 3, "usage_by_role": True}
    async with closing(FakeBackend(tokenizer)) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert "usage_by_role" in response.headers["x-tandem-ignored"]
    assert "by_role" not in response.json()["usage"]["prompt_tokens_details"]
