"""One link of the `nccl` transport: a connection beside a process group, on which the opener says what comes next.

    opener    Hello ->            Copy(write, blocks, notification) -> data ->           Copy(read, blocks) ->
    acceptor           <- Welcome                                             <- Landed                        <- data

The acceptor posts the matching send or receive for each order, straight in its pool and in the same order. The
connection also carries what the group's store holds (its rendezvous), and its end is how a dead peer is noticed.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from typing_extensions import override

from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferRequest,
    TransferState,
    block_runs,
)
from tandem.kv_transfer.transport.pair import SHARD_GAP, LocalRun, PairChannel, PairCopy
from tandem.kv_transfer.transport.shards import piece_ids
from tandem.kv_transfer.transport.stream import MessageStream
from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import PeerLost, TransferError


class LinkHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The opener's first message."""

    secret: bytes
    worker_id: str
    epoch: int
    number: int  # counts the opener's links in the order in which it made them
    pieces: Annotated[int, Meta(ge=1, lt=1 << 20)]  # into which a block is cut on this link


class _LinkWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The acceptor makes the group from now on, and so should the opener.

    It has closed all earlier links of that opener: nothing of theirs lands in its pool any more.
    """


class _StoreUpdate(msgspec.Struct, frozen=True, array_like=True, tag="rendezvous"):
    """What the group set in the sender's store."""

    key: str
    value: bytes


class _CopyOrder(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """The next copy of this link. `runs` are in the acceptor's pool: (first piece, number of pieces)."""

    number: int
    is_read: bool
    runs: list[tuple[int, int]]
    notification: bytes


class _CopyLanded(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """All writes up to this number are in the acceptor's pool."""

    number: int


_LinkMessage = LinkHello | _LinkWelcome | _StoreUpdate | _CopyOrder | _CopyLanded
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], _LinkMessage] = safe_decoder(_LinkMessage)


class PairLink:
    """The part that both ends of a link share."""

    def __init__(self, stream: MessageStream, channel: PairChannel, name: str) -> None:
        self.stream = stream
        self.channel = channel
        self.name = name
        self.is_closed = False
        self._has_group = False  # both sides have made the process group
        self._relayed: set[str] = set()

    def receive(self) -> None:
        """Handle the peer's messages. Raises `TransferError` when the link is over."""
        for message in self.stream.receive():
            try:
                self.handle(_decode(message))
            except msgspec.MsgspecError as exc:
                raise TransferError(f"a message cannot be read: {exc}") from exc

    def handle(self, message: _LinkMessage) -> None:
        """Handle one message. Raises `TransferError` for one that is not expected now."""
        if not isinstance(message, _StoreUpdate):
            raise TransferError(f"unexpected message {type(message).__name__}")
        self._relayed.add(message.key)
        self.channel.store.set(message.key, message.value)  # type: ignore[arg-type]  # its stub forgets bytes

    def drive(self) -> None:
        """Do what does not wait for a message, and send. Raises `TransferError` when the link is over."""
        if self.channel.error:
            raise PeerLost(self.channel.error)
        if not self._has_group:
            # NOTE: in this order, because what the group set just before it became ready has to be sent too.
            self._has_group = self.channel.is_ready
            self._relay_store()
        self.stream.flush()

    def close(self) -> None:
        """Let go of the peer: nothing more of what it sends lands here."""
        self.is_closed = True
        self.stream.close()
        self.channel.close()

    def _put(self, message: _LinkMessage) -> None:
        self.stream.put(_encode(message))

    def _relay_store(self) -> None:
        """Send what the group has set in its store. What it is just setting is sent by the next call."""
        for key in self.channel.store.list_keys():
            if key not in self._relayed:
                self._relayed.add(key)
                self._put(_StoreUpdate(key, self.channel.store.get(key)))


class _CollectiveTransfer(Transfer):
    """Done when our side of the copy is and, if it is a write, the peer has confirmed it."""

    __slots__ = ("is_read", "number", "ours")

    def __init__(self, num_bytes: int, number: int, *, is_read: bool) -> None:
        super().__init__(num_bytes)
        self.number = number
        self.is_read = is_read
        self.ours: PairCopy | None = None


