"""The forwarded routes: what passes through unchanged, what a pair hands over, and what stays on one engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse, Response

from tandem.frontend.relay.apis import APIS
from tests.frontend.relay.recordings import KV, RECORDED, replay
from tests.support.engines_harness import PAIRED, Router, completion, pair, routing, spec_of
from tests.support.fake_openai import FakeServer

GENERATING = {name: recorded for name, recorded in RECORDED.items() if "stream" in recorded}


def as_json(response: Any) -> Any:
    return json.loads(response.text)


# -- what passes through -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
async def test_a_plain_answer_is_the_engines_own_and_its_tokens_are_counted(fake_a: FakeServer, name: str) -> None:
    body = replay(fake_a, name)
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(RECORDED[name]["path"], json=body)
        assert (response.status_code, as_json(response)) == (200, RECORDED[name]["answer"])
        assert (response.headers["x-tandem-engine"], fake_a.requests) == ("a", [body])
        if name in GENERATING:
            await expect_counted(router, RECORDED[name]["answer"]["usage"])


async def expect_counted(router: Router, usage: dict[str, Any]) -> None:
    metrics = (await router.client.get("/metrics")).text
    num_output = usage.get("completion_tokens") or usage.get("output_tokens")
    assert f"tandem_router_generation_tokens_total {num_output}.0" in metrics
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert f"tandem_router_prompt_tokens_total {num_prompt}.0" in metrics


@pytest.mark.parametrize("name", GENERATING)
async def test_a_stream_is_the_engines_own_and_its_tokens_are_counted(fake_a: FakeServer, name: str) -> None:
    body, usage = replay(fake_a, name) | {"stream": True}, RECORDED[name]["answer"]["usage"]
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(RECORDED[name]["path"], json=body)
        assert response.text == RECORDED[name]["stream"]
        added = {"stream_options": {"include_usage": True}} if "choices" in RECORDED[name]["answer"] else {}
        assert fake_a.requests == [body | added]
        if "input_tokens" in usage:
            await expect_counted(router, usage)
        else:  # the recorded streams of chats have no usage: it was not asked for
            assert "tandem_router_generation_tokens_total 0.0" not in (await router.client.get("/metrics")).text


EMBEDDING = {"object": "list", "data": [{"embedding": [0.5, 0.25]}], "usage": {"prompt_tokens": 5, "total_tokens": 5}}
COMPUTING = {
    "/v1/embeddings": ({"input": ["one text", "another"]}, EMBEDDING),
    "/v1/rerank": ({"query": "q", "documents": ["a", "b"]}, {"results": [{"index": 1, "relevance_score": 0.5}]}),
    "/v1/score": ({"text_1": "q", "text_2": ["a"]}, {"data": [{"index": 0, "score": 0.5}]}),
    "/pooling": ({"input": "a"}, {"data": [{"data": [1.0]}]}),
    "/classify": ({"input": "a"}, {"data": [{"label": "yes"}]}),
}


@pytest.mark.parametrize("path", COMPUTING)
async def test_routes_that_generate_nothing(fake_a: FakeServer, path: str) -> None:
    body, answer = COMPUTING[path]
    fake_a.replies[path] = lambda *_: JSONResponse(answer)
    async with routing(spec_of(fake_a, "a")) as router:
        before = router.fleet.lengths.mean_output_tokens
        response = await router.client.post(path, json=body | {"model": "fake-model"})
        assert (as_json(response), fake_a.requests) == (answer, [body | {"model": "fake-model"}])
        assert router.fleet.lengths.mean_output_tokens == before
        fake_a.replies.clear()
        missing = await router.client.post(path, json=body)
        assert (missing.status_code, as_json(missing)) == (404, {"detail": "Not Found"})
        assert router.engine("a").num_failures == 0


async def test_an_engine_whose_model_cannot_answer_a_route_has_not_failed(fake_a: FakeServer) -> None:
    refusal = {"error": {"message": "no embeddings", "type": "invalid_request_error", "param": None, "code": "x"}}
    fake_a.replies["/v1/embeddings"] = lambda *_: JSONResponse(refusal, 501)
    async with routing(spec_of(fake_a, "a")) as router:
        for _ in range(20):
            response = await router.client.post("/v1/embeddings", json={"input": "a"})
            assert (response.status_code, response.json()) == (501, refusal)
        assert router.engine("a").num_failures == 0
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200


async def test_embeddings_may_be_bytes(fake_a: FakeServer) -> None:
    raw = bytes(range(256))
    fake_a.replies["/v1/embeddings"] = lambda *_: Response(raw, media_type="application/octet-stream")
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post("/v1/embeddings", json={"input": "a", "encoding_format": "bytes"})
        assert (response.content, response.headers["content-type"]) == (raw, "application/octet-stream")


# -- errors and limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [api.path for api in APIS])
async def test_fields_of_the_router_are_refused_on_each_route(fake_a: FakeServer, path: str) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        for field in ("kv_transfer_params", "ec_transfer_params", "data_parallel_rank", "bootstrap_host"):
            response = await router.client.post(path, json={"input": "a", field: {"remote_host": "h"}})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not fake_a.requests


@pytest.mark.parametrize("path", [api.path for api in APIS])
async def test_a_failure_at_the_start_goes_elsewhere(fake_a: FakeServer, fake_b: FakeServer, path: str) -> None:
    [api] = [api for api in APIS if api.path == path]
    fake_a.replies[path] = lambda *_: JSONResponse({"error": {"message": "broken"}}, 500)
    fake_b.replies[path] = lambda *_: JSONResponse({"id": "b", api.answer_field: [{"text": ""}]})
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        for number in range(4):
            response = await router.client.post(path, json={"input": f"{number}" * 99, "prompt": f"{number}" * 99})
            assert (response.status_code, response.headers["x-tandem-engine"]) == (200, "b"), response.text
        assert router.engine("a").num_failures > 0
        fake_b.replies[path] = lambda *_: JSONResponse({"nothing": "here"})
        strange = await router.client.post(path, json={"input": "a", "prompt": "a"})
        assert (strange.status_code, strange.json()["error"]["code"]) == (502, "engine_failed")


@pytest.mark.parametrize("name", ["responses", "messages", "chat_auto"])
async def test_a_stream_that_breaks_ends_in_an_error_event_of_its_kind(fake_a: FakeServer, name: str) -> None:
    body = replay(fake_a, name) | {"stream": True}
    path, whole = RECORDED[name]["path"], RECORDED[name]["stream"]
    first = "\n\n".join(whole.split("\n\n")[:5]) + "\n\n"
    fake_a.replies[path] = lambda *_: Response(first, media_type="text/event-stream")
    async with routing(spec_of(fake_a, "a")) as router:
        response = await router.client.post(path, json=body)
        assert response.text.startswith(first)
        last = response.text.removeprefix(first).strip().splitlines()
        assert last[:-1] == ([] if name == "chat_auto" else ["event: error"])
        told = json.loads(last[-1].removeprefix("data: "))
        assert (told["error"]["code"], told.get("type")) == ("engine_failed", None if name == "chat_auto" else "error")
        if name == "responses":
            assert told["code"] == "engine_failed"
        assert told["error"]["type"] == ("api_error" if name == "messages" else "server_error")


async def test_the_routers_own_errors_have_the_shape_of_their_api(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a")) as router:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
            unknown = (await router.client.post(path, json={"model": "other"})).json()
            wrong = (await router.client.post(path, json={"kv_transfer_params": {}})).json()
            kinds = (unknown.get("type"), unknown["error"]["type"], wrong["error"]["type"])
            own = (None, "invalid_request_error", "invalid_request_error")
            anthropic = ("error", "not_found_error", "invalid_request_error")
            assert kinds == (own if path == "/v1/responses" else anthropic)


async def test_a_clients_error_in_a_stream_has_the_shape_of_its_route(fake_a: FakeServer) -> None:
    error = {"message": "too hot", "code": 400}
    events = f"event: error\ndata: {json.dumps({'type': 'error', 'error': error})}\n\n"
    fake_a.replies["/v1/messages"] = lambda _method, _body: Response(events, media_type="text/event-stream")
    async with routing(spec_of(fake_a, "a")) as router:
        answer = await router.client.post("/v1/messages", json={"messages": [], "max_tokens": 3, "stream": True})
    assert answer.status_code == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", **error}}


@pytest.mark.parametrize("name", ["responses", "messages"])
async def test_an_error_as_first_event_goes_elsewhere(fake_a: FakeServer, fake_b: FakeServer, name: str) -> None:
    body = replay(fake_b, name) | {"stream": True}
    replay(fake_a, name)
    error = 'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n'
    fake_a.replies[RECORDED[name]["path"]] = lambda *_: Response(error, media_type="text/event-stream")
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        for number in range(3):  # another salt each time: else all go where the first one is cached
            salted = body | {"cache_salt": f"s{number}"}
            assert (await router.client.post(RECORDED[name]["path"], json=salted)).text == RECORDED[name]["stream"]
        assert router.engine("a").num_failures > 0


async def test_each_route_gets_the_salt_of_its_tenant_if_it_computes(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), api_keys={"sk-a": "a"}) as router:
        for api in APIS:
            refused = await router.client.post(api.path, json={"input": "a"})
            assert refused.status_code == 401
            fake_a.replies[api.path] = lambda *_: JSONResponse({})
            await router.client.post(api.path, json={"input": "a"}, headers={"x-api-key": "sk-a"})
            assert ("cache_salt" in fake_a.requests[-1]) == api.is_salted


# -- pairs -----------------------------------------------------------------------------------------------------------

LIMITS = {"/v1/responses": "max_output_tokens"}


@pytest.mark.parametrize("name", sorted(GENERATING.keys() - {"completions_n"}))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_pair_hands_over_on_each_route(fake_a: FakeServer, fake_b: FakeServer, name: str, stream: bool) -> None:
    body = replay(fake_a, name) | {"stream": stream}
    replay(fake_b, name)
    recorded = RECORDED[name]
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        response = await router.client.post(recorded["path"], json=body)
        [prefill], [decode] = fake_a.requests, fake_b.requests
        assert fake_a.paths == fake_b.paths == [f"POST {recorded['path']}"]
        changed = {"stream", "kv_transfer_params", LIMITS.get(recorded["path"], "max_tokens"), "store"}
        assert {key: prefill[key] for key in body.keys() - changed} == {key: body[key] for key in body.keys() - changed}
        assert prefill[LIMITS.get(recorded["path"], "max_tokens")] == 1
        assert prefill["stream"] is False
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert (decode["kv_transfer_params"], {key: decode[key] for key in body}) == (KV, body)
        if stream:
            assert [line for line in response.text.splitlines() if '"usage":{' not in line] == [
                line for line in recorded["stream"].splitlines() if '"usage":{' not in line
            ]
        else:
            assert {**as_json(response), "usage": None} == {**recorded["answer"], "usage": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_a_pair_are_the_first_ones(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    def reply(num_cached: int) -> Any:
        response_usage = {"input_tokens": 20, "output_tokens": 8, "input_tokens_details": {"cached_tokens": num_cached}}
        message_usage = {"input_tokens": 20 - num_cached, "cache_read_input_tokens": num_cached, "output_tokens": 8}

        def answer(method: str, body: dict[str, Any]) -> Response:
            is_message = "max_tokens" in body
            usage = message_usage if is_message else response_usage
            if not body["stream"]:
                return JSONResponse({"output": [], "content": [], "usage": usage, "kv_transfer_params": KV})
            done = {"type": "message_delta", "usage": usage}
            if not is_message:
                done = {"type": "response.completed", "response": {"usage": usage}}
            events = [done, {"type": "message_stop"}] if is_message else [done]
            text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
            return Response(text, media_type="text/event-stream")

        return answer

    for fake, num_cached in ((fake_a, 4), (fake_b, 19)):
        fake.replies |= dict.fromkeys(("/v1/responses", "/v1/messages"), reply(num_cached))
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        for path, limit in (("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")):
            body = {"input": "a", "messages": [], limit: 8, "stream": stream}
            response = await router.client.post(path, json=body)
            told = response.text if not stream else response.text.split("data: ")[1].partition("\n")[0]
            usage = json.loads(told).get("usage") or json.loads(told)["response"]["usage"]
            if path == "/v1/responses":
                assert usage["input_tokens_details"] == {"cached_tokens": 4}
            else:
                assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (16, 4)
        metrics = (await router.client.get("/metrics")).text
        assert "tandem_router_cached_prompt_tokens_total 8.0" in metrics


TOOL = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": "a", "best_of": 2}),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 1}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"prompt": "", "prompt_embeds": "base64"}),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": -1}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/responses", {"input": "a", "truncation": "auto"}),
        ("/v1/responses", {"input": "a", "tools": [TOOL, {"type": "code_interpreter"}]}),
        ("/v1/messages", {"messages": [], "tools": [], "tool_choice": {"type": "tool", "name": "f"}}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_what_is_not_one_sequence_of_one_prompt_stays_on_one_engine(
    fake_a: FakeServer, fake_b: FakeServer, path: str, fields: dict[str, Any]
) -> None:
    [api] = [api for api in APIS if api.path == path]
    fake_b.replies[path] = lambda *_: JSONResponse({api.answer_field: [{"text": ""}]})
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        response = await router.client.post(path, json=fields)
        assert response.status_code == 200, response.text
        assert not fake_a.requests
        assert fake_b.requests == [fields | {"model": "fake-model"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a"]}),
        ("/v1/completions", {"prompt": [1, 2, 3], "n": 1, "logprobs": 5, "stop": ["x"], "seed": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}),
        ("/v1/responses", {"input": "a", "tools": [TOOL], "store": True}),
        ("/v1/messages", {"messages": [], "tool_choice": {"type": "any"}}),
    ],
)
async def test_what_is_one_sequence_is_handed_over(
    fake_a: FakeServer, fake_b: FakeServer, path: str, fields: dict[str, Any]
) -> None:
    [api] = [api for api in APIS if api.path == path]
    for fake in (fake_a, fake_b):
        fake.replies[path] = lambda *_: JSONResponse({api.answer_field: [{}], "kv_transfer_params": KV})
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        assert (await router.client.post(path, json=fields)).status_code == 200
        assert fake_b.requests == [fields | {"model": "fake-model", "kv_transfer_params": KV}]
        assert "store" not in fields or fake_a.requests[0]["store"] is False


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/completions", {"choices": [{"finish_reason": "stop"}]}),
        ("/v1/completions", {"choices": [{"finish_reason": "tool_calls"}]}),
        ("/v1/responses", {"output": [], "status": "completed"}),
        ("/v1/messages", {"content": [], "stop_reason": "end_turn"}),
    ],
)
async def test_a_first_token_that_ends_the_answer_needs_no_kv(
    fake_a: FakeServer, fake_b: FakeServer, path: str, answer: dict[str, Any]
) -> None:
    for fake in (fake_a, fake_b):
        fake.replies[path] = lambda *_: JSONResponse(answer)
    body = {"prompt": "a", "input": "a", "messages": []}
    async with routing(*pair(fake_a, fake_b), config=PAIRED) as router:
        assert as_json(await router.client.post(path, json=body)) == answer
        assert "kv_transfer_params" not in fake_b.requests[0]
