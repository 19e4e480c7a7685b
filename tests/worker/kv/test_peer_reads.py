"""KV read from a peer: the same tokens, whatever happens to the peer, the link or the lease."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.block_pool import BlockPool
from tandem.engine.device import HostStream
from tandem.engine.kv_pool import KvPool
from tandem.engine.pool_admission import PoolAdmission
from tandem.engine.scheduler import Scheduler
from tandem.kv_transfer.transport.in_process import InProcessWrite
from tandem.protocol.config import TierConfig, TransferConfig
from tandem.protocol.messages import (
    Cancel,
    Generate,
    KvHolder,
    Message,
    PeerAddress,
    Prefill,
    ReadDone,
    ReadGrant,
    ReadRequest,
    RequestFailed,
    Role,
    StepOutput,
    WorkerEpoch,
)
from tandem.protocol.sampling import SamplingParams
from tandem.scheduling.workers.load import RequestLoad
from tandem.worker.kv.kv_source import Piece
from tandem.worker.kv.peer_lender import PeerLender
from tandem.worker.kv.peer_read import PeerRead
from tandem.worker.kv.peer_reader import PeerReader
from tandem.worker.loop import Worker
from tests.support.cluster_harness import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    PAIR,
    Client,
    Cluster,
    Oracle,
    prompt_of,
    running_cluster,
)
from tests.support.judged_hub import JudgedHub, Verdict, deliver_damaged
from tests.support.late_device import LateDevice, LateStream, touched_early
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

SEED = int(os.environ.get("TEST_SEED", "0"))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
TWO = {"a": Role.COLOCATED, "b": Role.COLOCATED}
NUM_BLOCKS = 48


@dataclass
class Answered:
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


async def ask(
    cluster: Cluster, worker_id: str, tokens: list[int], holder: KvHolder | None = None, request_id: str = "r"
) -> Answered:
    """Have a worker serve a request whose prompt another is said to hold."""

    def exchange() -> Answered:
        client, answer = Client(cluster.worker(worker_id)), Answered()
        try:
            client.send(Generate(request_id=request_id, token_ids=tokens, sampling=GREEDY, kv_holder=holder))
            while True:
                output = client.receive(StepOutput | RequestFailed)
                assert isinstance(output, StepOutput), output
                for delta in output.deltas:
                    answer.token_ids += delta.token_ids
                    answer.num_cached_tokens = delta.num_cached_tokens or answer.num_cached_tokens
                    if delta.finish_reason is not None:
                        return answer
        finally:
            client.close()

    return await asyncio.to_thread(exchange)


def outcomes(cluster: Cluster, worker_id: str) -> list[str]:
    return [record.outcome for record in cluster.worker(worker_id).parts.cache.fetcher.records]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("transport", "checksums"), [("in_process", "off"), ("in_process", "all"), ("nixl", "all"), ("nccl", "all")]
)
async def test_a_prompt_is_read_from_a_pool(tiny_model: Path, oracle: Oracle, transport: str, checksums: str) -> None:
    rng = random.Random(1)
    async with running_cluster(tiny_model, TWO, transfer={"transport": transport, "checksums": checksums}) as cluster:
        tokens = prompt_of(rng, 28)
        first = await ask(cluster, "a", tokens)
        holder = KvHolder(cluster.worker("a").address, 28)
        second = await ask(cluster, "b", tokens, holder)
        assert second.token_ids == first.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        stats = cluster.worker("b").parts.cache.fetcher.stats()
        assert stats.num_loaded_blocks["peer"] * BLOCK_SIZE == second.num_cached_tokens > 20 * BLOCK_SIZE
        assert cluster.worker("a").parts.lender.num_lent_blocks == stats.num_loaded_blocks["peer"]
        assert [(one.outcome, one.sources) for one in stats.latest] == [("loaded", ["peer:a"])]
        third = await ask(cluster, "b", tokens)
        assert third.num_cached_tokens == 28 * BLOCK_SIZE, "what was read is cached like anything else"
        await cluster.becomes_idle()


@pytest.mark.usefixtures("patient")
async def test_most_of_a_pool_is_read_under_one_lease_after_another(tiny_model: Path, oracle: Oracle) -> None:
    rng = random.Random(9)
    async with running_cluster(tiny_model, TWO, engine={"num_blocks": 40}) as cluster:
        tokens = prompt_of(rng, 29)
        await ask(cluster, "a", tokens)
        pool, lent = cluster.worker("a").parts.engine.pool, list[int]()
        acquire = pool.acquire_cached
        await cluster.call("a", lambda: setattr(pool, "acquire_cached", lambda wanted: take(acquire(wanted))))

        def take(blocks: list[int]) -> list[int]:
            lent.append(len(blocks))
            return blocks

        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 29))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert outcomes(cluster, "b") == ["loaded"]
        assert cluster.worker("b").parts.cache.fetcher.stats().num_loaded_blocks["peer"] >= 24
        assert max(lent) <= 40 // 8
        await cluster.becomes_idle()
        await cluster.call("a", lambda: pool.release(pool.try_allocate(pool.num_free + 24) or []))
        assert (await ask(cluster, "a", tokens)).num_cached_tokens < 10 * BLOCK_SIZE, "it has moved"


@pytest.mark.cpu_engine("each step has its results when it returns")
@pytest.mark.usefixtures("patient")
async def test_a_read_moves_a_prefix_and_leaves_what_others_use(tiny_model: Path) -> None:
    rng = random.Random(7)
    async with running_cluster(tiny_model, TWO, engine={"num_blocks": NUM_BLOCKS}) as cluster:
        shared = prompt_of(rng, 2)[: 2 * BLOCK_SIZE]
        stays, moves = shared + prompt_of(rng, 8), shared + prompt_of(rng, 9)
        await ask(cluster, "a", stays)
        await ask(cluster, "a", moves)
        await ask(cluster, "b", moves, KvHolder(cluster.worker("a").address, 11))
        await cluster.becomes_idle()
        pool = cluster.worker("a").parts.engine.pool

        def need(num_blocks: int) -> None:
            """Somebody else wants room at the holder."""
            pool.release(pool.try_allocate(num_blocks) or [])

        await cluster.call("a", lambda: need(pool.num_free + 9))
        again = [await ask(cluster, name, tokens) for name, tokens in (("a", stays), ("a", moves), ("b", moves))]
        assert [answer.num_cached_tokens // BLOCK_SIZE for answer in again] == [10, 2, 11]
        await cluster.becomes_idle()


@pytest.mark.usefixtures("patient")
async def test_a_holder_that_the_prompt_goes_back_to_keeps_its_copy(tiny_model: Path) -> None:
    rng = random.Random(8)
    async with running_cluster(tiny_model, PAIR) as cluster:
        sender, receiver = cluster.worker("p"), cluster.worker("d")
        tokens, demoted = prompt_of(rng, 12), []
        await ask(cluster, "d", tokens)
        await cluster.call("d", lambda: setattr(receiver.parts.engine.pool, "demote", demoted.append))
        client = Client(sender)
        try:
            client.send(
                Prefill(
                    request_id="back",
                    token_ids=tokens,
                    sampling=GREEDY,
                    decode_worker=receiver.address,
                    kv_holder=KvHolder(receiver.address, 12),
                )
            )
            await eventually(lambda: receiver.parts.lender.num_lent_blocks and not receiver.parts.lender.num_open)
            client.send(Cancel(request_id="back"))
            await cluster.becomes_idle()
        finally:
            client.close()
        assert demoted == []


@pytest.mark.usefixtures("patient")
async def test_a_prompt_is_read_from_the_host_memory_of_a_peer(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TierConfig(tier=(f"host:?gb={500 * BLOCK_BYTES / 1e9}&name=dram",))
    rng = random.Random(2)
    engine = {"num_blocks": NUM_BLOCKS}
    async with running_cluster(tiny_model, TWO, engine=engine, tiers=tiers) as cluster:
        tokens = prompt_of(rng, 12)
        await ask(cluster, "a", tokens)
        for number in range(4):
            await ask(cluster, "a", prompt_of(rng, 14), request_id=f"flood {number}")
        await eventually(lambda: not cluster.worker("a").parts.cache.is_busy)
        card = cluster.worker("a").reporter.card
        assert [card.lends(holder) for holder in ("a", "a/dram", "a/host")] == [True, True, False]
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 12))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert cluster.worker("b").parts.cache.fetcher.stats().num_loaded_blocks["peer"] >= 10
        assert cluster.worker("a").parts.cache.tiers[0].tier.stats().num_hits >= 10
        other = tokens[: 4 * BLOCK_SIZE] + prompt_of(rng, 6)  # the reader asks from its own fifth block on
        await ask(cluster, "a", other, request_id="other")
        for number in range(4):
            await ask(cluster, "a", prompt_of(rng, 14), request_id=f"flood again {number}")
        await eventually(lambda: not cluster.worker("a").parts.cache.is_busy)
        parents: list[bytes | None] = []
        pool = cluster.worker("a").parts.engine.pool
        publish = pool.publish
        monkeypatch.setattr(pool, "publish", lambda *args: (parents.append(args[2]), publish(*args)))
        await ask(cluster, "b", other, KvHolder(cluster.worker("a").address, 10), "asked from the middle")
        assert parents, "blocks were brought up"
        assert None not in parents
        await cluster.becomes_idle()


def replace_device(worker: Worker, seed: int) -> LateDevice:
    """Let the worker's device run behind its caller, as a GPU does."""
    device = LateDevice(worker.parts.engine, seed)
    for cached in worker.parts.cache.tiers:
        device.make_late(cached.codec)
    return device