class OutgoingLink(PairLink):
    """A link that we opened, to write to a peer's pool and read from it."""

    def __init__(
        self,
        stream: MessageStream,
        channel: PairChannel,
        hello: LinkHello,
        *,
        name: str,
        epoch: int,
        shapes: tuple[PoolShape, PoolShape],
        timeout_s: float,
    ) -> None:
        """`shapes` are those of our pool and of the peer's."""
        super().__init__(stream, channel, name)
        self.epoch = epoch
        self._shape, self.remote_shape = shapes
        self._pieces = hello.pieces
        channel.cut(hello.pieces)
        self.is_welcome = False
        self._in_flight: deque[_CollectiveTransfer] = deque()
        self._num_copies = 0
        self._last_landed = 0
        self._has_begun = False
        self._timeout_s = timeout_s
        self._set_up_deadline = time.monotonic() + timeout_s
        self._put(hello)

    def start(self, request: TransferRequest) -> Transfer:
        """Order a copy; `drive` sends the order."""
        runs = block_runs(
            piece_ids(request.local_block_ids, self._shape, self._pieces, SHARD_GAP),
            piece_ids(request.remote_block_ids, self.remote_shape, self._pieces, SHARD_GAP),
        )
        self._num_copies += 1
        num_bytes, is_read = len(request.local_block_ids) * self._shape.block_bytes, request.is_read
        copy = _CollectiveTransfer(num_bytes, self._num_copies, is_read=is_read)
        if runs:
            copy.ours = self.channel.submit([LocalRun(run.local, run.num_blocks) for run in runs], is_send=not is_read)
        self._in_flight.append(copy)
        remote_runs = [(run.remote, run.num_blocks) for run in runs]
        self._put(_CopyOrder(copy.number, is_read, remote_runs, request.notification))
        return copy

    @override
    def handle(self, message: _LinkMessage) -> None:
        if isinstance(message, _CopyLanded):
            self._last_landed = message.number
        elif isinstance(message, _LinkWelcome) and not self.is_welcome:
            self.is_welcome = True
            self.channel.start()
        else:
            super().handle(message)

    @override
    def drive(self) -> None:
        if self.channel.is_ready and not self._has_begun:
            self._has_begun = True
            self._begin_next()  # the seconds of the first transfer exclude the set-up
        while self._in_flight and self._is_done(self._in_flight[0]):
            self._in_flight.popleft().settle(TransferState.DONE)
            self._begin_next()
        if not self._has_begun and time.monotonic() >= self._set_up_deadline:
            raise PeerLost(f"the link did not come up in {self._timeout_s:.0f} s")
        super().drive()

    @override
    def close(self) -> None:
        super().close()
        while self._in_flight:
            self._in_flight.popleft().settle(TransferState.LOST)

    def _begin_next(self) -> None:
        if self._in_flight:
            self._in_flight[0].begin()

    def _is_done(self, copy: _CollectiveTransfer) -> bool:
        return (copy.ours is None or copy.ours.is_done) and (copy.is_read or copy.number <= self._last_landed)


class LinkAdmission(NamedTuple):
    """The conditions on which an acceptor accepts an opener."""

    secret: bytes
    timeout_s: float  # for the first message
    on_hello: Callable[[LinkHello], None]  # raises `TransferError` to refuse the opener


class IncomingLink(PairLink):
    """A link that a peer opened, to write to our pool and read from it."""

    def __init__(self, stream: MessageStream, channel: PairChannel, admission: LinkAdmission) -> None:
        super().__init__(stream, channel, "a stranger")
        self.arrived: list[Notification] = []
        self.hello: LinkHello | None = None
        self._admission = admission
        self._hello_deadline = time.monotonic() + admission.timeout_s
        self._orders: deque[tuple[_CopyOrder, PairCopy | None]] = deque()

    @override
    def handle(self, message: _LinkMessage) -> None:
        if self.hello is None:
            self._greet(message)
        elif isinstance(message, _CopyOrder):
            self._orders.append((message, self._submit(message)))
        else:
            super().handle(message)

    @override
    def drive(self) -> None:
        if self.hello is None:
            if time.monotonic() >= self._hello_deadline:
                raise TransferError("no greeting came")
            return
        last_landed = 0
        while self._orders and _is_done(self._orders[0][1]):
            order, _ = self._orders.popleft()
            last_landed = order.number
            if order.notification:
                self.arrived.append(Notification(self.hello.worker_id, self.hello.epoch, order.notification))
        if last_landed:
            self._put(_CopyLanded(last_landed))
        super().drive()

    def _greet(self, message: _LinkMessage) -> None:
        if not isinstance(message, LinkHello) or not hmac.compare_digest(message.secret, self._admission.secret):
            raise TransferError("it does not know the secret of this worker's metadata")
        self.channel.cut(message.pieces)
        self._admission.on_hello(message)
        self.hello = message
        self.name = f"{message.worker_id} epoch {message.epoch}"
        self._put(_LinkWelcome())
        self.channel.start()

    def _submit(self, order: _CopyOrder) -> PairCopy | None:
        runs = [LocalRun(*run) for run in order.runs]
        for run in runs:
            if not self.channel.holds(run):
                raise TransferError(f"{run.num_pieces} pieces from {run.start} leave the pool")
        return self.channel.submit(runs, is_send=order.is_read) if runs else None


def _is_done(copy: PairCopy | None) -> bool:
    return copy is None or copy.is_done
