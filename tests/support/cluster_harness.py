"""A whole cluster in one process: real workers on threads, in-process KV, a real router over loopback sockets."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.engine.step_result import StepResult
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessWrite
from tandem.protocol.config import EngineConfig, RouterConfig, TierConfig, TransferConfig, WorkerConfig
from tandem.protocol.digest import EVERYONE
from tandem.protocol.messages import FinishReason, Message, PromptLogprobs, Role, decode_message, encode_message
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.router.workers.metrics import LoadCollector, PinCollector, WorkerCollector
from tandem.runtime.curve import KeyPair, connect_to_worker, make_keys
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.worker.kv import fetcher
from tandem.worker.loop import Worker
from tests.support.device import DEVICE
from tests.support.judged_hub import JudgedHub, Verdict
from tests.support.streams import Pulled
from tests.support.tiny_llama import VOCAB_SIZE
from tests.support.waiting import eventually

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, keys and values, tokens, heads, head_dim, float32
DEADLINE_S = 20.0  # of any wait; generous, as the machine may be busy
ROUTER_KEYS = make_keys()  # of every router here, bare sockets included
PAIR = {"p": Role.PREFILL, "d": Role.DECODE}


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{num_tokens}").choices(range(3, VOCAB_SIZE), k=num_tokens)


def prompt_of(rng: random.Random, num_blocks: int) -> list[int]:
    """So many whole blocks and three tokens."""
    return [rng.randrange(5, 250) for _ in range(num_blocks * BLOCK_SIZE + 3)]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)


def engine_config(model: Path, *, num_blocks: int = 256, block_size: int = BLOCK_SIZE, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        served_model_name="tiny",
        device=DEVICE,
        block_size=block_size,
        pool_bytes=num_blocks * BLOCK_BYTES * block_size // BLOCK_SIZE,
        **{"dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 64, "max_num_seqs": 32} | fields,
    )


class RunningWorker:
    """A worker whose loop runs on a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=worker.config.worker_id)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as exc:
            self.failure = exc

    def stop(self) -> None:
        self.worker.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), f"{self.worker.config.worker_id} does not stop"


def wait_for_loads(monkeypatch: pytest.MonkeyPatch, *, probes: bool = True) -> None:
    """A tiny model computes faster than anything loads: believe in a slow one, and wait for its loads."""
    monkeypatch.setattr(fetcher, "_LATE_SLACK_S", DEADLINE_S)
    monkeypatch.setattr(fetcher.Fetcher, "after_step", lambda self, stats: None)
    if not probes:
        monkeypatch.setattr(fetcher.Fetcher, "_probe", lambda *_: None)


