from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq
from zmq.constants import SocketType

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import PeerAddress
from tandem.runtime.curve import KeyAuthenticator, KeyPair, connect_to_worker, listening_socket, make_keys
from tandem.runtime.dropped import DroppedMessages, DropReason
from tests.support.waiting import until

DEADLINE_S = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context: zmq.Context = zmq.Context()
    yield context
    context.term()  # this ends the authenticator's thread


def listener(context: zmq.Context) -> tuple[zmq.Socket, PeerAddress]:
    keys = make_keys()
    socket = listening_socket(context, SocketType.ROUTER, keys, max_queued=0)
    endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    return socket, PeerAddress("w", 1, endpoint, endpoint, keys.public)


@contextmanager
def calling(worker: PeerAddress, keys: KeyPair) -> Iterator[zmq.Socket]:
    context: zmq.Context = zmq.Context()
    dealer, heartbeats = connect_to_worker(context, keys, worker, max_queued=0)
    heartbeats.close()
    dealer.send(b"let me in")
    yield dealer
    dealer.close()
    context.term()


def test_a_secret_key_is_not_printed() -> None:
    keys = make_keys()
    assert keys.secret.decode() not in repr(keys)
    assert keys != make_keys()


def test_a_zeromq_without_curve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="without CURVE"):
        make_keys()


def test_without_an_authenticator_nobody_is_accepted(context: zmq.Context) -> None:
    socket, address = listener(context)
    with closing(socket), calling(address, make_keys()):
        assert not socket.poll(500)  # no event tells that a connection was not accepted


def test_a_key_allowed_soon_after_is_accepted_and_an_unknown_one_counted(context: zmq.Context) -> None:
    dropped = DroppedMessages()
    authenticator = KeyAuthenticator(context, dropped)
    socket, address = listener(context)
    early, stranger = make_keys(), make_keys()
    with closing(socket), calling(address, early), calling(address, stranger):
        assert not socket.poll(100)  # no event tells that both have knocked
        authenticator.allow(early.public)
        assert socket.poll(DEADLINE_S * 1000)
        assert not dropped.counts, "it had to knock again"
        assert socket.recv_multipart(copy=False)[-1].get("User-Id") == early.public
        until(lambda: dropped.counts)
        assert set(dropped.counts) == {"stranger"}


def test_a_flood_of_unknown_keys_keeps_no_allowed_key_out(context: zmq.Context) -> None:
    dropped = DroppedMessages()
    authenticator = KeyAuthenticator(context, dropped)
    socket, address = listener(context)
    guest = make_keys()
    authenticator.allow(guest.public)
    with closing(socket), ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(calling(address, make_keys()))
        stack.enter_context(calling(address, guest))
        assert socket.poll(DEADLINE_S * 1000)
        assert socket.recv_multipart(copy=False)[-1].get("User-Id") == guest.public
        until(lambda: dropped.counts["stranger"] > 30)  # those above the limit are dropped at once
        assert not socket.poll(0)


def test_a_flood_of_drops_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedMessages()
    for number in range(1000):
        dropped.add(DropReason.MALFORMED, f"message {number}")
    dropped.add(DropReason.IMPOSTOR, "another")
    assert dropped.counts == {"malformed": 1000, "impostor": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "dropped (malformed, number 1): message 0",
        "dropped (impostor, number 1): another",
    ]


def test_a_message_that_is_too_long_is_not_received(context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.runtime.curve._MAX_MESSAGE_BYTES", 1000)
    authenticator = KeyAuthenticator(context, DroppedMessages())
    socket, address = listener(context)
    keys = make_keys()
    authenticator.allow(keys.public)
    with closing(socket), calling(address, keys) as dealer:
        assert socket.poll(DEADLINE_S * 1000)
        assert socket.recv_multipart()[-1] == b"let me in"
        dealer.send(b"x" * 10_000)

        def is_heard() -> bool:  # what is sent during the reconnection is lost
            dealer.send(b"short")
            return bool(socket.poll(20))

        until(is_heard)
        assert socket.recv_multipart()[-1] == b"short"
