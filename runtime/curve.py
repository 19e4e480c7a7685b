"""Authentication and encryption of all sockets between router and workers and among workers: ZeroMQ's CURVE.

Each process creates a key pair when it starts; the secret key never leaves it. A connecting socket names the public key
that it expects, and proves that it holds its own secret key. A listening socket accepts only the keys that its
`KeyAuthenticator` allows. Everything after this handshake is encrypted. An unknown key gets no reply.

The allowed keys come from the process that starts the workers: it gives each worker the router's key, and its router
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

# The longest message is the snapshot of a large tier: 18 bytes for each of up to some 60 million blocks. A prompt of a
# million tokens has 5 MB. Without a bound, a length field of a few bytes could make the receiver allocate any size.
_MAX_MESSAGE_BYTES = 1 << 30
_HANDSHAKE_TIMEOUT_MS = 3000  # without progress; then the connection is tried again
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 500
_PATIENCE_S = 2.0  # a key that is not allowed yet may wait this long: less than the handshake timeout
_MAX_WAITING = 64  # waiting connections; beyond it the oldest are dropped at once, so that a flood costs little
_POLL_MS = 10
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks about each connection (RFC 27, ZAP)
_ZAP_DOMAIN = "tandem"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's CURVE keys, in ZeroMQ's printable form of 40 characters."""

    public: str
    secret: bytes = field(repr=False)


def make_keys() -> KeyPair:
    """A new key pair. Raises `ConfigError` if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"this libzmq {zmq.zmq_version()} was built without CURVE, which protects the sockets between processes; "
            "install the pyzmq wheel from PyPI"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret)


def listening_socket(context: zmq.Context[Any], kind: SocketType, keys: KeyPair, *, max_queued: int) -> Any:
    """A socket to bind. It accepts nobody until its context has a `KeyAuthenticator`."""
    socket = _socket(context, kind, keys, max_queued)
    socket.setsockopt(SocketOption.CURVE_SERVER, 1)
    socket.setsockopt_string(SocketOption.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(SocketOption.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def bind(socket: Any, endpoint: str) -> str:
    """Bind a listening socket. Returns the endpoint to connect to, with a port number. Raises `ZMQError`."""
    _allow_ipv6(socket, endpoint)
    socket.bind(endpoint)
    return str(socket.last_endpoint.decode().rstrip("\0"))


def connect_to_worker(
    context: zmq.Context[Any], keys: KeyPair, worker: PeerAddress, *, max_queued: int
) -> tuple[Any, Any]:
    """A DEALER to a worker and a SUB of its heartbeats. Raises `ZMQError` for an invalid key or endpoint."""
    sockets: list[Any] = []
    try:
        for kind, endpoint in ((SocketType.DEALER, worker.endpoint), (SocketType.SUB, worker.heartbeat_endpoint)):
            sockets.append(_socket(context, kind, keys, max_queued))
            sockets[-1].setsockopt_string(SocketOption.CURVE_SERVERKEY, worker.public_key)
            _allow_ipv6(sockets[-1], endpoint)
            sockets[-1].connect(endpoint)
    except ZMQError:
        for socket in sockets:
            socket.close()
        raise
    messages, heartbeats = sockets
    heartbeats.setsockopt(SocketOption.SUBSCRIBE, b"")
    return messages, heartbeats


def _allow_ipv6(socket: Any, endpoint: str) -> None:
    socket.setsockopt(SocketOption.IPV6, "[" in endpoint)


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

    ZeroMQ asks it about each connection, on a thread that ends with the context. An unknown key waits for a moment,
    because its introduction may follow. After that it is dropped without a reply.

    Frames of an accepted connection carry its key: `frame.get("User-Id")`. NOTE: a revoked key stays connected, so
    check the key of each message.
    """

    def __init__(self, context: zmq.Context[Any], dropped: DroppedMessages) -> None:
        self._keys: set[str] = set()
        self._dropped = dropped
        socket = context.socket(SocketType.ROUTER)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._answer_all, args=(socket,), name="key-authenticator", daemon=True).start()

    def allow(self, key: str) -> None:
        """Accept connections with this key."""
        self._keys.add(key)

    def revoke(self, key: str) -> None:
        """Accept no new connections with this key."""
        self._keys.discard(key)

    def _answer_all(self, socket: Any) -> None:
        waiting: list[_ZapRequest] = []
        with contextlib.suppress(ZMQError), contextlib.closing(socket):  # it raises when the context ends
            while True:
                if socket.poll(_POLL_MS if waiting else None):
                    waiting.append(_parse_request(socket.recv_multipart(), time.monotonic() + _PATIENCE_S))
                waiting = self._answer(socket, waiting)

    def _answer(self, socket: Any, waiting: list[_ZapRequest]) -> list[_ZapRequest]:
        """Accept the allowed keys and drop those that waited too long. Returns the requests that still wait."""
        now = time.monotonic()
        num_over = len(waiting) - _MAX_WAITING
        left = []
        for position, request in enumerate(waiting):
            if request.key in self._keys:
                socket.send_multipart([*request.envelope, b"200", b"OK", request.key.encode(), b""])
            elif now >= request.deadline or position < num_over:
                self._dropped.add(DropReason.STRANGER, f"a connection from {request.address} with an unknown key")
            else:
                left.append(request)
        return left


class _ZapRequest(NamedTuple):
    """ZeroMQ's question whether a connection may be accepted."""

    envelope: tuple[bytes, ...]  # the first frames of the reply
    key: str
    address: str
    deadline: float


def _parse_request(frames: list[bytes], deadline: float) -> _ZapRequest:
    connection, delimiter, version, number, _domain, address, _identity, mechanism, *credentials = frames
    key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
    return _ZapRequest((connection, delimiter, version, number), key, address.decode() or "this machine", deadline)
