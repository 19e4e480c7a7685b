"""A worker's sockets: a ROUTER for everyone who talks to it, a DEALER and a SUB for each peer, a PUB for heartbeats.

`receive` returns only messages whose sender is proven: the router, or a peer that the router introduced, in its own
name.
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
    WorkerEpoch,
    decode_heartbeat,
    decode_peer_message,
    decode_router_message,
    encode_message,
    request_ids_of,
)
from tandem.runtime.curve import KeyAuthenticator, KeyPair, bind, connect_to_worker, listening_socket
from tandem.runtime.dropped import DroppedMessages, DropReason
from tandem.runtime.ports import bracketed
from tandem.runtime.waker import Waker

logger = logging.getLogger(__name__)

# Messages kept for a peer that does not read. Later ones are dropped: the loop never waits for a peer.
_SEND_QUEUE_MESSAGES = 100_000
_MAX_RECEIVED = 10_000  # messages taken in at once: a flood does not keep the loop from its other work
_MAX_IPC_PATH = 107  # bytes, of a Unix socket on Linux


def socket_endpoint(folder: str, host: str, name: str) -> str:
    """Where to bind: a Unix socket in `folder`, or without one a free TCP port of this address.

    Raises ConfigError for a path that is too long.
    """
    if not folder:
        return f"tcp://{bracketed(host)}:*"
    path = f"{folder}/{name}"
    if len(path.encode()) > _MAX_IPC_PATH:
        raise ConfigError(f"{path} is too long for a Unix socket ({_MAX_IPC_PATH} bytes); set TMPDIR to a shorter one")
    return f"ipc://{path}"


@dataclass(frozen=True, slots=True, eq=False)
class _PeerSockets:
    """The sockets for one peer: messages go to it, heartbeats come from it."""

    peer: PeerAddress
    messages: Any
    heartbeats: Any


class WorkerSockets:
    """Non-blocking sends and receives for a worker's loop. Belongs to that loop's thread."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, keys: KeyPair, router_key: str, dropped: DroppedMessages
    ) -> None:
        """`router_key` is the public key of the only router that may connect; empty = no router may."""
        self._context = context
        self._keys = keys
        self._router_key = router_key
        self._dropped = dropped
        self._introduced: dict[str, PeerAddress] = {}  # by public key
        self._gone: set[WorkerEpoch] = set()  # a late request may still name it
        self._authenticator = KeyAuthenticator(context, dropped)
        if router_key:
            self._authenticator.allow(router_key)
        self._router = listening_socket(context, SocketType.ROUTER, keys, max_queued=_SEND_QUEUE_MESSAGES)
        self.endpoint = bind(self._router, endpoint)
        self._peer_sockets: dict[WorkerEpoch, _PeerSockets] = {}
        self._waker = Waker()
        self._poller = zmq.Poller()
        for readable in (self._router, self._waker):
            self._poller.register(readable, PollEvent.POLLIN)

    def watch(self, waker: Any) -> None:
        """End `receive` early whenever this socket or file is readable."""
        self._poller.register(waker, PollEvent.POLLIN)

    def wake(self) -> None:
        """End the present or the next `receive` early. This is the only method that other threads may call."""
        self._waker.set()

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Message]]:
        """The messages that are here as (identity, message), after waiting up to `timeout_ms` for a first one.

        Heartbeats come from b"". A message that is malformed or names another sender is counted and dropped.
        """
        messages: list[tuple[bytes, Message]] = []
        ready = dict(self._poller.poll(timeout_ms))
        if self._waker.fileno() in ready:
            self._waker.clear()
        for sockets in list(self._peer_sockets.values()):
            if sockets.heartbeats in ready:
                for frames in _frames_of(sockets.heartbeats):
                    self._take_heartbeat(messages, sockets.peer, frames)
        if self._router in ready:
            for frames in _frames_of(self._router):
                self._take(messages, frames)
        return messages

    def obey(self, router_key: str) -> None:
        """Admit another router in place of the former one."""
        self._authenticator.revoke(self._router_key)
        self._router_key = router_key
        self._authenticator.allow(router_key)

    def introduce(self, peer: PeerAddress) -> None:
        """Let this peer connect and take its messages from now on. Call it only on the router's word."""
        if peer.public_key and peer.process not in self._gone:
            self._introduced[peer.public_key] = peer
            self._authenticator.allow(peer.public_key)

    def reply(self, identity: bytes, message: Message) -> None:
        """Send to the socket that connected under this identity; dropped if it is gone."""
        try:
            self._router.send_multipart([identity, encode_message(message)], zmq.NOBLOCK)
        except Again:
            self._dropped.add(DropReason.UNDELIVERED, f"a {type(message).__name__}: the router does not read")

    def send_peer(self, peer: PeerAddress, message: Message) -> None:
        """Send to a peer that was introduced. The first message connects to it and subscribes to its heartbeats."""
        sockets = self._peer_sockets.get(peer.process) or self._open(peer)
        if sockets is None:
            self._dropped.add(DropReason.UNDELIVERED, f"a {type(message).__name__} to {peer}: it is not a peer of ours")
            return
        try:
            sockets.messages.send(encode_message(message), zmq.NOBLOCK)
        except Again:
            text = f"a {type(message).__name__} to {peer.worker_id}: it does not read"
            self._dropped.add(DropReason.UNDELIVERED, text)

    def forget_peer(self, peer: PeerAddress) -> None:
        """Close the sockets for this epoch of a peer, and accept no more messages from it."""
        self._gone.add(peer.process)
        self._introduced.pop(peer.public_key, None)
        self._authenticator.revoke(peer.public_key)
        sockets = self._peer_sockets.pop(peer.process, None)
        if sockets is not None:
            self._poller.unregister(sockets.heartbeats)
            sockets.messages.close()
            sockets.heartbeats.close()

    def close(self) -> None:
        """Close all sockets; unsent messages get a moment to leave."""
        for sockets in self._peer_sockets.values():
            sockets.messages.close()
            sockets.heartbeats.close()
        self._peer_sockets.clear()
        self._waker.close()
        self._router.close(linger=200)

    def _open(self, peer: PeerAddress) -> _PeerSockets | None:
        """Connect to a peer; None for one that was not introduced or whose address cannot be used."""
        if self._introduced.get(peer.public_key) != peer:
            return None
        try:
            messages, heartbeats = connect_to_worker(self._context, self._keys, peer, max_queued=_SEND_QUEUE_MESSAGES)
        except ZMQError as exc:
            logger.warning("%s cannot be reached: %s", peer, exc)
            return None
        self._poller.register(heartbeats, PollEvent.POLLIN)
        sockets = self._peer_sockets[peer.process] = _PeerSockets(peer, messages, heartbeats)
        return sockets

    def _take(self, messages: list[tuple[bytes, Message]], frames: list[zmq.Frame]) -> None:
        """Read one message from our ROUTER. The key that it came with decides which kinds of message it may be."""
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
        except msgspec.DecodeError as exc:  # includes ValidationError
            self._dropped.add(DropReason.MALFORMED, str(exc))
            text = f"the request is malformed: {exc}"
            for request_id in request_ids_of(data) if key == self._router_key else []:
                self.reply(identity, RequestFailed(request_id=request_id, message=text, code=WorkerError.code or ""))

    def _take_heartbeat(
        self, messages: list[tuple[bytes, Message]], peer: PeerAddress, frames: list[zmq.Frame]
    ) -> None:
        try:
            message = decode_heartbeat(frames[-1].buffer)
        except msgspec.DecodeError as exc:
            self._dropped.add(DropReason.MALFORMED, f"a heartbeat of {peer.worker_id}: {exc}")
            return
        if message.sender == peer.process:
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
        """Peers and routers that the `WorkerSockets` of this context admit may subscribe."""
        self._socket = listening_socket(context, SocketType.PUB, keys, max_queued=_SEND_QUEUE_MESSAGES)
        self.endpoint = bind(self._socket, endpoint)
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
    """The messages that are here, up to `_MAX_RECEIVED`; the next poll reports the rest."""
    for _ in range(_MAX_RECEIVED):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except Again:
            return