@dataclass
class Cluster:
    hub: JudgedHub
    registry: Registry
    client: WorkerClient
    index: PrefixIndex
    costs: CostModel
    flow: RequestFlow
    sizing: CacheSizing
    workers: dict[str, RunningWorker] = field(default_factory=dict)
    num_requests: int = 0
    num_tokens: int = 0  # that all clients have received
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)

    def worker(self, worker_id: str) -> Worker:
        return self.workers[worker_id].worker

    async def add(self, config: WorkerConfig, *, hub: InProcessHub | None = None) -> Worker:
        worker = await asyncio.to_thread(Worker, config, hub=hub or self.hub)
        self.workers[config.worker_id] = RunningWorker(worker)
        await self.client.add_worker(worker.address)
        return worker

    def request(self, token_ids: Sequence[int], **sampling: Any) -> GenerateRequest:
        self.num_requests += 1
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)
        return GenerateRequest(f"r{self.num_requests}", list(token_ids), params, EVERYONE)

    async def generate(self, token_ids: Sequence[int], **sampling: Any) -> Answer:
        return await self.serve(self.request(token_ids, **sampling))

    async def serve(self, request: GenerateRequest, *, cancel_after: int | None = None) -> Answer:
        """The whole answer, or what came before `cancel_after` deltas had come and the client left."""
        out: list[int] = []
        num_cached, reason, num_deltas, scores, loaded = 0, None, 0, None, dict[str, int]()
        async with asyncio.timeout(DEADLINE_S), aclosing(Pulled(self.flow.serve(request))) as deltas:
            async for delta in deltas:
                out += delta.token_ids
                self.num_tokens += len(delta.token_ids)
                num_cached = num_cached if delta.num_cached_tokens is None else delta.num_cached_tokens
                scores = scores or delta.prompt_logprobs
                loaded = loaded or delta.num_loaded_tokens or {}
                reason = delta.finish_reason
                num_deltas += 1
                if num_deltas == cancel_after:
                    break
        return Answer(out, reason, num_cached, scores, loaded)

    def sample(self, name: str, **labels: str) -> float:
        """A sample of `/metrics` as it is now; 0 if there is none."""
        return self.metrics.get_sample_value(name, labels) or 0.0

    async def call(self, worker_id: str, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(self.worker(worker_id).call, function)

    async def becomes_idle(self, *worker_ids: str) -> None:
        """Every worker's books (or those of the named) say that nothing is held, and so do the router's."""
        problem = ""

        async def is_idle() -> bool:
            nonlocal problem
            problem = await self._what_is_held(worker_ids or tuple(self.workers))
            return not problem

        await eventually(is_idle, DEADLINE_S, lambda: problem)

    async def _what_is_held(self, worker_ids: tuple[str, ...]) -> str:
        for worker_id in worker_ids:
            worker = self.worker(worker_id)
            try:
                await asyncio.to_thread(worker.call, lambda worker=worker: worker.check_integrity(idle=True))
            except AssertionError as exc:
                return f"{worker_id}: {exc}"
        held = f"{self.registry.num_bookings} bookings, {self.client.num_open_sub_requests} open sub-requests"
        return "" if held == "0 bookings, 0 open sub-requests" else held


@asynccontextmanager
async def running_cluster(
    model: Path,
    roles: dict[str, Role] | None = None,
    *,
    engine: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    judge: Callable[[InProcessWrite], Verdict] | None = None,
    overrides: dict[str, dict[str, Any]] | None = None,
    tiers: TierConfig | None = None,
    tenants: Tenants = Tenants(),
) -> AsyncIterator[Cluster]:
    """Workers of these roles behind a router that always pairs them, and lets a request end with its first error.

    It sends workers all that comes, however long they are busy: what waits waits there.
    `overrides`: engine fields by worker id.
    """
    registry, index, costs = Registry(), PrefixIndex(), CostModel()
    sizing = CacheSizing(registry, costs)
    defaults = {"routing": "cost,pairs", "max_moves": 0, "max_worker_queue_s": 3600.0}
    config = RouterConfig(**defaults | (router or {}))
    client = WorkerClient(registry, index, costs, config, keys=ROUTER_KEYS)
    placer = Placer(registry, index, costs, config)
    flow = RequestFlow(
        model="tiny",
        registry=registry,
        index=index,
        costs=costs,
        placer=placer,
        sizing=sizing,
        workers=client,
        config=config,
        tenants=tenants,
    )
    cluster = Cluster(JudgedHub(judge), registry, client, index, costs, flow, sizing)
    for collector in (LoadCollector(registry), WorkerCollector(registry), PinCollector(flow.cache, registry)):
        cluster.metrics.register(collector)
    await client.start()
    try:
        for worker_id, role in (roles or PAIR).items():
            fields = (engine or {}) | (overrides or {}).get(worker_id, {})
            await cluster.add(worker_config(model, worker_id, role, transfer, tiers, **fields))
        yield cluster
    finally:
        await client.close()
        for running in cluster.workers.values():
            with suppress(Exception):
                await asyncio.to_thread(running.stop)


def worker_config(
    model: Path,
    worker_id: str,
    role: Role,
    transfer: dict[str, Any] | None = None,
    tiers: TierConfig | None = None,
    **engine: Any,
) -> WorkerConfig:
    defaults = {"transport": "in_process", "max_heartbeat_interval_s": 0.1, "lease_ttl_s": 5.0}
    return WorkerConfig(
        worker_id=worker_id,
        role=role,
        engine=engine_config(engine.pop("model", model), **engine),
        transfer=TransferConfig(**defaults | (transfer or {})),
        tiers=tiers or TierConfig(),
        router_key=ROUTER_KEYS.public,
    )


def hold_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine, condition: Callable[[], Any]) -> threading.Event:
    """Let no step begin while the condition holds, until the event that is returned is set."""
    step, may_go_on = engine.step, threading.Event()

    def step_unless_held(**hooks: Any) -> list[StepResult]:
        is_held = condition() and not may_go_on.wait(0.001)
        return [] if is_held else step(**hooks)

    monkeypatch.setattr(engine, "step", step_unless_held)
    return may_go_on


class Client:
    """A router's bare socket; with other keys that of a peer, or of anybody."""

    def __init__(self, worker: Worker, keys: KeyPair = ROUTER_KEYS) -> None:
        self._context = zmq.Context()
        self._socket, self._heartbeats = connect_to_worker(self._context, keys, worker.address, max_queued=0)

    def send(self, message: Message) -> None:
        self.send_bytes(encode_message(message))

    def poll(self, timeout_ms: int) -> int:
        """Whether there is anything to receive."""
        return int(self._socket.poll(timeout_ms))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    def send_raw(self, message: dict[str, Any]) -> None:
        """A message that no `Message` can be."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def receive(self, kind: type[Any] | UnionType) -> Any:
        """The next message of this kind, or of one of these; others are skipped."""
        while self._socket.poll(DEADLINE_S * 1000):
            message = decode_message(self._socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} came")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Oracle:
    """One engine alone: what every way of serving must give, token for token."""

    def __init__(self, model: Path, max_run: int | None = None, dtype: str = "float32", **fields: Any) -> None:
        """`max_run` is the engine's, unless it is None."""
        self._engine = Engine(engine_config(model, **{"speculate": "off", "dtype": dtype, **fields}))
        if max_run is not None:
            self._engine.max_run = max_run
        self._num_requests = 0

    def answer(self, token_ids: Sequence[int], **sampling: Any) -> list[int]:
        sequence = self._computed(token_ids, **sampling)
        return sequence.output_ids

    def scores(self, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
        scores = self._computed(token_ids, num_prompt_logprobs=num_top, max_tokens=1).prompt_scores
        assert scores is not None
        return scores.packed()

    def _computed(self, token_ids: Sequence[int], **sampling: Any) -> EngineSequence:
        self._num_requests += 1
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)
        # A salt of its own keeps the oracle from ever using its cache.
        salt = str(self._num_requests)
        sequence = self._engine.factory.make_sequence(salt, list(token_ids), params, cache_salt=salt)
        self._engine.add(sequence)
        while sequence.finish_reason is None:
            self._engine.step()
        return sequence
