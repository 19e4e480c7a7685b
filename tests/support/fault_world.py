"""A world of handoffs under injected faults, in virtual time: is any token wrong, any block leaked, any wait endless?

Two prefill and two decode workers run their real engines (a tiny model of random weights) and roles in one process, so
hours of timeouts take minutes and a seed repeats exactly. Messages between them are dropped, delayed, repeated and
reordered. Writes of KV fail, tear, are lost with their link, arrive late, or have a flipped bit. Workers are killed and
restarted, and clients leave. Answers are compared with those of one undisturbed engine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tandem.decode_worker.role import DecodeRole
from tandem.engine.engine import Engine
from tandem.engine.step_result import SequenceOutput
from tandem.kv_transfer.handshake import compatibility_fields
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.faulty import FaultyTransport
from tandem.kv_transfer.transport.in_process import InProcessTransport, InProcessWrite
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.prefill_worker.role import PrefillRole
from tandem.protocol.config import EngineConfig, TransferConfig
from tandem.protocol.errors import ServingError
from tandem.protocol.faults import Fault
from tandem.protocol.messages import (
    Cancel,
    Decode,
    FinishReason,
    Heartbeat,
    Message,
    PeerAddress,
    Prefill,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.worker.handoff_messages import HandoffMessages
from tandem.worker.kv.cpu_codec import codec_for
from tests.support.judged_hub import JudgedHub, Verdict
from tests.support.late_device import LateDevice, touched_early
from tests.support.tiny_llama import save_tiny_model

_PREFILL, _DECODE = ("p0", "p1"), ("d0", "d1")
_BLOCK_SIZE = 8
_NUM_BLOCKS = 56  # a few prompts: requests wait for room, cached blocks are evicted all the time
_VOCAB_SIZE = 256
_NUM_PROMPTS = 300  # different ones; they share prefixes
_NUM_CONCURRENT = 16

# Virtual seconds.
_TURN_S = 0.005  # one turn of every worker's loop
_TRANSFER = TransferConfig(transport="in_process", lease_ttl_s=2.0, handoff_timeout_s=4.0, checksums="all")
_LATENCY_S = 0.02
_DEATH_NOTICED_S = 1.0  # until the router, and another second until every worker, knows of a death
_LATE_S = 5.0  # longest delay of a late message or write: later than any lease lives
# A request may wait for word of room, for its sender to read the grant, and for a write that then stalls, each up to
# the handoff timeout; without heartbeats its lease then runs out; or it ends when a death is noticed. And a turn's
# delay.
DEADLINE_S = 3 * _TRANSFER.handoff_timeout_s + _TRANSFER.lease_ttl_s + 2 * _DEATH_NOTICED_S + 1.0
_DRAIN_S = 2 * (DEADLINE_S + _LATE_S)

_REASONS = {
    "did not arrive in time": "KV did not arrive in time",
    "no word from": "no grant in time",
    "was silent": "no news of the prompt",
    "is failed": "a write failed",
    "is lost": "a write was lost",
    "took over": "a write stalled",
    "died": "a worker died",
    "is gone": "a worker died",
    "did not answer": "link not up in time",
    "revoked": "lease revoked",
    "cancelled": "lease revoked",
    "another lease": "lease revoked",
}


@dataclass(frozen=True)
class Faults:
    """Probabilities: of `writes` per write, of messages per message, of the rest per handoff."""

    writes: dict[Fault, float] = field(
        default_factory=lambda: {
            Fault.DELAY: 0.02,
            Fault.STICK: 0.003,
            Fault.FAIL: 0.01,
            Fault.LOSE: 0.005,
            Fault.TEAR: 0.01,
            Fault.FLIP: 0.01,
            Fault.GARBLE: 0.005,
            Fault.DROP: 0.005,
            Fault.REPEAT: 0.03,
        }
    )
    message_dropped: float = 0.02
    message_repeated: float = 0.02
    message_late: float = 0.03
    sub_request_dropped: float = 0.003
    cancel: float = 0.1
    kill_sender: float = 0.005
    kill_receiver: float = 0.005


@dataclass
class Report:
    """Counts of what happened. The last three must be 0."""

    handoffs: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    longest_wait_s: float = 0.0  # virtual
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    overdue: int = 0
    saved_bytes: int = 0  # the most that one worker saved by packing
    complaints: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether all aims were reached."""
        return self.wrong_tokens == self.leaked_blocks == self.overdue == 0 and not self.complaints


