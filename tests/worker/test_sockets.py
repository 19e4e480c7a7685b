from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import UnionType

import msgspec
import pytest
import zmq

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import (
    Cancel,
    Generate,
    Heartbeat,
    LeaseRefused,
    LeaseRequest,
    Message,
    PeerAddress,
    RequestFailed,
    Welcome,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.runtime.curve import KeyPair, connect_to_worker, make_keys
from tandem.runtime.dropped import DroppedMessages
from tandem.worker.sockets import HeartbeatThread, WorkerSockets, socket_endpoint
from tests.support.addresses import has_ipv6_loopback
from tests.support.builders import make_card

DEADLINE_S = 10.0
ROUTER = make_keys()


class Side:
    """The sockets of one worker, without the worker."""

    def __init__(self, worker_id: str, folder: str = "", host: str = "127.0.0.1") -> None:
        self.context: zmq.Context = zmq.Context()
        self.dropped = DroppedMessages()
        self.keys = make_keys()
        endpoint = socket_endpoint(folder, host, worker_id)
        self.sockets = WorkerSockets(self.context, endpoint, self.keys, ROUTER.public, self.dropped)
        self.beat = Heartbeat(worker_id=worker_id, epoch=1, progress_age_s=0.0, load=WorkerLoad())
        endpoint = socket_endpoint(folder, host, f"{worker_id}.beats")
        self.heartbeats = HeartbeatThread(self.context, endpoint, self.keys, 0.01)
        self.heartbeats.start(lambda: self.beat)
        self.address = PeerAddress(worker_id, 1, self.sockets.endpoint, self.heartbeats.endpoint, self.keys.public)

    def receive(self, count: int = 1, kind: type | UnionType = LeaseRequest | LeaseRefused) -> list[Message]:
        """`count` messages of a kind: heartbeats come beside them from every peer that was spoken to."""
        messages: list[Message] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(messages) < count and time.monotonic() < deadline:
            messages += [message for _, message in self.sockets.receive(50) if isinstance(message, kind)]
        return messages

    def receives_until(self, condition: Callable[[], bool]) -> list[Message]:
        """What is received until the condition is true."""
        messages: list[Message] = []
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not come true; received {messages}"
            messages += [message for _, message in self.sockets.receive(50)]
        return messages

    def close(self) -> None:
        self.heartbeats.close()
        self.sockets.close()
        self.context.term()


@contextmanager
def introduced(a: Side, b: Side) -> Iterator[tuple[Side, Side]]:
    """Two workers that know each other."""
    a.sockets.introduce(b.address)
    b.sockets.introduce(a.address)
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    with introduced(Side("a"), Side("b")) as sides:
        yield sides


class Caller:
    """A process that connects to a worker: the router, unless it has other keys."""

    def __init__(self, worker: PeerAddress, keys: KeyPair = ROUTER) -> None:
        self.context: zmq.Context = zmq.Context()
        self.messages, self.heartbeats = connect_to_worker(self.context, keys, worker, max_queued=0)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def call() -> Iterator[Callable[..., Caller]]:
    callers: list[Caller] = []

    def make(worker: PeerAddress, keys: KeyPair = ROUTER) -> Caller:
        callers.append(Caller(worker, keys))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def lease_request(sender: PeerAddress, request_id: str = "r") -> LeaseRequest:
    return LeaseRequest(sender=sender, request_id=request_id)


def test_a_reply_reaches_the_one_that_asked(pair: tuple[Side, Side], call: Callable[..., Caller]) -> None:
    worker, _ = pair
    router = call(worker.address).messages
    for data in (b"\xff no message", b"\x81\xa4type\xa4what", encode_message(Cancel(request_id="r1"))):
        router.send(data)
    (identity, message), *more = [*_received(worker)]
    assert (message, more) == (Cancel(request_id="r1"), [])
    assert worker.dropped.counts["malformed"] == 2
    worker.sockets.reply(identity, Welcome(card=make_card()))
    worker.sockets.reply(b"nobody", Welcome(card=make_card()))
    assert router.poll(DEADLINE_S * 1000)
    assert decode_message(router.recv()) == Welcome(card=make_card())


def _received(side: Side) -> Iterator[tuple[bytes, Message]]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if messages := side.sockets.receive(50):
            yield from messages
            return


def test_a_malformed_request_fails_at_once(pair: tuple[Side, Side], call: Callable[..., Caller]) -> None:
    worker, _ = pair
    router = call(worker.address).messages
    request = Generate(request_id="r7", token_ids=[1], sampling=SamplingParams(max_tokens=1))
    router.send(msgspec.msgpack.encode(msgspec.to_builtins(request) | {"type": "Generate", "priority": ["no number"]}))
    worker.receives_until(lambda: worker.dropped.counts["malformed"] > 0)
    assert router.poll(DEADLINE_S * 1000)
    failed = decode_message(router.recv())
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "r7"
    assert "malformed" in failed.message


def test_wake_ends_a_wait_early_and_is_harmless_after_close() -> None:
    side = Side("a")
    timer = Timer(0.1, side.sockets.wake)
    timer.start()
    assert side.sockets.receive(3_600_000) == []
    timer.join()
    side.close()
    side.sockets.wake()


def test_heartbeats_of_peers_are_heard_until_they_are_forgotten(pair: tuple[Side, Side]) -> None:
    a, b = pair
    assert a.sockets.receive(50) == [], "nobody was connected to"
    a.sockets.send_peer(b.address, lease_request(a.address))
    assert a.receive(2, Heartbeat)[:2] == [b.beat] * 2
    a.sockets.forget_peer(b.address)
    assert a.sockets.receive(200) == []
    a.sockets.forget_peer(b.address)  # twice is fine


def test_a_worker_takes_orders_from_its_router_only(pair: tuple[Side, Side], call: Callable[..., Caller]) -> None:
    worker, peer = pair
    for keys in (peer.keys, make_keys()):
        call(worker.address, keys).messages.send(encode_message(Cancel(request_id="r")))
    seen = worker.receives_until(lambda: worker.dropped.counts["malformed"] > 0)
    seen += worker.receives_until(lambda: worker.dropped.counts["stranger"] > 0)
    assert seen == []


def test_the_router_does_not_speak_as_a_peer(pair: tuple[Side, Side], call: Callable[..., Caller]) -> None:
    worker, peer = pair
    call(worker.address).messages.send(encode_message(lease_request(peer.address)))
    assert worker.receives_until(lambda: worker.dropped.counts["malformed"] > 0) == []


@pytest.mark.parametrize(
    "change", [{"worker_id": "c"}, {"epoch": 2}, {"endpoint": "tcp://127.0.0.1:1"}, {"public_key": "k" * 40}], ids=str
)
def test_a_peer_speaks_in_its_own_name_only(
    pair: tuple[Side, Side], call: Callable[..., Caller], change: dict[str, object]
) -> None:
    worker, peer = pair
    claimed = msgspec.structs.replace(peer.address, **change)
    call(worker.address, peer.keys).messages.send(encode_message(lease_request(claimed)))
    assert worker.receives_until(lambda: worker.dropped.counts["impostor"] > 0) == []


def test_heartbeats_in_anothers_name_are_dropped(pair: tuple[Side, Side]) -> None:
    a, b = pair
    b.beat = msgspec.structs.replace(b.beat, worker_id="c")
    a.sockets.send_peer(b.address, lease_request(a.address))
    assert a.receives_until(lambda: a.dropped.counts["impostor"] > 0) == []


def test_a_peer_that_is_dead_is_listened_to_no_more(pair: tuple[Side, Side]) -> None:
    a, b = pair
    a.sockets.send_peer(b.address, lease_request(a.address))
    assert b.receive() == [lease_request(a.address)]
    b.sockets.forget_peer(a.address)
    b.sockets.introduce(a.address)  # a request that was sent before its death was known
    a.sockets.send_peer(b.address, lease_request(a.address))
    assert b.receives_until(lambda: b.dropped.counts["stranger"] > 0) == []
    b.sockets.send_peer(a.address, lease_request(b.address))
    assert b.dropped.counts["undelivered"] == 1


def test_a_peer_that_knocks_before_it_is_introduced_gets_in_afterwards() -> None:
    a, b = Side("a"), Side("b")
    try:
        a.sockets.introduce(b.address)
        a.sockets.send_peer(b.address, lease_request(a.address))
        assert b.receives_until(lambda: b.dropped.counts["stranger"] > 0) == []
        b.sockets.introduce(a.address)
        assert b.receive() == [lease_request(a.address)]
    finally:
        a.close()
        b.close()


@pytest.mark.parametrize(
    "change",
    [{"public_key": ""}, {"public_key": "short"}, {"endpoint": "nowhere"}, {"heartbeat_endpoint": ""}],
    ids=str,
)
def test_an_address_that_is_none_harms_nobody(pair: tuple[Side, Side], change: dict[str, object]) -> None:
    a, b = pair
    wrong = msgspec.structs.replace(b.address, **change)
    a.sockets.introduce(wrong)
    a.sockets.send_peer(wrong, lease_request(a.address))
    assert a.dropped.counts["undelivered"] == 1


def test_a_frame_too_many_or_too_few_is_not_a_message(pair: tuple[Side, Side], call: Callable[..., Caller]) -> None:
    worker, _ = pair
    router = call(worker.address).messages
    router.send_multipart([b"x", encode_message(Cancel(request_id="last frame counts"))])
    router.send(b"")
    seen = worker.receives_until(lambda: worker.dropped.counts["malformed"] > 0)
    assert seen == [Cancel(request_id="last frame counts")]


def check_both_ways(a: Side, b: Side) -> None:
    for sender, receiver in ((a, b), (b, a)):
        sender.sockets.send_peer(receiver.address, lease_request(sender.address))
        assert receiver.receive() == [lease_request(sender.address)]


def test_sockets_in_a_folder_work_alike(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    with introduced(Side("a", str(folder)), Side("b", str(folder))) as (a, b):
        assert a.address.endpoint == f"ipc://{folder}/a"
        check_both_ways(a, b)
        sockets = {name for name in os.listdir(folder) if stat.S_ISSOCK((folder / name).stat().st_mode)}
        assert sockets == {"a", "a.beats", "b", "b.beats"}


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no ::1")
def test_sockets_at_an_address_of_ipv6_work_alike() -> None:
    with introduced(Side("a", host="::1"), Side("b", host="127.0.0.1")) as (a, b):
        assert a.address.endpoint.startswith("tcp://[::1]:")
        check_both_ways(a, b)


def test_a_folder_whose_name_is_too_long_is_reported() -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        socket_endpoint("/tmp/" + "x" * 100, "127.0.0.1", "decode-0")
