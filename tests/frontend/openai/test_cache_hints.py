from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from tandem.frontend.openai.cache_hints import MAX_HINTS, read_hints
from tandem.protocol.digest import cache_scope
from tandem.protocol.errors import NoWorker, PinQuotaExceeded, RequestError
from tandem.protocol.messages import Prefetch
from tandem.router.backend import HintAction, HintedPin, PinRequest
from tests.support.fake_backend import Client, FakeBackend

USER = [{"role": "user", "content": "hello world"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hello world"},
    "/v1/responses": {"input": "hello world"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}
COMPLETIONS = "/v1/completions"
RETAIN = {"target": "prefix", "action": "retain"}


def shown(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return json.loads(response.headers["x-tandem-cache-hints"])


async def ask(client: Client, hints: Any, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return await client.post(path, json=BODIES[path] | fields | {"cache_hints": hints})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_each_hint_is_answered_in_its_place(
    backend: FakeBackend, client: Client, path: str, stream: bool
) -> None:
    hints = [
        RETAIN | {"ttl_s": 60, "priority": 3},
        {"target": "session", "action": "prefetch", "ttl_s": 4000, "priority": 90},
        {"target": "answer", "action": "retain"},
        {"target": "session", "action": "demote"},
        RETAIN,
    ]
    answers = shown(await ask(client, hints, path, stream=stream, conversation_id="c", cache_salt="s"))
    assert answers[:2] == [{"status": "accepted"}, {"status": "clipped", "ttl_s": 3600.0}]
    assert [one["status"] for one in answers[2:]] == ["refused", "accepted", "refused"]
    assert "answer" in answers[2]["reason"]
    (served,) = backend.requests
    scope = cache_scope("s")
    session = PinRequest(token_ids=None, conversation_id="c", cache_scope=scope, ttl_s=4000.0, prefetch=Prefetch.POOL)
    assert backend.cache.hinted[0] == (HintAction.PREFETCH, session)  # of the highest priority
    assert backend.cache.hinted[1] == (
        HintAction.RETAIN,
        PinRequest(token_ids=served.token_ids, cache_scope=scope, ttl_s=60.0),
    )
    assert served.is_demoted


async def test_without_hints_there_is_no_answer_to_them(backend: FakeBackend, client: Client) -> None:
    for hints in (None, []):
        assert "x-tandem-cache-hints" not in (await ask(client, hints)).headers
    assert [request.is_demoted for request in backend.requests] == [False, False]
    assert backend.cache.hinted == []


async def test_a_hint_acts_once_for_each_prompt(backend: FakeBackend, client: Client) -> None:
    hints = [RETAIN, {"target": "session", "action": "retain"}]
    response = await ask(client, hints, prompt=["hello", "world"], n=3, conversation_id="c")
    assert shown(response) == [{"status": "accepted"}] * 2
    prompts = [request.token_ids for _, request in backend.cache.hinted]
    assert len(prompts) == 3
    assert prompts.count(None) == 1
    assert len(backend.requests) == 6


@pytest.mark.parametrize("num_allowed", [0, 1])
async def test_a_hint_that_cannot_be_followed_refuses_no_request(
    backend: FakeBackend, client: Client, monkeypatch: pytest.MonkeyPatch, num_allowed: int
) -> None:
    asked: list[PinRequest] = []

    async def refuse(request: PinRequest, _: HintAction) -> HintedPin:
        asked.append(request)
        if len(asked) > num_allowed:
            raise PinQuotaExceeded("Over the limit of 1 (max_pins); \u00fcber\r\nx: y", retry_after_s=1.0)
        return HintedPin(300.0, 16, is_cut=True)

    monkeypatch.setattr(backend.cache, "hint", refuse)
    (answer,) = shown(await ask(client, [RETAIN], prompt=["hello", "world", "hello world"]))
    reason = "Over the limit of 1 (max_pins)"
    clipped = {"status": "clipped", "prompts": 1, "reason": reason, "tokens": 16}
    assert answer == (clipped if num_allowed else {"status": "refused", "reason": reason})
    assert len(asked) == num_allowed + 1  # the others would be refused too


@pytest.mark.parametrize(("lengths", "num_kept"), [([1, 20, 20], 2), ([20, 1, 20], 2), ([1, 1], 0)])
async def test_a_prompt_that_is_too_short_does_not_keep_the_others_from_theirs(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_kept: int
) -> None:
    async def refuse(request: PinRequest, _: HintAction) -> HintedPin:
        if len(request.token_ids or ()) < 16:
            raise RequestError("The prompt is shorter than a block.")
        return HintedPin(300.0, 16, is_cut=False)

    monkeypatch.setattr(backend.cache, "hint", refuse)
    (answer,) = shown(await ask(client, [RETAIN], prompt=[[5] * length for length in lengths]))
    reason = {"reason": "The prompt is shorter than a block."}
    assert answer == ({"status": "clipped", "prompts": num_kept} if num_kept else {"status": "refused"}) | reason


async def test_without_a_worker_the_error_is_the_requests_own(
    backend: FakeBackend, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: PinRequest, action: HintAction) -> HintedPin:
        raise NoWorker("No worker is available to keep the prefix.")

    monkeypatch.setattr(backend.cache, "hint", refuse)
    assert shown(await ask(client, [RETAIN]))[0]["status"] == "refused"
    session = [{"target": "session", "action": "retain"}]
    assert shown(await ask(client, session)) == [{"status": "refused", "reason": "The request names no conversation."}]


HOSTILE = [
    "1",
    '"retain"',
    "{}",
    "[1]",
    "[null, [], {}]",
    '[{"target": "prefix", "action": "retain", "ttl_s": 1e999}]',
    '[{"target": "prefix", "action": "retain", "ttl_s": -1}]',
    '[{"target": "prefix", "action": "retain", "ttl_s": 0}]',
    '[{"target": "prefix", "action": "retain", "ttl_s": "\\r\\nx-evil: 1"}]',
    '[{"target": "prefix", "action": "\\r\\nx-evil: \\u00fc", "priority": 1}]',
    '[{"target": "prefix", "action": "' + "x" * 10_000 + '"}]',
    '[{"target": "prefix", "action": "retain", "priority": 101}]',
    '[{"target": "prefix", "action": "retain", "priority": 1e400}]',
    '[{"target": {}, "action": []}]',
    json.dumps([{"target": '\U0001f600"\\' * 300, "action": "x"}] * MAX_HINTS),
    "[" * 500 + "]" * 500,
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("hints", HOSTILE, ids=lambda text: text[:60])
async def test_no_hint_locks_a_client_out(backend: FakeBackend, client: Client, path: str, hints: str) -> None:
    body = json.dumps(BODIES[path])[:-1] + f', "cache_hints": {hints}}}'
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert backend.cache.hinted == []
    assert "x-evil" not in response.headers
    if "x-tandem-cache-hints" in response.headers:
        assert len(response.headers["x-tandem-cache-hints"]) < 3000
        assert {one["status"] for one in shown(response)} == {"refused"}
    else:
        assert "cache_hints" in response.headers["x-tandem-ignored"]


async def test_ten_thousand_hints_cost_those_of_the_first_few(backend: FakeBackend, client: Client) -> None:
    response = await ask(client, [RETAIN] * 10_000)
    answers = shown(response)
    assert (len(answers), answers[0]["status"], answers[1]["status"]) == (MAX_HINTS, "accepted", "refused")
    assert len(backend.cache.hinted) == 1
    assert f"cache_hints (only the first {MAX_HINTS} are looked at)" in response.headers["x-tandem-ignored"]


def test_an_absurd_time_is_a_time() -> None:
    (hint,) = read_hints(msgspec.Raw(b'[{"target": "prefix", "action": "retain", "ttl_s": 1e308}]'))
    assert not isinstance(hint, str)
    assert hint.ttl_s == 1e308


async def test_an_explained_decision_follows_no_hint(backend: FakeBackend, client: Client) -> None:
    await client.post("/v1/route/explain", json={"prompt": "hello", "cache_hints": [RETAIN]})
    assert backend.cache.hinted == []
