from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from tandem.frontend.relay.prompt_forms import chat_form
from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.digest import EVERYONE, token_bytes
from tandem.protocol.messages import WorkerState
from tandem.router.engines.dispatcher import DispatchRequest
from tandem.router.overview import MEMBER_COLUMNS
from tandem.scheduling.request import ServiceClass
from tandem.text.tokenizer import Tokenizer
from tests.support.engines_harness import CHAT, COMPLETIONS, Router, completion, routing, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.kv_event_publisher import IDS, evicted, offloaded, publishing, removed, stored
from tests.support.waiting import eventually

PROMPT = [*IDS, 1, 2, 3]


async def expected_tokens(router: Router, **fields: Any) -> int:
    response = await router.client.post(COMPLETIONS, json=completion(PROMPT, **fields))
    assert response.status_code == 200, response.text
    return int(response.headers["x-tandem-expected-cached-tokens"])


def dispatch_request(prompt: list[int]) -> DispatchRequest:
    return DispatchRequest(
        request_id="r",
        model="fake-model",
        prompt=token_bytes(prompt),
        cache_scope=EVERYONE,
        max_tokens=4,
        is_stream=True,
        service_class=ServiceClass(),
    )


async def test_the_index_follows_the_engine(fake_a: FakeServer) -> None:
    async with publishing(fake_a, keeps=2) as (publisher, spec):
        await publisher.publish(stored(0, 3), is_lost=True)  # before the router came
        async with routing(spec, readers={"fake-model": PromptReader()}) as router:
            index = router.fleet.index
            await eventually(lambda: index.num_blocks("a") == 3)
            assert await expected_tokens(router) == 48
            assert await expected_tokens(router, cache_salt="another tenant") == 0
            await publisher.publish(removed(2))
            await eventually(lambda: index.num_blocks("a") == 2)
            for _ in range(3):  # more than it keeps for a replay, so the removal of block 1 is never told
                await publisher.publish(removed(1), is_lost=True)
            await publisher.publish({"type": "AllBlocksCleared"}, is_lost=True)
            await publisher.publish(stored(0, 1))
            await eventually(lambda: router.engine("a").cache.num_event_gaps == 1)
            await eventually(lambda: index.num_blocks("a") == 1)


async def test_a_hit_in_an_engines_host_memory_is_counted_and_named(fake_a: FakeServer) -> None:
    async with (
        publishing(fake_a, has_replay=False) as (publisher, spec),
        routing(spec, readers={"fake-model": PromptReader()}) as router,
    ):
        index, now = router.fleet.index, router.fleet.clock
        await publisher.publish_until(lambda: index.num_blocks("a") == 4, stored(0, 4))
        assert router.engine("a").to_json(now())["tiers"] == []
        assert "tiers" not in await router.dispatcher.overview()  # nor has the dashboard a panel for them
        await publisher.publish(*[offloaded(i) for i in range(4)], offloaded(0, medium="STORAGE"), removed(3, 2, 1, 0))
        await eventually(lambda: index.num_blocks("a") == 0)
        answer = await router.client.post(COMPLETIONS, json=completion(PROMPT), headers={"x-tandem-explain": "1"})
        [candidate] = json.loads(answer.headers["x-tandem-explain"])["placement"]["candidates"]
        assert (candidate["num_cached_tokens"], candidate["kv_tier"]) == (64, "host")
        assert answer.headers["x-tandem-expected-cached-tokens"] == "64"
        assert answer.headers["x-tandem-expected-tier"] == "host"
        tiers = (await router.client.get("/v1/pools")).json()["engines"][0]["tiers"]
        assert [(tier["name"], tier["num_blocks"]) for tier in tiers] == [("host", 4), ("disk", 1)]
        overview = await router.dispatcher.overview()
        assert ["host", 4, 0] in overview["members"]["rows"][0][MEMBER_COLUMNS.index("tiers")]
        assert [tier["name"] for tier in overview["tiers"]] == ["pool", "host", "disk"]
        assert overview["curve"]["num_tokens"] == len(PROMPT)
        [sizing] = (await router.client.get("/v1/pools")).json()["cache_sizing"].values()
        assert sizing["measured_hit_ratio"] == pytest.approx(64 / 67, abs=1e-6)
        await publisher.publish(evicted(3, 2, 1, 0))
        await eventually(lambda: index.num_blocks("a/host") == 0)
        assert index.num_blocks("a/disk") == 1