async def test_what_a_peer_may_read_has_been_brought_up_by_a_late_device(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)  # what a tier or a peer has is always loaded
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher.after_step", lambda self, stats: None)
    devices: dict[str, LateDevice] = {}

    def judge(write: InProcessWrite) -> Verdict:
        complaint = touched_early(write, lambda transport: devices.get(transport.worker_id))
        assert not complaint, complaint
        return Verdict.DELIVER

    tiers, engine = TierConfig(host_cache_gb=500 * BLOCK_BYTES / 1e9), {"num_blocks": NUM_BLOCKS}
    async with running_cluster(tiny_model, TWO, engine=engine, tiers=tiers, judge=judge) as cluster:
        for seed, name in enumerate(TWO):
            devices[name] = await cluster.call(name, partial(replace_device, cluster.worker(name), seed))
        rng = random.Random(2)
        tokens = prompt_of(rng, 12)
        await ask(cluster, "a", tokens)
        for number in range(4):
            await ask(cluster, "a", prompt_of(rng, 14), request_id=f"flood {number}")
            await eventually(lambda: not cluster.worker("a").parts.cache.is_busy)
        before = devices["a"].stream.num_late
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 12))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert devices["a"].stream.num_late > before, "blocks came up from the host tier"
        await cluster.becomes_idle()