Checksums = Literal["off", "all"]


MakeDevice = Callable[[Engine, int], LateDevice]


def run(
    model: Path,
    *,
    handoffs: int,
    seed: int,
    faults: Faults,
    check_every: int = 250,
    checksums: Checksums = "all",
    make_device: MakeDevice | None = None,
    packs: bool = False,
) -> Report:
    """Run `handoffs` handoffs; after every `check_every` of them wait until all is idle and check every account.

    `make_device(engine, seed)` makes a worker's engine compute late. With `packs` KV is bfloat16, and is packed on its
    way where that saves blocks.
    """
    world = _World(model, random.Random(seed), faults, checksums, make_device, packs)
    while world.report.handoffs < handoffs:
        world.play(min(check_every, handoffs - world.report.handoffs))
        world.come_to_rest()
    return world.report


class _Work(NamedTuple):
    """A prompt, its sampling parameters, and the answer of an undisturbed engine."""

    token_ids: list[int]
    sampling: SamplingParams
    answer: list[int]


@dataclass(eq=False)
class _Request:
    """A client's request and the tokens received so far."""

    request_id: str
    work: _Work
    prefill: PeerAddress
    decode: PeerAddress
    started: float
    cancel_at: float
    first: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)


class _Worker:
    """A worker without sockets: one iteration of `tandem.worker.loop`, in virtual time."""

    def __init__(self, world: _World, worker_id: str, epoch: int) -> None:
        self.address = PeerAddress(worker_id, epoch, "", "")
        self.engine = world.make_engine()
        make_device = world.make_device
        self.device = None if make_device is None else make_device(self.engine, world.source.randrange(1 << 30))
        inner = world.hub.join(worker_id, epoch, self.engine.kv.shards)
        self.transport = FaultyTransport(
            inner,
            self.engine.kv.shards[0],
            rates=world.faults.writes,
            source=world.source,
            clock=lambda: world.now,
            max_delay_s=_LATE_S,
            injected=world.report.injected,
        )
        compatibility = compatibility_fields(
            model_revision="tiny",
            namespace=self.engine.namespace,
            kv_dtype=str(self.engine.kv.dtype),
            block_size=_BLOCK_SIZE,
            block_shape=self.engine.kv.block_shape,
            transport="in_process",
            checksums=world.transfer.checksums,
        )
        config, kv = world.transfer, self.engine.kv
        wire = WireCodec(kv.shards, codec_for("exact", kv.device), "exact") if world.packs else None
        self.links = PeerLinks(
            self.address, compatibility, self.transport, world.send, timeout_s=config.handoff_timeout_s, wire=wire
        )
        self.prefill = PrefillRole(self.engine, self.transport, self.links, config, self._fail, self._forget, wire)
        self.decode = DecodeRole(self.engine, self.links, config, self._fail, first_generation=epoch << 32, wire=wire)
        self.handoffs = HandoffMessages(self.links, self.prefill, self.decode)
        self._world = world
        self._clients: set[str] = set()
        self._heartbeat_at = 0.0

    def turn(self, now: float) -> bool:
        """Whether the engine is busy."""
        for notification in self.transport.poll():
            self.decode.notified(notification, now)
        for change in self.links.expire(now):
            self.handoffs.link_changed(change, now)
        self.prefill.expire(now)
        self.decode.expire(now)
        self._send_output(self.prefill.take_first_tokens())
        self._pump(now)
        self._send_heartbeat(now)
        results = self.engine.step(before_compute=lambda: self.prefill.request_leases(self._world.now))
        for result in results:
            self._send_output(self.prefill.after_step(result))
            self._pump(now)
        self.engine.pool.take_events()
        self.engine.check_integrity()
        return bool(results)

    def handle(self, message: Message, now: float) -> None:
        match message:
            case Prefill() | Decode():
                self._accept(message, now)
            case Cancel():
                self._clients.discard(message.request_id)
                self.prefill.cancel(message.request_id)
                self.decode.cancel(message.request_id)
                self.engine.abort(message.request_id)
            case _:
                assert self.handoffs.take(message, now), f"{self.address.worker_id} got a {type(message).__name__}"

    def peer_died(self, peer: PeerAddress) -> None:
        self.links.forget(peer.process)
        self.prefill.peer_lost(peer.process)
        self.decode.peer_lost(peer.process)

    def check_integrity(self, *, idle: bool = False) -> None:
        self.prefill.check_integrity(idle=idle)
        self.decode.check_integrity(idle=idle)
        self.engine.check_integrity(idle=idle)

    def _accept(self, request: Prefill | Decode, now: float) -> None:
        self._clients.add(request.request_id)
        try:
            if isinstance(request, Prefill):
                self.prefill.accept(request, now)
            else:
                self.decode.accept(request, now)
        except ServingError as exc:
            self._fail(request.request_id, exc.message, exc.code or "")

    def _pump(self, now: float) -> None:
        self.prefill.pump(now)
        self.decode.pump(now)

    def _send_heartbeat(self, now: float) -> None:
        if now < self._heartbeat_at:
            return
        self._heartbeat_at = now + self._world.transfer.heartbeat_interval_s
        for worker_id in _DECODE:
            peer = self._world.workers[worker_id].address
            heartbeat = Heartbeat(
                worker_id=self.address.worker_id,
                epoch=self.address.epoch,
                progress_age_s=0.0,
                load=WorkerLoad(),
                handoffs=self.prefill.live_handoffs,
            )
            self._world.send(peer, heartbeat)

    def _send_output(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sequence = output.sequence
            if sequence.request_id in self._clients:
                if output.finish_reason is not None:
                    self._clients.discard(sequence.request_id)
                self._world.token(sequence.request_id, output.offset, output.token_id, output.finish_reason)

    def _fail(self, request_id: str, message: str, code: str) -> None:
        if request_id in self._clients:
            self._clients.discard(request_id)
            self._world.fail(request_id, message)

    def _forget(self, request_id: str) -> None:
        self._clients.discard(request_id)


class _World:
    """Virtual time, the network, the workers, and the router with its clients."""

    def __init__(
        self,
        model: Path,
        source: random.Random,
        faults: Faults,
        checksums: Checksums,
        make_device: MakeDevice | None,
        packs: bool,
    ) -> None:
        self.now = 0.0
        self.source = source
        self.faults = faults
        self.transfer = replace(_TRANSFER, checksums=checksums)
        self.report = Report()
        self.make_device = make_device
        self.packs = packs
        self.hub = JudgedHub(self._judge)
        self._model = model
        self._epochs = itertools.count(1)
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # what happens when: (time, tie break, what)
        self._open: dict[str, _Request] = {}
        self._oracle = self.make_engine()
        self._work: dict[int, _Work] = {}
        self._shared = [self._random_tokens(_BLOCK_SIZE * length) for length in (0, 0, 1, 2, 3, 4)]
        self.workers: dict[str, _Worker] = {}
        for worker_id in (*_PREFILL, *_DECODE):
            self.workers[worker_id] = _Worker(self, worker_id, next(self._epochs))
        self.known = {worker_id: worker.address for worker_id, worker in self.workers.items()}  # to the router
        self._dead: set[str] = set()
        self._is_calm = False

    def _judge(self, write: InProcessWrite) -> Verdict:
        is_stray = not write.is_read and not write.notification  # of a write that was lost, or whose end will be missed
        if complaint := touched_early(write, self._device_of, is_stray=is_stray):
            self.report.complaints.append(f"at {self.now:.1f} s: {complaint}")
        return Verdict.DELIVER

    def _device_of(self, transport: InProcessTransport) -> LateDevice | None:
        worker = self.workers[transport.worker_id]
        return worker.device if worker.address.epoch == transport.epoch else None

    def make_engine(self) -> Engine:
        num_elements = 2 * 2 * _BLOCK_SIZE * 2 * 8  # layers, keys and values, tokens, heads, head_dim
        # A device is late with steps that sample nothing: let prompts take several. Few blocks are not packed.
        max_num_batched_tokens = 11 if self.make_device is not None else 64 if self.packs else 32
        return Engine(
            EngineConfig(
                model=str(self._model),
                dtype="bfloat16" if self.packs else "float32",
                device="cpu",
                block_size=_BLOCK_SIZE,
                pool_bytes=_NUM_BLOCKS * num_elements * (2 if self.packs else 4),
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=16 if self.make_device is None else 8,
                num_threads=1,
            )
        )

    # The run.

    def play(self, handoffs: int) -> None:
        """Start this many requests, a few at a time, and run until all have ended."""
        remaining = handoffs
        while remaining or self._open:
            while remaining and len(self._open) < _NUM_CONCURRENT:
                self._start_request()
                remaining -= 1
            self._turn()

    def come_to_rest(self) -> None:
        """Finish everything under way without new faults; then check that nothing is held."""
        for worker in self.workers.values():
            worker.transport.rates = {}
        self._run_for(_DRAIN_S)
        for worker in self.workers.values():
            self._check_idle(worker)
            saved_bytes = sum(load.num_saved_bytes for load in worker.prefill.writes.loads)
            self.report.saved_bytes = max(self.report.saved_bytes, saved_bytes)
            worker.transport.rates = self.faults.writes
        self.report.checks += 1

    def _run_for(self, duration_s: float) -> None:
        self._is_calm = True  # no more faults in messages
        until = self.now + duration_s
        while self.now < until:
            self._turn()
        self._is_calm = False

    def _turn(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        is_busy = False
        for worker_id, worker in self.workers.items():
            if worker_id not in self._dead:
                is_busy |= worker.turn(self.now)
        for request in list(self._open.values()):
            self._check_patience(request)
        # With nothing to compute, skip to the next message or timeout.
        self.now += _TURN_S * (1 if is_busy else 20 if self._is_calm else 4)

    def _check_idle(self, worker: _Worker) -> None:
        try:
            worker.check_integrity(idle=True)
        except AssertionError as exc:
            self.report.complaints.append(f"{worker.address.worker_id} at {self.now:.1f} s: {exc}")
            self.report.leaked_blocks += worker.engine.pool.num_used

    # The router and its clients.

    def _start_request(self) -> None:
        self.report.handoffs += 1
        work = self._pick_work()
        prefill, decode = self.known[self.source.choice(_PREFILL)], self.known[self.source.choice(_DECODE)]
        request_id = f"r{self.report.handoffs}"
        leaves = self.source.random() < self.faults.cancel
        cancel_at = self.now + self.source.uniform(0.0, 0.3) if leaves else float("inf")
        self._open[request_id] = _Request(request_id, work, prefill, decode, self.now, cancel_at)
        fields = {"request_id": request_id, "token_ids": work.token_ids, "sampling": work.sampling}
        self._dispatch(prefill, Prefill(**fields, decode_worker=decode))  # type: ignore[arg-type]
        self._dispatch(decode, Decode(**fields, prefill_worker=prefill))  # type: ignore[arg-type]
        for names, rate in ((_PREFILL, self.faults.kill_sender), (_DECODE, self.faults.kill_receiver)):
            if self.source.random() < rate:
                victim = self.source.choice(names)
                self._after(self.source.uniform(0.0, 0.2), partial(self._kill, victim))

    def token(self, request_id: str, offset: int, token_id: int, finish_reason: FinishReason | None) -> None:
        """Receive a token: the first from the prefill worker, all others from the decode worker."""
        request = self._open.get(request_id)
        if request is None:
            return
        tokens, position = (request.first, 0) if offset == 0 else (request.rest, offset - 1)
        assert position == len(tokens), f"{request_id}: token {offset} came after {len(tokens)}"
        tokens.append(token_id)
        if finish_reason is not None:
            self.report.completed += 1
            self._close(request, is_complete=True)
            if offset == 0:  # nothing is left to decode
                self._cancel_sub_requests(request)

    def fail(self, request_id: str, reason: str) -> None:
        """Handle a worker's failure: cancel the other sub-request."""
        request = self._open.get(request_id)
        if request is not None:
            self.report.failed[_kind_of(reason)] += 1
            self._close(request)
            self._cancel_sub_requests(request)

    def _check_patience(self, request: _Request) -> None:
        if self.now >= request.cancel_at:
            self.report.cancelled += 1
            self._close(request)
            self._cancel_sub_requests(request)
        elif self.now - request.started > DEADLINE_S:
            self.report.overdue += 1
            self.report.complaints.append(f"{request.request_id} waits since {request.started:.1f} s")
            self._close(request)
            self._cancel_sub_requests(request)

    def _close(self, request: _Request, *, is_complete: bool = False) -> None:
        """Check that the client saw a prefix of the right answer, and all of it if the request completed."""
        del self._open[request.request_id]
        self.report.longest_wait_s = max(self.report.longest_wait_s, self.now - request.started)
        seen = request.first + request.rest
        expected = request.work.answer if is_complete else request.work.answer[: len(seen)]
        wrong = sum(a != b for a, b in itertools.zip_longest(seen, expected))
        if wrong:
            self.report.wrong_tokens += wrong
            self.report.complaints.append(f"{request.request_id}: {seen} instead of {expected}")

    def _cancel_sub_requests(self, request: _Request) -> None:
        for address in (request.prefill, request.decode):
            self._dispatch(address, Cancel(request_id=request.request_id))

    def _pick_work(self) -> _Work:
        number = self.source.randrange(_NUM_PROMPTS)
        if number not in self._work:
            prompt = self.source.choice(self._shared) + self._random_tokens(self.source.randint(1, 4 * _BLOCK_SIZE))
            sampling = SamplingParams(temperature=0.0, max_tokens=self.source.choice((1, 2, 4, 8, 16)))
            if number % 2:
                sampling = msgspec.structs.replace(sampling, temperature=0.9, top_p=0.95, seed=number)
            self._work[number] = _Work(prompt, sampling, self._answer(prompt, sampling, salt=str(number)))
        return self._work[number]

    def _answer(self, prompt: list[int], sampling: SamplingParams, *, salt: str) -> list[int]:
        sequence = self._oracle.factory.make_sequence(salt, prompt, sampling, cache_salt=salt)
        self._oracle.add(sequence)
        while sequence.finish_reason is None:
            self._oracle.step()
        return sequence.output_ids

    def _random_tokens(self, count: int) -> list[int]:
        return self.source.choices(range(3, _VOCAB_SIZE), k=count)

    # The network and the supervisor.

    def send(self, peer: PeerAddress, message: Message) -> None:
        """Send from worker to worker over the lossy network."""
        fate, faults = self.source.random(), self.faults
        if self._is_calm or fate >= faults.message_dropped + faults.message_repeated + faults.message_late:
            self._deliver(peer, message, _LATENCY_S)
        elif fate < faults.message_dropped:
            self.report.injected["message dropped"] += 1
        elif fate < faults.message_dropped + faults.message_repeated:
            self.report.injected["message repeated"] += 1
            self._deliver(peer, message, _LATENCY_S)
            self._deliver(peer, message, _LATE_S)
        else:
            self.report.injected["message late"] += 1
            self._deliver(peer, message, _LATE_S)

    def _dispatch(self, peer: PeerAddress, message: Message) -> None:
        """Send from router to worker; it may not arrive."""
        if not self._is_calm and self.source.random() < self.faults.sub_request_dropped:
            self.report.injected["sub-request or cancel dropped"] += 1
        else:
            self._deliver(peer, message, _LATENCY_S)

    def _deliver(self, peer: PeerAddress, message: Message, within_s: float) -> None:
        data = encode_message(message)

        def arrive() -> None:
            worker = self.workers[peer.worker_id]
            if worker.address.epoch == peer.epoch and peer.worker_id not in self._dead:
                worker.handle(decode_message(data), self.now)

        self._after(self.source.uniform(0.0, within_s), arrive)

    def _kill(self, worker_id: str) -> None:
        """Kill a process at once; router, peers and successor notice at different times."""
        if worker_id in self._dead:
            return
        side = "sender" if worker_id in _PREFILL else "receiver"
        self.report.injected[f"{side} killed"] += 1
        address = self.workers[worker_id].address
        self._dead.add(worker_id)
        self.workers[worker_id].transport.close()
        noticed_s = self.source.uniform(0.0, _DEATH_NOTICED_S)
        self._after(noticed_s, partial(self._replace, address))
        for other_id in self.workers:
            told_s = noticed_s + self.source.uniform(0.0, _DEATH_NOTICED_S)
            self._after(told_s, partial(self._tell, other_id, address))

    def _replace(self, dead: PeerAddress) -> None:
        """Fail the requests that ran there, and start a new process in its place."""
        self.workers[dead.worker_id] = _Worker(self, dead.worker_id, next(self._epochs))
        self._dead.remove(dead.worker_id)
        self.known[dead.worker_id] = self.workers[dead.worker_id].address
        for request in list(self._open.values()):
            if dead in (request.prefill, request.decode):
                self.fail(request.request_id, f"{dead.worker_id} died")

    def _tell(self, worker_id: str, dead: PeerAddress) -> None:
        if worker_id not in self._dead and worker_id != dead.worker_id:
            self.workers[worker_id].peer_died(dead)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), action))


def _kind_of(reason: str) -> str:
    """A reason without the names and numbers in it."""
    return next((kind for part, kind in _REASONS.items() if part in reason), reason)


def save_model(folder: Path) -> Path:
    """The model of every worker, whose block is `block_bytes` of `make_engine` long."""
    return save_tiny_model(folder, vocab_size=_VOCAB_SIZE, hidden_size=32, max_model_len=256)