async def test_a_copy_in_the_pool_goes_before_one_in_a_tier_and_that_before_none(
    fake_a: FakeServer, fake_b: FakeServer
) -> None:
    async with (
        publishing(fake_a, "a", has_replay=False) as (first, spec_a),
        publishing(fake_b, "b", has_replay=False) as (second, spec_b),
        routing(
            *(replace(spec, hardware="cpu") for spec in (spec_a, spec_b)), readers={"fake-model": PromptReader()}
        ) as router,
    ):
        index = router.fleet.index

        async def chosen() -> str:
            answer = await router.client.post("/v1/route/explain", json=completion(PROMPT))
            best = answer.json()["data"][0]["placement"]["candidates"][0]
            return f"{best['decode_worker']}/{best['kv_tier']}"

        await first.publish_until(lambda: index.num_blocks("a") == 4, stored(0, 4))
        await first.publish(*[offloaded(i) for i in range(4)], removed(3, 2, 1, 0))
        await eventually(lambda: (index.num_blocks("a"), index.num_blocks("a/host")) == (0, 4))
        assert await chosen() == "a/host"
        await second.publish_until(lambda: index.num_blocks("b") == 4, stored(0, 4))
        assert await chosen() == "b/None"


async def test_a_restarted_engine_has_nothing_in_its_tiers(fake_a: FakeServer) -> None:
    async with (
        publishing(fake_a, has_replay=False) as (publisher, spec),
        routing(spec, readers={"fake-model": PromptReader()}) as router,
    ):
        index = router.fleet.index
        await publisher.publish_until(lambda: index.num_blocks("a") == 4, stored(0, 4))
        await publisher.publish(offloaded(0), offloaded(1, medium="STORAGE"))
        await eventually(lambda: index.num_blocks("a/disk") == 1)
        publisher.number = 0  # its messages are numbered anew
        await publisher.publish(stored(0, 2))
        await eventually(lambda: index.num_blocks("a") == 2)
        assert (index.num_blocks("a/host"), index.num_blocks("a/disk")) == (0, 0)
        await publisher.publish(offloaded(1))
        await eventually(lambda: index.num_blocks("a/host") == 1)
        router.engine("a").leave("it is stopped")
        await eventually(lambda: router.engine("a").state is WorkerState.READY)
        assert index.num_blocks("a/host") == 0
        assert router.engine("a").to_json(router.fleet.clock())["tiers"] == []


async def test_a_first_token_after_a_load_teaches_what_the_load_costs(fake_a: FakeServer) -> None:
    """The engine takes 50 ms for a load from its host memory, which was assumed to take a few."""
    async with (
        publishing(fake_a, has_replay=False) as (publisher, spec),
        routing(spec, readers={"fake-model": PromptReader()}) as router,
    ):
        engine, index = router.engine("a"), router.fleet.index
        await publisher.publish_until(lambda: index.num_blocks("a") == 4, stored(0, 4))
        await publisher.publish(*[offloaded(i) for i in range(4)], removed(3, 2, 1, 0))
        await eventually(lambda: index.num_blocks("a") == 0)
        steps = router.fleet.costs.steps(engine.spec.cost_kind)
        former, now = steps.costs, router.fleet.clock() + 1000.0
        costs = router.fleet.registry.table.tiers["host"]
        assert costs.latency_s[0] + 4 * costs.block_s[0] < 0.005
        for _ in range(30):
            reservation = router.dispatcher.reserve(dispatch_request(PROMPT), lambda *_: None)
            await reservation.place()
            now += steps.prefill_s(3, 64, engine.card.max_num_batched_tokens) + 0.05
            reservation.first_token(now)  # the first one seems to take 1,000 s
            reservation.release()
        assert costs.latency_s[0] + 4 * costs.block_s[0] == pytest.approx(0.05, rel=0.1)
        assert steps.costs == former  # such a prompt says nothing about steps


