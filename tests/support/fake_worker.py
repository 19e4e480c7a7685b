"""Scripted workers behind real sockets, and a router connected to them. No engine, no torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from zmq.asyncio import Context
from zmq.constants import SocketType

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import DIGEST_BYTES, CacheScope, join_digests
from tandem.protocol.messages import (
    CANCELLED,
    POOL_PLACE,
    BlockSnapshot,
    Cancel,
    CopyKv,
    Decode,
    FinishReason,
    Generate,
    Heartbeat,
    Hello,
    Introduce,
    LinkLoad,
    Message,
    PeerAddress,
    Prefill,
    RequestFailed,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    StepStats,
    Welcome,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.operator_api import WorkerManager
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import UNMANAGED, RequestFlow
from tandem.runtime.curve import make_keys
from tandem.runtime.tracing.tracing import Tracing
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import NAMESPACE, make_card
from tests.support.streams import Pulled

Script = Callable[["FakeWorker", Message], None]


def digests(names: Sequence[bytes]) -> list[bytes]:
    """Blocks of these names."""
    return [name.ljust(DIGEST_BYTES, b".") for name in names]


class FakeWorker:
    """Answers hellos and snapshot requests by itself; all but introductions is up to `script`."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        script: Script | None = None,
        *,
        epoch: int = 1,
        namespace: bytes = NAMESPACE,
        kernels: str = "",
        refusal: str = "",
        tiers: dict[str, str] | None = None,
        is_mute: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.received: list[Message] = []
        self.cached: list[bytes] = []
        self.stored: list[bytes] = []  # in each of its tiers
        self.sequence = 0
        self.confirms = True  # the end of requests that it is told to stop
        self._script = script
        self._refusal = refusal
        self._is_mute = is_mute
        self._context = Context()
        self._keys = make_keys()
        self._socket, self._beats = (self._listening(kind) for kind in (SocketType.ROUTER, SocketType.PUB))
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        beats_port = self._beats.bind_to_random_port("tcp://127.0.0.1")
        self.card = make_card(
            worker_id,
            role,
            epoch=epoch,
            endpoint=f"tcp://127.0.0.1:{port}",
            heartbeat_endpoint=f"tcp://127.0.0.1:{beats_port}",
            namespace=namespace,
        )
        address = msgspec.structs.replace(self.card.address, public_key=self._keys.public)
        self.card = msgspec.structs.replace(self.card, address=address, tiers=tiers or {}, kernels=kernels)
        self._peer = b""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def address(self) -> PeerAddress:
        return self.card.address

    def of_type(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.received if isinstance(message, kind)]

    def send(self, message: Message) -> None:
        self.send_raw(encode_message(message))

    def send_raw(self, data: bytes) -> None:
        self._socket.send_multipart([self._peer, data])

    def output(self, *deltas: SequenceDelta, stats: StepStats | None = None) -> None:
        self.send(
            StepOutput(
                worker_id=self.worker_id,
                epoch=self.address.epoch,
                deltas=list(deltas),
                stats=stats or StepStats(duration_s=0.02, num_decode_seqs=1, num_decode_kv_tokens=10),
                load=WorkerLoad(num_running=len(deltas)),
            )
        )

    def beat(self, load: WorkerLoad, *links: LinkLoad, progress_age_s: float = 0.5) -> None:
        beat = Heartbeat(
            worker_id=self.worker_id,
            epoch=self.address.epoch,
            progress_age_s=progress_age_s,
            load=load,
            links=list(links),
        )
        self.beat_raw(encode_message(beat))

    def beat_raw(self, data: bytes) -> None:
        self._beats.send(data)

    def confirm(self, request_id: str) -> None:
        """Say that a request was stopped."""
        self.send(RequestFailed(request_id=request_id, message="it was cancelled", code=CANCELLED))

    @property
    def is_closed(self) -> bool:
        return self._socket.closed

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)
        self._beats.close(linger=0)
        self._context.term()

    def _listening(self, kind: SocketType) -> Any:
        """Whoever knows its key may connect."""
        socket = self._context.socket(kind)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret
        return socket

    async def _run(self) -> None:
        while True:
            self._peer, data = await self._socket.recv_multipart()
            message = decode_message(data)
            self.received.append(message)
            if self._is_mute:
                continue
            if isinstance(message, Cancel) and message.is_confirmed and self.confirms:
                self.confirm(message.request_id)
            if isinstance(message, Hello):
                self.send(Welcome(card=self.card, refusal=self._refusal))
            elif isinstance(message, SnapshotRequest):
                for place in message.places:
                    self.send(
                        BlockSnapshot(
                            worker_id=self.worker_id,
                            epoch=self.address.epoch,
                            sequence=self.sequence,
                            digests=join_digests(digests(self.cached if place == POOL_PLACE else self.stored)),
                            place=place,
                        )
                    )
            elif self._script is not None and not isinstance(message, Introduce):
                self._script(self, message)


