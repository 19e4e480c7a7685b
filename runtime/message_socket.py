"""A ZeroMQ socket on the event loop, for processes that receive thousands of messages a second.

`zmq.asyncio` creates a future and wakes a task for each message, both ways: that was a fifth of a short request's cost
in the deciding process. Here one callback of the loop first sends all queued messages and then receives all that have
arrived. Messages that are sent together wake ZeroMQ's thread once, which saves another tenth.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
from zmq.error import Again

from tandem.protocol.fault_boundary import error_of

logger = logging.getLogger(__name__)

MAX_RECEIVED = 256  # messages received before other callbacks of the loop run
MAX_READ_S = 0.002  # likewise the time for which they are handled


class MessageSocket:
    """Calls `on_message` with the frames of each message, in order of arrival, until `close`.

    `on_message` may close the socket; its exceptions are logged. The socket belongs to the event loop it is created in.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._unsent: list[tuple[bytes, ...]] = []
        self._loop.add_reader(socket.fileno(), self._read)
        self._schedule()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._socket.closed

    def send(self, *frames: bytes) -> None:
        """Queue a message, to be sent with all others of this loop iteration. After `close` it is dropped.

        Never blocks if the socket's queue has no limit.
        """
        if not self._socket.closed:
            self._unsent.append(frames)
            self._schedule()

    def close(self) -> None:
        """Close, and drop messages that were not sent or not received yet. May be called again."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send_and_receive)

    def _send_and_receive(self) -> None:
        """Send, then receive. NOTE: the descriptor signals new messages once, and sending may consume that signal."""
        self._is_scheduled = False
        if not self._socket.closed:
            unsent, self._unsent = self._unsent, []
            for *parts, last in unsent:
                for part in parts:
                    self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(last, zmq.NOBLOCK)
            self._read()

    def _read(self) -> None:
        """Receive what has arrived; after `MAX_RECEIVED` messages or `MAX_READ_S`, go on in a later callback."""
        until = time.perf_counter() + MAX_READ_S
        for _ in range(MAX_RECEIVED):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except Again:
                return
            if (error := error_of(self._on_message, frames)) is not None:
                # NOTE: go on, because messages left unread here are never signalled again.
                logger.error("a message could not be handled", exc_info=error)
            if time.perf_counter() >= until:
                break
        self._schedule()