@pytest.mark.usefixtures("patient")
async def test_a_peer_with_less_than_was_said_gives_what_it_has(tiny_model: Path, oracle: Oracle) -> None:
    rng = random.Random(3)
    async with running_cluster(tiny_model, TWO) as cluster:
        tokens = prompt_of(rng, 28)
        await ask(cluster, "a", tokens[: 22 * BLOCK_SIZE])
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 28))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert outcomes(cluster, "b") == ["failed", "loaded"]
        # The answer of "a" was not that of the prompt, so its last full block is not of this prompt.
        assert cluster.worker("b").parts.cache.fetcher.stats().num_loaded_blocks["peer"] >= 15
        nothing = prompt_of(rng, 20)
        answer = await ask(cluster, "b", nothing, KvHolder(cluster.worker("a").address, 20), "nothing")
        assert answer.token_ids == oracle.answer(nothing, max_tokens=6, ignore_eos=True)
        assert outcomes(cluster, "b")[2:] == ["failed"]
        await cluster.becomes_idle()


async def test_a_peer_that_is_gone_costs_only_time(tiny_model: Path, oracle: Oracle) -> None:
    rng = random.Random(4)
    async with running_cluster(tiny_model, TWO) as cluster:
        tokens = prompt_of(rng, 28)
        await ask(cluster, "a", tokens)
        gone = cluster.worker("a").address
        await asyncio.to_thread(cluster.workers.pop("a").stop)
        answer = await ask(cluster, "b", tokens, KvHolder(gone, 28))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert answer.num_cached_tokens == 0
        await cluster.call("b", lambda: cluster.worker("b").peer_died(gone))
        await eventually(lambda: not cluster.worker("b").parts.reader.is_reading)
        await cluster.call("b", lambda: cluster.worker("b").check_integrity(idle=True))


Judge = Callable[[InProcessWrite], Verdict]


def only_reads(verdict: Verdict) -> Judge:
    return lambda write: verdict if write.is_read else Verdict.DELIVER


def add_one_to_the_fourth(pool: Tensor, blocks: list[int]) -> None:
    pool[blocks[3]] += 1


def damage(write: InProcessWrite) -> Verdict:
    """One block of each read."""
    if write.is_read:
        deliver_damaged(write, add_one_to_the_fourth)
    return Verdict.DELIVER