async def test_a_cleared_cache_costs_only_its_own_blocks(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following a worker again would take a pass over the blocks of all engines."""
    async with (
        publishing(fake_a, has_replay=False) as (publisher, spec),
        routing(spec, readers={"fake-model": PromptReader()}) as router,
    ):
        index = router.fleet.index
        await publisher.publish_until(lambda: index.num_blocks("a") == 3, stored(0, 3))
        added: list[str] = []
        monkeypatch.setattr(index, "add_worker", lambda name, _: added.append(name))
        await publisher.publish_until(lambda: index.num_blocks("a") == 0, {"type": "AllBlocksCleared"})
        await publisher.publish_until(lambda: index.num_blocks("a") == 2, stored(0, 2))
        assert not added


@pytest.mark.parametrize(
    "wrong", [{"token_ids": [-1] * 16}, {"token_ids": [2**40] * 16}, {"lora_name": 5}, {"block_hashes": 3}], ids=str
)
async def test_a_malformed_batch_leaves_nothing_and_the_next_counts(fake_a: FakeServer, wrong: dict[str, Any]) -> None:
    async with (
        publishing(fake_a, has_replay=False) as (publisher, spec),
        routing(spec, readers={"fake-model": PromptReader()}) as router,
    ):
        index = router.fleet.index
        await publisher.publish_until(lambda: index.num_blocks("a") == 3, stored(0, 3))
        await publisher.publish(removed(2), stored(0, 1) | wrong)
        await eventually(lambda: index.num_blocks("a") == 0)
        assert "its KV events are malformed" in router.engine("a").reason
        await publisher.publish(stored(0, 2))
        await eventually(lambda: index.num_blocks("a") == 2)


def image_chat(data: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}, image]}],
        "max_tokens": 1,
        "stream": False,
    }


async def test_prompts_with_images_and_of_text_share_no_blocks(fake_a: FakeServer, tokenizer: Tokenizer) -> None:
    """The engine's blocks contain the same token ids in each case."""
    fake_a.replies[CHAT] = lambda *_: JSONResponse({"choices": [{}]})
    reader = PromptReader(tokenizer)
    guessed = reader.read(chat_form(image_chat("a")), EVERYONE, 4096).token_ids
    num_blocks = len(guessed) // 16
    async with publishing(fake_a) as (publisher, spec), routing(spec, readers={"fake-model": reader}) as router:
        # Blocks whose ids are the guess for a prompt with an image, computed as text: a real prompt of these ids.
        names = [b"text-%d" % i for i in range(num_blocks)]
        ids = guessed[: num_blocks * 16]
        await publisher.publish_until(
            lambda: router.fleet.index.num_blocks("a") == num_blocks,
            stored(0, num_blocks, block_hashes=names, token_ids=ids),
        )
        # Blocks of a prompt with an image, whose ids a prompt of text may have too: none is known beyond the text.
        images = [None, [["hash", 2]], None, None]
        await publisher.publish(stored(0, 4, extra_keys=images))
        await eventually(lambda: router.fleet.index.num_blocks("a") == num_blocks + 1)
        assert await expected_tokens(router) == 16  # of text before the image
        for _ in range(2):  # the second time the first request is on its way to be cached
            response = await router.client.post(CHAT, json=image_chat("a"))
            assert (response.status_code, response.headers["x-tandem-expected-cached-tokens"]) == (200, "0")


async def test_a_simulated_cache_tells_images_apart(fake_a: FakeServer, tokenizer: Tokenizer) -> None:
    fake_a.replies[CHAT] = lambda *_: JSONResponse({"choices": [{}]})
    async with routing(spec_of(fake_a, "a"), readers={"fake-model": PromptReader(tokenizer)}) as router:
        expected = []
        for data in ("a", "b", "a"):
            response = await router.client.post(CHAT, json=image_chat(data))
            expected.append(int(response.headers["x-tandem-expected-cached-tokens"]))
        assert expected[:2] == [0, 0]
        assert expected[2] > 400
