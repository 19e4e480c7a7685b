from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from zmq.constants import SocketType

from cluster.sockets import HeartbeatThread, WorkerSockets
from protocol.messages import Cancel, Heartbeat, Message, PeerAddress, Welcome, WorkerLoad, decode_message
from tests.router.builders import make_card

HOST = "127.0.0.1"
DEADLINE_S = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def pair(context: zmq.Context) -> Iterator[tuple[WorkerSockets, WorkerSockets]]:
    a, b = WorkerSockets(context, HOST), WorkerSockets(context, HOST)
    yield a, b
    a.close()
    b.close()


def receive(sockets: WorkerSockets, count: int = 1) -> list[tuple[bytes, Message]]:
    messages: list[tuple[bytes, Message]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += sockets.receive(100)
    return messages


def address_of(sockets: WorkerSockets, beat: str = "tcp://127.0.0.1:9") -> PeerAddress:
    return PeerAddress("b", 1, sockets.endpoint, beat)


def test_messages_to_a_peer_come_in_order(pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    a, b = pair
    for number in range(100):
        a.send_peer(address_of(b), Cancel(request_id=str(number)))
    assert [m.request_id for _, m in receive(b, 100) if isinstance(m, Cancel)] == [str(n) for n in range(100)]


def test_a_reply_reaches_whoever_asked(context: zmq.Context, pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    worker, _ = pair
    with context.socket(SocketType.DEALER) as client:
        client.connect(worker.endpoint)
        client.send(b"\xff no message")  # dropped
        client.send(b"\x81\xa4type\xa4what")  # dropped too: an unknown type
        client.send(b"\x82\xa4type\xa6Cancel\xaarequest_id\xa2r1")
        ((identity, message),) = receive(worker)
        assert message == Cancel(request_id="r1")
        worker.reply(identity, Welcome(card=make_card()))
        worker.reply(b"nobody", Welcome(card=make_card()))
        assert client.poll(DEADLINE_S * 1000)
        assert decode_message(client.recv()) == Welcome(card=make_card())


def test_wake_ends_a_wait_early_and_is_harmless_after_close(context: zmq.Context) -> None:
    sockets = WorkerSockets(context, HOST)
    timer = threading.Timer(0.1, sockets.wake)
    timer.start()
    started = time.monotonic()
    assert sockets.receive(60_000) == []
    assert time.monotonic() - started < DEADLINE_S
    timer.join()
    sockets.close()
    sockets.wake()


def test_heartbeats_of_peers_are_heard_until_they_are_forgotten(
    context: zmq.Context, pair: tuple[WorkerSockets, WorkerSockets]
) -> None:
    a, b = pair
    beat = Heartbeat(worker_id="b", epoch=1, step_age_s=0.0, load=WorkerLoad())
    thread = HeartbeatThread(context, HOST, 0.01, lambda: beat)
    thread.start()
    try:
        peer = address_of(b, thread.endpoint)
        a.send_peer(peer, Cancel(request_id="opens the way"))
        assert receive(a, 2)[:2] == [(b"", beat)] * 2
        a.forget_peer(peer)
        a.receive(0)
        assert a.receive(200) == []
        a.forget_peer(peer)  # twice is fine
    finally:
        thread.close()
