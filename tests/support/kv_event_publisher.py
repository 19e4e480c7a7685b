"""A publisher of KV events in vLLM's wire format; it follows vllm/distributed/kv_events.py (0.32)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from zmq.asyncio import Context
from zmq.constants import SocketType

from tandem.router.engines.config import EngineSpec
from tests.support.engines_harness import spec_of
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

IDS = list(range(100, 164))


def stored(first: int, count: int, *, block_size: int = 16, **fields: Any) -> dict[str, Any]:
    """`count` blocks of IDS from block `first` on; a block's number makes its hash."""
    return {
        "type": "BlockStored",
        "block_hashes": [name(i) for i in range(first, first + count)],
        "parent_block_hash": name(first - 1) if first else None,
        "token_ids": IDS[first * 16 : (first + count) * 16],
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def removed(*numbers: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name(i) for i in numbers], "medium": "GPU", "group_idx": 0}


def offloaded(first: int, count: int = 1, medium: str = "CPU", *, is_described: bool = True) -> dict[str, Any]:
    """A chunk of `count` blocks in a tier, recorded from `OffloadingEventsTracker` of vLLM 0.32.

    Without a description it is the placeholder of a chunk whose request is not known, such as a promoted one.
    """
    if is_described:
        return stored(first, count, medium=medium, group_idx=0, kv_cache_spec_kind="full_attention")
    key = [name(first + count - 1)]
    return stored(0, 0, block_hashes=key, medium=medium, group_idx=0, block_size=0)


def evicted(*numbers: int, medium: str = "CPU") -> dict[str, Any]:
    """Chunks of one block that left a tier."""
    return removed(*numbers) | {"medium": medium}


def name(number: int) -> bytes:
    return b"vllm-%d" % number


def pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


class Publisher:
    """A PUB socket and a replay ROUTER like vLLM's: numbers start at 0, the latest `keeps` batches can be replayed."""

    def __init__(self, context: Context, *, has_topic: bool = True, keeps: int = 100, is_endless: bool = False) -> None:
        """`is_endless`: its replays do not end."""
        self._pub = context.socket(SocketType.PUB)
        self._router = context.socket(SocketType.ROUTER)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.number = 0
        self.replayed: list[int] = []  # first number of each replay that was requested
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self._topic = [b"kv"] if has_topic else []
        self._is_endless = is_endless
        self._task = asyncio.create_task(self._replay())

    async def publish(self, *events: Any, is_lost: bool = False) -> None:
        payload = pack(*events)
        number, self.number = self.number, self.number + 1
        self._kept.append((number, payload))
        if not is_lost:
            await self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def publish_until(self, condition: Callable[[], Any], *events: Any) -> None:
        """Publish events until they are heard: a SUB socket does not tell when its subscription has arrived."""

        async def is_heard() -> bool:
            if not (heard := bool(condition())):
                await self.publish(*events)
            return heard

        await eventually(is_heard)

    async def send_raw(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def _replay(self) -> None:
        while True:
            peer, empty, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replayed.append(first)
            for number, payload in [item for item in self._kept if item[0] >= first]:
                frames = [peer, empty, *self._topic, number.to_bytes(8, "big"), payload]
                await self._router.send_multipart(frames)
            while self._is_endless:
                await self._router.send_multipart([peer, empty, *self._topic, bytes(8), pack()])
                await asyncio.sleep(0)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([peer, empty, *([b""] if self._topic else []), end, b""])


@asynccontextmanager
async def publishing(
    fake: FakeServer, name: str = "a", *, has_replay: bool = True, **options: Any
) -> AsyncIterator[tuple[Publisher, EngineSpec]]:
    """An engine's publisher, and the engine as an engines file names it."""
    context = Context()
    publisher = Publisher(context, **options)
    endpoints = {"kv_events": f"tcp://127.0.0.1:{publisher.port}"}
    if has_replay:
        endpoints["kv_replay"] = f"tcp://127.0.0.1:{publisher.replay_port}"
    try:
        yield publisher, spec_of(fake, name, model=fake.model, block_size=16, **endpoints)
    finally:
        await publisher.close()
        context.term()
