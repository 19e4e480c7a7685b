"""The sockets between the processes of one router: each publishes at its own endpoint and listens to all the others'.

Every process hears everything. What is lost (a peer that connects late or reads too slowly) `PeerRouters` notices and
asks for. On one machine the endpoints are Unix sockets in a folder that only the user may enter, because whoever can
write there can add engines. NOTE: endpoints on a network would need ZeroMQ's CURVE keys for the same reason.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from zmq.constants import SocketOption, SocketType
from zmq.error import Again

from tandem.router.processes.sibling_messages import (
    Answer,
    Question,
    SiblingMessage,
    decode_sibling_message,
    encode_sibling_message,
)
from tandem.router.processes.siblings import BEAT_INTERVAL_S, PeerRouters
from tandem.runtime.background import BackgroundTasks

__all__ = ["PeerRouterBus"]

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 0.5
JOIN_TIMEOUT_S = 2.0  # for the snapshots of all peers; those that are not there do not come
_MAX_PER_TURN = 256  # messages taken in before requests get their turn
_QUEUED_MESSAGES = 100_000  # for a peer that does not read; what is beyond is lost
_RECONNECT_MS = 50


class PeerRouterBus:
    """Carries the messages of one `PeerRouters`, and questions to all of them. Belongs to one event loop."""

    def __init__(self, siblings: PeerRouters, endpoint: str, peers: Sequence[str]) -> None:
        """`endpoint` is where we publish, `peers` where the others do."""
        self.answers: Mapping[str, Callable[[], bytes]] = {}  # by topic, what we say when asked
        # By topic, who is told of every answer, to whomever it is: (sender, epoch, content).
        self.listeners: Mapping[str, Callable[[str, int, bytes], None]] = {}
        self._siblings = siblings
        self._endpoint = endpoint
        self._peers = [peer for peer in peers if peer != endpoint]
        self._context = zmq.Context(io_threads=1)
        self._publisher = self._context.socket(SocketType.PUB)
        self._subscriber = self._context.socket(SocketType.SUB)
        self._questions: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._background = BackgroundTasks()
        self._has_started = False
        self._has_changed = asyncio.Event()

    async def start(self) -> None:
        """Join the others: return when they and we know what is open, or `JOIN_TIMEOUT_S` later without the absent."""
        self._publisher.setsockopt(SocketOption.SNDHWM, _QUEUED_MESSAGES)
        self._publisher.bind(self._endpoint)
        self._subscriber.setsockopt(SocketOption.RCVHWM, _QUEUED_MESSAGES)
        self._subscriber.setsockopt(SocketOption.RECONNECT_IVL, _RECONNECT_MS)
        self._subscriber.setsockopt(SocketOption.SUBSCRIBE, b"")
        for peer in self._peers:
            self._subscriber.connect(peer)
        self._siblings.send = self._send
        asyncio.get_running_loop().add_reader(self._subscriber.fileno(), self._read)
        self._has_started = True
        self._background.keep("beat to siblings", self._beat_for_ever)
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S if self._peers else 0):
                while len(self._siblings.living) < len(self._peers) or not self._siblings.is_joined:
                    self._has_changed.clear()
                    await self._has_changed.wait()
        except TimeoutError:
            logger.info("%d of %d siblings have answered", len(self._siblings.living), len(self._peers))

    async def ask(self, topic: str) -> dict[str, bytes]:
        """What each living sibling says to a topic; without those that take longer than `ANSWER_TIMEOUT_S`.

        What we would say ourselves is told to them.
        """
        missing = set(self._siblings.living)
        if not missing:
            return {}
        number = next(self._numbers)
        asked = self._questions[number] = _Asked(missing)
        try:
            self._send(Question(self._siblings.stamp, number, topic))
            self.tell(topic, number)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await asked.is_complete.wait()
        except TimeoutError:
            logger.warning("no answer to %r from sibling(s) %s", topic, ", ".join(sorted(asked.missing)))
        finally:
            del self._questions[number]
        return asked.answers

    def tell(self, topic: str, number: int = 0, to: str = "") -> None:
        """Say what we have to say to a topic, asked or not."""
        if (answer := self.answers.get(topic)) is not None:
            self._send(Answer(self._siblings.stamp, to, number, topic, answer()))

    async def close(self) -> None:
        """Tell the others that we end, and close the sockets."""
        await self._background.close()
        if self._has_started:
            for topic in self.listeners:
                self.tell(topic)  # our last word
            self._siblings.leave()
            self._siblings.send = lambda _: None
            asyncio.get_running_loop().remove_reader(self._subscriber.fileno())
        self._publisher.close(linger=200)
        self._subscriber.close(linger=0)
        self._context.term()

    def _send(self, message: SiblingMessage) -> None:
        self._publisher.send(encode_sibling_message(message), zmq.NOBLOCK)  # a publisher drops, it never blocks

    async def _beat_for_ever(self) -> None:
        while True:
            self._siblings.tick(time.monotonic())
            self._read()  # the descriptor tells of new messages once only, and sending may have hidden it
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _read(self) -> None:
        """Take in what is there, and come back for the rest after other work."""
        if self._subscriber.closed:
            return
        for _ in range(_MAX_PER_TURN):
            try:
                frame = self._subscriber.recv(zmq.NOBLOCK)
            except Again:
                break
            self._take(frame)
        else:
            asyncio.get_running_loop().call_soon(self._read)
        self._has_changed.set()

    def _take(self, frame: Any) -> None:
        try:
            message = decode_sibling_message(frame)
        except msgspec.DecodeError as exc:
            logger.warning("dropped a malformed message of a sibling: %s", exc)
            return
        self._siblings.receive(message, time.monotonic())
        if isinstance(message, Question):
            self.tell(message.topic, message.number, message.stamp.sender)
        elif isinstance(message, Answer):
            if (listener := self.listeners.get(message.topic)) is not None:
                listener(message.stamp.sender, message.stamp.epoch, message.content)
            if message.to == self._siblings.name and (asked := self._questions.get(message.number)) is not None:
                asked.take(message.stamp.sender, message.content)


class _Asked:
    """A question under way."""

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.answers: dict[str, bytes] = {}
        self.is_complete = asyncio.Event()

    def take(self, sender: str, content: bytes) -> None:
        """Note one answer."""
        self.answers[sender] = content
        self.missing.discard(sender)
        if not self.missing:
            self.is_complete.set()
