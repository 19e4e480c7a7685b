from __future__ import annotations

import pytest
import torch

from tandem.kv_transfer.links import LinkState, PeerLinks
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessTransport
from tandem.protocol.messages import Message, PeerAddress, PeerHello, PeerRefused, WorkerEpoch

TIMEOUT_S = 5.0


class Side:
    """One worker's links; its messages wait in `sent` until `deliver`."""

    def __init__(self, hub: InProcessHub, worker_id: str, epoch: int = 1, **fields: str) -> None:
        self.address = PeerAddress(worker_id, epoch, f"tcp://{worker_id}", f"tcp://{worker_id}-beat")
        self.transport = InProcessTransport(worker_id, epoch, torch.zeros(4, 8), hub)
        self.sent: list[tuple[PeerAddress, Message]] = []
        compatibility = {"model_revision": "m", "block_size": "16"} | fields
        self.links = PeerLinks(
            self.address,
            compatibility,
            self.transport,
            lambda peer, message: self.sent.append((peer, message)),
            timeout_s=TIMEOUT_S,
        )

    def take(self, message: Message) -> LinkState | None:
        if isinstance(message, PeerHello):
            change = self.links.hello(message)
        else:
            assert isinstance(message, PeerRefused)
            change = self.links.refused(message)
        return None if change is None else change.state


def deliver(sender: Side, receiver: Side) -> list[LinkState | None]:
    sent, sender.sent = sender.sent, []
    assert all(peer == receiver.address for peer, _ in sent)
    return [receiver.take(message) for _, message in sent]


def connect(a: Side, b: Side) -> LinkState | None:
    a.links.connect(b.address, now=0.0)
    assert deliver(a, b) == [None]
    (state,) = deliver(b, a)
    return state


@pytest.fixture
def hub() -> InProcessHub:
    return InProcessHub()


def test_a_link_is_ready_once_its_hello_is_answered(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    assert not a.links.is_ready(b.address)
    assert connect(a, b) is LinkState.READY
    assert a.links.is_ready(b.address)
    assert not b.links.is_ready(a.address), "each direction has a link of its own"
    a.transport.write_blocks("b", [0], [1])


def test_memory_is_described_only_after_both_agree(hub: InProcessHub) -> None:
    a, b = Side(hub, "a", model_revision="other"), Side(hub, "b")
    a.links.connect(b.address, now=0.0)
    (hello,) = [message for _, message in a.sent]
    assert isinstance(hello, PeerHello)
    assert hello.transport_metadata == b""
    deliver(a, b)
    ((_, answer),) = b.sent
    assert isinstance(answer, PeerRefused)
    assert answer.reason == "model_revision", "no values"
    assert deliver(b, a) == [LinkState.REFUSED]
    assert not a.links.is_ready(b.address)


def test_connecting_twice_sends_one_hello(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    a.links.connect(b.address, now=0.0)
    a.links.connect(b.address, now=1.0)
    assert len(a.sent) == 1
    deliver(a, b)
    deliver(b, a)
    a.links.connect(b.address, now=2.0)
    assert a.sent == []


def test_a_peer_that_does_not_answer_is_given_up(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    a.links.connect(b.address, now=1.0)
    assert a.links.expire(TIMEOUT_S + 0.9) == []
    (change,) = a.links.expire(TIMEOUT_S + 1.0)
    assert (change.peer, change.state) == (b.address, LinkState.REFUSED)
    assert change.reason == "b cannot be written to: b did not answer in 5.0 s"
    assert a.links.expire(100.0) == [], "told once"
    deliver(a, b)
    assert set(deliver(b, a)) == {None}, "a late answer changes nothing"


def test_a_lost_hello_is_said_again_and_answers_may_come_twice(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    a.links.connect(b.address, now=0.0)
    a.sent.clear()
    for now in (1.0, 2.0):
        assert a.links.expire(now) == []
    assert len(a.sent) == 2
    deliver(a, b)
    assert deliver(b, a) == [LinkState.READY, None]
    assert a.links.expire(3.0) == []
    assert a.sent == []


def test_an_answer_of_another_epoch_changes_nothing(hub: InProcessHub) -> None:
    a, old = Side(hub, "a"), Side(hub, "b", epoch=1)
    a.links.connect(old.address, now=0.0)
    deliver(a, old)
    new = Side(hub, "b", epoch=2)
    a.links.connect(new.address, now=0.0)
    assert deliver(old, a) == [None]
    assert not a.links.is_ready(new.address)
    assert deliver(a, new) == [None]
    assert deliver(new, a) == [LinkState.READY]
    assert not a.links.is_ready(old.address)


def test_a_break_of_an_earlier_epoch_leaves_the_new_link_alone(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b", epoch=2)
    connect(a, b)
    a.links.broke(WorkerEpoch("b", 1))
    a.links.forget(WorkerEpoch("b", 1))
    assert a.links.is_ready(b.address)


@pytest.mark.parametrize("is_opening", [False, True], ids=["open", "opening"])
def test_a_late_message_of_a_former_epoch_does_not_replace_the_new_link(hub: InProcessHub, is_opening: bool) -> None:
    a, former, b = Side(hub, "a"), Side(hub, "b", 1), Side(hub, "b", 2)
    if is_opening:
        a.links.connect(b.address, now=0.0)
        a.sent.clear()
    else:
        assert connect(a, b) is LinkState.READY
    a.links.connect(former.address, now=1.0)
    a.links.reopen(WorkerEpoch("b", 1), now=1.0)
    assert a.sent == []
    assert a.links.is_ready(b.address) is not is_opening
    assert a.links.expire(now=2.0) == []
    assert {peer.epoch for peer, _ in a.sent} == ({2} if is_opening else set())


def test_nothing_is_sent_to_an_epoch_that_was_forgotten(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    connect(a, b)
    a.links.forget(WorkerEpoch("b", 1))
    a.links.send(WorkerEpoch("b", 1), PeerRefused(sender=a.address, reason=""))
    assert a.sent == []
    assert not a.links.is_ready(b.address)


def test_a_worker_answers_remembered_peers(hub: InProcessHub) -> None:
    a, b = Side(hub, "a"), Side(hub, "b")
    message = PeerRefused(sender=a.address, reason="")
    a.links.send(WorkerEpoch("b", 1), message)
    assert a.sent == []
    a.links.remember(b.address)
    a.links.send(WorkerEpoch("b", 1), message)
    assert a.sent == [(b.address, message)]
