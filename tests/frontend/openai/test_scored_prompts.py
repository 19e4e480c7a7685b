"""`echo` with `logprobs`: prompts are repeated with the log probabilities of their tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.frontend.openai import logprobs
from tandem.frontend.openai.logprobs import ScoredPrompt
from tandem.protocol.messages import PromptLogprobs, SequenceDelta
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, closing, events

COMPLETIONS = "/v1/completions"
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    pieces = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
    lists = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "logprobs": {name: [value for one in lists for value in one[name]] for name in FIELDS},
        "finish_reason": pieces[-1]["finish_reason"],
    }


def check_lists(choice: dict[str, Any]) -> None:
    """All lists are of one length, and every token but a hidden one stands in the text where its offset says."""
    found = choice["logprobs"]
    assert len({len(found[name]) for name in FIELDS}) == 1
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token == "<s>" or choice["text"][offset:].startswith(token), (token, offset)
    assert "".join(found["tokens"]).removeprefix("<s>") == choice["text"]


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
async def test_prompt_and_answer_are_scored_in_one_list(
    tokenizer: Tokenizer, backend: FakeBackend, client: Client, num_logprobs: int
) -> None:
    backend.reply = "hello é w"
    body = {"prompt": "hé world", "echo": True, "logprobs": num_logprobs}
    plain = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    assert (backend.requests[0].sampling.num_prompt_logprobs, plain["text"]) == (num_logprobs, "hé worldhello é w")
    check_lists(plain)
    num_prompt = len(backend.requests[0].token_ids)
    found = plain["logprobs"]
    assert found["tokens"][0] == "<s>"
    assert found["token_logprobs"][1:num_prompt] == [-float(i) for i in range(1, num_prompt)]
    assert (found["token_logprobs"][num_prompt], found["text_offset"][num_prompt]) == (-0.5, len("hé world"))
    likeliest = {tokenizer.token_text(i): -0.5 - i for i in range(num_logprobs)}
    assert found["top_logprobs"][1] == likeliest | {found["tokens"][1]: -1.0}
    assert joined(chunks) == {name: plain[name] for name in ("text", "logprobs", "finish_reason")}


@pytest.mark.parametrize("prompt", ["hello", [[104, 105], [104]], [104, 105, 106]])
@pytest.mark.parametrize("n", [1, 3])
async def test_max_tokens_0_scores_each_prompt_once(backend: FakeBackend, client: Client, prompt: Any, n: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "n": n, "ignore_eos": True}
    plain = (await client.post(COMPLETIONS, json=body)).json()
    num_requests = len(backend.requests)
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    num_prompts = 2 if isinstance(prompt, list) and isinstance(prompt[0], list) else 1
    assert num_requests == num_prompts
    assert all(request.sampling.max_tokens == 1 for request in backend.requests)
    assert (plain["usage"]["completion_tokens"], len(plain["choices"])) == (0, num_prompts * n)
    for choice in plain["choices"]:
        request = backend.requests[choice["index"] // n]
        assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("length", len(request.token_ids))
        check_lists(choice)
        streamed = joined(chunks, choice["index"])
        assert streamed == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


async def test_a_token_that_ends_the_answer_is_scored_after_a_scored_prompt(tokenizer: Tokenizer) -> None:
    """lm-eval asks for one token and drops the last score, whichever token was generated."""
    async with closing(FakeBackend(tokenizer, "")) as client:
        body = {"prompt": [104, 105], "echo": True, "logprobs": 1, "max_tokens": 1}
        plain = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
        unscored = (await client.post(COMPLETIONS, json=body | {"echo": False})).json()["choices"][0]
    assert (plain["finish_reason"], plain["logprobs"]["token_logprobs"]) == ("stop", [None, -1.0, -0.5])
    assert plain["logprobs"]["tokens"][-1] == ""
    check_lists(plain)
    assert joined(chunks) == {name: plain[name] for name in ("text", "logprobs", "finish_reason")}
    assert unscored["logprobs"]["tokens"] == []


async def test_siblings_show_the_scores_of_the_first(backend: FakeBackend, client: Client) -> None:
    body = {"prompt": ["one", "two!"], "echo": True, "logprobs": 2, "n": 3}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    asked = [request.sampling.num_prompt_logprobs for request in backend.requests]
    assert sorted(asked, key=str) == [2, 2, None, None, None, None]
    for choice in choices:
        check_lists(choice)
        assert choice["logprobs"] == choices[choice["index"] // 3 * 3]["logprobs"]


async def test_without_echo_or_logprobs_no_prompt_is_scored(backend: FakeBackend, client: Client) -> None:
    await client.post(COMPLETIONS, json={"prompt": "a", "logprobs": 1})
    await client.post(COMPLETIONS, json={"prompt": "a", "echo": True})
    unscored = (await client.post(COMPLETIONS, json={"prompt": "a", "echo": True, "max_tokens": 0})).json()
    assert [request.sampling.num_prompt_logprobs for request in backend.requests] == [None, None]
    assert unscored["choices"][0]["logprobs"] is None


async def test_a_prompt_that_fills_the_context_leaves_no_room_to_score_it(backend: FakeBackend, client: Client) -> None:
    backend.max_model_len = 8
    body = {"prompt": [104] * 8, "echo": True, "max_tokens": 0}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    refused = await client.post(COMPLETIONS, json=body | {"logprobs": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    served = await client.post(COMPLETIONS, json=body | {"logprobs": 0, "prompt": [104] * 7})
    assert len(served.json()["choices"][0]["logprobs"]["tokens"]) == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", ["missing", "short", "long", "other number"])
async def test_scores_of_another_size_fail(backend: FakeBackend, client: Client, wrong: str, stream: bool) -> None:

    def spoil(delta: SequenceDelta) -> SequenceDelta:
        scores = delta.prompt_logprobs
        if scores is None or wrong == "missing":
            return msgspec.structs.replace(delta, prompt_logprobs=None)
        changes: dict[str, Any] = {
            "short": {"chosen": scores.chosen[:-4]},
            "long": {"top_ids": scores.top_ids + b"1234"},
            "other number": {"top_logprobs": b"", "top_ids": b""},
        }[wrong]
        return msgspec.structs.replace(delta, prompt_logprobs=msgspec.structs.replace(scores, **changes))

    backend.script = lambda request: [
        spoil(step) if isinstance(step, SequenceDelta) else step for step in backend.reply_steps(request)
    ]
    body = {"prompt": "hi there", "echo": True, "logprobs": 2, "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 502, response.text
    assert "bytes of scores" in response.json()["error"]["message"]


async def test_infinite_scores_are_cut(backend: FakeBackend, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LONG_PROMPT", 2)

    def script(request: Any) -> list[Any]:
        first, *rest = backend.reply_steps(request)
        assert isinstance(first, SequenceDelta)
        scores = PromptLogprobs(b"\x00\x00\x80\xff", b"\x00\x00\x80\xff", b"\xff\xff\xff\x7f")
        return [msgspec.structs.replace(first, prompt_logprobs=scores), *rest]

    backend.script = script
    body = {"prompt": [104, 105], "echo": True, "logprobs": 1, "max_tokens": 0}
    found = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None, -9999.0]


async def test_special_tokens_take_no_room_unless_the_text_has_them(tokenizer: Tokenizer) -> None:
    for text in ("a<s>b", "<s>a", "", "é</s>"):
        token_ids = tokenizer.encode(text)
        prompt = ScoredPrompt(token_ids, text, 0, tokenizer)
        size = 4 * (len(token_ids) - 1)
        await prompt.fill(PromptLogprobs(bytes(size), b"", b""))
        assert "".join(prompt.logprobs.tokens) == "<s>" + text
        ends = [*prompt.logprobs.text_offset[1:], len(text)]
        shown = [text[start:end] for start, end in zip(prompt.logprobs.text_offset, ends, strict=True)]
        assert "".join(shown) == text
    ids = tokenizer.encode("é", add_special_tokens=False)
    cut = tokenizer.encode("€", add_special_tokens=False)[:1]  # the first byte of a character
    prompt = ScoredPrompt([*ids, *cut], tokenizer.decode([*ids, *cut]), 0, tokenizer)
    await prompt.fill(PromptLogprobs(bytes(4 * len([*ids, *cut]) - 4), b"", b""))
    assert "".join(prompt.logprobs.tokens) == "é\ufffd"
