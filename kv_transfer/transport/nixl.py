"""Transport over NIXL (UCX): one-sided writes and reads between processes and hosts, host memory or CUDA.

Between workers of one machine whose pools are in host memory UCX opens no port (see `one_machine`). Otherwise its
traffic is neither encrypted nor authenticated: every process that can connect to UCX's port can write to this process'
memory, so the network must be trusted.

The owner's polls drive everything. How UCX behaves then, measured between two processes of one host:

- The bytes move inside `write_blocks` and `read_blocks` (CMA, the interpreter lock is released). Where UCX has a port,
  a write completes only after the receiver has polled: the receiver's UCX worker answers its flush. A read needs
  nothing of the peer.
- A transfer picks from descriptor lists of both pools that were prepared once, which takes 30 us; new lists take 100 to
  14,000 us. NIXL merges picks that are neighbours on both sides, so they are given in order of block ids: 64 MB as 8 KB
  blocks take 16 ms in one run, 65 ms block by block; from 256 KB on there is nothing to gain.
- NIXL's own notifications arrive in the order in which writes complete. So they are sent from here, when the writes
  before them are done, and numbered (see `notification_order`).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
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
    metadata_decoder,
    pool_shape,
)
from tandem.kv_transfer.transport.nixl_agent import (
    BlockList,
    NixlAgent,
    PoolMemory,
    ShardAddress,
    TransferHandle,
    needs_no_port,
)
from tandem.kv_transfer.transport.notification_order import NotificationReceiver, agent_name, number_notification
from tandem.kv_transfer.transport.one_machine import Mailbox, MailboxAddress, MailboxSender
from tandem.kv_transfer.transport.shards import num_pieces, piece_ids, shards_of
from tandem.protocol.errors import IncompatiblePeer, PeerLost, TransferError

logger = logging.getLogger(__name__)


class _NixlShard(msgspec.Struct, frozen=True, array_like=True):
    address: Annotated[int, Meta(ge=1)]
    device_id: Annotated[int, Meta(ge=0, lt=1024)]


class _NixlMetadata(msgspec.Struct, frozen=True, array_like=True):
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
    shards: Annotated[list[_NixlShard], Meta(min_length=1, max_length=1024)]
    memory_type: Literal["DRAM", "VRAM"]
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    mailbox: MailboxAddress | None  # None: it takes notifications from UCX

    @property
    def memory(self) -> PoolMemory:
        shards = [ShardAddress(shard.address, shard.device_id) for shard in self.shards]
        return PoolMemory(shards, self.memory_type, PoolShape(self.num_blocks, self.block_bytes, len(shards)))


_decode_metadata = metadata_decoder(_NixlMetadata)


class _NixlTransfer(Transfer):
    """A write or read and the notification to send when it is done. `handle` is None for a pure notification."""

    __slots__ = ("handle", "is_read", "notification", "worker_id")

    def __init__(self, request: TransferRequest, block_bytes: int) -> None:
        super().__init__(len(request.local_block_ids) * block_bytes)
        self.worker_id = request.worker_id
        self.is_read = request.is_read
        self.handle: TransferHandle | None = None
        self.notification = request.notification


@dataclass(eq=False, slots=True)
class _NixlPeer:
    worker_id: str
    epoch: int
    shape: PoolShape
    blocks: BlockList  # cut into `pieces`
    pieces: int
    link: int
    mailbox: MailboxSender | None  # its notifications go there; None: through UCX
    in_flight: deque[_NixlTransfer] = field(default_factory=deque)
    num_notifications: int = 0
    is_lost: bool = False

    def check_alive(self) -> None:
        """Raise `PeerLost` if the peer's process is known to have ended."""
        if self.mailbox is not None and self.mailbox.is_dead:
            raise PeerLost(f"the process of {self.worker_id} has ended")


