"""Transport over process groups of torch.distributed: NCCL between GPUs, gloo between CPUs. Named `nccl`.

NCCL and gloo only know sends that meet receives. A connection beside each process group makes one-sided transfers of
them (see `pair_link`). Each worker opens its own link to a peer, so two workers that write to each other have two
links.

A peer is admitted by a secret in the metadata, which only the workers' handshake hands out. The bytes of gloo and NCCL
are neither authenticated nor encrypted, so the network between the workers must be trusted.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferRequest,
    Transport,
    check_block_ids,
    check_described,
    metadata_decoder,
    pool_shape,
)
from tandem.kv_transfer.transport.pair import PairChannel
from tandem.kv_transfer.transport.pair_link import IncomingLink, LinkAdmission, LinkHello, OutgoingLink, PairLink
from tandem.kv_transfer.transport.shards import num_pieces, shards_of
from tandem.kv_transfer.transport.stream import MessageStream, connect, listen
from tandem.protocol.errors import ConfigError, IncompatiblePeer, PeerLost, TransferError
from tandem.runtime.waker import Waker

logger = logging.getLogger(__name__)

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
    num_shards: int


_decode_metadata = metadata_decoder(_CollectiveMetadata)


class CollectiveTransport(Transport):
    """All links of one pool, in both directions. `host` is the address at which peers reach this machine."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        pool: Tensor | Sequence[Tensor],
        host: str,
        mailbox: str = "",
        *,
        hello_timeout_s: float = 10.0,
        set_up_timeout_s: float = 30.0,
        copy_timeout_s: float = 30.0,
    ) -> None:
        """`mailbox` is not used.

        Time limits: for a connection that says nothing, and for a live peer that does not poll or take part.
        """
        self._worker_id = worker_id
        self._epoch = epoch
        self._shards = shards_of(pool)
        self._shape = pool_shape(self._shards)
        if len({shard.device for shard in self._shards}) > 1:
            raise ConfigError("transport='nccl' reaches one GPU of a worker; use 'nixl' for workers of several GPUs")
        self._host = host
        self._hello_timeout_s = hello_timeout_s
        self._set_up_timeout_s = set_up_timeout_s
        self._copy_timeout_s = copy_timeout_s
        self._secret = secrets.token_bytes(16)
        self._listener = listen(host)
        self._opened: dict[str, OutgoingLink] = {}
        self._accepted: list[IncomingLink] = []
        self._copied = Waker()  # set by the threads of the links
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._copied, selectors.EVENT_READ, self._copied.clear)
        self.waker = self._selector
        self._num_opened = 0
        self._is_closed = False

    @override
    def local_metadata(self) -> bytes:
        port = self._listener.getsockname()[1]
        device_type = self._shards[0].device.type
        return msgspec.msgpack.encode(
            _CollectiveMetadata(self._worker_id, self._epoch, self._host, port, self._secret, device_type, *self._shape)
        )

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        if self._is_closed:
            raise PeerLost(f"{worker_id} cannot be added: this transport is closed")
        theirs: _CollectiveMetadata = _decode_metadata(metadata)
        shape = PoolShape(theirs.num_blocks, theirs.block_bytes, theirs.num_shards)
        pieces = self._check_peer(worker_id, epoch, theirs, shape)
        known = self._opened.get(worker_id)
        if known is not None and known.epoch == epoch and not known.is_closed:
            return
        self.remove_peer(worker_id)
        stream = connect(theirs.host, theirs.port)
        self._num_opened += 1
        link = OutgoingLink(
            stream,
            self._make_channel(0),
            LinkHello(theirs.secret, self._worker_id, self._epoch, self._num_opened, pieces),
            name=f"{worker_id} epoch {epoch}",
            epoch=epoch,
            shapes=(self._shape, shape),
            timeout_s=self._set_up_timeout_s,
        )
        self._opened[worker_id] = link
        self._watch(link)
        self._run(link, link.drive)
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
    def poll(self) -> list[Notification]:
        if self._is_closed:
            return []
        for key, _ in self._selector.select(0):
            key.data()
        for opened in self._opened.values():
            self._run(opened, opened.drive)
        arrived: list[Notification] = []
        for accepted in list(self._accepted):
            self._run(accepted, accepted.drive)
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
        self._copied.close()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for link in links:
            link.channel.join(max(0.0, deadline - time.monotonic()))

    def _check_peer(self, worker_id: str, epoch: int, theirs: _CollectiveMetadata, shape: PoolShape) -> int:
        """The pieces of each block on a link to this peer. Raises TransferError if there can be none."""
        check_described(theirs, worker_id, epoch)
        device_type = self._shards[0].device.type
        if theirs.device_type != device_type:
            raise IncompatiblePeer(f"device: {device_type} here, {theirs.device_type} at {worker_id}")
        return num_pieces(self._shape, shape, worker_id)

    @override
    def _copy(self, request: TransferRequest) -> Transfer:
        link = self._opened.get(request.worker_id)
        if link is None or link.is_closed:
            raise PeerLost(f"{request.worker_id} is unknown or gone")
        check_block_ids(request, self._shape, link.remote_shape)
        transfer = link.start(request)
        self._run(link, link.drive)
        return transfer

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has gone already
            return
        stream = MessageStream(connection)
        admission = LinkAdmission(self._secret, self._hello_timeout_s, self._replace_links)
        link = IncomingLink(stream, self._make_channel(1), admission)
        self._accepted.append(link)
        self._watch(link)

    def _make_channel(self, rank: int) -> PairChannel:
        return PairChannel(rank, self._shards, self._host, self._copy_timeout_s, self._copied.set)

    def _watch(self, link: PairLink) -> None:
        self._selector.register(link.stream, selectors.EVENT_READ, lambda: self._run(link, link.receive))

    def _replace_links(self, hello: LinkHello) -> None:
        """Close the earlier links of this opener. Raises `TransferError` if this one is not its latest."""
        opener = (hello.worker_id, hello.epoch)
        for link in [link for link in self._accepted if link.hello is not None]:
            assert link.hello is not None
            if (link.hello.worker_id, link.hello.epoch) == opener:
                if link.hello.number >= hello.number:
                    raise TransferError(f"link {hello.number} was replaced by link {link.hello.number}")
                self._close(link)

    def _run(self, link: PairLink, action: Callable[[], None]) -> None:
        if link.is_closed:
            return
        try:
            action()
        except TransferError as exc:
            # An opener may leave when it likes; a peer to which we opened a link should not.
            level = logging.WARNING if isinstance(link, OutgoingLink) else logging.INFO
            logger.log(level, "link with %s is lost: %s", link.name, exc.message)
            self._close(link)

    def _close(self, link: PairLink) -> None:
        if link.is_closed:
            return
        self._selector.unregister(link.stream)
        link.close()
        if isinstance(link, IncomingLink):
            self._accepted.remove(link)
