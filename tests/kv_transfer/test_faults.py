"""Injected faults: the faulty transport, roles whose peers and writes fail, and hundreds of handoffs."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode_worker.role import DecodeRole
from tandem.engine.engine import Engine
from tandem.kv_transfer.links import LinkState, PeerLinks
from tandem.kv_transfer.transport.base import Notification, TransferState
from tandem.kv_transfer.transport.checksum import append_checksum, strip_checksum
from tandem.kv_transfer.transport.faulty import FaultyTransport
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessTransport
from tandem.prefill_worker import block_writes
from tandem.prefill_worker.block_writes import RecentPace
from tandem.prefill_worker.role import PrefillRole
from tandem.protocol.config import EngineConfig, TransferConfig
from tandem.protocol.errors import PeerLost
from tandem.protocol.faults import Fault
from tandem.protocol.messages import (
    ChunkArrived,
    Decode,
    HandoffDone,
    LeaseClosed,
    LeaseGrant,
    LeaseRequest,
    Message,
    PeerAddress,
    PeerHello,
    Prefill,
    WorkerEpoch,
    decode_message,
)
from tandem.protocol.sampling import SamplingParams
from tests.support.fault_world import Faults, run, save_model
from tests.support.late_device import LateDevice, LateStream

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # links break by the dozen here
    yield
    logging.disable(logging.NOTSET)


class Link:
    """A faulty sender "p" and a receiver "d" over the in-process transport; the test sets the time."""

    def __init__(self, rates: dict[Fault, float], *, num_blocks: int = 8, seed: int = 0) -> None:
        self.now = 0.0
        self.source, self.target = torch.rand(num_blocks, 64) + 1, torch.zeros(num_blocks, 64)
        self.hub = InProcessHub()
        self.receiver = InProcessTransport("d", 1, self.target, self.hub)
        self.sender = FaultyTransport(
            InProcessTransport("p", 1, self.source, self.hub),
            self.source,
            rates=rates,
            source=random.Random(seed),
            clock=lambda: self.now,
            max_delay_s=10.0,
        )
        self.sender.add_peer("d", 1, self.receiver.local_metadata())

    @property
    def landed(self) -> list[int]:
        return [block for block in range(len(self.target)) if torch.equal(self.target[block], self.source[block])]

    def arrived(self) -> list[bytes]:
        return [notification.payload for notification in self.receiver.poll()]


@pytest.mark.parametrize(
    ("fault", "landed", "payloads"),
    [
        (Fault.DROP, 3, []),
        (Fault.REPEAT, 3, [b"message", b"message"]),
        (Fault.TEAR, 2, [b"message"]),
        (Fault.FLIP, 2, [b"message"]),
    ],
)
def test_a_fault_of_a_write_that_is_reported_as_done(fault: Fault, landed: int, payloads: list[bytes]) -> None:
    link = Link({fault: 1.0})
    before = link.source.clone()
    assert link.sender.write_blocks("d", [1, 2, 3], [1, 2, 3], b"message").state is TransferState.DONE
    assert (len(link.landed), link.arrived()) == (landed, payloads)
    assert torch.equal(link.source, before)
    assert link.sender.injected == Counter({fault.value: 1})


def test_a_delayed_write_holds_up_the_link_and_keeps_its_order() -> None:
    link = Link({Fault.DELAY: 1.0})
    first = link.sender.write_blocks("d", [1], [1], b"1")
    link.sender.rates = {}
    second = link.sender.write_blocks("d", [2], [2], b"2")
    link.sender.poll()
    assert (first.is_settled, second.is_settled, link.landed) == (False, False, [])
    link.now = 10.0
    link.sender.poll()
    assert (first.state, second.state) == (TransferState.DONE, TransferState.DONE)
    assert (link.landed, link.arrived()) == ([1, 2], [b"1", b"2"])


def test_a_lost_link_is_down_until_it_is_opened_and_its_blocks_land_late() -> None:
    link = Link({Fault.LOSE: 1.0}, seed=1)
    assert link.sender.write_blocks("d", [1, 2, 3], [1, 2, 3], b"x").state is TransferState.LOST
    assert link.landed == []
    with pytest.raises(PeerLost):
        link.sender.write_blocks("d", [4], [4])
    link.sender.rates = {}
    link.sender.add_peer("d", 1, link.receiver.local_metadata())
    assert link.sender.write_blocks("d", [4], [4]).state is TransferState.DONE
    assert not link.sender.is_quiet("d")
    link.now = 10.0
    link.sender.poll()
    assert (link.landed, link.arrived()) == ([1, 2, 3, 4], [])
    assert link.sender.is_quiet("d")


def test_nothing_that_was_lost_lands_in_the_next_process_of_that_name() -> None:
    link = Link({Fault.LOSE: 1.0})
    link.sender.write_blocks("d", [1, 2, 3], [1, 2, 3])
    target = torch.zeros(8, 64)
    restarted = InProcessTransport("d", 2, target, link.hub)
    link.sender.add_peer("d", 2, restarted.local_metadata())
    link.now = 10.0
    link.sender.poll()
    assert not target.any()


def test_what_is_held_is_lost_with_its_peer() -> None:
    link = Link({Fault.DELAY: 1.0})
    transfer = link.sender.write_blocks("d", [1], [1])
    link.sender.remove_peer("d")
    assert transfer.state is TransferState.LOST
    link.now = 10.0
    link.sender.poll()
    assert (link.landed, link.sender.is_quiet("d")) == ([], False)
    link.sender.add_peer("d", 1, link.receiver.local_metadata())
    link.sender.poll()
    assert (link.landed, link.sender.is_quiet("d")) == ([1], True), "it was only down"


def test_a_sealed_message_shows_every_flipped_bit_and_every_cut() -> None:
    message = b"the first token is 42"
    sealed = append_checksum(message)
    assert strip_checksum(sealed) == message
    for position in range(len(sealed)):
        assert strip_checksum(sealed[:position]) is None
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[position] ^= 1 << bit
            assert strip_checksum(bytes(flipped)) is None


@pytest.mark.parametrize(("checksums", "num_expected"), [("off", 0), ("all", 32)])
def test_all_blocks_are_checked_or_none(model: Path, checksums: str, num_expected: int) -> None:
    sender = SenderSide(model, checksums=checksums)
    num_checked = num_blocks = 0
    for number in range(8):
        for chunk in sender.hand_off(f"r{number}", [number + 3] * 3 * BLOCK_SIZE + [5]):
            num_blocks += chunk.num_blocks
            assert len(chunk.checksums) in (0, chunk.num_blocks)
            num_checked += sum(checksum != b"" for checksum in chunk.checksums)
    assert (num_blocks, num_checked) == (32, num_expected)


def make_engine(model: Path) -> Engine:
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", block_size=BLOCK_SIZE, pool_bytes=1 << 18, num_threads=1
    )
    return Engine(config)


def address(worker_id: str, epoch: int = 1) -> PeerAddress:
    return PeerAddress(worker_id, epoch, "", "")


class SenderSide:
    """A prefill role with a link to "d". The test plays d's pool and answers."""

    def __init__(
        self, model: Path, *, rates: dict[Fault, float] | None = None, max_delay_s: float = 1000.0, **config: Any
    ) -> None:
        self.now = 0.0
        self.generation = 0
        self.engine = make_engine(model)
        self.hub = InProcessHub()
        self.transport = FaultyTransport(
            InProcessTransport("p", 1, self.engine.kv.shards, self.hub),
            self.engine.kv.shards[0],
            rates=rates or {},
            source=random.Random(0),
            clock=lambda: self.now,
            max_delay_s=max_delay_s,
        )
        self.sent: list[Message] = []
        self.failed: list[str] = []
        self.links = PeerLinks(
            address("p"), {}, self.transport, lambda _, message: self.sent.append(message), timeout_s=30.0
        )
        self.role = PrefillRole(
            self.engine,
            self.transport,
            self.links,
            TransferConfig(transport="in_process", **config),
            lambda request_id, message, code: self.failed.append(message),
            lambda request_id: None,
        )
        self.receiver = self.start_receiver(1)

    def start_receiver(self, epoch: int) -> InProcessTransport:
        """A process named "d"; the link leads to it from now on."""
        receiver = InProcessTransport("d", epoch, torch.zeros_like(self.engine.kv.shards[0]), self.hub)
        self.links.connect(address("d", epoch), self.now)
        reply = PeerHello(
            sender=address("d", epoch), compatibility={}, transport_metadata=receiver.local_metadata(), is_reply=True
        )
        assert self.links.hello(reply) is not None
        return receiver

    def answer_hello(self) -> None:
        """The receiver answers if it is asked to open the link."""
        reply = PeerHello(
            sender=address("d"), compatibility={}, transport_metadata=self.receiver.local_metadata(), is_reply=True
        )
        change = self.links.hello(reply)
        if change is not None and change.state is LinkState.READY:
            self.role.link_ready(change.peer, self.now)

    def prefill(self, request_id: str, prompt: list[int]) -> None:
        request = Prefill(request_id=request_id, token_ids=prompt, sampling=GREEDY, decode_worker=address("d"))
        self.role.accept(request, self.now)
        while request_id in self.engine.sequences:
            [result] = self.engine.step()
            self.role.after_step(result)

    def grant(self, request_id: str, num_blocks: int) -> None:
        self.generation += 1
        grant = LeaseGrant(
            sender=address("d"),
            request_id=request_id,
            generation=self.generation,
            first_block=0,
            block_ids=list(range(num_blocks)),
            ttl_s=30.0,
        )
        self.role.granted(grant, self.now)

    def send(self, request_id: str, token_id: int = 7) -> None:
        """Compute a prompt of three blocks, and begin to write it."""
        self.prefill(request_id, [token_id] * 20)
        self.grant(request_id, 3)
        self.role.pump(0.0)

    def check_idle(self) -> None:
        self.role.check_integrity(idle=True)
        self.engine.check_integrity(idle=True)

    def hand_off(self, request_id: str, prompt: list[int]) -> list[ChunkArrived]:
        """The notifications that the receiver gets, without the one that ends the handoff."""
        self.prefill(request_id, prompt)
        self.grant(request_id, -(-len(prompt) // BLOCK_SIZE))
        self.role.pump(self.now)
        messages = [decode_message(strip_checksum(n.payload) or b"") for n in self.receiver.poll()]
        return [message for message in messages if isinstance(message, ChunkArrived)]


def test_a_grant_of_a_dead_process_is_not_written_to_its_successor(model: Path) -> None:
    sender = SenderSide(model)
    sender.prefill("r", [7] * 20)
    sender.grant("r", 3)
    successor = sender.start_receiver(2)  # a later request brought its link up before the death was told
    sender.role.pump(0.0)
    assert not successor.shards[0].any(), "blocks that the dead process granted are somebody else's in the new one"
    assert successor.poll() == []
    assert sender.failed == ["KV handoff failed: a write to d is failed"]
    sender.check_idle()


def test_a_write_that_stalls_stops_vouching_for_its_lease(model: Path) -> None:
    sender = SenderSide(model, rates={Fault.DELAY: 1.0}, handoff_timeout_s=30.0)
    sender.send("r")
    sender.role.expire(29.0)
    assert sender.role.live_handoffs == [("r", 1)]
    sender.role.expire(30.0)
    assert sender.role.live_handoffs == []
    assert sender.engine.pool.num_used == 3, "blocks under a write were given back"
    sender.now = 1000.0
    sender.transport.poll()
    sender.role.pump(1000.0)
    sender.check_idle()


def stuck_writes(sender: SenderSide, *, num_handoffs: int) -> None:
    """Handoffs of three blocks each whose writes are stuck, one behind the other, from time 0 on."""
    sender.transport.rates = {Fault.STICK: 1.0}
    for number in range(num_handoffs):
        sender.prefill(f"r{number}", [7 + number] * 3 * BLOCK_SIZE)
        sender.grant(f"r{number}", 3)
    sender.role.pump(0.0)
    sender.role.expire(0.0)


def test_a_stuck_link_of_known_pace_is_reset_in_seconds(model: Path) -> None:
    sender = SenderSide(model, handoff_timeout_s=30.0)
    sender.hand_off("before", [9] * 20)
    sender.role.pump(0.0)
    stuck_writes(sender, num_handoffs=2)
    sender.role.expire(9.9)
    assert (sender.failed, len(sender.role.live_handoffs)) == ([], 2)
    sender.role.expire(10.0)
    sender.role.pump(10.0)
    assert sender.role.writes.loads[0].num_resets == 1
    assert len(sender.failed) == 2
    assert not sender.engine.has_work
    sender.check_idle()


@pytest.mark.parametrize(
    ("seconds_per_block", "stuck_after_s"), [(0.001, 10.0), (0.2, 12.0), (0.45, 27.0), (9.0, 30.0)]
)
def test_a_link_may_need_many_times_its_pace(model: Path, seconds_per_block: float, stuck_after_s: float) -> None:
    sender = SenderSide(model, handoff_timeout_s=30.0)
    sender.role.writes.paces["d"] = RecentPace(sender.engine.block_bytes, seconds_per_block)
    stuck_writes(sender, num_handoffs=1)
    sender.role.expire(stuck_after_s - 0.01)
    assert not sender.role.writes.totals
    sender.role.expire(stuck_after_s + 0.01)
    assert sender.role.writes.totals["d"].num_resets == 1


def test_after_a_reset_a_write_gets_twice_the_time_until_one_was_fast(model: Path) -> None:
    sender = SenderSide(model, handoff_timeout_s=30.0)
    block_bytes, writes = sender.engine.block_bytes, sender.role.writes
    writes.paces["d"] = pace = RecentPace()
    for _ in range(10_000):
        pace.note(3 * block_bytes, 0.03)  # 10 ms a block, for long
    stuck_writes(sender, num_handoffs=1)
    sender.role.expire(10.0)
    assert sender.role.writes.totals["d"].num_resets == 1
    assert writes.seconds_to_send("d", 3) * 20 == pytest.approx(20.0)
    writes.paces["d"].note(3 * block_bytes, 15.0)
    assert writes.seconds_to_send("d", 3) * 20 > 150.0, "it is slow now"
    writes.paces["d"] = RecentPace(3 * block_bytes, 1.0)
    writes.paces["d"].note(3 * block_bytes, 0.03)
    assert writes.seconds_to_send("d", 3) * 20 < 10.0, "it was stuck"


def closed_leases(sender: SenderSide) -> list[int]:
    return [message.generation for message in sender.sent if isinstance(message, LeaseClosed)]


def test_leases_of_a_reset_link_are_confirmed_when_that_is_safe(model: Path) -> None:
    sender = SenderSide(model, rates={Fault.STICK: 1.0}, handoff_timeout_s=30.0)
    for number in range(2):
        sender.prefill(f"r{number}", [7 + number] * 20)
        sender.grant(f"r{number}", 3)
    for now in (0.0, 29.0, 30.0):
        sender.now = now
        sender.role.pump(now)
        sender.role.expire(now)
        sender.transport.poll()
    sender.role.pump(30.0)
    (load,) = sender.role.writes.loads
    assert (load.num_resets, load.num_lost, load.num_handoffs) == (1, 4, 0)
    assert sender.failed == ["KV handoff failed: a write to d took over 30.0 s"] * 2
    sender.check_idle()
    assert closed_leases(sender) == [], "what was lost may still land"
    sender.transport.rates = {}
    sender.answer_hello()
    for now in (31.0, 32.0, 1100.0, 1102.0):  # strays land within 1,000 s
        sender.now = now
        sender.transport.poll()
        sender.role.expire(now)
        sender.role.pump(now)
    assert closed_leases(sender) == [1, 2]
    assert len(sender.hand_off("after", [9] * 20)) == 1, "the link is whole again"


@pytest.mark.parametrize("num_before", range(6))
def test_wherever_a_link_flaps_every_lease_is_confirmed_after_it_healed(model: Path, num_before: int) -> None:
    sender = SenderSide(model, max_delay_s=10.0)
    num_writes = 0
    write_blocks = sender.transport.write_blocks

    def flap(*args: Any, **fields: Any) -> Any:
        nonlocal num_writes
        sender.transport.rates = {Fault.LOSE: 1.0} if num_writes == num_before else {}
        num_writes += 1
        return write_blocks(*args, **fields)

    sender.transport.write_blocks = flap  # type: ignore[method-assign]
    for number in range(3):
        sender.send(f"r{number}", 7 + number)
    sender.role.pump(0.0)
    assert len(closed_leases(sender)) < 3
    sender.transport.rates = {}
    for now in (1.0, 2.0, 20.0, 22.0, 24.0):
        sender.now = now
        sender.role.expire(now)
        sender.answer_hello()
        sender.transport.poll()
        sender.role.pump(now)
    notifications = [decode_message(strip_checksum(n.payload) or b"") for n in sender.receiver.poll()]
    done = {message.generation for message in notifications if isinstance(message, HandoffDone)}
    assert sorted({*done, *closed_leases(sender)}) == [1, 2, 3]
    assert not done & set(closed_leases(sender))
    sender.check_idle()


def test_nothing_is_sent_for_a_receiver_that_is_known_to_be_dead(model: Path) -> None:
    sender = SenderSide(model)
    sender.links.forget(WorkerEpoch("d", 1))
    sender.role.peer_lost(WorkerEpoch("d", 1))
    sender.sent.clear()
    with pytest.raises(PeerLost, match="decode worker d died"):
        sender.prefill("r", [7] * 20)
    sender.grant("r", 3)  # a last message
    assert sender.sent == [], "the link to a dead process is opened again"
    sender.engine.check_integrity(idle=True)


def make_receiver(model: Path, sent: list[Message] | None = None) -> tuple[DecodeRole, Engine]:
    engine = make_engine(model)
    transport = InProcessTransport("d", 1, engine.kv.shards, InProcessHub())
    messages = [] if sent is None else sent
    links = PeerLinks(address("d"), {}, transport, lambda peer, message: messages.append(message), timeout_s=30.0)
    role = DecodeRole(
        engine,
        links,
        TransferConfig(transport="in_process"),
        lambda request_id, message, code: None,
        first_generation=1,
    )
    return role, engine


def test_no_lease_is_granted_to_a_sender_that_is_known_to_be_dead(model: Path) -> None:
    role, engine = make_receiver(model)
    role.peer_given_up(WorkerEpoch("p", 1))
    request = Decode(request_id="r", token_ids=[7] * 20, sampling=GREEDY, prefill_worker=address("p"))
    with pytest.raises(PeerLost, match="prefill worker p died"):  # its blocks would stay in quarantine for ever
        role.accept(request, 0.0)
    role.pump(0.0)
    role.check_integrity(idle=True)
    engine.check_integrity(idle=True)


@pytest.mark.parametrize("ends", ["granted", "cancelled", "given up"])
def test_a_grant_leaves_once_the_device_has_done_with_its_blocks(model: Path, ends: str) -> None:
    sent: list[Message] = []
    role, engine = make_receiver(model, sent)
    engine.stream = stream = LateStream(0, share_done=0.0)
    stream.launch(lambda: None)  # it may use blocks that have been freed since
    role.accept(Decode(request_id="r", token_ids=[7] * 20, sampling=GREEDY, prefill_worker=address("p")), 0.0)
    role.requested(LeaseRequest(sender=address("p"), request_id="r"), 0.0)
    role.pump(0.0)
    assert role.num_leases == 1
    assert not any(isinstance(message, LeaseGrant) for message in sent)
    if ends == "cancelled":
        role.cancel("r")
    elif ends == "given up":
        role.peer_lost(WorkerEpoch("p", 1))
    stream.flush()
    role.pump(0.0)
    assert sum(isinstance(message, LeaseGrant) for message in sent) == (ends == "granted")


@pytest.mark.parametrize("payload", [b"", b"garbage", append_checksum(b"garbage"), append_checksum(b"")], ids=str)
def test_a_notification_that_cannot_be_read_is_dropped(model: Path, payload: bytes) -> None:
    role, engine = make_receiver(model)
    role.accept(Decode(request_id="r", token_ids=[7] * 20, sampling=GREEDY, prefill_worker=address("p")), 0.0)
    role.requested(LeaseRequest(sender=address("p"), request_id="r"), 0.0)
    role.pump(0.0)
    role.notified(Notification("p", 1, payload), 0.0)
    assert (role.num_open, role.num_leases, engine.pool.num_used) == (1, 1, 3)


def test_two_hundred_handoffs_under_all_faults(model: Path) -> None:
    report = run(model, handoffs=200, seed=1, faults=Faults())
    print(f"seed 1: {report}")
    assert report.is_clean, report.complaints[:5]
    assert report.completed > 100
    assert report.completed + report.cancelled + report.failed.total() == report.handoffs == 200
    assert len(report.injected) > 8


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))])
def test_handoffs_that_are_packed_under_all_faults(model: Path, seed: int) -> None:
    faults = Faults(writes=Faults().writes | {Fault.REPEAT: 0.2, Fault.FLIP: 0.05, Fault.TEAR: 0.05})
    report = run(model, handoffs=200, seed=seed, faults=faults, packs=True)
    print(f"seed {seed}: {report}")
    assert report.is_clean, report.complaints[:5]
    assert report.completed > 100
    assert report.saved_bytes > 0