class FakeCluster:
    """Some fake workers and the router's parts, connected."""

    def __init__(
        self,
        config: RouterConfig,
        tenants: Tenants = Tenants(),
        manager: WorkerManager = UNMANAGED,
        tracing: Tracing | None = None,
        heartbeat_interval_s: float = 60.0,
    ) -> None:
        """The workers send no heartbeats by themselves."""
        self.registry = Registry()
        self.index = PrefixIndex()
        self.costs = CostModel()
        self.sizing = CacheSizing(self.registry, self.costs)
        self.client = WorkerClient(
            self.registry, self.index, self.costs, config, heartbeat_interval_s=heartbeat_interval_s
        )
        self.flow = RequestFlow(
            model="toy",
            registry=self.registry,
            index=self.index,
            costs=self.costs,
            placer=Placer(self.registry, self.index, self.costs, config),
            sizing=self.sizing,
            workers=self.client,
            config=config,
            tenants=tenants,
            manager=manager,
            tracing=tracing,
        )
        self.workers: dict[str, FakeWorker] = {}

    async def add(self, worker: FakeWorker) -> FakeWorker:
        self.workers[worker.worker_id] = worker
        await self.client.add_worker(worker.address)
        return worker

    def assert_nothing_left(self) -> None:
        assert (self.client.num_open_sub_requests, self.registry.num_bookings) == (0, 0)
        for worker in self.registry:
            assert (worker.queued_prompt_tokens, worker.num_booked_seqs, worker.booked_kv_tokens) == (0, 0, 0)


@contextlib.asynccontextmanager
async def fake_cluster(
    *,
    prefill: Script | None = None,
    decode: Script | None = None,
    config: RouterConfig | None = None,
    tenants: Tenants = Tenants(),
    manager: WorkerManager = UNMANAGED,
    local_prefill: bool = False,
    tracing: Tracing | None = None,
    heartbeat_interval_s: float = 60.0,
) -> AsyncIterator[FakeCluster]:
    """Workers "p" and "d", those whose script is given, behind a started router. At the end nothing may be left."""
    config = replace(config or RouterConfig(), routing="cost" if local_prefill else "cost,pairs")
    cluster = FakeCluster(config, tenants, manager, tracing, heartbeat_interval_s)
    await cluster.client.start()
    try:
        if prefill is not None:
            await cluster.add(FakeWorker("p", Role.PREFILL, prefill))
        if decode is not None:
            await cluster.add(FakeWorker("d", Role.DECODE, decode))
        yield cluster
        cluster.assert_nothing_left()
    finally:
        await cluster.client.close()
        for worker in cluster.workers.values():
            await worker.close()


def make_request(
    *, request_id: str = "r0", num_prompt_tokens: int = 64, max_tokens: int = 4, scope: str = ""
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        token_ids=list(range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_scope=CacheScope(scope),
    )


def silent(worker: FakeWorker, message: Message) -> None:
    """Take every request and never answer."""


def first_token(worker: FakeWorker, message: Message) -> None:
    """Do the prefill part: token 100, or the one behind the known output."""
    if isinstance(message, Prefill):
        offset = len(message.output_ids)
        num_cached = None if offset else 0
        worker.output(SequenceDelta(message.request_id, offset, [100 + offset], num_cached_tokens=num_cached))


def remaining_tokens(worker: FakeWorker, message: Message) -> None:
    """Do the decode part, or the whole request: tokens 101 and so on, one per step. Copies are made at once."""
    if isinstance(message, CopyKv):
        worker.output(SequenceDelta(message.request_id, 0, [], FinishReason.LENGTH))
    if not isinstance(message, Decode | Generate):
        return
    start = len(message.output_ids) + isinstance(message, Decode)
    last = message.sampling.max_tokens - 1
    for offset in range(start, last + 1):
        finish_reason = FinishReason.LENGTH if offset == last else None
        worker.output(SequenceDelta(message.request_id, offset, [100 + offset], finish_reason))


def one_token(worker: FakeWorker, message: Message) -> None:
    """Send the first token of the decode part and stop there."""
    if isinstance(message, Decode):
        offset = len(message.output_ids) + 1
        worker.output(SequenceDelta(message.request_id, offset, [100 + offset]))


def fails(worker: FakeWorker, message: Message) -> None:
    """Give every request up."""
    if not isinstance(message, Cancel):
        assert isinstance(message, Prefill | Decode | Generate)
        worker.send(RequestFailed(request_id=message.request_id, message="pool is on fire", code="kv_peer_lost"))


def gives_up(code: str, **fields: Any) -> Script:
    """Refuse what it should serve alone, for this reason."""

    def refuse(worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Generate):
            worker.send(RequestFailed(request_id=message.request_id, message="odd", code=code, **fields))

    return refuse


async def collect(cluster: FakeCluster, request: GenerateRequest) -> list[SequenceDelta]:
    async with asyncio.timeout(10):
        return [delta async for delta in Pulled(cluster.flow.serve(request))]


def tokens(deltas: list[SequenceDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def take(stream: Pulled[SequenceDelta], count: int) -> list[int]:
    """So many tokens, in however many deltas they come."""
    taken: list[int] = []
    while len(taken) < count:
        taken += (await anext(stream)).token_ids
    return taken


async def begun(cluster: FakeCluster, **fields: Any) -> Pulled[SequenceDelta]:
    """The stream of a request whose client has two tokens."""
    stream = Pulled(cluster.flow.serve(make_request(**fields)))
    assert await take(stream, 2) == [100, 101]
    return stream
