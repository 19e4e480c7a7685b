"""Cost of Tandem's own HTTP edge: the edge in front of workers that compute nothing.

    python -m benchmarks.native_edge worker ENDPOINT [ENDPOINT ...]
    python -m benchmarks.native_edge edge PORT MODEL PROCESSES ENDPOINT [ENDPOINT ...]

The workers speak the real protocol over ZeroMQ, all of them in one process, and send one message per step with the new
token of every sequence. The edge is the app of `tandem serve` with everything behind it but the workers: chat template,
tokenizer, placement, admission, request flow, detokenizer. `seed` is the length of a step, as in `mock_engine`.
`BareClient` asks the same workers with nothing in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator

import uvloop
import zmq
from prometheus_client import CollectorRegistry
from zmq.utils import z85

from benchmarks.mock_engine import MODEL, expected_text
from tandem.cluster.http_frontend import serve_http
from tandem.cluster.model_store import resolve_model
from tandem.frontend.http.listening import listening
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import ClusterConfig, EngineConfig, RouterConfig
from tandem.protocol.messages import (
    BlockSnapshot,
    Cancel,
    FinishReason,
    Generate,
    Heartbeat,
    Hello,
    Message,
    PeerAddress,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    StepStats,
    Welcome,
    WorkerCard,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.runtime.curve import KeyAuthenticator, KeyPair, connect_to_worker, listening_socket
from tandem.runtime.dropped import DroppedMessages
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.message_socket import MessageSocket
from tandem.runtime.signals import wait_for_any
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.text.tokenizer import Tokenizer

__all__ = ["BareClient", "address_of", "main", "make_flow"]

_BEAT_S = 0.5
_FIRST_WORDS = 4096  # longest answer
_PROMPT = list(range(256))  # of the bare client, about as long as that of a request over HTTP


def address_of(endpoint: str) -> PeerAddress:
    """The worker at this endpoint; its heartbeats come from the next port."""
    host, port = endpoint.rsplit(":", 1)
    return PeerAddress(
        worker_id=f"mock-{port}",
        epoch=1,
        endpoint=endpoint,
        heartbeat_endpoint=f"{host}:{int(port) + 1}",
        public_key=_keys_of(endpoint).public,
    )


def _keys_of(endpoint: str) -> KeyPair:
    """Keys that both sides derive. They are not secret, but the cost of encryption is measured."""
    secret = z85.encode(hashlib.sha256(endpoint.encode()).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret)


_CLIENT_KEYS = _keys_of("client")


def make_flow(registry: CollectorRegistry, config: RouterConfig) -> tuple[RequestFlow, WorkerClient]:
    """Everything behind the edge except the workers."""
    workers, index, costs = Registry(), PrefixIndex(), CostModel()
    client = WorkerClient(workers, index, costs, config, keys=_CLIENT_KEYS)
    flow = RequestFlow(
        model=MODEL,
        registry=workers,
        index=index,
        costs=costs,
        placer=Placer(workers, index, costs, config),
        sizing=CacheSizing(workers),
        workers=client,
        config=config,
    )
    return flow, client


class _Worker:
    """Answers every request with the ids from its `answer`, one token per step."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, answer: list[int]) -> None:
        self.address = address_of(endpoint)
        keys = _keys_of(endpoint)
        self.socket = listening_socket(context, zmq.ROUTER, keys, max_queued=0)
        self.socket.bind(endpoint)
        self._beats = listening_socket(context, zmq.PUB, keys, max_queued=0)
        self._beats.bind(self.address.heartbeat_endpoint)
        self._answer = answer
        self._peer = b""
        self._running: dict[float, dict[str, tuple[int, int]]] = {}  # by length of step: offset, and tokens left
        self._due: dict[float, float] = {}
        self._news: deque[SequenceDelta] = deque()

    def receive(self, now: float) -> None:
        """Receive all pending messages."""
        while True:
            try:
                self._peer, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(decode_message(data), now)
        self._flush()

    def step(self, now: float) -> float:
        """Run the steps that are due; returns the time of the next."""
        for step_s, running in self._running.items():
            if running and now >= self._due[step_s]:
                self._due[step_s] = now + step_s
                for request_id, (offset, num_left) in list(running.items()):
                    self._emit(running, request_id, offset, num_left)
        self._flush()
        return min((self._due[step_s] for step_s, running in self._running.items() if running), default=now + 1.0)

    def beat(self) -> None:
        """Send a heartbeat."""
        beat = Heartbeat(
            worker_id=self.address.worker_id, epoch=1, progress_age_s=0.0, load=WorkerLoad(num_free_blocks=1 << 16)
        )
        self._beats.send(encode_message(beat))

    def _take(self, message: Message, now: float) -> None:
        match message:
            case Hello():
                self._send(Welcome(card=self._card(), refusal=""))
            case SnapshotRequest():
                self._send(BlockSnapshot(worker_id=self.address.worker_id, epoch=1, sequence=0, digests=[]))
            case Cancel():
                for running in self._running.values():
                    running.pop(message.request_id, None)
            case Generate():
                step_s = (message.sampling.seed or 0) / 1e3
                running = self._running.setdefault(step_s, {})
                if not running:
                    self._due[step_s] = now + step_s
                self._emit(running, message.request_id, 0, min(message.sampling.max_tokens, len(self._answer)))

    def _emit(self, running: dict[str, tuple[int, int]], request_id: str, offset: int, num_left: int) -> None:
        finish = FinishReason.LENGTH if num_left == 1 else None
        cached = 0 if offset == 0 else None
        self._news.append(SequenceDelta(request_id, offset, [self._answer[offset]], finish, num_cached_tokens=cached))
        if finish is None:
            running[request_id] = (offset + 1, num_left - 1)
        else:
            running.pop(request_id, None)

    def _flush(self) -> None:
        if self._news:
            deltas = list(self._news)
            self._news.clear()
            stats = StepStats(duration_s=0.01, num_decode_seqs=len(deltas), num_decode_kv_tokens=len(deltas) * 256)
            load = WorkerLoad(num_running=len(deltas), num_free_blocks=1 << 16)
            self._send(StepOutput(worker_id=self.address.worker_id, epoch=1, deltas=deltas, stats=stats, load=load))

    def _send(self, message: Message) -> None:
        self.socket.send_multipart([self._peer, encode_message(message)])

    def _card(self) -> WorkerCard:
        return WorkerCard(
            address=self.address,
            role=Role.COLOCATED,
            kind="mock",
            model=MODEL,
            max_model_len=1 << 17,
            block_size=16,
            num_blocks=1 << 16,
            block_bytes=16 * 23_040,
            max_num_batched_tokens=2048,
            namespace=b"mock-namespace--",
            pid=0,
        )


