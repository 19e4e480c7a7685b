"""The contract of a KV transport, and the table of transports.

A transport owns the way into and out of one block pool. It knows blocks by number and peers by worker id; leases,
requests and what a notification means are the business of its caller.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from protocol.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from torch import Tensor

    from kv_transfer.transport.in_process import InProcessHub

__all__ = [
    "Notification",
    "PoolShape",
    "Transfer",
    "TransferState",
    "Transport",
    "check_block_ids",
    "create_transport",
    "pool_shape",
]


class TransferState(enum.Enum):
    """Where a write stands.

    FAILED and LOST differ in what may still happen at the receiver, and so in whether its blocks may be reused.
    """

    PENDING = "pending"
    DONE = "done"  # every byte is in place and the notification is on its way
    FAILED = "failed"  # not done, and no byte of it will land from now on
    LOST = "lost"  # the link broke: bytes already under way may still land


class Transfer:
    """One write. Its state changes only inside `write_blocks`, `poll`, `remove_peer` and `close` of its transport.

    The local blocks must stay unchanged until it is settled. There is nothing to release.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = TransferState.PENDING

    @property
    def is_settled(self) -> bool:
        """Whether the state will not change any more."""
        return self.state is not TransferState.PENDING


class Notification(NamedTuple):
    """Bytes a peer attached to a write of its own."""

    worker_id: str
    epoch: int
    payload: bytes


class PoolShape(NamedTuple):
    """Size of a block pool; `block_bytes` must be the same on both sides of a link."""

    num_blocks: int
    block_bytes: int


class Transport(abc.ABC):
    """One-sided writes of blocks from this worker's pool into its peers' pools.

    No method waits for a peer. All calls come from one thread; which one is up to the owner.

    Both sides of a link must `poll` often: a write may need the receiver's polls to complete, and the sender's poll
    sends its notification. An idle poll costs about a microsecond.
    """

    @abc.abstractmethod
    def local_metadata(self) -> bytes:
        """What a peer needs to write here, for `PeerHello.transport_metadata`. Opaque to everyone else."""

    @abc.abstractmethod
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        """Make a peer writable. A known worker id with another epoch is a restart: it replaces the old peer.

        Adding a peer again that is known and not lost changes nothing. Raises `IncompatiblePeer` for another block
        size, `TransferError` for metadata that does not describe this peer, `PeerLost` if it is already gone.
        """

    @abc.abstractmethod
    def remove_peer(self, worker_id: str) -> None:
        """Forget a peer; its unsettled writes become LOST. Unknown ids are ignored."""

    @abc.abstractmethod
    def write_blocks(
        self,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
    ) -> Transfer:
        """Start copying `local_block_ids[i]` of our pool over `remote_block_ids[i]` of the peer's pool.

        The peer's `poll` returns the notification once all bytes of this write are in place, and notifications of
        one link arrive in the order of their writes. Without blocks the write is an ordered notification; an empty
        notification is not sent. The copy may run inside this call, on the caller's thread.

        Raises `PeerLost` for an unknown or lost peer and `TransferError` for ids that are outside of either pool,
        not paired, or repeated at the receiver; then nothing was written. A peer found dead meanwhile makes it LOST.
        """

    @abc.abstractmethod
    def poll(self) -> list[Notification]:
        """Drive unsettled writes and return the notifications that arrived, oldest first per peer.

        A peer that has our metadata may write before we added it, so the sender may be one not added here.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of all peers and of the pool; unsettled writes become LOST. Closing twice is fine."""


def pool_shape(pool: Tensor) -> PoolShape:
    """Shape of a pool `[num_blocks, ...]`. Raises `TransferError` unless its blocks are contiguous and not empty."""
    if pool.dim() < 2 or not pool.is_contiguous() or pool.numel() == 0:
        raise TransferError(
            f"a block pool must be a contiguous, non-empty tensor [num_blocks, ...], not {tuple(pool.shape)} "
            f"with strides {pool.stride()}"
        )
    num_blocks = pool.shape[0]
    return PoolShape(num_blocks, pool.numel() // num_blocks * pool.element_size())


def check_block_ids(
    local_block_ids: Sequence[int], remote_block_ids: Sequence[int], local: PoolShape, remote: PoolShape
) -> None:
    """Raise `TransferError` unless the ids pair up, lie within their pools and name no remote block twice."""
    if len(local_block_ids) != len(remote_block_ids):
        raise TransferError(f"{len(local_block_ids)} local blocks cannot fill {len(remote_block_ids)} remote blocks")
    if not local_block_ids:
        return
    for side, block_ids, shape in (("local", local_block_ids, local), ("remote", remote_block_ids, remote)):
        if min(block_ids) < 0 or max(block_ids) >= shape.num_blocks:
            raise TransferError(
                f"{side} block ids {min(block_ids)}..{max(block_ids)} leave the pool of {shape.num_blocks} blocks"
            )
    if len(set(remote_block_ids)) != len(remote_block_ids):
        raise TransferError("a write names a remote block twice")


def create_transport(
    name: str, *, worker_id: str, epoch: int, pool: Tensor, hub: InProcessHub | None = None
) -> Transport:
    """Transport of this name around `pool`, a contiguous tensor `[num_blocks, ...]` that must outlive it.

    `hub` joins `in_process` transports; the others do not use it.
    """
    if name not in _FACTORIES:
        raise ConfigError(f"transport={name!r} is unknown; choose one of {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name](worker_id, epoch, pool, hub)


def _create_in_process(worker_id: str, epoch: int, pool: Tensor, hub: InProcessHub | None) -> Transport:
    from kv_transfer.transport.in_process import InProcessTransport

    if hub is None:
        raise ConfigError("transport='in_process' needs the hub that joins the transports of this process")
    return InProcessTransport(worker_id, epoch, pool, hub)


def _create_nixl(worker_id: str, epoch: int, pool: Tensor, hub: InProcessHub | None) -> Transport:
    from kv_transfer.transport.nixl import NixlTransport

    return NixlTransport(worker_id, epoch, pool)


_FACTORIES: dict[str, Callable[[str, int, Tensor, InProcessHub | None], Transport]] = {
    "in_process": _create_in_process,
    "nixl": _create_nixl,
}
