"""What clients of OpenAI's API expect beyond single fields. docs/api_table.md names these tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tandem.router.backend import GenerateRequest
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend, Step, delta_of, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODIES: Any = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
PREFIXES = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", "/v1/responses": "resp_", "/v1/messages": "msg_"}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", BODIES)
async def test_ids_are_prefixed_and_never_the_same(client: Client, path: str) -> None:
    ids = [(await client.post(path, json=BODIES[path])).json()["id"] for _ in range(5)]
    assert len(set(ids)) == 5
    assert all(one.startswith(PREFIXES[path]) for one in ids)


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_nobody_knows_yet_are_tolerated(client: Client, path: str) -> None:
    newer = {"brand_new": {"a": [1]}, "service_tier": "auto", "safety_identifier": "x", "verbosity": "low"}
    response = await client.post(path, json=BODIES[path] | newer)
    assert response.status_code == 200, response.text


async def test_text_is_one_prompt_escaped_raw_or_as_token_ids(backend: FakeBackend, client: Client) -> None:
    text = 'ünï "😀"\n'
    ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    for body in (
        json.dumps({"prompt": text}, ensure_ascii=True),
        json.dumps({"prompt": text}, ensure_ascii=False),
        json.dumps({"prompt": ids}),
    ):
        response = await client.post(COMPLETIONS, content=body.encode(), headers=JSON)
        assert response.status_code == 200, response.text
    assert [request.token_ids for request in backend.requests] == [ids] * 3


@pytest.mark.parametrize("key", [None, "Bearer anything", "Basic eDp5"])
async def test_a_server_without_keys_takes_any_and_none(client: Client, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key}
    assert (await client.post(COMPLETIONS, json={"prompt": "hi"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_known_before_the_first_token_is_not_streamed(client: Client, path: str) -> None:
    for wrong in ({"temperature": 99}, {"model": "nope"}):
        response = await client.post(path, json=BODIES[path] | {"stream": True} | wrong)
        assert response.status_code in (400, 404)
        assert response.headers["content-type"] == "application/json"
        assert "error" in response.json()


async def test_clients_at_once_get_their_own_answer(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:

    def echo(request: GenerateRequest) -> list[Step]:
        text = tokenizer.decode(request.token_ids, skip_special_tokens=True)
        ids = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.encode("</s>", add_special_tokens=False)]
        *rest, last = (delta_of([one]) for one in ids)
        steps = backend.reply_steps(request)
        return [*rest, steps[-1]] if rest else [last]

    backend.script = echo

    async def ask(number: int) -> tuple[str, str]:
        body = {"prompt": f"prompt {number}", "max_tokens": 64, "stream": number % 2 == 0}
        response = await client.post(COMPLETIONS, json=body)
        if number % 2:
            return body["prompt"], response.json()["choices"][0]["text"]
        return body["prompt"], "".join(one["choices"][0]["text"] for one in events(response)[:-1])

    answers = await asyncio.gather(*map(ask, range(40)))
    assert all(prompt == text for prompt, text in answers)
