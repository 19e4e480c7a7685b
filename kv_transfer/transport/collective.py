"""Transport over process groups of torch.distributed: NCCL between GPUs, gloo between CPUs. Named `nccl`.

NCCL and gloo only know sends that meet receives. What makes one-sided transfers of them is a connection beside each
process group, on which the side that opened the link says what comes next:

    opener    Hello ->            Copy(write, blocks, notification) -> data ->           Copy(read, blocks) ->
    acceptor           <- Welcome                                             <- Landed                        <- data

The acceptor's `poll` takes these orders and posts what meets them, straight in its pool and in the same order. Each
worker opens its own link to a peer, so two workers that write to each other have two links.

The connection also carries what the group's store holds (its rendezvous), and its end is how a dead peer is noticed.
It is admitted by a secret in the metadata, which only the workers' handshake hands out; the bytes of gloo and NCCL are
neither authenticated nor encrypted, so the network between the workers must be trusted.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferState,
    Transport,
    block_runs,
    check_block_ids,
    pool_shape,
)
from tandem.kv_transfer.transport.pair import LocalRun, PairChannel, PairCopy
from tandem.kv_transfer.transport.stream import MessageStream, connect, listen
from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import IncompatiblePeer, PeerLost, TransferError

__all__ = ["CollectiveTransport"]

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0  # for someone who connects and says nothing
_SET_UP_TIMEOUT_S = 30.0  # for a peer that lives but does not poll
_JOIN_TIMEOUT_S = 1.0  # in `close`, for all threads together


class _CollectiveMetadata(msgspec.Struct, frozen=True, array_like=True):
    worker_id: str
    epoch: int
    host: str
    port: int
    secret: bytes
    device_type: str
    num_blocks: int
    block_bytes: int


class _Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    secret: bytes
    worker_id: str
    epoch: int
    number: int  # of the opener's links, in the order in which it made them


class _Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The acceptor makes the group from now on, and so should the opener.

    It has closed all earlier links of that opener: nothing of theirs lands in its pool any more.
    """


class _Rendezvous(msgspec.Struct, frozen=True, array_like=True, tag="rendezvous"):
    """What the group set in the sender's store."""

    key: str
    value: bytes


class _CopyOrder(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """The next copy of this link. `runs` are of the acceptor's pool: (first block, number of blocks)."""

    number: int
    is_read: bool
    runs: list[tuple[int, int]]
    notification: bytes


class _Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """All writes up to this number are in the acceptor's pool."""

    number: int


_Message = _Hello | _Welcome | _Rendezvous | _CopyOrder | _Landed
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], _Message] = safe_decoder(_Message)
_metadata_of = safe_decoder(_CollectiveMetadata)


class _CollectiveTransfer(Transfer):
    """A transfer of ours: done when our side of the copy is and, if it is a write, the peer said so."""

    __slots__ = ("is_read", "number", "ours")

    def __init__(self, num_bytes: int, number: int, *, is_read: bool) -> None:
        super().__init__(num_bytes)
        self.number = number
        self.is_read = is_read
        self.ours: PairCopy | None = None


class _PairLink:
    """What both ends of a link have in common."""

    def __init__(self, stream: MessageStream, channel: PairChannel, name: str) -> None:
        self.stream = stream
        self.channel = channel
        self.name = name
        self.is_closed = False
        self.is_met = False  # both sides have the group
        self._relayed: set[str] = set()

    def receive(self) -> None:
        """Take what the peer said. Raises `TransferError` when the link is over."""
        for message in self.stream.receive():
            try:
                self.take(_decode(message))
            except msgspec.MsgspecError as exc:
                raise TransferError(f"a message cannot be read: {exc}") from exc

    def take(self, message: _Message) -> None:
        """Take one message. Raises `TransferError` for one that has no place here."""
        if not isinstance(message, _Rendezvous):
            raise TransferError(f"unexpected message {type(message).__name__}")
        self._relayed.add(message.key)
        self.channel.store.set(message.key, message.value)  # type: ignore[arg-type]  # its stub forgets bytes

    def drive(self) -> None:
        """Do what does not wait for a message, and send. Raises `TransferError` when the link is over."""
        if self.channel.error:
            raise PeerLost(self.channel.error)
        if not self.is_met:
            # NOTE: in this order, as what was set just before it became ready has to be sent too.
            self.is_met = self.channel.is_ready
            self._relay()
        self.stream.flush()

    def close(self) -> None:
        """Let go of the peer: nothing of it lands here any more."""
        self.is_closed = True
        self.stream.close()
        self.channel.close()

    def _put(self, message: _Message) -> None:
        self.stream.put(_encode(message))

    def _relay(self) -> None:
        """Send what the group has set in its store. It may be in the middle of setting it; then the next call does."""
        for key in self.channel.store.list_keys():
            if key not in self._relayed:
                self._relayed.add(key)
                self._put(_Rendezvous(key, self.channel.store.get(key)))


