"""Responses live in the memory of the engine that made them: what continues, reads or cancels one goes there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse, Response

from tandem.protocol.config import RouterConfig
from tandem.router.engines import stored_answers
from tandem.router.engines.stored_answers import StoredAnswers
from tests.support.engines_harness import Router, routing, routing_by_decider, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

PATH = "/v1/responses"
NUMBERS = itertools.count()


def respond(fake: FakeServer, name: str) -> None:
    def reply(_: str, body: dict[str, Any]) -> Response:
        answer = {"id": f"resp_{name}{next(NUMBERS)}", "output": [], "status": "completed"}
        fake.replies[f"{PATH}/{answer['id']}"] = lambda method, _: JSONResponse(answer | {"read_by": method})
        fake.replies[f"{PATH}/{answer['id']}/input_items"] = lambda *_: JSONResponse({"data": [answer["id"]]})
        fake.replies[f"{PATH}/{answer['id']}/cancel"] = lambda *_: JSONResponse(answer | {"status": "cancelled"})
        if not body.get("stream"):
            return JSONResponse(answer)
        events = "".join(
            f'event: {kind}\ndata: {{"type":"{kind}","response":{{"id":"{answer["id"]}"}}}}\n\n'
            for kind in ("response.created", "response.completed")
        )
        return Response(events, media_type="text/event-stream")

    fake.replies[PATH] = reply


async def create(router: Router, **fields: Any) -> httpx.Response:
    return await router.client.post(PATH, json={"input": f"{next(NUMBERS)}" * 50} | fields)


async def owned(router: Router, **fields: Any) -> tuple[str, str]:
    """A new response's id, and the engine that made it."""
    response = await create(router, **fields)
    assert response.status_code == 200, response.text
    found = response.text.partition('"id":"')[2].partition('"')[0]
    return found, response.headers["x-tandem-engine"]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_of_a_response_go_to_its_engine(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    respond(fake_a, "a")
    respond(fake_b, "b")
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        made = [await owned(router, stream=stream) for _ in range(6)]
        assert {engine for _, engine in made} == {"a", "b"}
        for answer_id, engine in made:
            _, where = await owned(router, previous_response_id=answer_id)
            assert where == engine
            read = await router.client.get(f"{PATH}/{answer_id}")
            assert (read.status_code, read.json()["read_by"]) == (200, "GET")
            assert (await router.client.delete(f"{PATH}/{answer_id}")).json()["read_by"] == "DELETE"
            listed = await router.client.get(f"{PATH}/{answer_id}/input_items", params={"limit": 5})
            assert listed.json()["data"] == [answer_id]
            cancelled = await router.client.post(f"{PATH}/{answer_id}/cancel")
            assert cancelled.json()["status"] == "cancelled"
        fake = {"a": fake_a, "b": fake_b}[made[-1][1]]
        assert fake.paths[-4:] == [
            f"GET {PATH}/{answer_id}",
            f"DELETE {PATH}/{answer_id}",
            f"GET {PATH}/{answer_id}/input_items?limit=5",
            f"POST {PATH}/{answer_id}/cancel",
        ]


async def test_the_events_of_a_response_in_the_background_pass_through(fake_a: FakeServer) -> None:
    respond(fake_a, "a")
    events = 'event: response.created\ndata: {"type":"response.created"}\n\n' * 3
    async with routing(spec_of(fake_a, "a")) as router:
        answer_id, _ = await owned(router)
        fake_a.replies[f"{PATH}/{answer_id}"] = lambda *_: Response(events, media_type="text/event-stream")
        response = await router.client.get(f"{PATH}/{answer_id}", params={"stream": "true", "starting_after": "2"})
        assert (response.text, response.headers["content-type"].partition(";")[0]) == (events, "text/event-stream")
        assert fake_a.paths[-1] == f"GET {PATH}/{answer_id}?stream=true&starting_after=2"


async def test_what_is_not_known_is_refused_with_the_remedy(fake_a: FakeServer) -> None:
    respond(fake_a, "a")
    async with routing(spec_of(fake_a, "a")) as router:
        unstored, _ = await owned(router, store=False)
        num_requests = len(fake_a.requests)
        answers = [
            await create(router, previous_response_id="resp_other"),
            await create(router, previous_response_id=unstored),
            await router.client.get(f"{PATH}/resp_other"),
            await router.client.get(f"{PATH}/resp%0d%0aX:1"),
            await router.client.get(f"{PATH}/{'x' * 300}"),
            await router.client.delete(f"{PATH}/resp_other"),
            await router.client.post(f"{PATH}/resp_other/cancel"),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            assert "Send the whole conversation as 'input'" in answer.json()["error"]["message"]
        assert (answers[0].json()["error"]["param"], len(fake_a.requests)) == ("previous_response_id", num_requests)


async def test_a_tenant_reaches_its_own_responses_only(fake_a: FakeServer) -> None:
    respond(fake_a, "a")
    async with routing(spec_of(fake_a, "a"), api_keys={"sk-a": "a", "sk-b": "b"}) as router:
        keys = [{"authorization": f"Bearer sk-{tenant}"} for tenant in "ab"]
        made = await router.client.post(PATH, json={"input": "x"}, headers=keys[0])
        url, follow_up = f"{PATH}/{made.json()['id']}", {"input": "y", "previous_response_id": made.json()["id"]}
        for headers, status in zip(keys, (200, 404), strict=True):
            assert (await router.client.get(url, headers=headers)).status_code == status
            assert (await router.client.post(f"{url}/cancel", headers=headers)).status_code == status
            assert (await router.client.post(PATH, json=follow_up, headers=headers)).status_code == status


async def test_an_engine_that_is_gone_is_named_with_the_remedy(fake_a: FakeServer, fake_b: FakeServer) -> None:
    respond(fake_a, "a")
    async with routing(spec_of(fake_a, "a"), admin_token="secret") as router:
        answer_id, _ = await owned(router)
        headers = {"authorization": "Bearer secret"}
        await router.client.post("/v1/engines", json={"name": "b", "url": fake_b.url}, headers=headers)
        respond(fake_b, "b")
        await router.all_ready("b")
        fake_a.stop()
        await eventually(lambda: router.engine("a").state.value == "dead")
        refused = await create(router, previous_response_id=answer_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        assert "engine a, which keeps the response before this one: dead:" in refused.json()["error"]["message"]
        assert (await router.client.get(f"{PATH}/{answer_id}")).status_code == 502
        await router.fleet.remove("a")
        assert (await create(router, previous_response_id=answer_id)).status_code == 404
        assert (await create(router)).headers["x-tandem-engine"] == "b"


async def test_an_engine_that_hangs_is_a_bounded_wait(fake_a: FakeServer) -> None:
    respond(fake_a, "a")
    async with routing(spec_of(fake_a, "a"), config=RouterConfig(request_timeout_s=1.0)) as router:
        answer_id, _ = await owned(router)
        fake_a.headers_pause.clear()
        read = await router.client.get(f"{PATH}/{answer_id}")
        assert (read.status_code, read.json()["error"]["code"]) == (504, "engine_timeout")
        assert "sent nothing within request_timeout_s=1" in read.json()["error"]["message"]
        fake_a.resume()


async def test_all_frontends_know_all_responses(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    respond(fake_a, "a")
    respond(fake_b, "b")
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), spec_of(fake_b, "b")) as decider:
        one, other = await decider.frontend("1"), await decider.frontend("2")
        for _ in range(3):
            answer_id, engine = await owned(one)
            assert await owned(other, previous_response_id=answer_id) != (answer_id, engine)
            assert (await owned(other, previous_response_id=answer_id))[1] == engine
            assert (await other.client.get(f"{PATH}/{answer_id}")).status_code == 200
        missing = await other.client.get(f"{PATH}/resp_none")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "response_id")


def test_only_the_latest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_answers, "MAX_STORED_ANSWERS", 3)
    answers = StoredAnswers()
    for i in range(3):
        answers.note(f"resp_{i}", "a", "t")
    assert answers.engine_of("resp_0", "t") == "a"  # used just now, so it is not the oldest any more
    answers.note("resp_3", "b", "t")
    answers.note("resp_3", "a", "other")  # taken
    answers.note("x" * 300, "a", "t")  # too long
    assert [answers.engine_of(f"resp_{i}", "t") for i in range(4)] == ["a", None, "a", "b"]
    assert answers.engine_of("resp_3", "other") is None
    assert len(answers) == 3
