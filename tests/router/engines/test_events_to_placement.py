"""KV events of an engine decide where a prompt is expected to be cached."""

from __future__ import annotations

from typing import Any

from zmq.asyncio import Context

from tandem.router.engines.relay.prompts import TextReader
from tests.support.engines_harness import COMPLETIONS, Router, completion, routing, spec_of, until
from tests.support.fake_openai import FakeServer
from tests.support.kv_event_publisher import IDS, Publisher, removed, stored

PROMPT = [*IDS, 1, 2, 3]


async def expected_tokens(router: Router, **fields: Any) -> int:
    response = await router.client.post(COMPLETIONS, json=completion(PROMPT, **fields))
    assert response.status_code == 200, response.text
    return int(response.headers["x-tandem-expected-cached-tokens"])


async def test_the_index_follows_the_engine(fake_a: FakeServer) -> None:
    context = Context()
    publisher = Publisher(context, keeps=2)
    spec = spec_of(
        fake_a,
        "a",
        model="fake-model",
        kv_events=f"tcp://127.0.0.1:{publisher.port}",
        kv_replay=f"tcp://127.0.0.1:{publisher.replay_port}",
        block_size=16,
    )
    try:
        await publisher.publish(stored(0, 3), is_lost=True)  # before the router came
        async with routing(spec, readers={"fake-model": TextReader()}) as router:
            index = router.fleet.index
            await until(lambda: index.num_blocks("a") == 3)
            assert await expected_tokens(router) == 48
            assert await expected_tokens(router, cache_salt="another tenant") == 0
            await publisher.publish(removed(2))
            await until(lambda: index.num_blocks("a") == 2)
            for _ in range(3):  # more than it keeps for a replay, so the removal of block 1 is never told
                await publisher.publish(removed(1), is_lost=True)
            await publisher.publish({"type": "AllBlocksCleared"}, is_lost=True)
            await publisher.publish(stored(0, 1))
            await until(lambda: router.engine("a").cache.num_event_gaps == 1)
            await until(lambda: index.num_blocks("a") == 1)
    finally:
        await publisher.close()
        context.term()
