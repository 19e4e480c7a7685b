"""A worker's sockets: one ROUTER for everyone who talks to it, one DEALER and SUB per peer, and its PUB for heartbeats.

What `receive` returns was said by who it claims: the router, or a peer that the router introduced, in its own name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.constants import PollEvent, SocketType
from zmq.error import Again, ZMQError

from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import (
    Heartbeat,
    Message,
    PeerAddress,
    RequestFailed,
    decode_heartbeat,
    decode_peer_message,
    decode_router_message,
    encode_message,
    request_id_of,
)
from tandem.runtime.curve import KeyAuthenticator, KeyPair, connect_to_worker, listening_socket
from tandem.runtime.dropped import DroppedMessages, DropReason

__all__ = ["HeartbeatThread", "WorkerSockets", "socket_endpoint"]

logger = logging.getLogger(__name__)

# A peer that reads nothing for this many messages is as good as gone; what is beyond is dropped, never waited for.
_SEND_QUEUE_MESSAGES = 100_000
_MAX_PER_TURN = 10_000  # messages taken in at once: whoever floods us does not keep the loop from its other work
_MAX_IPC_PATH = 107  # bytes, of a Unix socket on Linux


def socket_endpoint(folder: str, host: str, name: str) -> str:
    """Where to bind: a Unix socket in `folder`, or without one a free TCP port of this address.

    Raises ConfigError for a path that is too long.
    """
    if not folder:
        return f"tcp://{host}:*"
    path = f"{folder}/{name}"
    if len(path.encode()) > _MAX_IPC_PATH:
        raise ConfigError(f"{path} is too long for a Unix socket ({_MAX_IPC_PATH} bytes); set TMPDIR to a shorter one")
    return f"ipc://{path}"


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """To a peer, and its heartbeats from it."""

    peer: PeerAddress
    messages: Any
    heartbeats: Any


class WorkerSockets:
    """Non-blocking sends and receives for a worker's loop. Belongs to that loop's thread."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, keys: KeyPair, router_key: str, dropped: DroppedMessages
    ) -> None:
        """`router_key` is the public key of the only router that may connect; empty = none may."""
        self._context = context
        self._keys = keys
        self._router_key = router_key
        self._dropped = dropped
        self._introduced: dict[str, PeerAddress] = {}  # by public key
        self._gone: set[tuple[str, int]] = set()  # worker and epoch; a late request may still name them
        self._authenticator = KeyAuthenticator(context, dropped)
        if router_key:
            self._authenticator.allow(router_key)
        self._router = listening_socket(context, SocketType.ROUTER, keys, max_queued=_SEND_QUEUE_MESSAGES)
        self._router.bind(endpoint)
        self.endpoint: str = self._router.last_endpoint.decode().rstrip("\0")
        self._ways: dict[tuple[str, int], _Way] = {}
        self._wake = context.socket(SocketType.PULL)
        self._wake.bind(f"inproc://wake-{id(self)}")
        self._wake_lock = threading.Lock()
        self._waker = context.socket(SocketType.PUSH)
        self._waker.connect(f"inproc://wake-{id(self)}")
        self._poller = zmq.Poller()
        for socket in (self._router, self._wake):
            self._poller.register(socket, PollEvent.POLLIN)

    def wake(self) -> None:
        """End the present or the next `receive` early. The only method other threads may call."""
        with self._wake_lock:
            if self._waker.closed:
                return
            try:
                self._waker.send(b"", zmq.NOBLOCK)
            except Again:
                pass  # it is being woken already

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Message]]:
        """The messages here now as (who, message), waiting up to `timeout_ms` for a first one.

        Heartbeats come from b"". What is malformed, or not from who it says, is counted and dropped.
        """
        messages: list[tuple[bytes, Message]] = []
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake in ready:
            for _ in _frames_of(self._wake):
                pass
        for way in list(self._ways.values()):
            if way.heartbeats in ready:
                for frames in _frames_of(way.heartbeats):
                    self._take_heartbeat(messages, way.peer, frames)
        if self._router in ready:
            for frames in _frames_of(self._router):
                self._take(messages, frames)
        return messages

    def introduce(self, peer: PeerAddress) -> None:
        """Let this peer connect, and take what it says from now on. Only the router's word introduces a peer."""
        if peer.public_key and (peer.worker_id, peer.epoch) not in self._gone:
            self._introduced[peer.public_key] = peer
            self._authenticator.allow(peer.public_key)

    def reply(self, identity: bytes, message: Message) -> None:
        """Send to whoever connected under this identity; dropped if it is gone."""
        try:
            self._router.send_multipart([identity, encode_message(message)], zmq.NOBLOCK)
        except Again:
            self._dropped.add(DropReason.UNDELIVERED, f"a {type(message).__name__}: the router does not read")

    def send_peer(self, peer: PeerAddress, message: Message) -> None:
        """Send to a peer that was introduced, connecting first if this epoch of it was never sent to.

        From then on its heartbeats are heard.
        """
        way = self._ways.get((peer.worker_id, peer.epoch)) or self._open(peer)
        if way is None:
            self._dropped.add(DropReason.UNDELIVERED, f"a {type(message).__name__} to {peer}: it is no peer of ours")
            return
        try:
            way.messages.send(encode_message(message), zmq.NOBLOCK)
        except Again:
            text = f"a {type(message).__name__} to {peer.worker_id}: it does not read"
            self._dropped.add(DropReason.UNDELIVERED, text)

    def forget_peer(self, peer: PeerAddress) -> None:
        """Close the way to this epoch of a peer, and listen to it no more."""
        self._gone.add((peer.worker_id, peer.epoch))
        self._introduced.pop(peer.public_key, None)
        self._authenticator.revoke(peer.public_key)
        way = self._ways.pop((peer.worker_id, peer.epoch), None)
        if way is not None:
            self._poller.unregister(way.heartbeats)
            way.messages.close()
            way.heartbeats.close()

    def close(self) -> None:
        """Close all sockets; unsent messages get a moment to leave."""
        with self._wake_lock:
            self._waker.close()
        for way in self._ways.values():
            way.messages.close()
            way.heartbeats.close()
        self._ways.clear()
        self._wake.close()
        self._router.close(linger=200)

    def _open(self, peer: PeerAddress) -> _Way | None:
        """Connect to a peer; None for one that was not introduced, or at an address that is none."""
        if self._introduced.get(peer.public_key) != peer:
            return None
        try:
            messages, heartbeats = connect_to_worker(self._context, self._keys, peer, max_queued=_SEND_QUEUE_MESSAGES)
        except ZMQError as exc:
            logger.warning("%s cannot be reached: %s", peer, exc)
            return None
        self._poller.register(heartbeats, PollEvent.POLLIN)
        way = self._ways[peer.worker_id, peer.epoch] = _Way(peer, messages, heartbeats)
        return way

    def _take(self, messages: list[tuple[bytes, Message]], frames: list[zmq.Frame]) -> None:
        """One message to our ROUTER. The key it came with says which conversation it may be part of."""
        identity, data, key = frames[0].bytes, frames[-1].buffer, str(frames[-1].get("User-Id"))
        try:
            if key == self._router_key:
                messages.append((identity, decode_router_message(data)))
            elif (peer := self._introduced.get(key)) is not None:
                message = decode_peer_message(data)
                if message.sender == peer:
                    messages.append((identity, message))
                else:
                    self._dropped.add(DropReason.IMPOSTOR, f"{peer} said it was {message.sender}")
            else:
                self._dropped.add(DropReason.STRANGER, "a message of a peer that is known to be dead")
        except msgspec.DecodeError as exc:  # ValidationError is one
            self._dropped.add(DropReason.MALFORMED, str(exc))
            if key == self._router_key and (request_id := request_id_of(data)) is not None:
                text = f"the request is malformed: {exc}"
                self.reply(identity, RequestFailed(request_id=request_id, message=text, code=WorkerError.code or ""))

    def _take_heartbeat(
        self, messages: list[tuple[bytes, Message]], peer: PeerAddress, frames: list[zmq.Frame]
    ) -> None:
        try:
            message = decode_heartbeat(frames[-1].buffer)
        except msgspec.DecodeError as exc:
            self._dropped.add(DropReason.MALFORMED, f"a heartbeat of {peer.worker_id}: {exc}")
            return
        if (message.worker_id, message.epoch) == (peer.worker_id, peer.epoch):
            messages.append((b"", message))
        else:
            self._dropped.add(DropReason.IMPOSTOR, f"{peer} sent a heartbeat of {message.worker_id}")


class HeartbeatThread:
    """Publishes `make_heartbeat()` at a fixed interval, whatever the worker's loop is busy with."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        keys: KeyPair,
        interval_s: float,
    ) -> None:
        """It is heard by the guests of the `WorkerSockets` of this context."""
        self._socket = listening_socket(context, SocketType.PUB, keys, max_queued=_SEND_QUEUE_MESSAGES)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.last_endpoint.decode().rstrip("\0")
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, make_heartbeat: Callable[[], Heartbeat]) -> None:
        """Begin publishing what `make_heartbeat` returns. It is called in another thread."""
        self._thread = threading.Thread(target=self._run, args=(make_heartbeat,), name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing and close the socket."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=self._interval_s + 1.0)
        self._socket.close()

    def _run(self, make_heartbeat: Callable[[], Heartbeat]) -> None:
        while not self._stopped.wait(self._interval_s):
            self._socket.send(encode_message(make_heartbeat()), zmq.NOBLOCK)


def _frames_of(socket: Any) -> Iterator[list[zmq.Frame]]:
    """The messages that are here, up to `_MAX_PER_TURN`; the poller tells of the rest again."""
    for _ in range(_MAX_PER_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except Again:
            return