@pytest.mark.parametrize("seed", [20, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (21, 22, 23))])
def test_links_that_are_reset_early_lose_nothing(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writes, "_LEAST_STUCK_S", 0.5)  # of the 4 s of a handoff
    faults = Faults(writes={Fault.STICK: 0.02, Fault.DELAY: 0.1}, kill_receiver=0.001)
    report = run(model, handoffs=150, seed=seed, faults=faults)
    print(f"seed {seed}: {report}")
    assert report.is_clean, report.complaints[:5]
    assert report.injected["write stuck"] > 0


@pytest.mark.parametrize("seed", [6, pytest.param(7, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_handoffs_between_devices_that_run_behind_their_callers(model: Path, seed: int, request: Any) -> None:
    """Nothing is sent before it is computed, and nothing is overwritten that a device still uses."""
    handoffs = 2000 if request.node.get_closest_marker("slow") else 60
    print(f"seed {seed}")
    devices: list[LateDevice] = []

    def make_device(engine: Engine, seed: int) -> LateDevice:
        devices.append(LateDevice(engine, seed))
        return devices[-1]

    faults = Faults(kill_sender=0.001, kill_receiver=0.001)
    report = run(model, handoffs=handoffs, seed=seed, faults=faults, make_device=make_device)
    print(report)
    assert report.is_clean, report.complaints[:5]
    assert report.completed > handoffs / 2
    assert sum(device.stream.num_late for device in devices) > handoffs / 3


def test_without_waiting_for_the_device_its_blocks_are_touched_early(model: Path) -> None:
    make_device = partial(LateDevice, is_impatient=True)
    for seed in range(6, 9):
        report = run(model, handoffs=80, seed=seed, faults=Faults(), make_device=make_device)
        early = [complaint for complaint in report.complaints if "before they are computed" in complaint]
        print(f"seed {seed}: {len(early)} reads too early, {report.wrong_tokens} wrong tokens")
        if early:
            break
    assert early
    assert not report.is_clean


def test_without_checksums_damage_is_seen(model: Path) -> None:
    faults = Faults(writes={Fault.TEAR: 0.3})
    report = run(model, handoffs=40, seed=4, faults=faults, checksums="off")
    assert report.wrong_tokens > 0
    assert not report.is_clean