class NixlTransport(Transport):
    """A NIXL agent around one pool, or its shards. `host` is the address at which peers reach this machine.

    `mailbox` is an `ipc://` endpoint in a private folder, if all peers are on this machine and have theirs there.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        pool: Tensor | Sequence[Tensor],
        host: str = "127.0.0.1",
        mailbox: str = "",
        *,
        make_agent: Callable[..., NixlAgent] = NixlAgent,
    ) -> None:
        shards = shards_of(pool)
        self._shape = pool_shape(shards)
        self._peers: dict[str, _NixlPeer] = {}
        self._notifications = NotificationReceiver()
        self._links = itertools.count(1)
        self._stuck: list[_NixlTransfer] = []  # transfers of lost links that NIXL could not cancel yet
        self._is_closed = False
        has_mailbox = bool(mailbox) and needs_no_port(shards[0])
        name = agent_name(worker_id, epoch)
        self._agent = make_agent(name, shards, self._shape, opens_port=not has_mailbox, host=host)
        self._mailbox = Mailbox(mailbox, name) if has_mailbox else None
        self.waker = self._mailbox.socket if self._mailbox is not None else None

    @override
    def local_metadata(self) -> bytes:
        addresses, memory_type, shape = self._agent.memory
        shards = [_NixlShard(*address) for address in addresses]
        mailbox = self._mailbox.address if self._mailbox is not None else None
        return msgspec.msgpack.encode(
            _NixlMetadata(self._agent.metadata, shards, memory_type, shape.num_blocks, shape.block_bytes, mailbox)
        )

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        if self._is_closed:
            raise PeerLost(f"{worker_id} cannot be added: this transport is closed")
        theirs: _NixlMetadata = _decode_metadata(metadata)
        memory = theirs.memory
        pieces = num_pieces(self._shape, memory.shape, worker_id)
        known = self._peers.get(worker_id)
        if known is not None and known.epoch == epoch and not known.is_lost:
            return
        self.remove_peer(worker_id)
        name = agent_name(worker_id, epoch)
        mailbox = self._open_mailbox(worker_id, theirs.mailbox)
        with ExitStack() as on_error:
            if mailbox is not None:
                on_error.callback(mailbox.close)
            blocks = self._agent.connect(name, theirs.agent_metadata, memory, pieces)
            on_error.pop_all()
        self._peers[worker_id] = _NixlPeer(worker_id, epoch, memory.shape, blocks, pieces, next(self._links), mailbox)
        self._notifications.keep_only(name)

    @override
    def remove_peer(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is not None:
            self._disconnect(peer)

    @override
    def is_quiet(self, worker_id: str) -> bool:
        """True on one machine once all copies have finished; always False across machines.

        There, NIXL does not know the end of a transfer that it gave up: its release cancels the part that has not
        begun, but bytes in a network card or in the buffers of a TCP connection still land. New keys for the receiver's
        memory would not stop them either: UCX checks none over TCP.
        """
        return self._mailbox is not None and all(copy.worker_id != worker_id for copy in self._stuck)

    @override
    def poll(self) -> list[Notification]:
        if self._is_closed:
            return []
        for peer in self._peers.values():
            try:
                if peer.in_flight:
                    peer.check_alive()
                self._progress(peer)
            except TransferError as exc:
                self._lose(peer, exc)
        if self._stuck:
            self._release_stuck()
        arrived = self._mailbox.take() if self._mailbox is not None else self._agent.take_notifications()
        if not arrived:
            return []
        due = self._notifications.take(arrived)
        self.num_dropped = self._notifications.num_dropped
        return due

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker_id in list(self._peers):
            self.remove_peer(worker_id)
        self._release_stuck()
        for copy in self._stuck:
            if not copy.is_settled:
                copy.settle(TransferState.LOST)
        try:
            self._agent.close()
        finally:
            if self._mailbox is not None:
                self._mailbox.close()

    def _open_mailbox(self, worker_id: str, theirs: MailboxAddress | None) -> MailboxSender | None:
        if (theirs is None) != (self._mailbox is None):
            raise IncompatiblePeer(
                f"UCX has a port here or at {worker_id}, but not at both; is UCX_TLS set for only one worker?"
            )
        return None if self._mailbox is None or theirs is None else self._mailbox.open(theirs)

    @override
    def _copy(self, request: TransferRequest) -> Transfer:
        peer = self._peers.get(request.worker_id)
        if peer is None or peer.is_lost:
            raise PeerLost(f"{request.worker_id} is unknown or gone")
        check_block_ids(request, self._shape, peer.shape)
        copy = _NixlTransfer(request, self._shape.block_bytes)
        peer.in_flight.append(copy)
        try:
            peer.check_alive()  # its process id may be reused, and CMA knows nothing but that id
            if request.local_block_ids:
                local = piece_ids(request.local_block_ids, self._shape, peer.pieces)
                remote = piece_ids(request.remote_block_ids, peer.shape, peer.pieces)
                operation = "READ" if request.is_read else "WRITE"
                copy.handle = self._agent.prepare(operation, local, peer.blocks, remote, peer.pieces)
                self._agent.begin(copy.handle)
            self._progress(peer)
        except TransferError as exc:  # it may have begun: it shares the fate of the link
            self._lose(peer, exc)
        return copy

    def _progress(self, peer: _NixlPeer) -> None:
        """Settle finished transfers, oldest first: a write's notification waits for the transfers before it."""
        while peer.in_flight and self._try_finish(peer, peer.in_flight[0]):
            peer.in_flight.popleft().settle(TransferState.DONE)
            if peer.in_flight:
                peer.in_flight[0].begin()

    def _try_finish(self, peer: _NixlPeer, copy: _NixlTransfer) -> bool:
        """Finish a transfer if possible. Returns whether it is done and its notification was sent."""
        if copy.handle is not None:
            if not self._agent.try_finish(copy.handle):
                return False
            copy.handle = None
        return not copy.notification or self._try_notify(peer, copy.notification)

    def _try_notify(self, peer: _NixlPeer, notification: bytes) -> bool:
        message = number_notification(peer.link, peer.num_notifications, notification)
        if peer.mailbox is None:
            self._agent.notify(agent_name(peer.worker_id, peer.epoch), message)
        elif not peer.mailbox.send(message):
            return False
        peer.num_notifications += 1
        return True

    def _lose(self, peer: _NixlPeer, reason: TransferError) -> None:
        logger.warning("link to %s epoch %d is lost: %s", peer.worker_id, peer.epoch, reason.message)
        self._disconnect(peer)

    def _disconnect(self, peer: _NixlPeer) -> None:
        """Release what NIXL holds for this peer; its open transfers become LOST.

        A read that cannot be cancelled may still land in our pool: it becomes LOST only when it can be cancelled.
        """
        for copy in peer.in_flight:
            if not self._try_release(copy):
                self._stuck.append(copy)
            if copy.handle is None or not copy.is_read:
                copy.settle(TransferState.LOST)
        peer.in_flight.clear()
        if peer.is_lost:
            return
        peer.is_lost = True
        if peer.mailbox is not None:
            peer.mailbox.close()
        try:
            self._agent.disconnect(agent_name(peer.worker_id, peer.epoch), peer.blocks)
        except TransferError as exc:
            logger.warning("%s", exc.message)

    def _release_stuck(self) -> None:
        stuck, self._stuck = self._stuck, []
        for copy in stuck:
            if not self._try_release(copy):
                self._stuck.append(copy)
            elif not copy.is_settled:
                copy.settle(TransferState.LOST)

    def _try_release(self, copy: _NixlTransfer) -> bool:
        """Release a transfer. Returns whether NIXL holds nothing more for it."""
        if copy.handle is not None:
            # A copy between processes that has begun goes on after its release, so its end is awaited.
            if self._mailbox is not None and self._agent.is_moving(copy.handle):
                return False
            if not self._agent.try_release(copy.handle):
                return False
            copy.handle = None
        return True
