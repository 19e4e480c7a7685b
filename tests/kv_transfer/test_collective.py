"""The `nccl` transport against strangers and peers that misbehave, and the connection beneath it."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from tandem.kv_transfer.transport.base import Notification, TransferState, Transport
from tandem.kv_transfer.transport.collective import CollectiveTransport
from tandem.kv_transfer.transport.stream import MessageStream, connect, listen
from tandem.protocol.errors import IncompatiblePeer, PeerLost

DEADLINE_S = 10.0


@pytest.fixture
def transport() -> Iterator[CollectiveTransport]:
    transport = CollectiveTransport("d", 1, torch.zeros(4, 6), "127.0.0.1")
    yield transport
    transport.close()


@pytest.fixture
def other() -> Iterator[CollectiveTransport]:
    other = CollectiveTransport("p", 1, torch.ones(4, 6), "127.0.0.1")
    yield other
    other.close()


def wait_for(condition: Callable[[], object], *transports: Transport) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        for transport in transports:
            transport.poll()
        assert time.monotonic() < deadline, f"condition not met within {DEADLINE_S} s"


def arrived_until_dropped(transport: Transport, stranger: Stranger) -> list[Notification]:
    """Poll until the transport has ended the stranger's connection."""
    arrived: list[Notification] = []
    wait_for(lambda: arrived.extend(transport.poll()) or stranger.is_dropped())
    return arrived


class Stranger:
    """Sends raw messages to a transport over a connection of its own."""

    def __init__(self, transport: Transport) -> None:
        metadata = msgspec.msgpack.decode(transport.local_metadata())
        self.secret: bytes = metadata[4]
        self.socket = socket.create_connection((metadata[2], metadata[3]), timeout=DEADLINE_S)

    def say(self, *message: object) -> None:
        payload = msgspec.msgpack.encode(message)
        self.socket.sendall(struct.pack("<I", len(payload)) + payload)

    def greet(self, secret: bytes, worker_id: str = "p") -> None:
        """Send the first message of a link: epoch 1, the first link, blocks in one piece."""
        self.say("hello", secret, worker_id, 1, 1, 1)

    def is_dropped(self) -> bool:
        """Whether the transport ended the connection."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True


@pytest.fixture
def stranger(transport: Transport) -> Iterator[Stranger]:
    stranger = Stranger(transport)
    yield stranger
    stranger.socket.close()


@pytest.mark.parametrize(
    "message",
    [
        ("hello", bytes(16), "p", 1, 1, 1),
        ("hello", b"", "p", 1, 1, 1),
        ("welcome",),
        ("rendezvous", "0/0", b"x"),
        ("copy", 1, True, [[0, 1]], b""),
        ("landed", 1),
        ("pigeon",),
        (),
    ],
    ids=str,
)
def test_a_stranger_is_dropped(transport: CollectiveTransport, stranger: Stranger, message: tuple[object, ...]) -> None:
    stranger.say(*message)
    assert arrived_until_dropped(transport, stranger) == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64])
def test_what_is_not_a_message_ends_the_link(transport: CollectiveTransport, stranger: Stranger, data: bytes) -> None:
    stranger.socket.sendall(data)
    assert arrived_until_dropped(transport, stranger) == []


@pytest.mark.parametrize("run", [[4, 1], [-1, 1], [3, 2], [0, 0], [2, -1], [0, 2**40]], ids=str)
@pytest.mark.parametrize("is_read", [False, True])
def test_an_order_that_leaves_the_pool_ends_the_link(
    transport: CollectiveTransport, stranger: Stranger, run: list[int], is_read: bool
) -> None:
    stranger.greet(stranger.secret)
    stranger.say("copy", 1, is_read, [run], b"never")
    assert arrived_until_dropped(transport, stranger) == []


def test_a_silent_connection_is_closed() -> None:
    transport = CollectiveTransport("d", 1, torch.zeros(4, 6), "127.0.0.1", hello_timeout_s=0.05)
    stranger = Stranger(transport)
    assert arrived_until_dropped(transport, stranger) == []
    stranger.socket.close()
    transport.close()


def test_strangers_do_not_disturb_a_link(
    transport: CollectiveTransport, other: CollectiveTransport, stranger: Stranger
) -> None:
    other.add_peer("d", 1, transport.local_metadata())
    transfer = other.write_blocks("d", [1], [2], b"hello")
    stranger.greet(bytes(16), "d")
    arrived: list[Notification] = []
    wait_for(lambda: arrived.extend(transport.poll()) or (transfer.is_settled and stranger.is_dropped()), other)
    assert transfer.state is TransferState.DONE
    assert arrived == [Notification("p", 1, b"hello")]


def test_a_transport_listens_on_its_host_only(transport: CollectiveTransport) -> None:
    metadata = msgspec.msgpack.decode(transport.local_metadata())
    assert metadata[2] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", metadata[3]), timeout=DEADLINE_S)


def test_pools_on_different_devices_do_not_match(transport: CollectiveTransport, other: CollectiveTransport) -> None:
    metadata = msgspec.msgpack.decode(transport.local_metadata())
    metadata[5] = "cuda"
    with pytest.raises(IncompatiblePeer, match="device: cpu here, cuda at d"):
        other.add_peer("d", 1, msgspec.msgpack.encode(metadata))


def test_a_peer_that_does_not_poll_is_lost_in_time(transport: CollectiveTransport) -> None:
    other = CollectiveTransport("p", 1, torch.ones(4, 6), "127.0.0.1", set_up_timeout_s=0.1)
    other.add_peer("d", 1, transport.local_metadata())
    transfer = other.write_blocks("d", [0], [0])
    wait_for(lambda: transfer.is_settled, other)
    assert transfer.state is TransferState.LOST
    other.close()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_peer_that_stops_polling_is_lost_in_time(transport: CollectiveTransport, is_read: bool) -> None:
    other = CollectiveTransport("p", 1, torch.ones(4, 6), "127.0.0.1", copy_timeout_s=0.5)
    other.add_peer("d", 1, transport.local_metadata())
    first = other.write_blocks("d", [0], [0])
    wait_for(lambda: first.is_settled, other, transport)
    assert first.state is TransferState.DONE
    start = other.read_blocks if is_read else other.write_blocks
    pending = [start("d", [block], [block]) for block in (1, 2)]
    wait_for(lambda: all(transfer.is_settled for transfer in pending), other)
    assert {transfer.state for transfer in pending} == {TransferState.LOST}
    with pytest.raises(PeerLost):
        other.write_blocks("d", [0], [0])
    other.close()


def streams() -> tuple[MessageStream, MessageStream]:
    listener = listen("127.0.0.1")
    near = connect(*listener.getsockname())
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection, _ = listener.accept()
            break
        except BlockingIOError:
            assert time.monotonic() < deadline
    listener.close()
    return near, MessageStream(connection)


def test_messages_of_all_sizes_arrive_whole_and_in_order() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    near, far = streams()
    sent = [rng.randbytes(rng.choice([0, 1, 100, 70_000, 1_000_000])) for _ in range(40)]
    arrived: list[bytes] = []
    for message in sent:
        near.put(message)
    deadline = time.monotonic() + DEADLINE_S
    while len(arrived) < len(sent):
        near.flush()
        arrived += far.receive()
        assert time.monotonic() < deadline
    assert arrived == sent
    near.close()
    far.close()


def test_a_connection_that_takes_nothing_does_not_block() -> None:
    near, far = streams()
    for _ in range(40):
        near.put(bytes(1_000_000))
        near.flush()
    assert len(far.receive()) < 40, "the rest waits at the sender"
    near.close()
    far.close()
