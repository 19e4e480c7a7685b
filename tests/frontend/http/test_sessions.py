"""Which conversation a request belongs to, by what clients call their session."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.frontend.http.ignored_fields import begin_ignored
from tandem.frontend.http.sessions import MAX_CONVERSATION_ID_CHARS, SESSION_HEADERS, conversation_named
from tests.support.fake_backend import Client, FakeBackend

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}
CLIENTS = {
    "opencode": "X-Session-Affinity",
    "codex": "session-id",
    "codex before": "session_id",
    "claude code": "X-Claude-Code-Session-Id",
    "gateways": "x-session-id",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("client_name", CLIENTS)
async def test_a_session_names_a_conversation(
    backend: FakeBackend, client: Client, path: str, client_name: str
) -> None:
    response = await client.post(path, json=BODIES[path], headers={CLIENTS[client_name]: "s-1"})
    assert response.status_code == 200, response.text
    await client.post(path, json=BODIES[path] | {"conversation_id": "c-1"}, headers={CLIENTS[client_name]: "s-1"})
    assert [request.conversation_id for request in backend.requests] == ["s-1", "c-1"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_codex_prompt_cache_key_names_the_conversation(backend: FakeBackend, client: Client, path: str) -> None:
    for key in ("k-1", "", None, 7, ["k"], "k" * 257, "k" * 256):
        response = await client.post(path, json=BODIES[path] | {"prompt_cache_key": key})
        assert response.status_code == 200, response.text
        is_bad = key not in ("k-1", "", None, "k" * 256)
        assert ("prompt_cache_key" in response.headers.get("x-tandem-ignored", "")) == is_bad
    assert [request.conversation_id for request in backend.requests] == ["k-1", *[""] * 5, "k" * 256]


def test_our_own_names_win_over_sessions_and_sessions_over_keys() -> None:
    sessions = dict.fromkeys(SESSION_HEADERS, "session")
    assert conversation_named(sessions | {"x-tandem-conversation": "header"}, "body", "key") == "body"
    assert conversation_named(sessions | {"x-tandem-conversation": "header"}, None, "key") == "header"
    assert (conversation_named(sessions, None, "key"), conversation_named({}, None, "key")) == ("session", "key")
    assert conversation_named({}, None, None) == ""


@pytest.mark.parametrize("bad", ["s" * (MAX_CONVERSATION_ID_CHARS + 1), "é", "a\tb", "\x00"])
@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_a_bad_session_is_ignored_and_named(name: str, bad: str) -> None:
    ignored = begin_ignored()
    assert (conversation_named({name: bad}, None, "key"), [one.partition(" ")[0] for one in ignored]) == ("key", [name])