class _OutgoingLink(_PairLink):
    """A link to a peer that we may write to and read from."""

    def __init__(self, stream: MessageStream, channel: PairChannel, peer: _CollectiveMetadata, hello: _Hello) -> None:
        super().__init__(stream, channel, f"{peer.worker_id} epoch {peer.epoch}")
        self.epoch = peer.epoch
        self.shape = PoolShape(peer.num_blocks, peer.block_bytes)
        self._in_flight: deque[_CollectiveTransfer] = deque()
        self._num_copies = 0
        self._last_landed = 0
        self._has_begun = False
        self.is_welcome = False
        self._set_up_deadline = time.monotonic() + _SET_UP_TIMEOUT_S
        self._put(hello)

    def start(
        self, local: Sequence[int], remote: Sequence[int], notification: bytes, *, is_read: bool
    ) -> _CollectiveTransfer:
        """Order a copy; `drive` sends the order."""
        runs = block_runs(local, remote)
        self._num_copies += 1
        copy = _CollectiveTransfer(len(local) * self.shape.block_bytes, self._num_copies, is_read=is_read)
        if runs:
            copy.ours = self.channel.submit([LocalRun(run.local, run.num_blocks) for run in runs], is_send=not is_read)
        self._in_flight.append(copy)
        self._put(_CopyOrder(copy.number, is_read, [(run.remote, run.num_blocks) for run in runs], notification))
        return copy

    @override
    def take(self, message: _Message) -> None:
        if isinstance(message, _Landed):
            self._last_landed = message.number
        elif isinstance(message, _Welcome) and not self.is_welcome:
            self.is_welcome = True
            self.channel.start()
        else:
            super().take(message)

    @override
    def drive(self) -> None:
        if self.channel.is_ready and not self._has_begun:
            self._has_begun = True
            self._begin_next()  # its seconds are not those of the set-up
        while self._in_flight and self._is_done(self._in_flight[0]):
            self._in_flight.popleft().settle(TransferState.DONE)
            self._begin_next()
        if not self._has_begun and time.monotonic() >= self._set_up_deadline:
            raise PeerLost(f"the link did not come up in {_SET_UP_TIMEOUT_S:.0f} s")
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


class _IncomingLink(_PairLink):
    """A link that a peer opened, to write to our pool and read from it."""

    def __init__(
        self,
        stream: MessageStream,
        channel: PairChannel,
        num_blocks: int,
        secret: bytes,
        on_greeted: Callable[[_Hello], None],
    ) -> None:
        super().__init__(stream, channel, "a stranger")
        self.arrived: list[Notification] = []
        self._on_greeted = on_greeted
        self._num_blocks = num_blocks
        self._secret = secret
        self.hello: _Hello | None = None
        self._hello_deadline = time.monotonic() + _HELLO_TIMEOUT_S
        self._orders: deque[tuple[_CopyOrder, PairCopy | None]] = deque()

    @override
    def take(self, message: _Message) -> None:
        if self.hello is None:
            self._greet(message)
        elif isinstance(message, _CopyOrder):
            self._orders.append((message, self._submit(message)))
        else:
            super().take(message)

    @override
    def drive(self) -> None:
        if self.hello is None:
            if time.monotonic() >= self._hello_deadline:
                raise TransferError("no greeting came")
            return
        last_landed = 0
        while self._orders and self._is_done(self._orders[0][1]):
            order, _ = self._orders.popleft()
            last_landed = order.number
            if order.notification:
                self.arrived.append(Notification(self.hello.worker_id, self.hello.epoch, order.notification))
        if last_landed:
            self._put(_Landed(last_landed))
        super().drive()

    def _greet(self, message: _Message) -> None:
        if not isinstance(message, _Hello) or not hmac.compare_digest(message.secret, self._secret):
            raise TransferError("it does not know the secret of this worker's metadata")
        self._on_greeted(message)
        self.hello = message
        self.name = f"{message.worker_id} epoch {message.epoch}"
        self._put(_Welcome())
        self.channel.start()

    def _submit(self, order: _CopyOrder) -> PairCopy | None:
        for start, count in order.runs:
            if start < 0 or count < 1 or start + count > self._num_blocks:
                raise TransferError(f"{count} blocks from {start} leave the pool of {self._num_blocks} blocks")
        if not order.runs:
            return None
        return self.channel.submit([LocalRun(*run) for run in order.runs], is_send=order.is_read)

    def _is_done(self, ours: PairCopy | None) -> bool:
        return ours is None or ours.is_done


