"""A worker's sockets: one ROUTER for everyone who talks to it, one DEALER per peer, SUB and PUB for heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.constants import PollEvent, SocketOption, SocketType
from zmq.error import Again, ZMQError

from protocol.messages import Heartbeat, Message, PeerAddress, decode_message, encode_message

__all__ = ["HeartbeatThread", "WorkerSockets"]

logger = logging.getLogger(__name__)

# A peer that reads nothing for this many messages is as good as gone; what is beyond is dropped, never waited for.
_SEND_QUEUE_MESSAGES = 100_000


class WorkerSockets:
    """Non-blocking sends and receives for a worker's loop. Belongs to that loop's thread."""

    def __init__(self, context: zmq.Context[Any], host: str) -> None:
        self._context = context
        self._router = _socket(context, SocketType.ROUTER)
        port = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._heartbeats = _socket(context, SocketType.SUB)
        self._heartbeats.setsockopt(SocketOption.SUBSCRIBE, b"")
        self._peers: dict[tuple[str, int], Any] = {}
        self._wake = _socket(context, SocketType.PULL)
        self._wake.bind(f"inproc://wake-{id(self)}")
        self._wake_lock = threading.Lock()
        self._waker = _socket(context, SocketType.PUSH)
        self._waker.connect(f"inproc://wake-{id(self)}")
        self._poller = zmq.Poller()
        for socket in (self._router, self._heartbeats, self._wake):
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
        """All messages here now as (who, message), waiting up to `timeout_ms` for a first one.

        Heartbeats come from b"". What cannot be decoded is logged and dropped.
        """
        messages: list[tuple[bytes, Message]] = []
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake in ready:
            _drain(self._wake, lambda _: None)
        if self._heartbeats in ready:
            _drain(self._heartbeats, lambda frames: _decode_into(messages, b"", frames[-1]))
        if self._router in ready:
            _drain(self._router, lambda frames: _decode_into(messages, frames[0], frames[-1]))
        return messages

    def reply(self, identity: bytes, message: Message) -> None:
        """Send to whoever connected under this identity; dropped if it is gone."""
        try:
            self._router.send_multipart([identity, encode_message(message)], zmq.NOBLOCK)
        except Again:
            logger.warning("dropped a %s: its receiver does not read", type(message).__name__)

    def send_peer(self, peer: PeerAddress, message: Message) -> None:
        """Send to a peer's ROUTER, connecting first if this epoch of it was never sent to; hear its heartbeats."""
        key = (peer.worker_id, peer.epoch)
        socket = self._peers.get(key)
        if socket is None:
            socket = self._peers[key] = _socket(self._context, SocketType.DEALER)
            socket.connect(peer.endpoint)
            self._heartbeats.connect(peer.heartbeat_endpoint)
        try:
            socket.send(encode_message(message), zmq.NOBLOCK)
        except Again:
            logger.warning("dropped a %s to %s: it does not read", type(message).__name__, peer.worker_id)

    def forget_peer(self, peer: PeerAddress) -> None:
        """Close the way to this epoch of a peer."""
        socket = self._peers.pop((peer.worker_id, peer.epoch), None)
        if socket is not None:
            socket.close()
            try:
                self._heartbeats.disconnect(peer.heartbeat_endpoint)
            except ZMQError:
                logger.debug("was not connected to %s", peer.heartbeat_endpoint)

    def close(self) -> None:
        """Close all sockets; unsent messages get a moment to leave."""
        with self._wake_lock:
            self._waker.close()
        for socket in (self._router, self._heartbeats, self._wake, *self._peers.values()):
            socket.close(linger=200 if socket is self._router else 0)
        self._peers.clear()


class HeartbeatThread:
    """Publishes `make_heartbeat()` at a fixed interval, whatever the worker's loop is busy with."""

    def __init__(
        self, context: zmq.Context[Any], host: str, interval_s: float, make_heartbeat: Callable[[], Heartbeat]
    ) -> None:
        self._socket = _socket(context, SocketType.PUB)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._interval_s = interval_s
        self._make_heartbeat = make_heartbeat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin publishing."""
        self._thread.start()

    def close(self) -> None:
        """Stop publishing and close the socket."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._interval_s + 1.0)
        self._socket.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._socket.send(encode_message(self._make_heartbeat()), zmq.NOBLOCK)


def _socket(context: zmq.Context[Any], kind: SocketType) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.setsockopt(SocketOption.SNDHWM, _SEND_QUEUE_MESSAGES)
    socket.setsockopt(SocketOption.RCVHWM, _SEND_QUEUE_MESSAGES)
    return socket


def _drain(socket: Any, take: Callable[[list[bytes]], None]) -> None:
    while True:
        try:
            take(socket.recv_multipart(zmq.NOBLOCK))
        except Again:
            return


def _decode_into(messages: list[tuple[bytes, Message]], sender: bytes, frame: bytes) -> None:
    try:
        messages.append((sender, decode_message(frame)))
    except msgspec.DecodeError as exc:  # ValidationError is one
        logger.warning("dropped a malformed message: %s", exc)