class BareClient:
    """Keeps `concurrency` requests running on the workers, as many on each, until `close`.

    Calls `on_answer` with the seconds to the first token and to the last one, and the number of tokens. Belongs to the
    running event loop.
    """

    def __init__(
        self,
        endpoints: list[str],
        sampling: Iterator[SamplingParams],
        concurrency: int,
        on_answer: Callable[[float, float, int], None],
    ) -> None:
        self._sampling = sampling
        self._on_answer = on_answer
        self._asked_s: dict[str, float] = {}  # by request
        self._first_s: dict[str, float] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers = [self._connected(i, endpoint) for i, endpoint in enumerate(endpoints)]
        for i in range(concurrency):
            self._ask(i % len(endpoints))

    def close(self) -> None:
        """Close the sockets."""
        for worker in self._workers:
            worker.close()
        self._context.term()

    def _connected(self, i: int, endpoint: str) -> MessageSocket:
        dealer, heartbeats = connect_to_worker(self._context, _CLIENT_KEYS, address_of(endpoint), max_queued=0)
        heartbeats.close()
        return MessageSocket(dealer, lambda frames: self._take(i, decode_message(frames[0])))

    def _ask(self, i: int) -> None:
        request = Generate(request_id=uuid.uuid4().hex, token_ids=_PROMPT, sampling=next(self._sampling))
        self._asked_s[request.request_id] = time.perf_counter()
        self._workers[i].send(encode_message(request))

    def _take(self, i: int, message: Message) -> None:
        assert isinstance(message, StepOutput), "the worker was asked for nothing else"
        now = time.perf_counter()
        for delta in message.deltas:
            if delta.request_id not in self._asked_s:
                continue  # for an earlier client
            if delta.offset == 0:
                self._first_s[delta.request_id] = now - self._asked_s[delta.request_id]
            if delta.finish_reason is not None:
                whole_s = now - self._asked_s.pop(delta.request_id)
                self._on_answer(self._first_s.pop(delta.request_id), whole_s, delta.offset + len(delta.token_ids))
                self._ask(i)


def _run_workers(endpoints: list[str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tokenizer = Tokenizer(resolve_model())
    answer = tokenizer.encode(expected_text(_FIRST_WORDS), add_special_tokens=False)
    authenticator = KeyAuthenticator(context, DroppedMessages())
    authenticator.allow(_CLIENT_KEYS.public)
    workers = [_Worker(context, endpoint, answer) for endpoint in endpoints]
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    next_beat_s = due_s = 0.0
    while True:
        now = time.monotonic()
        ready = dict(poller.poll(round(max(0.0, min(due_s, next_beat_s) - now) * 1e3)))
        now = time.monotonic()
        for worker in workers:
            if worker.socket in ready:
                worker.receive(now)
        due_s = min(worker.step(now) for worker in workers)
        if now >= next_beat_s:
            next_beat_s = now + _BEAT_S
            for worker in workers:
                worker.beat()


async def _run_edge(port: int, model: str, num_processes: int, endpoints: list[str]) -> None:
    folder = str(resolve_model(model))
    # Mock workers may still be starting.
    router = RouterConfig(port=port, router_processes=num_processes, worker_timeout_s=60.0)
    config = ClusterConfig(engine=EngineConfig(model=folder), router=router)
    metrics = CollectorRegistry()
    flow, client = make_flow(metrics, router)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await client.start()
    try:
        for endpoint in endpoints:
            await client.add_worker(address_of(endpoint))
        with listening(router.host, port) as listener:
            async with serve_http(flow, Tokenizer(folder), metrics, config, listener, ApiKeys(), Tenants()) as (
                front,
                _,
            ):
                freeze_startup_heap()
                await wait_for_any(front.serving, stop)
    finally:
        await client.close()


def main() -> None:
    if sys.argv[1] == "worker":
        _run_workers(sys.argv[2:])
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_edge(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
