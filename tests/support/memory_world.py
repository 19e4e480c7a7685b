"""A request flow whose workers answer at once, in this process: very many requests, and what they leave behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import cache_scope, join_digests
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import (
    BlockEvents,
    Decode,
    FinishReason,
    Generate,
    Message,
    Prefill,
    RequestFailed,
    Role,
    SequenceDelta,
    StepOutput,
    StepStats,
    Welcome,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.router.workers.link import Link
from tandem.scheduling.request import ServiceClass
from tests.support.builders import make_card
from tests.support.fake_worker import FakeCluster
from tests.support.streams import Pulled

NUM_POOL_BLOCKS = 512  # that a worker keeps and announces


class InstantSocket:
    """Stands for the socket to a worker: a message is answered in the next iteration of the event loop."""

    closed = False

    def __init__(self, client: WorkerClient, worker_id: str, role: Role, rng: random.Random) -> None:
        self.link: Any = None
        self._client = client
        self._worker_id = worker_id
        self._role = role
        self._rng = rng
        self._pool: deque[bytes] = deque()
        self._sequence = 0

    def send(self, data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, Generate | Prefill | Decode):
            asyncio.get_running_loop().call_soon(self._answer, message)

    def close(self) -> None:
        self.closed = True

    def _answer(self, message: Generate | Prefill | Decode) -> None:
        if self._rng.random() < 0.02:
            self._tell(RequestFailed(request_id=message.request_id, message="no", code="kv_peer_lost"))
            return
        num = message.sampling.max_tokens
        if isinstance(message, Prefill):
            deltas = [SequenceDelta(message.request_id, 0, [1], num_cached_tokens=0)]
        else:
            start = 1 if isinstance(message, Decode) else 0
            deltas = [SequenceDelta(message.request_id, start, [1] * (num - start), FinishReason.LENGTH)]
        stats = StepStats(duration_s=0.001, num_decode_seqs=1, num_decode_kv_tokens=32)
        self._tell(StepOutput(worker_id=self._worker_id, epoch=1, deltas=deltas, stats=stats, load=WorkerLoad()))
        self._store()

    def _store(self) -> None:
        stored, removed = [self._rng.randbytes(16) for _ in range(2)], []
        self._pool.extend(stored)
        while len(self._pool) > NUM_POOL_BLOCKS:
            removed.append(self._pool.popleft())
        self._sequence += 1
        runs = {"stored": join_digests(stored), "removed": join_digests(removed)}
        self._tell(BlockEvents(worker_id=self._worker_id, epoch=1, sequence=self._sequence, **runs))

    def _tell(self, message: Message) -> None:
        self._client.receive(self.link, encode_message(message))


class MemoryWorld:
    """The flow, its workers, and clients that send, leave in the middle, and come back as other tenants."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = FakeCluster(RouterConfig())
        self.num_sent = 0
        for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("c", Role.COLOCATED)):
            card = make_card(worker_id, role)
            socket = InstantSocket(self.cluster.client, worker_id, role, self.rng)
            socket.link = link = Link(card.address, socket, socket)  # type: ignore[arg-type]
            self.cluster.client.attach(link)
            self.cluster.client.receive(link, encode_message(Welcome(card=card)))
            link.snapshots_due.clear()

    @property
    def flow(self) -> RequestFlow:
        return self.cluster.flow

    async def send(self, count: int, concurrency: int = 32) -> None:
        """Send `count` requests; a few clients leave in the middle."""
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self._one()

        await asyncio.gather(*(client() for _ in range(concurrency)))
        self.cluster.assert_nothing_left()

    async def close(self) -> None:
        await self.cluster.client.close()

    async def _one(self) -> None:
        self.num_sent += 1
        number, rng = self.num_sent, self.rng
        tenant = f"tenant-{number if number % 500 == 0 else number % 50}" if number % 5 == 0 else "default"
        request = GenerateRequest(
            request_id=f"r{number}",
            token_ids=[rng.randrange(1 << 16) for _ in range(rng.randint(1, 40))],
            sampling=SamplingParams(max_tokens=rng.randint(1, 4)),
            cache_scope=cache_scope(f"salt-{number}" if number % 3 else ""),
            conversation_id=f"chat-{number}" if number % 2 else "",
            service_class=ServiceClass(tenant),
            explains=number % 50 == 0,
        )
        stream = Pulled(self.flow.serve(request))
        leaves = rng.random() < 0.05
        try:
            async for _ in stream:
                if leaves:
                    break
        except ServingError:
            pass
        finally:
            await stream.aclose()


def table_sizes(*roots: object) -> dict[str, int]:
    """Entries of every container that can be reached, by the class and attribute that has them."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root) for root in roots]
    while todo:
        where, found = todo.pop()
        if id(found) in seen or isinstance(found, type | ModuleType | FunctionType | MethodType | str | bytes | int):
            continue
        seen.add(id(found))
        if isinstance(found, Mapping | list | set | frozenset | deque | tuple):
            sizes[where] += len(found)
            values = found.values() if isinstance(found, Mapping) else found
            todo += [(where + "[]", value) for value in list(values)]
        else:
            todo += [(f"{type(found).__name__}.{name}", value) for name, value in _attributes(found)]
    return dict(sizes)


def _attributes(found: object) -> Iterator[tuple[str, object]]:
    if not type(found).__module__.startswith(("tandem", "collections")):
        return
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(found, name):
                yield name, getattr(found, name)