FAILING_READS = [only_reads(Verdict.FAIL), only_reads(Verdict.LOSE), damage]


@pytest.mark.parametrize("judge", FAILING_READS, ids=["fails", "is lost", "is damaged"])
@pytest.mark.usefixtures("patient")
async def test_a_read_that_fails_is_computed(tiny_model: Path, oracle: Oracle, judge: Judge) -> None:
    rng = random.Random(5)
    async with running_cluster(tiny_model, TWO, judge=judge, transfer={"checksums": "all"}) as cluster:
        tokens = prompt_of(rng, 28)
        await ask(cluster, "a", tokens)
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 28))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert outcomes(cluster, "b") == ["failed"]
        cluster.hub.stop_judging()
        again = prompt_of(rng, 28)
        await ask(cluster, "a", again, request_id="again")
        await ask(cluster, "b", again, KvHolder(cluster.worker("a").address, 28), "again")
        assert outcomes(cluster, "b") == ["failed", "loaded"], "the link comes back"
        await cluster.becomes_idle()


async def test_a_slow_read_is_overtaken_and_its_blocks_wait_for_it(tiny_model: Path, oracle: Oracle) -> None:
    rng = random.Random(7)
    async with running_cluster(tiny_model, TWO, judge=only_reads(Verdict.HOLD)) as cluster:
        tokens = prompt_of(rng, 28)
        await ask(cluster, "a", tokens)
        answer = await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 28))
        assert answer.token_ids == oracle.answer(tokens, max_tokens=6, ignore_eos=True)
        assert outcomes(cluster, "b") == ["overtaken"]
        held = {block for write in cluster.hub.held for block in write.local_block_ids}
        assert held
        reader = cluster.worker("b")
        for number in range(3):
            await ask(cluster, "b", prompt_of(rng, 30), request_id=f"more {number}")

        def take_all() -> list[int]:
            pool = reader.parts.engine.pool
            blocks = pool.try_allocate(pool.num_available)
            assert blocks
            pool.release(blocks)
            return blocks

        given = await cluster.call("b", take_all)
        assert held.isdisjoint(given), "somebody else may be given a block that is still written"
        cluster.hub.release_held()
        await cluster.becomes_idle()


