"""However requests end, they leave nothing behind: clients, workers and the server stop at random moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import Decode, FinishReason, Generate, Message, SequenceDelta
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import RawClient
from tests.support.fake_worker import FakeCluster, FakeWorker, fake_cluster, first_token

NUM_TOKENS = 12
ENDS = ("nothing happens", "clients leave", "tasks are cancelled", "a worker dies", "the server stops", "a worker goes")


class SlowClient(RawClient):
    """Takes what is sent to it from `room` on."""

    room: asyncio.Event

    async def _send(self, message: object) -> None:
        await self.room.wait()
        await super()._send(message)


def dripping(rng: random.Random, token_ids: list[int], tasks: list[asyncio.Task[None]]) -> Callable[..., None]:
    """A worker that sends its tokens one by one."""

    async def drip(worker: FakeWorker, message: Decode | Generate) -> None:
        for offset in range(int(isinstance(message, Decode)), NUM_TOKENS):
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))  # the pace of its tokens
            if worker.is_closed:
                return
            finish = FinishReason.LENGTH if offset == NUM_TOKENS - 1 else None
            worker.output(SequenceDelta(message.request_id, offset, [token_ids[offset % len(token_ids)]], finish))

    def answer(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Decode | Generate):
            tasks.append(asyncio.create_task(drip(worker, message)))

    return answer


def strike(end: str, rng: random.Random, cluster: FakeCluster, clients: list[SlowClient]) -> None:
    """Let it happen."""
    match end:
        case "clients leave":
            for client in clients[:3]:
                client.leave()
        case "tasks are cancelled":
            for client in clients[:3]:
                client.task.cancel()
        case "a worker dies":
            cluster.client.mark_dead(rng.choice("pd"), "dead")
        case "the server stops":
            cluster.flow.shut_down()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("end", ENDS)
async def test_nothing_is_left(end: str, seed: int, tokenizer: Tokenizer) -> None:
    rng = random.Random(f"{end} {seed}")
    metrics = CollectorRegistry()
    config = RouterConfig(request_timeout_s=0.5)
    tasks: list[asyncio.Task[None]] = []
    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    async with fake_cluster(prefill=first_token, decode=dripping(rng, token_ids, tasks), config=config) as cluster:
        app = create_app(cluster.flow, tokenizer, RouterConfig(), metrics, api_keys=ApiKeys())
        clients = []
        for _ in range(4):
            body = {"model": cluster.flow.model, "prompt": "hello world " * 9, "max_tokens": NUM_TOKENS}
            body |= {"stream": rng.random() < 0.7, "n": rng.choice([1, 1, 3])}
            body |= {"stop": ["world"]} if rng.random() < 0.3 else {}
            client = SlowClient(app, "/v1/completions", body)
            client.room = asyncio.Event()
            if rng.random() < 0.7:
                client.room.set()
            clients.append(client)
        await asyncio.sleep(rng.random() * 0.03)  # the moment
        strike(end, rng, cluster, clients)
        going = asyncio.create_task(cluster.client.remove_worker("d")) if end == "a worker goes" else None
        await asyncio.sleep(rng.random() * 0.02)  # how far the end gets before slow clients read on
        for client in clients:
            client.room.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
            cluster.assert_nothing_left()
            assert cluster.flow.num_running == 0
            assert metrics.get_sample_value("tandem_router_running_requests") == 0
            if going is not None:
                await going
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
