"""Pairs of SGLang engines: both get a request at once, and neither answers alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.router.engines.config import EngineSpec, check_fleet, ranks_of, spec_from
from tandem.router.engines.engine_status import CacheSize, parse_cache_size, parse_report
from tests.support.engines_harness import COMPLETIONS, Router, completion, dead_url, routing
from tests.support.fake_backend import RawClient, events
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

BOOTSTRAP_PORT = 8998


def half(fake: FakeServer | str, name: str, role: str, **fields: Any) -> EngineSpec:
    port = {"bootstrap_port": BOOTSTRAP_PORT} if role == "prefill" else {}
    url = fake if isinstance(fake, str) else fake.url
    entry = {"name": name, "url": url, "kind": "sglang", "role": role, "model": "fake-model"}
    return spec_from(entry | port | fields, "test")


def pair(fake_a: FakeServer, fake_b: FakeServer) -> list[EngineSpec]:
    return [half(fake_a, "p", "prefill"), half(fake_b, "d", "decode")]


async def error_of(router: Router, **fields: Any) -> tuple[int, str]:
    response = await router.client.post(COMPLETIONS, json=completion(**fields))
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_both_engines_get_the_same_request(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    fake_a.num_cached, fake_b.num_cached = 1, 2
    body = completion(stream=stream, model="fake-model", min_tokens=2, seed=7)
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with routing(*pair(fake_a, fake_b)) as router:
        response = await router.client.post(COMPLETIONS, json=body)
        assert response.headers["x-tandem-engine"] == "d"
        await eventually(lambda: bool(fake_a.requests))
        [prefill], [decode] = fake_a.requests, fake_b.requests
        meeting = {name: decode.pop(name) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
        assert decode == body
        assert prefill == {name: body[name] for name in body if name != "stream_options"} | meeting | {"stream": False}
        assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("127.0.0.1", BOOTSTRAP_PORT)
        assert 0 <= meeting["bootstrap_room"] < 2**63
        usage = events(response)[-2]["usage"] if stream else response.json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        [transfers] = router.fleet.costs.export()["transfers"].values()
        assert transfers["relative_error"] == 0.0  # nothing is learned of it: it is a part of the prefill


async def test_each_attempt_has_a_room_of_its_own(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(*pair(fake_a, fake_b)) as router:
        for _ in range(3):
            await router.client.post(COMPLETIONS, json=completion())
        assert len({request["bootstrap_room"] for request in fake_b.requests}) == 3


@pytest.mark.parametrize(
    ("name", "message"), [("p", "out of pages"), ("d", "no slots")], ids=["the prefill engine", "the decode engine"]
)
async def test_a_failure_ends_the_others_half(fake_a: FakeServer, fake_b: FakeServer, name: str, message: str) -> None:
    failing, other = (fake_a, fake_b) if name == "p" else (fake_b, fake_a)
    failing.status, failing.error = 500, {"message": message}
    other.headers_pause.clear()  # a decode engine waits for KV that never comes
    async with routing(*pair(fake_a, fake_b)) as router:
        assert await error_of(router, stream=name == "d") == (502, f"engine {name}: answered 500: {message}")
        await eventually(lambda: other.num_left == len(other.requests))
        assert [router.engine(one).num_failures for one in "pd"] == [int(one == name) for one in "pd"]


async def test_a_refusal_of_the_prompt_is_the_clients_own_error(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.status, fake_a.error = 400, {"message": "the prompt is too long"}
    fake_b.headers_pause.clear()
    async with routing(*pair(fake_a, fake_b)) as router:
        assert await error_of(router) == (400, "the prompt is too long")
        assert router.engine("p").num_failures == 0


async def test_a_prefill_engine_that_is_silent_is_named(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.headers_pause.clear()
    fake_b.headers_pause.clear()
    config = RouterConfig(request_timeout_s=0.3)
    async with routing(*pair(fake_a, fake_b), config=config) as router:
        status, message = await error_of(router)
        assert (status, message) == (504, "engine p: did not end the prompt within request_timeout_s=0.3")
        await eventually(lambda: (fake_a.num_left, fake_b.num_left) == (1, 1))


async def test_a_client_that_leaves_ends_both_halves(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.headers_pause.clear()
    fake_b.headers_pause.clear()
    async with routing(*pair(fake_a, fake_b)) as router:
        client = RawClient(router.app, COMPLETIONS, completion())
        await eventually(lambda: len(fake_a.requests) == len(fake_b.requests) == 1)
        client.leave()
        await eventually(lambda: (fake_a.num_left, fake_b.num_left) == (1, 1))
        await asyncio.wait_for(client.task, 10)


async def test_another_pair_takes_over_before_the_first_byte(fake_a: FakeServer, fake_b: FakeServer) -> None:
    specs = [half(dead_url(), "gone", "prefill"), *pair(fake_a, fake_b)]
    fake_a.status = 500
    fake_b.headers_pause.clear()  # it waits for KV that never comes
    async with routing(*specs, wait=False) as router:
        await router.all_ready("p", "d")
        assert (await error_of(router))[0] == 502
        fake_a.status = 200
        fake_b.resume()
        router.engine("p").breaker.succeeded()
        response = await router.client.post(COMPLETIONS, json=completion())
        assert response.headers["x-tandem-engine"] == "d"


async def test_neither_half_answers_alone(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.health = 503
    async with routing(*pair(fake_a, fake_b), wait=False) as router:
        await router.all_ready("d")
        assert "No engine is ready" in str(router.dispatcher.unready)
        status, message = await error_of(router)
        assert status == 503
        assert "none computes prompts" in message
        assert not fake_b.requests
        fake_b.replies["/tokenize"] = lambda *_: JSONResponse({"tokens": [1]})  # nothing is generated for it
        answer = await router.client.post("/tokenize", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "d")
        fake_a.health = 200
        await router.all_ready("p")
        assert (await router.client.post(COMPLETIONS, json=completion())).status_code == 200


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a b", "c"]}, {"echo": True}], ids=str)
async def test_a_pair_refuses_what_it_cannot(fake_a: FakeServer, fake_b: FakeServer, fields: dict[str, Any]) -> None:
    async with routing(*pair(fake_a, fake_b)) as router:
        status, message = await error_of(router, **fields)
        assert status == 503
        assert "answers one prompt with one sequence" in message
        assert not fake_a.requests
        assert not fake_b.requests


async def test_an_adapter_that_is_gone_is_not_a_failure(fake_a: FakeServer, fake_b: FakeServer) -> None:
    for fake in (fake_a, fake_b):
        fake.adapters = ["tuned"]
    fake_a.unloaded = ["fake-model:tuned"]
    fake_b.headers_pause.clear()
    async with routing(*pair(fake_a, fake_b)) as router:
        status, message = await error_of(router, model="tuned")
        assert (status, message) == (404, "engine p: does not have the adapter 'tuned' any more")
        assert router.engine("p").num_failures == 0


async def test_ranks_of_a_prefill_server_are_named_to_the_decode_server(fake_a: FakeServer, fake_b: FakeServer) -> None:
    prefill = ranks_of(half(fake_a, "p", "prefill", data_parallel_size=2))
    async with routing(*prefill, half(fake_b, "d", "decode")) as router:
        await router.client.post(COMPLETIONS, json=completion())
        await eventually(lambda: bool(fake_a.requests))
        rank = fake_a.request_headers[0]["x-data-parallel-rank"]
        assert fake_b.requests[0]["disagg_prefill_dp_rank"] == int(rank)
        assert "disagg_prefill_dp_rank" not in fake_a.requests[0]
        assert "x-data-parallel-rank" not in fake_b.request_headers[0]


async def test_a_broken_prefill_answer_is_a_failure(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.replies[COMPLETIONS] = lambda *_: Response("what?")
    fake_b.headers_pause.clear()
    async with routing(*pair(fake_a, fake_b)) as router:
        assert await error_of(router) == (502, "engine p: answered 200 with something that is not JSON")


# -- what the engines file may say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kind": "sglang", "role": "prefill"}, "needs bootstrap_port; give the server's --disaggregation-bootstrap-p"),
        ({"kind": "sglang", "bootstrap_port": 1}, "bootstrap_port=1 is for kind='sglang' with a role"),
        ({"kind": "vllm", "role": "prefill", "bootstrap_port": 1}, "bootstrap_port=1 is for kind='sglang'"),
        ({"kind": "sglang", "role": "prefill", "bootstrap_port": 70000}, "bootstrap_port=70000 must be a port"),
        ({"kind": "llamacpp", "role": "decode"}, "needs kind='vllm' .* or kind='sglang'"),
    ],
)
def test_roles_and_ports_that_do_not_fit_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        spec_from({"url": "http://h:1"} | fields, "test")


def test_halves_need_their_other_half() -> None:
    prefill, decode = half("http://h:1", "p", "prefill"), half("http://h:2", "d", "decode")
    check_fleet([prefill, decode])
    check_fleet([decode], is_complete=False)
    with pytest.raises(ConfigError, match="only SGLang decode engines"):
        check_fleet([decode])
    for other in ({"kind": "vllm", "role": "decode"}, {"kind": "sglang"}):
        whole = spec_from({"name": "w", "url": "http://h:3", "model": "fake-model"} | other, "test")
        with pytest.raises(ConfigError, match="engine p is one half of an SGLang pair, and w of group '' cannot be"):
            check_fleet([prefill, decode, whole])


def test_sglangs_metrics_show_its_cache_and_its_progress() -> None:
    text = """\
sglang:num_running_reqs{dp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="0"} 1.0
sglang:page_size{dp_rank="0"} 16.0
sglang:num_pages{dp_rank="0"} 512.0
sglang:num_pages{dp_rank="1"} 500.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode"} 40.0
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute"} 100.0
"""
    assert parse_cache_size(text, 0) == CacheSize(16, 512)
    report = parse_report(text)
    assert report.load is not None
    assert report.work is not None
    assert (report.load.is_busy, report.work.num_tokens) == (True, 140.0)