async def test_blocks_of_an_endless_read_count_as_lost(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NIXL: what was given up may land for as long as the peer lives."""
    transfer = {"lease_ttl_s": 0.6, "handoff_timeout_s": 0.6}
    async with running_cluster(
        tiny_model, TWO, judge=only_reads(Verdict.HOLD), transfer=transfer, tiers=None
    ) as cluster:
        tokens = prompt_of(random.Random(9), 28)
        await ask(cluster, "a", tokens)
        reader = cluster.worker("b")
        monkeypatch.setattr(reader.parts.transport, "remove_peer", lambda worker_id: None)
        await ask(cluster, "b", tokens, KvHolder(cluster.worker("a").address, 28))
        num_held = sum(len(write.local_block_ids) for write in cluster.hub.held)
        assert num_held
        assert reader.parts.engine.scheduler.admission.num_lost_blocks == 0, "it may only be slow"
        await eventually(lambda: reader.parts.engine.scheduler.admission.num_lost_blocks == num_held)
        status = await cluster.call("b", reader.status)
        assert status.load.num_quarantined_blocks == num_held
        cluster.hub.release_held()
        await eventually(lambda: reader.parts.engine.scheduler.admission.num_lost_blocks == 0)
        status = await cluster.call("b", reader.status)
        assert status.load.num_quarantined_blocks == 0
        await cluster.becomes_idle()


@pytest.mark.usefixtures("patient")
async def test_a_request_that_is_cancelled_while_it_reads_leaves_nothing(tiny_model: Path) -> None:
    rng = random.Random(8)
    async with running_cluster(tiny_model, TWO, judge=only_reads(Verdict.HOLD)) as cluster:
        tokens = prompt_of(rng, 28)
        await ask(cluster, "a", tokens)
        client = Client(cluster.worker("b"))
        try:
            holder = KvHolder(cluster.worker("a").address, 28)
            client.send(Generate(request_id="r", token_ids=tokens, sampling=GREEDY, kv_holder=holder))
            await eventually(lambda: cluster.hub.held)
            client.send(Cancel(request_id="r"))
            await eventually(lambda: outcomes(cluster, "b") == ["withdrawn"])
        finally:
            client.close()
        cluster.hub.release_held()
        await cluster.becomes_idle()


@pytest.mark.usefixtures("patient")
async def test_an_idle_worker_reads_a_prompt_from_the_busy_one(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.scheduling.cost_model.StepModel.observe", lambda self, stats: None)
    rng = random.Random(9)
    async with running_cluster(tiny_model, TWO, router={"routing": "cost"}) as cluster:
        tokens = prompt_of(rng, 30)
        await cluster.generate(tokens)
        await eventually(lambda: max(map(cluster.index.num_blocks, TWO)) >= 30)
        holder = max(TWO, key=cluster.index.num_blocks)
        booking = cluster.registry.reserve(RequestLoad(holder, holder, 5000, 0, 5000))
        answer = await cluster.generate(tokens)
        booking.release()
        assert answer.token_ids == oracle.answer(tokens)
        (other,) = TWO.keys() - {holder}
        assert cluster.worker(other).parts.cache.fetcher.stats().num_loaded_blocks["peer"] > 20
        await cluster.becomes_idle()


class _Side:
    """A worker's pool, transport and links, without an engine."""

    def __init__(self, world: World, name: str, num_blocks: int) -> None:
        self.kv = KvPool([torch.zeros(num_blocks, 1, 1, 2, 1, 2)])
        self.pool = BlockPool(num_blocks)
        self.address = PeerAddress(name, 1, "", "")
        self.transport = world.hub.join(name, 1, self.kv.shards)
        self.engine: Any = SimpleNamespace(
            pool=self.pool,
            kv=self.kv,
            stream=HostStream(),
            scheduler=Scheduler(self.pool, block_size=1, max_num_seqs=1, max_num_batched_tokens=1),
            block_bytes=self.kv.block_bytes,
        )
        self.links: Any = SimpleNamespace(
            me=self.address,
            send=lambda process, message: world.send(process.worker_id, message),
            connect=lambda peer, now: None,
            is_ready=lambda peer: True,
            broke=lambda process: None,
        )


class World:
    """Two workers. Time passes anywhere: between any two of their steps, and inside each turn of their loops."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.hub = JudgedHub(lambda write: Verdict.HOLD)
        self.sent: list[tuple[float, str, Message]] = []  # when, to whom
        self.a, self.b = _Side(self, "a", 12), _Side(self, "b", 12)
        for one, other in ((self.a, self.b), (self.b, self.a)):
            one.transport.add_peer(other.address.worker_id, 1, other.transport.local_metadata())
        config = TransferConfig(lease_ttl_s=5.0, checksums="off")
        self.lender = PeerLender(self.a.engine, None, self.a.links, config)
        self.reader = PeerReader(self.b.engine, self.b.transport, self.b.links, config, clock=self.clock)
        self.pieces: list[tuple[Any, Piece]] = []
        self.num_read = self.num_stale = 0

    def clock(self) -> float:
        return self.now

    def send(self, to: str, message: Message) -> None:
        self.pass_time()
        self.sent.append((self.now, to, message))

    def pass_time(self) -> None:
        """A process may be held up between any two lines of its code, and the network goes on meanwhile."""
        if self.rng.random() < 0.2:
            self.now += self.rng.choice([0.01, 0.03, 0.3])
            if self.rng.random() < 0.3:
                self.land()

    def hold_reader_up(self) -> None:
        """The same of the reader, with a holder that goes on."""
        self.pass_time()
        if self.rng.random() < 0.2:
            self.lender.pump(self.now)
            self.evict()
            self.land()

    def content(self, digest: bytes) -> torch.Tensor:
        return torch.full_like(self.a.kv.shards[0][0], float(digest[0] + 1))

    def digests(self) -> list[bytes]:
        return [bytes([idx]) for idx in range(6)]

    def fill(self) -> None:
        """The holder computes the chain again, as far as it has room."""
        have = self.a.pool.acquire_cached(self.digests())
        blocks = self.a.pool.try_allocate(6 - len(have)) or []
        for block, digest in zip(blocks, self.digests()[len(have) :], strict=False):
            self.a.kv.shards[0][block] = self.content(digest)
            self.a.pool.publish(block, digest, bytes([digest[0] - 1]) if digest[0] else None)
        self.a.pool.release([*have, *blocks])

    def evict(self) -> None:
        """Somebody else takes all blocks nobody uses, and writes into them."""
        blocks = self.a.pool.try_allocate(self.a.pool.num_available)
        assert blocks is not None
        self.a.kv.shards[0][blocks] = -1.0
        self.a.pool.release(blocks)

    def open(self, num_blocks: int) -> PeerRead:
        """Have the leading blocks of the chain read under one lease."""
        digests = self.digests()[:num_blocks]
        cost = self.reader.source(KvHolder(self.a.address, num_blocks)).cost
        return self.reader.ask(self.a.address, cost, digests, 0, num_blocks, self.now, digests[-1])

    def ask(self) -> None:
        digests, start = self.digests(), self.rng.randrange(5)
        source = self.reader.source(KvHolder(self.a.address, 6))
        now = self.now
        self.pass_time()
        opened = source.open(digests, start, 6, now)
        middle = self.rng.randrange(start, 6)
        for first, end in ((middle, 6), (start, middle)):
            if first < end:
                self.pieces.append((opened, opened.begin(first, end, self.now)))

    def deliver(self) -> None:
        if not self.sent:
            return
        idx = self.rng.randrange(len(self.sent))
        _, to, message = self.sent[idx]
        fate = self.rng.random()
        if fate > 0.1:
            del self.sent[idx]  # else it comes again
        if fate > 0.9:
            return  # lost
        now = self.now
        self.pass_time()
        match message:
            case ReadRequest():
                self.lender.requested(message, now)
            case ReadGrant():
                self.reader.granted(message, now)
            case ReadDone():
                self.lender.done(message)
            case _:
                raise AssertionError((to, message))

    def pump(self) -> None:
        for role, time_passes in ((self.reader, self.hold_reader_up), (self.lender, self.pass_time)):
            now = self.now
            time_passes()
            role.pump(now)
        for opened, piece in list(self.pieces):
            if piece.is_done or self.rng.random() < 0.1:
                self.pieces.remove((opened, piece))
                self.use(piece)
            if self.rng.random() < 0.2:
                opened.close()

    def use(self, piece: Piece) -> None:
        if not piece.is_complete:
            piece.drop()
            return
        blocks = self.b.pool.try_allocate(6)
        if blocks is None:
            piece.drop()
            return
        sequence: Any = SimpleNamespace(blocks=blocks)
        piece.place(sequence, piece.first_block, self.b.kv)
        self.num_read += 1
        for idx in range(piece.first_block, piece.end_block):
            expected = self.content(self.digests()[idx])
            assert torch.equal(self.b.kv.shards[0][sequence.blocks[idx]], expected), f"block {idx} is not what was held"
        self.b.pool.release(sequence.blocks)

    def step(self) -> None:
        common = [self.fill, self.evict, self.ask, *[self.deliver] * 4, *[self.pump] * 3, self.land, self.tick]
        action = self.rng.choice([*common * 3, self.wait])
        action()
        self.a.pool.check_integrity()
        self.b.pool.check_integrity()

    def land(self) -> None:
        self.hub.release_held()

    def tick(self) -> None:
        self.now += self.rng.choice([0.1, 1.0, 3.0])

    def wait(self) -> None:
        """Until just before or after some deadline: there the two sides must agree on who may still touch a block."""
        deadlines = [*self.lender.deadlines, *self.reader.deadlines]
        if deadlines:
            self.now = max(self.now, self.rng.choice(deadlines) + self.rng.choice([-0.06, -0.02, 0.0, 0.001]))

    def end(self) -> None:
        """The network is quiet and time passes: nothing may be left."""
        self.sent.clear()
        self.hub.release_held()
        self.now += 100.0
        for opened, _ in self.pieces:
            opened.close()
        for _ in range(3):
            self.pump()
        for opened, piece in self.pieces:
            opened.close()
            self.use(piece)
        self.pump()
        for side in (self.a, self.b):
            side.pool.check_integrity(idle=True)
        self.lender.check_integrity(idle=True)


@pytest.fixture
def still_world() -> World:
    """Its clock does not move, and the holder has the chain."""
    world = World(random.Random(0))
    world.pass_time = lambda: None  # type: ignore[method-assign]
    world.fill()
    return world


def run_worlds(num: int) -> int:
    """The number of pieces that were read and used."""
    num_read = 0
    for number in range(num):
        world = World(random.Random(SEED * 1_000_003 + number))
        for _ in range(80):
            world.step()
        world.end()
        num_read += world.num_read
    return num_read


@pytest.mark.parametrize("has_copy", [True, False])
def test_only_a_copy_at_the_reader_makes_the_holders_one_too_many(has_copy: bool) -> None:
    world = World(random.Random(0))
    pool, digests, reader = world.a.pool, world.digests(), world.b.address
    older = pool.try_allocate(1) or []
    pool.publish(older[0], b"older")
    pool.release(older)
    world.fill()
    world.lender.requested(ReadRequest(sender=reader, read_id=1, digests=digests[3:], ttl_s=1.0), 0.0)
    world.lender.done(ReadDone(sender=reader, read_id=1, copied=digests[-1] if has_copy else b""))
    pool.try_allocate(pool.num_free + 1)
    assert pool.count_cached(digests) == (5 if has_copy else 6)
    assert (b"older" in pool) is has_copy


def test_a_read_begins_once_the_device_is_done_with_its_blocks(still_world: World) -> None:
    world = still_world
    stream = world.b.engine.stream = LateStream(0, share_done=0.0)
    stream.launch(lambda: None)  # it may use blocks that have been freed since
    opened = world.open(3)
    pieces: list[Any] = [opened.begin(0, 2, 0.0), opened.begin(2, 3, 0.0)]
    ask_and_grant(world)
    for _ in range(2):
        world.reader.pump(0.0)
        assert [piece.transfer for piece in pieces] == [None, None]
        assert world.b.pool.num_used == 3
    pieces[1].drop()
    world.reader.pump(0.0)
    assert world.b.pool.num_used == 2
    stream.flush()
    world.reader.pump(0.0)
    assert pieces[0].transfer is not None
    land(world)
    assert pieces[0].is_complete


@pytest.mark.parametrize("is_published", [True, False])
def test_a_reader_has_a_copy_only_of_what_it_published(still_world: World, is_published: bool) -> None:
    world, digests = still_world, still_world.digests()[:3]
    opened = world.open(3)
    piece = opened.begin(0, 3, 0.0)
    ask_and_land(world)
    assert piece.is_complete
    sequence: Any = SimpleNamespace(blocks=world.b.pool.try_allocate(3))
    piece.place(sequence, 0, world.b.kv)
    if is_published:
        world.b.pool.publish_chain(sequence.blocks, digests, 0)
    world.b.pool.release(sequence.blocks)
    opened.close()
    world.reader.pump(0.0)
    [done] = [message for _, _, message in world.sent if isinstance(message, ReadDone)]
    assert done.copied == (digests[-1] if is_published else b"")


def test_no_read_ever_gives_other_bytes_than_were_held() -> None:
    print(f"seed {SEED}")
    assert run_worlds(400) > 80


def test_the_check_above_finds_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder lets go of blocks before the reader's deadline."""
    monkeypatch.setattr("tandem.worker.kv.peer_lender._LONGER", 0.2)
    with pytest.raises(AssertionError, match="is not what was held"):
        run_worlds(300)


def ask_and_grant(world: World) -> None:
    """What the reader asks for reaches the holder, and its grants the reader, which begins to read; all at time 0."""
    for _, _, message in list(world.sent):
        assert isinstance(message, ReadRequest)
        world.lender.requested(message, 0.0)
    for _, _, message in list(world.sent):
        if isinstance(message, ReadGrant):
            world.reader.granted(message, 0.0)
    world.reader.pump(0.0)


def ask_and_land(world: World) -> None:
    """The same, and what is read arrives."""
    ask_and_grant(world)
    land(world)


def land(world: World) -> None:
    world.land()
    world.reader.pump(0.0)


def take_in_turn(world: World, *pieces: Piece) -> None:
    """Each piece arrives while the room is its own, and is dropped."""
    for piece in pieces:
        world.reader.pump(0.0)
        land(world)
        assert piece.is_complete
        piece.drop()


def spare_blocks(monkeypatch: pytest.MonkeyPatch, world: World, num: int) -> None:
    monkeypatch.setattr(PoolAdmission, "num_spare_blocks", property(lambda self: num - world.b.pool.num_used))


def test_an_end_seen_after_the_deadline_is_late_whenever_the_turn_began(still_world: World) -> None:
    world = still_world
    piece = world.open(3).begin(0, 3, 0.0)
    ask_and_grant(world)
    assert world.hub.held, "it is being read"
    turn_began, world.now = 4.9, 5.1  # the reader was held up, and the holder lets go meanwhile
    world.lender.pump(world.now)
    assert world.lender.num_open == 0
    world.evict()
    world.land()
    world.reader.pump(turn_began)
    assert (piece.is_done, piece.is_complete) == (True, False)


def test_of_a_dead_peer_nothing_is_asked(still_world: World) -> None:
    world = still_world
    world.reader.peer_lost(WorkerEpoch("a", 1))
    opened = world.open(3)
    piece = opened.begin(0, 3, 0.0)
    assert world.sent == []
    world.reader.pump(0.0)
    assert (opened.is_failed, piece.is_done, piece.is_complete) == (True, True, False)
    opened.close()
    world.reader.pump(0.0)
    world.reader.check_integrity(idle=True)


def test_a_read_lands_only_in_room_that_no_running_sequence_needs(
    still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolAdmission, "num_spare_blocks", 1)
    opened = still_world.open(3)
    large, small = opened.begin(1, 3, 0.0), opened.begin(0, 1, 0.0)
    ask_and_land(still_world)
    assert (large.is_done, large.is_complete) == (True, False)
    assert (small.is_done, small.is_complete) == (True, True)


def test_a_piece_waits_for_the_room_of_those_before_it(still_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spare_blocks(monkeypatch, still_world, 2)
    opened = still_world.open(3)
    last, first = opened.begin(1, 3, 0.0), opened.begin(0, 1, 0.0)
    ask_and_land(still_world)
    assert (last.is_complete, first.is_done) == (True, False)
    last.drop()
    take_in_turn(still_world, first)
    assert still_world.b.pool.num_used == 0


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "the later lease is granted first"])
def test_pieces_land_in_the_order_in_which_they_are_placed(
    still_world: World, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    world = still_world
    spare_blocks(monkeypatch, world, 1)
    opened = world.reader.source(KvHolder(world.a.address, 6)).open(world.digests(), 0, 6, 0.0)
    pieces = [opened.begin(5, 6, 0.0), opened.begin(4, 5, 0.0)]
    requests = [message for _, _, message in world.sent if isinstance(message, ReadRequest)]
    for idx in order:
        world.lender.requested(requests[idx], 0.0)
        world.reader.granted(world.sent[-1][2], 0.0)  # type: ignore[arg-type]
        world.reader.pump(0.0)
        world.land()
    take_in_turn(world, *pieces)


def test_a_small_piece_does_not_take_the_room_that_one_before_it_waits_for(
    still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.worker.kv.peer_lender._MAX_LENT_SHARE", 1.0)
    spare_blocks(monkeypatch, still_world, 2)
    of_another_prompt, opened = still_world.open(1).begin(0, 1, 0.0), still_world.open(3)
    large, small = opened.begin(1, 3, 0.0), opened.begin(0, 1, 0.0)
    ask_and_land(still_world)
    of_another_prompt.drop()
    take_in_turn(still_world, large, small)


@pytest.mark.parametrize(
    ("block_ids", "checksums"), [([0] * 7, []), ([0, 1], [b"c"]), ([0], [b"c", b"c"])], ids=["many", "few", "more"]
)
def test_a_grant_of_what_was_not_asked_for_ends_the_read(block_ids: list[int], checksums: list[bytes]) -> None:
    world = World(random.Random(0))
    opened = world.open(6)
    piece = opened.begin(0, 6, world.now)
    grant = ReadGrant(sender=world.a.address, read_id=1, block_ids=block_ids, checksums=checksums)
    world.reader.granted(grant, world.now)
    world.reader.pump(world.now)
    assert piece.is_done
    assert not piece.is_complete
    piece.drop()
    opened.close()
    world.reader.pump(world.now)
    world.reader.check_integrity(idle=True)
    assert world.b.pool.num_used == 0


def test_a_read_that_never_ends_is_given_up_with_its_link(still_world: World) -> None:
    world, resets = still_world, list[WorkerEpoch]()

    def reset(process: WorkerEpoch) -> None:
        resets.append(process)
        world.b.transport.remove_peer(process.worker_id)

    world.b.links.reset = reset
    opened = world.open(3)
    piece = opened.begin(0, 3, 0.0)
    ask_and_grant(world)
    piece.drop()
    opened.close()
    for world.now in (10.0, 34.9, 35.0, 35.1):  # a lease of 5 s and the 30 s in which something should have moved
        world.reader.pump(world.now)
        assert resets == ([("a", 1)] if world.now >= 35.0 else [])
    world.reader.check_integrity(idle=True)
    world.b.pool.check_integrity(idle=True)
