"""LoRA adapters: listed, followed as engines load and unload them, and routed to the engines that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.config import RouterConfig
from tests.support.engines_harness import COMPLETIONS, Router, completion, routing, routing_by_decider, spec_of
from tests.support.fake_openai import MODEL, FakeServer
from tests.support.kv_event_publisher import IDS, name, publishing, stored
from tests.support.waiting import eventually

PROMPT = [*IDS, 1, 2, 3]


async def ask(router: Router, model: str, prompt: Any = "a b c", **fields: Any) -> Any:
    return await router.client.post(COMPLETIONS, json=completion(prompt, model=model, **fields))


async def listed(router: Router) -> dict[str, str | None]:
    cards = (await router.client.get("/v1/models")).json()["data"]
    return {card["id"]: card["parent"] for card in cards}


async def test_requests_go_to_the_engines_that_have_the_adapter(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.adapters, fake_b.adapters = ["sql"], ["sql", "chat"]
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        assert await listed(router) == {MODEL: None, "sql": MODEL, "chat": MODEL}
        assert (await router.client.get("/v1/models/chat")).json()["max_model_len"] == 4096
        for _ in range(4):
            answer = await ask(router, "chat")
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        assert {body["model"] for body in fake_b.requests} == {"chat"}
        used = {(await ask(router, "sql", prompt)).headers["x-tandem-engine"] for prompt in ("x" * 99, "y" * 99)}
        assert used <= {"a", "b"}
        missing = await ask(router, "poem")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        costs = (await router.client.get("/v1/pools")).json()["costs"]
        assert "sql" not in str(costs)  # an adapter costs what its base model costs


async def test_adapters_are_followed_as_they_come_and_go(fake_a: FakeServer, fake_b: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        assert (await ask(router, "sql")).status_code == 404
        await ask(router, MODEL, "x" * 400)
        num_blocks = len(router.fleet.index)
        fake_b.adapters = ["sql"]
        await eventually(lambda: "sql" in router.fleet.adapters)
        assert (await ask(router, "sql")).headers["x-tandem-engine"] == "b"
        fake_a.adapters, fake_b.adapters = ["sql"], []
        await eventually(lambda: router.engine("a").adapters == ["sql"] and router.engine("b").adapters == [])
        assert (await ask(router, "sql")).headers["x-tandem-engine"] == "a"
        assert len(router.fleet.index) >= num_blocks  # what is cached stays known
        fake_a.stop()
        await eventually(lambda: router.engine("a").state.value == "dead")
        gone = await ask(router, "sql")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_worker")  # known, but not there now
        assert "1 without the adapter" in gone.json()["error"]["message"]
        assert (await ask(router, MODEL)).headers["x-tandem-engine"] == "b"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unloaded_adapter_is_sought_elsewhere(fake_a: FakeServer, fake_b: FakeServer, stream: bool) -> None:
    fake_a.adapters = fake_b.adapters = ["sql"]
    fake_a.unloaded = ["sql"]
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b")) as router:
        for number in range(4):
            answer = await ask(router, "sql", f"{number} " * 99, stream=stream)
            assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "b")
        assert fake_a.requests  # it was asked first
        fake_b.unloaded = ["sql"]
        gone = await ask(router, "sql", stream=stream)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert "does not have the adapter 'sql' any more" in gone.json()["error"]["message"]
        assert [engine.num_failures for engine in router.fleet.engines] == [0, 0]


async def test_hits_are_predicted_per_adapter_and_salt(fake_a: FakeServer) -> None:
    fake_a.adapters = ["sql", "chat"]
    async with publishing(fake_a) as (publisher, spec):
        await publisher.publish(stored(0, 3, lora_name="sql", extra_keys=[["sql"]] * 3), is_lost=True)
        others = [b"chat-%d" % i for i in range(2)]
        chat = stored(0, 2, lora_name="chat", extra_keys=[["chat"]] * 2, block_hashes=others)
        await publisher.publish(chat, is_lost=True)
        async with routing(spec, readers={MODEL: PromptReader()}) as router:
            await eventually(lambda: router.fleet.index.num_blocks("a") == 5)

            async def expected(model: str, **fields: Any) -> int:
                answer = await ask(router, model, PROMPT, **fields)
                return int(answer.headers["x-tandem-expected-cached-tokens"])

            assert [await expected(model) for model in ("sql", "chat", MODEL)] == [48, 32, 0]
            assert await expected("sql", cache_salt="own") == 0
            await publisher.publish({"type": "BlockRemoved", "block_hashes": [name(2)], "medium": "GPU"})
            await eventually(lambda: router.fleet.index.num_blocks("a") == 4)


async def test_sglang_is_told_the_adapter_in_its_own_way(fake_a: FakeServer) -> None:
    fake_a.adapters = ["sql"]
    async with routing(spec_of(fake_a, "a", kind="sglang")) as router:
        assert (await ask(router, "sql")).status_code == 200
        assert (await ask(router, MODEL)).status_code == 200
        told = [(body["model"], body.get("lora_path")) for body in fake_a.requests]
        assert told == [(f"{MODEL}:sql", "sql"), (MODEL, None)]


async def test_simulated_caches_keep_adapters_apart(fake_a: FakeServer) -> None:
    fake_a.adapters = ["sql"]
    async with routing(spec_of(fake_a, "a")) as router:
        seen = [await ask(router, model, "x" * 400) for model in (MODEL, "sql", "sql", MODEL)]
        cached = [int(answer.headers["x-tandem-expected-cached-tokens"]) for answer in seen]
        assert cached[:2] == [0, 0]
        assert min(cached[2:]) > 0


async def test_a_pair_has_the_adapter_on_both_sides(fake_a: FakeServer, fake_b: FakeServer) -> None:
    fake_a.adapters = ["sql"]
    specs = [spec_of(fake_a, "p", role="prefill"), spec_of(fake_b, "d", role="decode")]
    async with routing(*specs, config=RouterConfig(routing="cost,pairs")) as router:
        assert (await ask(router, "sql")).status_code == 503  # the decode engine lacks it
        fake_b.adapters = ["sql"]
        await eventually(lambda: router.engine("d").adapters == ["sql"])
        assert (await ask(router, "sql")).status_code == 200
        assert [fake_a.requests[-1]["model"], fake_b.requests[-1]["model"]] == ["sql", "sql"]


async def test_frontend_processes_know_the_adapters(fake_a: FakeServer, tmp_path: Path) -> None:
    fake_a.adapters = ["sql"]
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        frontend = await decider.frontend("1")
        assert await listed(frontend) == {MODEL: None, "sql": MODEL}
        assert (await ask(frontend, "sql")).status_code == 200
        fake_a.adapters = ["chat"]
        await eventually(lambda: dict(frontend.remote.adapters) == {"chat": MODEL})
        assert [(await ask(frontend, model)).status_code for model in ("sql", "chat")] == [404, 200]