class CollectiveTransport(Transport):
    """All links of one pool, in both directions. `host` is the address at which peers reach this machine."""

    def __init__(self, worker_id: str, epoch: int, pool: Tensor, host: str) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._shape = pool_shape(pool)
        self._pool = pool
        self._host = host
        self._secret = secrets.token_bytes(16)
        self._listener = listen(host)
        self._opened: dict[str, _OutgoingLink] = {}
        self._accepted: list[_IncomingLink] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._num_opened = 0
        self._is_closed = False

    @override
    def local_metadata(self) -> bytes:
        port = self._listener.getsockname()[1]
        device_type = self._pool.device.type
        return msgspec.msgpack.encode(
            _CollectiveMetadata(self._worker_id, self._epoch, self._host, port, self._secret, device_type, *self._shape)
        )

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        if self._is_closed:
            raise PeerLost(f"{worker_id} cannot be added: this transport is closed")
        theirs = _decode_metadata(metadata)
        self._check_peer(worker_id, epoch, theirs)
        known = self._opened.get(worker_id)
        if known is not None and known.epoch == epoch and not known.is_closed:
            return
        self.remove_peer(worker_id)
        stream = connect(theirs.host, theirs.port)
        self._num_opened += 1
        hello = _Hello(theirs.secret, self._worker_id, self._epoch, self._num_opened)
        link = _OutgoingLink(stream, PairChannel(0, self._pool, self._host), theirs, hello)
        self._opened[worker_id] = link
        self._selector.register(stream, selectors.EVENT_READ, link)
        self._attend(link, link.drive)
        if link.is_closed:
            raise PeerLost(f"{worker_id} epoch {epoch} is gone")

    @override
    def remove_peer(self, worker_id: str) -> None:
        link = self._opened.pop(worker_id, None)
        if link is not None:
            self._close(link)

    @override
    def is_quiet(self, worker_id: str) -> bool:
        link = self._opened.get(worker_id)
        return link is not None and not link.is_closed and link.is_welcome

    @override
    def write_blocks(
        self,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
    ) -> Transfer:
        return self._copy(worker_id, local_block_ids, remote_block_ids, notification)

    @override
    def read_blocks(self, worker_id: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        return self._copy(worker_id, local_block_ids, remote_block_ids, is_read=True)

    @override
    def poll(self) -> list[Notification]:
        if self._is_closed:
            return []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                self._attend(key.data, key.data.receive)
        for opened in self._opened.values():
            self._attend(opened, opened.drive)
        arrived: list[Notification] = []
        for accepted in list(self._accepted):
            self._attend(accepted, accepted.drive)
            arrived += accepted.arrived
            accepted.arrived.clear()
        return arrived

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        links = [*self._opened.values(), *self._accepted]
        for link in links:
            self._close(link)
        self._opened.clear()
        self._selector.close()
        self._listener.close()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for link in links:
            link.channel.join(max(0.0, deadline - time.monotonic()))

    def _check_peer(self, worker_id: str, epoch: int, theirs: _CollectiveMetadata) -> None:
        if (theirs.worker_id, theirs.epoch) != (worker_id, epoch):
            raise TransferError(
                f"metadata of {worker_id} epoch {epoch} describes {theirs.worker_id} epoch {theirs.epoch}"
            )
        device_type = self._pool.device.type
        if theirs.block_bytes != self._shape.block_bytes:
            raise IncompatiblePeer(f"block_bytes: {self._shape.block_bytes} here, {theirs.block_bytes} at {worker_id}")
        if theirs.device_type != device_type:
            raise IncompatiblePeer(f"device: {device_type} here, {theirs.device_type} at {worker_id}")

    def _copy(
        self,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
        *,
        is_read: bool = False,
    ) -> Transfer:
        link = self._opened.get(worker_id)
        if link is None or link.is_closed:
            raise PeerLost(f"{worker_id} is unknown or gone")
        check_block_ids(local_block_ids, remote_block_ids, self._shape, link.shape, is_read=is_read)
        copy = link.start(local_block_ids, remote_block_ids, notification, is_read=is_read)
        self._attend(link, link.drive)
        return copy

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone already
            return
        stream = MessageStream(connection)
        channel = PairChannel(1, self._pool, self._host)
        link = _IncomingLink(stream, channel, self._shape.num_blocks, self._secret, self._replace_links)
        self._accepted.append(link)
        self._selector.register(stream, selectors.EVENT_READ, link)

    def _replace_links(self, hello: _Hello) -> None:
        """Close the earlier links of this opener. Raises `TransferError` if this one is not its latest."""
        opener = (hello.worker_id, hello.epoch)
        for link in [link for link in self._accepted if link.hello is not None]:
            assert link.hello is not None
            if (link.hello.worker_id, link.hello.epoch) == opener:
                if link.hello.number >= hello.number:
                    raise TransferError(f"link {hello.number} was replaced by link {link.hello.number}")
                self._close(link)

    def _attend(self, link: _PairLink, action: Callable[[], None]) -> None:
        if link.is_closed:
            return
        try:
            action()
        except TransferError as exc:
            # That an opener leaves is its business; that a peer we opened a link to does is a failure.
            level = logging.WARNING if isinstance(link, _OutgoingLink) else logging.INFO
            logger.log(level, "link with %s is lost: %s", link.name, exc.message)
            self._close(link)

    def _close(self, link: _PairLink) -> None:
        if link.is_closed:
            return
        self._selector.unregister(link.stream)
        link.close()
        if isinstance(link, _IncomingLink):
            self._accepted.remove(link)


def _decode_metadata(metadata: bytes) -> _CollectiveMetadata:
    try:
        described: _CollectiveMetadata = _metadata_of(metadata)
    except msgspec.MsgspecError as exc:
        raise TransferError(f"transport metadata cannot be read: {exc}") from exc
    return described
