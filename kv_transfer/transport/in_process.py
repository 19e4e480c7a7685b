"""Transport between workers of one process: a copy between tensors.

The hub is the network. The code that starts the workers builds it and passes it to each transport.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferRequest,
    TransferState,
    Transport,
    check_block_ids,
    check_described,
    metadata_decoder,
    pool_shape,
)
from tandem.kv_transfer.transport.shards import byte_pieces, num_pieces, piece_ids, shards_of
from tandem.protocol.errors import PeerLost
from tandem.runtime.waker import Waker


@dataclass(eq=False, slots=True)
class InProcessWrite:
    """A write by `sender` into the pool of `receiver`; with `is_read`, a read by `sender` from that pool."""

    sender: InProcessTransport
    receiver: InProcessTransport
    local_block_ids: list[int]
    remote_block_ids: list[int]
    notification: bytes
    transfer: Transfer
    is_read: bool = False


class InProcessHub:
    """Joins the transports of one process; safe to use from all their threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._transports: dict[str, InProcessTransport] = {}

    def join(self, worker_id: str, epoch: int, pool: Tensor | Sequence[Tensor]) -> InProcessTransport:
        """A transport that peers find here."""
        return InProcessTransport(worker_id, epoch, pool, self)

    def attach(self, transport: InProcessTransport) -> None:
        """Called by a transport when it starts, so that peers find it. It replaces a former epoch."""
        with self.lock:
            former = self._transports.get(transport.worker_id)
            if former is not None:
                self.detach(former)
            self._transports[transport.worker_id] = transport

    def detach(self, transport: InProcessTransport) -> None:
        """Called by a transport when it closes."""
        with self.lock:
            if self._transports.get(transport.worker_id) is transport:
                del self._transports[transport.worker_id]

    def find(self, worker_id: str, epoch: int) -> InProcessTransport | None:
        """The attached transport of this worker and epoch."""
        with self.lock:
            transport = self._transports.get(worker_id)
            return transport if transport is not None and transport.epoch == epoch else None

    def submit(self, write: InProcessWrite) -> None:
        """Carry a write out: copy the blocks, then notify the receiver."""
        with self.lock:
            _copy_blocks(write)
            if write.notification:
                sender = write.sender
                write.receiver.deliver(Notification(sender.worker_id, sender.epoch, write.notification))
            write.transfer.settle(TransferState.DONE)


class _InProcessMetadata(msgspec.Struct, frozen=True, array_like=True):
    worker_id: str
    epoch: int
    num_blocks: int
    block_bytes: int
    num_shards: int


_decode_metadata = metadata_decoder(_InProcessMetadata)


class InProcessTransport(Transport):
    """A worker's end of the hub."""

    def __init__(self, worker_id: str, epoch: int, pool: Tensor | Sequence[Tensor], hub: InProcessHub) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.shards = shards_of(pool)
        self.shape: PoolShape = pool_shape(self.shards)
        self.arrived: deque[Notification] = deque()
        self._hub = hub
        self._peers: dict[str, InProcessTransport] = {}
        self._is_closed = False
        self.waker = self._arrival = Waker()
        hub.attach(self)

    def deliver(self, notification: Notification) -> None:
        """Called by the hub, in any thread."""
        self.arrived.append(notification)
        self._arrival.set()

    @override
    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_InProcessMetadata(self.worker_id, self.epoch, *self.shape))

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        theirs: _InProcessMetadata = _decode_metadata(metadata)
        check_described(theirs, worker_id, epoch)
        num_pieces(self.shape, PoolShape(theirs.num_blocks, theirs.block_bytes, theirs.num_shards), worker_id)
        known = self._peers.get(worker_id)
        if known is not None and known.epoch == epoch:
            return
        self.remove_peer(worker_id)
        peer = self._hub.find(worker_id, epoch)
        if self._is_closed or peer is None:
            raise PeerLost(f"{worker_id} epoch {epoch} is not attached to this hub")
        self._peers[worker_id] = peer

    @override
    def remove_peer(self, worker_id: str) -> None:
        self._peers.pop(worker_id, None)

    @override
    def is_quiet(self, worker_id: str) -> bool:
        return True  # bytes move inside calls only

    @override
    def poll(self) -> list[Notification]:
        arrived: list[Notification] = []
        self._arrival.clear()
        while self.arrived:  # popleft is atomic, so senders on other threads need no lock here
            arrived.append(self.arrived.popleft())
        return arrived

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._hub.detach(self)
        self._peers.clear()
        self.arrived.clear()
        self._arrival.close()

    @override
    def _copy(self, request: TransferRequest) -> Transfer:
        peer = self._peers.get(request.worker_id)
        if peer is None or self._hub.find(request.worker_id, peer.epoch) is not peer:
            raise PeerLost(f"{request.worker_id} is unknown or gone")
        check_block_ids(request, self.shape, peer.shape)
        transfer = Transfer(len(request.local_block_ids) * self.shape.block_bytes)
        local, remote = list(request.local_block_ids), list(request.remote_block_ids)
        self._hub.submit(
            InProcessWrite(self, peer, local, remote, request.notification, transfer, is_read=request.is_read)
        )
        return transfer


def _copy_blocks(write: InProcessWrite) -> None:
    """Copy as bytes, because the two pools may have different shapes."""
    sender, receiver = write.sender, write.receiver
    pieces = num_pieces(sender.shape, receiver.shape, receiver.worker_id)
    sources = _pieces_of(sender, write.local_block_ids, pieces)
    targets = _pieces_of(receiver, write.remote_block_ids, pieces)
    for source, target in zip(sources, targets, strict=True):
        if write.is_read:
            source, target = target, source
        target.copy_(source)


def _pieces_of(transport: InProcessTransport, block_ids: list[int], pieces: int) -> Iterator[Tensor]:
    rows = byte_pieces(transport.shards, pieces)
    for number in piece_ids(block_ids, transport.shape, pieces):
        shard, row = divmod(number, len(rows[0]))
        yield rows[shard][row]
