"""When a decode worker is asked for room: as late as the transfer allows, and in whatever order messages come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode_worker.role import DecodeRole
from tandem.engine.engine import Engine
from tandem.engine.step_result import SequenceOutput
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessTransport
from tandem.prefill_worker.block_writes import RecentPace
from tandem.prefill_worker.role import PrefillRole
from tandem.protocol.config import TransferConfig
from tandem.protocol.messages import (
    Decode,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    Message,
    PeerAddress,
    PeerHello,
    Prefill,
    WorkerEpoch,
    WorkerPriority,
    WriteBegun,
)
from tandem.protocol.sampling import SamplingParams
from tests.support.cluster_harness import BLOCK_SIZE, engine_config

pytestmark = [pytest.mark.cluster, pytest.mark.cpu_engine("each step has its results when it returns")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
STEP_TOKENS = 4 * BLOCK_SIZE
TIMEOUT_S = 30.0
P, D = PeerAddress("p", 1, "", ""), PeerAddress("d", 1, "", "")


class Side:
    """One role with a link to its peer, whose messages the test plays."""

    def __init__(self, tiny_model: Path, me: PeerAddress, peer: PeerAddress) -> None:
        self.now = 0.0
        config = engine_config(tiny_model, num_blocks=28, max_num_batched_tokens=STEP_TOKENS)
        self.clock_readings: list[float] = []  # the next ones; then it is `now`
        self.engine = Engine(config, clock=lambda: self.clock_readings.pop(0) if self.clock_readings else self.now)
        hub = InProcessHub()
        transport = self.transport = InProcessTransport(me.worker_id, 1, self.engine.kv.shards, hub)
        other = InProcessTransport(peer.worker_id, 1, torch.zeros_like(self.engine.kv.shards[0]), hub)
        self.sent: list[Message] = []
        self.failed: list[str] = []
        self.num_grants = 0
        self.tokens: list[str] = []  # requests whose first token was sent to the router
        links = PeerLinks(me, {}, transport, lambda _, message: self.sent.append(message), timeout_s=TIMEOUT_S)
        links.connect(peer, 0.0)
        hello = PeerHello(sender=peer, compatibility={}, transport_metadata=other.local_metadata(), is_reply=True)
        assert links.hello(hello) is not None
        fail = lambda request_id, message, code: self.failed.append(message)  # noqa: E731
        transfer = TransferConfig(transport="in_process", handoff_timeout_s=TIMEOUT_S)
        self.prefill = PrefillRole(self.engine, transport, links, transfer, fail, lambda request_id: None)
        self.decode = DecodeRole(self.engine, links, transfer, fail, first_generation=1)

    def ids(self, kind: type[Any]) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, kind)]

    # As the prefill worker.

    def send(self, request_id: str, num_tokens: int) -> None:
        tokens = random.Random(request_id).choices(range(5, 250), k=num_tokens)
        request = Prefill(request_id=request_id, token_ids=tokens, sampling=GREEDY, decode_worker=D)
        self.prefill.accept(request, self.now)

    def measured(self, *, seconds_per_block: float) -> None:
        self.prefill.writes.paces["d"] = RecentPace(self.engine.block_bytes, seconds_per_block)

    def run_step(self) -> None:
        """One step of a second."""
        self.prefill.pump(self.now)
        self.clock_readings = [self.now, self.now + 1.0]
        results = self.engine.step(before_compute=lambda: self.prefill.request_leases(self.now))
        self.now += 1.0
        for result in results:
            self.note_tokens(self.prefill.after_step(result))
        self.prefill.pump(self.now)

    def note_tokens(self, outputs: list[SequenceOutput]) -> None:
        self.tokens += [output.sequence.request_id for output in outputs]

    def grant(self, request_id: str, num_blocks: int) -> None:
        self.num_grants += 1
        grant = LeaseGrant(
            sender=D,
            request_id=request_id,
            generation=self.num_grants,
            first_block=0,
            block_ids=list(range(num_blocks)),
            ttl_s=9.0,
        )
        self.prefill.granted(grant, self.now)
        self.note_tokens(self.prefill.take_first_tokens())

    # As the decode worker.

    def receive(self, request_id: str, num_tokens: int) -> None:
        tokens = random.Random(request_id).choices(range(5, 250), k=num_tokens)
        self.decode.accept(Decode(request_id=request_id, token_ids=tokens, sampling=GREEDY, prefill_worker=P), self.now)

    def ask(self, request_id: str, sender: PeerAddress = P) -> None:
        self.decode.requested(LeaseRequest(sender=sender, request_id=request_id), self.now)

    def end(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.prefill.cancel(request_id)
            self.decode.cancel(request_id)
        self.decode.peer_lost(WorkerEpoch("p", 1))
        self.prefill.pump(self.now)
        self.prefill.check_integrity(idle=True)
        self.decode.check_integrity(idle=True)
        self.engine.check_integrity(idle=True)


@pytest.fixture
def sender(tiny_model: Path) -> Side:
    return Side(tiny_model, P, D)


@pytest.fixture
def receiver(tiny_model: Path) -> Side:
    return Side(tiny_model, D, P)


# Six steps, and a link on which all of the prompt takes as long as some of them.
@pytest.mark.parametrize(
    ("transfer_steps", "asked_after"), [(0.1, 4), (1.5, 4), (2.5, 3), (3.5, 2), (4.5, 1), (100.0, 1)]
)
def test_room_is_asked_for_as_late_as_the_transfer_allows(
    sender: Side, transfer_steps: float, asked_after: int
) -> None:
    sender.measured(seconds_per_block=transfer_steps / 24)
    sender.prefill.step_s = 1.0
    sender.send("r", 6 * STEP_TOKENS)
    for num_steps in range(6):
        sender.prefill.pump(sender.now)
        assert bool(sender.ids(LeaseRequest)) == (num_steps >= asked_after), f"after {num_steps} steps"
        sender.run_step()
    assert sender.ids(LeaseRequest) == ["r"], "once"
    sender.end("r")


@pytest.mark.parametrize("can_wake", [True, False])
def test_the_receiver_is_told_of_a_write_if_only_its_polls_would_show_it(sender: Side, can_wake: bool) -> None:
    if not can_wake:
        sender.transport.waker = None
    sender.send("r", 2 * STEP_TOKENS)
    sender.run_step()
    sender.grant("r", 8)
    sender.run_step()
    num_writes = sum(isinstance(message, WriteBegun) for message in sender.sent)
    assert num_writes == (0 if can_wake else 3), "two chunks and their end"
    assert (sender.prefill.writes.last_begun == sender.now) is not can_wake
    sender.end("r")


def test_prompts_in_the_queue_ask_when_it_is_their_turn(sender: Side) -> None:
    sender.measured(seconds_per_block=0.0)
    sender.prefill.step_s = 1.0
    for request_id, num_steps in (("a", 3), ("b", 1), ("c", 1)):
        sender.send(request_id, num_steps * STEP_TOKENS)
    asked = []
    for _ in range(5):
        sender.prefill.pump(sender.now)
        asked.append("".join(sender.ids(LeaseRequest)))
        sender.run_step()
    assert asked == ["", "a", "a", "a", "ab"]
    assert sender.ids(LeaseRequest) == ["a", "b", "c"]
    sender.end("a", "b", "c")


def test_a_cached_prompt_asks_while_its_only_step_computes(sender: Side) -> None:
    sender.measured(seconds_per_block=0.0)
    sender.send("first", 6 * STEP_TOKENS)
    for _ in range(6):
        sender.run_step()
    sender.prefill.cancel("first")
    sender.prefill.pump(sender.now)
    tokens = random.Random("first").choices(range(5, 250), k=6 * STEP_TOKENS)
    sender.prefill.accept(Prefill(request_id="again", token_ids=tokens, sampling=GREEDY, decode_worker=D), sender.now)
    sender.engine.step(before_compute=lambda: sender.prefill.request_leases(sender.now))
    assert sender.ids(LeaseRequest) == ["first", "again"]
    sender.end("again")


def test_a_prompt_that_waits_for_room_here_holds_none_there(tiny_model: Path) -> None:
    sender, receiver = Side(tiny_model, P, D), Side(tiny_model, D, P)

    def exchange() -> None:
        for request_id in sender.ids(LeaseRequest):
            receiver.decode.requested(LeaseRequest(sender=P, request_id=request_id), sender.now)
        sender.sent.clear()
        receiver.decode.pump(sender.now)
        for message in receiver.sent:
            if isinstance(message, LeaseGrant):
                sender.prefill.granted(message, sender.now)
        receiver.sent.clear()

    busy = sender.engine.pool.try_allocate(8) or []
    for request_id, num_blocks, order in (("waits", 24, 10.0), ("overtakes", 6, 1.0)):
        tokens = random.Random(request_id).choices(range(5, 250), k=num_blocks * BLOCK_SIZE)
        prompt = Prefill(
            request_id=request_id,
            token_ids=tokens,
            sampling=GREEDY,
            decode_worker=D,
            priority=WorkerPriority(order=order),
        )
        sender.prefill.accept(prompt, sender.now)
        receiver.receive(request_id, num_blocks * BLOCK_SIZE)
        sender.prefill.pump(sender.now)
        exchange()
    for _ in range(4):
        sender.run_step()
        exchange()
    sender.prefill.pump(sender.now)
    assert not sender.prefill.has("overtakes"), "it is delivered, not waiting for room that the other one holds"
    sender.engine.pool.release(busy)
    sender.end("waits")
    receiver.end("waits", "overtakes")


def test_a_prompt_that_was_never_granted_fails_in_time_after_it_asked(sender: Side) -> None:
    sender.measured(seconds_per_block=0.0)
    sender.prefill.step_s = 1.0
    sender.send("r", 6 * STEP_TOKENS)
    sender.prefill.expire(100.0)
    sender.prefill.pump(100.0)
    assert sender.prefill.live_handoffs == [("r", 0)], "not asked for yet, so nobody is late"
    for _ in range(5):
        sender.run_step()
    sender.prefill.expire(sender.now - 1.0 + TIMEOUT_S)
    sender.prefill.pump(sender.now)
    assert len(sender.failed) == 1
    assert "no word from d of the lease" in sender.failed[0]
    sender.end()


def test_a_first_token_is_sent_once_there_is_a_seat_and_room_for_the_next(sender: Side) -> None:
    sender.send("early", STEP_TOKENS)
    sender.send("late", STEP_TOKENS)
    sender.prefill.pump(0.0)
    sender.grant("early", 4)
    sender.run_step()
    assert sender.tokens == ["early"], "its lease was here when it was computed"
    sender.run_step()
    sender.prefill.queued(LeaseQueued(sender=D, request_ids=["late"]), sender.now)
    sender.note_tokens(sender.prefill.take_first_tokens())
    assert sender.tokens == ["early"]
    sender.grant("late", 4)
    assert sender.tokens == ["early", "late"]
    assert sender.prefill.take_first_tokens() == [], "once"
    sender.prefill.pump(sender.now)
    sender.end()


def test_a_prompt_that_fails_while_it_waits_for_room_has_sent_no_token(sender: Side) -> None:
    for request_id in ("refused", "cancelled", "dead"):
        sender.send(request_id, STEP_TOKENS)
        sender.run_step()
    sender.prefill.refused(LeaseRefused(sender=D, request_id="refused", reason="of a test"))
    sender.prefill.cancel("cancelled")
    sender.prefill.pump(sender.now)
    sender.prefill.check_integrity()
    sender.prefill.peer_lost(WorkerEpoch("d", 1))
    sender.prefill.pump(sender.now)
    assert (sender.tokens, sender.prefill.take_first_tokens()) == ([], [])
    sender.end()


def test_a_first_token_that_is_the_last_needs_no_room(sender: Side) -> None:
    once = SamplingParams(temperature=0.0, max_tokens=1)
    tokens = list(range(5, 25))
    sender.prefill.accept(Prefill(request_id="r", token_ids=tokens, sampling=once, decode_worker=D), 0.0)
    sender.run_step()
    assert sender.tokens == ["r"]
    sender.end()


def test_no_room_is_taken_before_it_is_asked_for(receiver: Side) -> None:
    receiver.receive("r", 10 * BLOCK_SIZE)
    receiver.decode.pump(0.0)
    assert (receiver.engine.pool.num_used, receiver.ids(LeaseGrant)) == (0, [])
    receiver.ask("r")
    receiver.ask("r")
    receiver.decode.pump(0.0)
    assert (receiver.engine.pool.num_used, receiver.ids(LeaseGrant)) == (10, ["r"])
    receiver.end("r")


def test_room_is_given_in_the_order_in_which_it_was_asked_for(receiver: Side) -> None:
    for request_id, num_blocks in (("late", 10), ("large", 25), ("small", 10)):
        receiver.receive(request_id, num_blocks * BLOCK_SIZE)
    for request_id in ("small", "large", "late"):
        receiver.ask(request_id)
    receiver.decode.pump(0.0)
    assert receiver.ids(LeaseGrant) == ["small", "late"], "it ends before the large one could begin"
    receiver.end("small", "large", "late")


def test_a_request_for_a_lease_may_come_before_the_request(receiver: Side) -> None:
    receiver.ask("r", PeerAddress("p", 0, "", ""))  # of an earlier process of that name
    receiver.receive("r", BLOCK_SIZE)
    receiver.decode.pump(0.0)
    assert receiver.ids(LeaseGrant) == []
    receiver.decode.cancel("r")
    receiver.ask("r")
    receiver.receive("r", BLOCK_SIZE)
    receiver.decode.pump(0.0)
    assert receiver.ids(LeaseGrant) == ["r"]
    receiver.end("r")


def test_a_prompt_in_line_for_room_is_never_late(sender: Side) -> None:
    sender.measured(seconds_per_block=0.0)
    sender.send("r", STEP_TOKENS)
    sender.run_step()
    assert sender.ids(LeaseRequest) == ["r"]
    for now in (20.0, 40.0, 60.0):
        sender.prefill.queued(LeaseQueued(sender=D, request_ids=["r", "unknown"]), now)
        sender.prefill.expire(now + TIMEOUT_S - 0.1)
        sender.prefill.pump(now + TIMEOUT_S - 0.1)
        assert sender.failed == []
    sender.prefill.expire(60.0 + TIMEOUT_S)
    sender.prefill.pump(60.0 + TIMEOUT_S)
    assert "no word from d of the lease" in sender.failed[0]
    sender.end()


def test_senders_are_told_what_is_in_line(receiver: Side) -> None:
    receiver.receive("large", 25 * BLOCK_SIZE)
    receiver.receive("r", 25 * BLOCK_SIZE)
    receiver.ask("large")
    receiver.ask("r")
    for now in (0.0, 0.5, 1.0):
        receiver.decode.pump(now)
    assert receiver.ids(LeaseGrant) == ["large"]
    queued = [message.request_ids for message in receiver.sent if isinstance(message, LeaseQueued)]
    assert queued == [["r"], ["r"]], "at once and every second"
    receiver.end("large", "r")


def test_a_request_of_a_dead_sender_leaves_the_line(receiver: Side) -> None:
    for request_id in ("large", "r"):
        receiver.receive(request_id, 25 * BLOCK_SIZE)
        receiver.ask(request_id)
    receiver.decode.pump(0.0)
    receiver.decode.peer_lost(WorkerEpoch("p", 1))
    receiver.decode.pump(1.0)
    assert receiver.ids(LeaseGrant) == ["large"]
    assert len(receiver.failed) == 2
    receiver.end()


@pytest.mark.parametrize("is_requested", [True, False])
def test_the_sender_vouches_for_a_prompt_until_it_has_its_lease(receiver: Side, is_requested: bool) -> None:
    receiver.receive("large", 25 * BLOCK_SIZE)
    receiver.ask("large")
    receiver.receive("r", 10 * BLOCK_SIZE)
    if is_requested:
        receiver.ask("r")
    receiver.decode.heartbeat(WorkerEpoch("p", 1), [("r", 0)], 20.0)
    for other, epoch in (("other", 1), ("p", 0)):
        receiver.decode.heartbeat(WorkerEpoch(other, epoch), [("r", 0)], 40.0)
    receiver.decode.heartbeat(WorkerEpoch("p", 1), [("large", 1)], 20.0)
    receiver.decode.expire(TIMEOUT_S - 0.1)
    receiver.decode.pump(TIMEOUT_S - 0.1)
    assert receiver.failed == []
    receiver.decode.expire(20.0 + TIMEOUT_S - 0.1)
    assert receiver.failed == [], "a full pool fails nothing"
    receiver.decode.expire(20.0 + TIMEOUT_S)
    assert receiver.ids(LeaseRefused) == ["r"]
    assert "prefill worker p was silent for 30.0 s" in receiver.failed[-1]
    receiver.end("large")
