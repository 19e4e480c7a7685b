from __future__ import annotations

import time
from typing import Any

import pytest

from tandem.protocol.digest import EVERYONE, cache_scope
from tandem.protocol.errors import PinQuotaExceeded
from tandem.protocol.messages import Prefetch
from tandem.router.backend import PinRequest, PinState
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import Client, FakeBackend

PIN = "/v1/cache/pin"
USER = {"role": "user", "content": "hello world"}
SYSTEM = {"role": "system", "content": "be kind"}


async def test_a_pin_has_its_expiry_and_its_places(tokenizer: Tokenizer, backend: FakeBackend, client: Client) -> None:
    body = {"prompt": "hello world", "ttl_s": 30, "cache_salt": "t", "prefetch": "pool", "model": "org/toy"}
    response = await client.post(PIN, json=body)
    pin = response.json()
    assert response.status_code == 200
    assert abs(pin.pop("expires_at") - (time.time() + 30)) < 5
    assert pin == {
        "id": "pin-1",
        "object": "cache.pin",
        "tenant": "default",
        "conversation_id": None,
        "num_tokens": 32,
        "num_blocks": 2,
        "prefetch": "pool",
        "remaining_s": 30.0,
        "held": {"d": {"pool": 1}, "p": None},
    }
    ids = tokenizer.encode("hello world")
    assert backend.cache.requests == [
        PinRequest(token_ids=ids, cache_scope=cache_scope("t"), ttl_s=30.0, prefetch=Prefetch.POOL)
    ]
    listed = (await client.get("/v1/cache/pins", params={"cache_salt": "t"})).json()
    assert (listed["object"], [pin["id"] for pin in listed["data"]]) == ("list", ["pin-1"])
    assert (await client.get("/v1/cache/pins")).json()["data"] == []
    prefetched = await client.post("/v1/cache/prefetch", json={"id": "pin-1", "to": "host"})
    assert (prefetched.status_code, backend.cache.prefetched) == (200, [Prefetch.HOST])
    gone = await client.post("/v1/cache/unpin", json={"id": "pin-1"})
    assert gone.json() == {"id": "pin-1", "object": "cache.pin", "deleted": True}
    again = await client.post("/v1/cache/unpin", json={"id": "pin-1"})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "pin_not_found")


@pytest.mark.parametrize(
    ("messages", "more", "opens_answer"),
    [
        ([SYSTEM, USER], {}, True),
        ([SYSTEM], {}, False),  # the next message is the client's
        ([SYSTEM], {"add_generation_prompt": True}, True),
    ],
)
async def test_messages_are_pinned_as_a_chat_request_renders_them(
    backend: FakeBackend, client: Client, messages: list[dict[str, str]], more: dict[str, Any], opens_answer: bool
) -> None:
    await client.post(PIN, json={"messages": messages, **more})
    body = {"messages": messages, "add_generation_prompt": opens_answer, "max_tokens": 1}
    await client.post("/v1/chat/completions", json=body)
    (pinned,), (served,) = backend.cache.requests, backend.requests
    assert pinned.token_ids == served.token_ids


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [("chat-1", None, "chat-1"), (None, "chat-2", "chat-2"), ("chat-1", "chat-2", "chat-1"), (None, None, "")],
)
async def test_a_request_names_its_conversation_in_body_or_header(
    backend: FakeBackend, client: Client, path: str, field: str | None, header: str | None, expected: str
) -> None:
    body = {"messages": [USER], "prompt": "hello", "conversation_id": field, "n": 2}
    response = await client.post(path, json=body, headers={"x-tandem-conversation": header} if header else {})
    assert (response.status_code, [request.conversation_id for request in backend.requests]) == (200, ["", expected])


@pytest.mark.parametrize(
    "pinned", [{"token_ids": [5, 6, 7]}, {"token_ids": None, "conversation_id": "chat-1"}], ids=["ids", "conversation"]
)
async def test_what_is_named_is_pinned_unchanged(backend: FakeBackend, client: Client, pinned: dict[str, Any]) -> None:
    conversation = pinned.get("conversation_id")
    body = {"prompt": pinned["token_ids"], "conversation_id": conversation}
    assert (await client.post(PIN, json=body)).json()["conversation_id"] == conversation
    unknown = await client.post(PIN, json=body | {"model": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert backend.cache.requests == [PinRequest(cache_scope=EVERYONE, **pinned)]


async def test_a_header_that_is_too_long_is_refused(client: Client) -> None:
    headers = {"x-tandem-conversation": "x" * 257}
    for body in ({"prompt": "a"}, {"prompt": "a", "conversation_id": "c"}):  # the body's is the one that counts
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_above_the_quota_is_a_429(backend: FakeBackend, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:

    async def refuse(_: PinRequest) -> PinState:
        raise PinQuotaExceeded("With this pin there would be 3 pins, over the limit of 2.", retry_after_s=12.2)

    monkeypatch.setattr(backend.cache, "pin", refuse)
    response = await client.post(PIN, json={"prompt": "hello"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    assert response.json()["error"]["code"] == "pin_quota_exceeded"
