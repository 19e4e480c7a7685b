"""Who may speak on the sockets between the router and its workers, and among workers: ZeroMQ's CURVE, on all of them.

Each process makes a key pair when it starts; the secret key never leaves it. A socket that connects names the public
key it expects to find, and proves that it holds its own secret key. A socket that listens lets in only keys that its
`KeyAuthenticator` allows. Everything after that handshake is encrypted. An unknown key gets no answer at all.

The lists come from the one process that starts the workers: it gives each worker the router's key, and its router
introduces the workers to each other (`tandem.protocol.messages.Introduce`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.constants import SocketOption, SocketType
from zmq.error import ZMQError
from zmq.utils import z85

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import PeerAddress
from tandem.runtime.dropped import DroppedMessages, DropReason

__all__ = ["KeyAuthenticator", "KeyPair", "connect_to_worker", "listening_socket", "make_keys"]

# The longest message is the snapshot of a large tier: 18 bytes for each of up to some 60 million blocks. A prompt of a
# million tokens has 5 MB. Without a bound four bytes would make the receiver allocate what they say.
_MAX_MESSAGE_BYTES = 1 << 30
_HANDSHAKE_TIMEOUT_MS = 3000  # for a connection that says nothing, or is not answered; then it is tried again
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 500
_PATIENCE_S = 2.0  # with a key that is not on the list (yet): less than the handshake may take
_MAX_WAITING = 64  # with such keys; what is beyond is forgotten at once, so that a flood costs little
_LOOK_AGAIN_MS = 10
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks about each connection (its RFC 27)
_ZAP_DOMAIN = "tandem"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process' CURVE keys, in ZeroMQ's printable form of 40 characters."""

    public: str
    secret: bytes = field(repr=False)


def make_keys() -> KeyPair:
    """New keys. Raises ConfigError where ZeroMQ has no CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"this libzmq {zmq.zmq_version()} was built without CURVE, which protects the sockets between processes; "
            "install the pyzmq wheel from PyPI"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret)


def listening_socket(context: zmq.Context[Any], kind: SocketType, keys: KeyPair, *, max_queued: int) -> Any:
    """A socket to bind. Nobody gets in while its context has no `KeyAuthenticator`."""
    socket = _socket(context, kind, keys, max_queued)
    socket.setsockopt(SocketOption.CURVE_SERVER, 1)
    socket.setsockopt_string(SocketOption.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(SocketOption.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def connect_to_worker(
    context: zmq.Context[Any], keys: KeyPair, worker: PeerAddress, *, max_queued: int
) -> tuple[Any, Any]:
    """A DEALER to a worker and a SUB of its heartbeats. Raises ZMQError for a key or an endpoint that is none."""
    sockets: list[Any] = []
    try:
        for kind, endpoint in ((SocketType.DEALER, worker.endpoint), (SocketType.SUB, worker.heartbeat_endpoint)):
            sockets.append(_socket(context, kind, keys, max_queued))
            sockets[-1].setsockopt_string(SocketOption.CURVE_SERVERKEY, worker.public_key)
            sockets[-1].connect(endpoint)
    except ZMQError:
        for socket in sockets:
            socket.close()
        raise
    messages, heartbeats = sockets
    heartbeats.setsockopt(SocketOption.SUBSCRIBE, b"")
    return messages, heartbeats


def _socket(context: zmq.Context[Any], kind: SocketType, keys: KeyPair, max_queued: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt_string(SocketOption.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(SocketOption.CURVE_SECRETKEY, keys.secret)
    for option, value in (
        (SocketOption.LINGER, 0),
        (SocketOption.SNDHWM, max_queued),
        (SocketOption.RCVHWM, max_queued),
        (SocketOption.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
        (SocketOption.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS),
        (SocketOption.RECONNECT_IVL, _RECONNECT_MS),
        (SocketOption.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
    ):
        socket.setsockopt(option, value)
    return socket


class KeyAuthenticator:
    """The public keys that may connect to the listening sockets of a context.

    ZeroMQ asks it about each connection, on a thread that ends with the context. A key that is not on the list yet is
    left waiting for a moment: its introduction may be on its way. After that it is forgotten without an answer.

    Frames of an admitted connection name its key: `frame.get("User-Id")`. NOTE: a key taken off the list stays
    connected; look the key of each message up.
    """

    def __init__(self, context: zmq.Context[Any], dropped: DroppedMessages) -> None:
        self._keys: set[str] = set()
        self._dropped = dropped
        socket = context.socket(SocketType.ROUTER)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._answer_all, args=(socket,), name="guest-list", daemon=True).start()

    def allow(self, key: str) -> None:
        """Let whoever holds this key connect."""
        self._keys.add(key)

    def revoke(self, key: str) -> None:
        """Let it connect no more."""
        self._keys.discard(key)

    def _answer_all(self, socket: Any) -> None:
        waiting: list[_ZapRequest] = []
        with contextlib.suppress(ZMQError), contextlib.closing(socket):  # it raises when the context ends
            while True:
                if socket.poll(_LOOK_AGAIN_MS if waiting else None):
                    waiting.append(_parse_request(socket.recv_multipart(), time.monotonic() + _PATIENCE_S))
                admitted = [knock for knock in waiting if knock.key in self._keys]
                for knock in admitted:
                    socket.send_multipart([*knock.envelope, b"200", b"OK", knock.key.encode(), b""])
                now = time.monotonic()
                num_over = len(waiting) - _MAX_WAITING
                late = [
                    knock
                    for place, knock in enumerate(waiting)
                    if knock.key not in self._keys and (now >= knock.deadline or place < num_over)
                ]
                for knock in late:
                    self._dropped.add(DropReason.STRANGER, f"a connection from {knock.address} with an unknown key")
                gone = {*admitted, *late}
                waiting = [knock for knock in waiting if knock not in gone]


class _ZapRequest(NamedTuple):
    """ZeroMQ's question whether a key may come in."""

    envelope: tuple[bytes, ...]  # what its answer begins with
    key: str
    address: str
    deadline: float


def _parse_request(frames: list[bytes], deadline: float) -> _ZapRequest:
    connection, delimiter, version, number, _domain, address, _identity, mechanism, *credentials = frames
    key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
    return _ZapRequest((connection, delimiter, version, number), key, address.decode() or "this machine", deadline)
