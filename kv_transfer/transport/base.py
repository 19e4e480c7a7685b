"""The contract of a KV transport.

A transport owns all access of peers to one block pool. It knows blocks by number and peers by worker id. Its caller
knows leases, requests and the meaning of notifications.
"""

from __future__ import annotations

import abc
import enum
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import TransferError
from tandem.protocol.messages import WorkerEpoch

if TYPE_CHECKING:
    from torch import Tensor


class TransferState(enum.Enum):
    """The state of a write or a read.

    After FAILED the receiver's blocks may be reused, after LOST not yet.
    """

    PENDING = "pending"
    DONE = "done"  # every byte is in place and the notification is sent
    FAILED = "failed"  # not done, and none of its bytes can land any more
    LOST = "lost"  # the link broke: bytes of a write may still land at the peer; bytes of a read cannot land here


class Transfer:
    """One write or read. Its state changes only inside calls of its transport.

    Until it is settled the local blocks of a write must stay unchanged, and those of a read belong to it. There is
    nothing to release.

    `num_bytes` excludes the notification. `seconds`, None until it is settled, is how long its link was busy with it:
    from the call, or from the end of the transfer before it on the link, to the poll that saw its end.
    """

    __slots__ = ("_begun", "num_bytes", "seconds", "state")

    def __init__(self, num_bytes: int = 0) -> None:
        self.state = TransferState.PENDING
        self.num_bytes = num_bytes
        self.seconds: float | None = None
        self._begun = time.perf_counter()

    @property
    def is_settled(self) -> bool:
        """Whether the state is final."""
        return self.state is not TransferState.PENDING

    def begin(self) -> None:
        """Called by its transport when it is the first on its link: `seconds` counts from here."""
        self._begun = time.perf_counter()

    def settle(self, state: TransferState) -> None:
        """Called by its transport, once."""
        self.state = state
        self.seconds = time.perf_counter() - self._begun


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One write to a peer's pool, or one read from it: `local_block_ids[i]` pairs with `remote_block_ids[i]`."""

    worker_id: str  # of the peer
    local_block_ids: Sequence[int]
    remote_block_ids: Sequence[int]
    notification: bytes = b""
    is_read: bool = False


class Notification(NamedTuple):
    """Bytes a peer attached to a write of its own."""

    worker_id: str
    epoch: int
    payload: bytes

    @property
    def sender(self) -> WorkerEpoch:
        """The process that wrote."""
        return WorkerEpoch(self.worker_id, self.epoch)


class PoolShape(NamedTuple):
    """Size of a block pool; `block_bytes`, of whole blocks, must be the same on both sides of a link."""

    num_blocks: int
    block_bytes: int
    num_shards: int = 1


class BlockRun(NamedTuple):
    """Consecutive blocks on both sides: `[local, local + num_blocks)` and `[remote, remote + num_blocks)`."""

    local: int
    remote: int
    num_blocks: int


class Transport(abc.ABC):
    """One-sided writes and reads of blocks between this worker's pool and those of its peers.

    No method waits for a peer. All calls come from one thread, which the owner chooses.

    Both sides of a link must `poll` often, and whenever `waker` says so: a transfer may need the peer's polls to
    complete, and the sender's poll may have to send its notification. An idle poll costs a few microseconds.
    """

    num_dropped = 0  # notifications that `poll` did not return: damaged, missing, or from an unknown sender

    waker: Any = None
    """What `zmq.Poller` may wait for: it is readable when `poll` has something to do. None: only polling tells."""

    @abc.abstractmethod
    def local_metadata(self) -> bytes:
        """What a peer needs to write here, for `PeerHello.transport_metadata`. Only transports can read it."""

    @abc.abstractmethod
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        """Make a peer writable. A known worker id with another epoch has restarted: it replaces the old peer.

        Adding a known peer again changes nothing unless it was lost. Raises `IncompatiblePeer` for another block size,
        `TransferError` for metadata that does not describe this peer, `PeerLost` if it is already gone.
        """

    @abc.abstractmethod
    def remove_peer(self, worker_id: str) -> None:
        """Forget a peer; open transfers with it become LOST. Unknown ids are ignored.

        The peer's own writes and reads here go on: only leases end them.
        """

    @abc.abstractmethod
    def is_quiet(self, worker_id: str) -> bool:
        """Whether no byte of the writes to this peer that are LOST now can land any more.

        True only if the transport can prove it; opening the link again may be the proof. A transport that cannot prove
        it always answers False: then those blocks wait for the end of this process.
        """

    def write_blocks(
        self,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
    ) -> Transfer:
        """Start copying `local_block_ids[i]` of our pool over `remote_block_ids[i]` of the peer's pool.

        The peer's `poll` returns the notification once all bytes of this write are in place. Notifications of one link
        arrive in the order of their writes. Without blocks the write is only an ordered notification; an empty
        notification is not sent. The copy may run inside this call, on the caller's thread. It waits for no work of a
        GPU: the caller offers blocks that are in memory, and reads into blocks that no such work uses any more.

        Raises `PeerLost` for an unknown or lost peer, and `TransferError` for ids that are outside either pool, not
        paired, or repeated at the receiver; then nothing was written. If the peer is found dead the transfer is LOST.
        """
        return self._copy(TransferRequest(worker_id, local_block_ids, remote_block_ids, notification))

    def read_blocks(self, worker_id: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        """Start copying `remote_block_ids[i]` of the peer's pool over `local_block_ids[i]` of ours.

        The peer's owner takes no part and is not told: the caller must hold a lease under which the remote blocks do
        not change. A read may run beside writes of the same link. The copy may run inside this call.

        Raises the same errors as `write_blocks`, with our pool as the receiver.
        """
        return self._copy(TransferRequest(worker_id, local_block_ids, remote_block_ids, is_read=True))

    @abc.abstractmethod
    def _copy(self, request: TransferRequest) -> Transfer:
        """Start a write, or a read."""

    @abc.abstractmethod
    def poll(self) -> list[Notification]:
        """Drive open transfers and return the notifications that arrived, oldest first per peer.

        A peer that has our metadata may write before we have added it, so the sender may be unknown here.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release all peers and the pool; open transfers become LOST. Closing twice is fine."""


def metadata_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Decodes a peer's metadata into this type. Raises `TransferError` if they cannot be read."""
    decode = safe_decoder(kind)

    def decode_metadata(metadata: bytes) -> Any:
        try:
            return decode(metadata)
        except msgspec.MsgspecError as exc:
            raise TransferError(f"transport metadata cannot be read: {exc}") from exc

    return decode_metadata


def check_described(theirs: Any, worker_id: str, epoch: int) -> None:
    """Raise `TransferError` unless these metadata describe this process."""
    if (theirs.worker_id, theirs.epoch) != (worker_id, epoch):
        raise TransferError(f"metadata of {worker_id} epoch {epoch} describes {theirs.worker_id} epoch {theirs.epoch}")


def pool_shape(shards: Sequence[Tensor]) -> PoolShape:
    """Shape of a pool of shards `[num_blocks, ...]`.

    Raises `TransferError` unless all have one shape, and their blocks are contiguous and not empty.
    """
    first = shards[0]
    for shard in shards:
        if shard.dim() < 2 or not shard.is_contiguous() or shard.numel() == 0 or shard.shape != first.shape:
            raise TransferError(
                f"a block pool must be a contiguous, non-empty tensor [num_blocks, ...], not {tuple(shard.shape)} "
                f"with strides {shard.stride()}"
            )
    num_blocks = first.shape[0]
    return PoolShape(num_blocks, first.numel() // num_blocks * first.element_size() * len(shards), len(shards))


def check_block_ids(request: TransferRequest, local: PoolShape, remote: PoolShape) -> None:
    """Raise `TransferError` unless the ids pair up, lie within their pools and write no block twice."""
    local_block_ids, remote_block_ids = request.local_block_ids, request.remote_block_ids
    if len(local_block_ids) != len(remote_block_ids):
        raise TransferError(f"{len(local_block_ids)} local blocks do not pair with {len(remote_block_ids)} remote ones")
    if not local_block_ids:
        return
    for side, block_ids, shape in (("local", local_block_ids, local), ("remote", remote_block_ids, remote)):
        if min(block_ids) < 0 or max(block_ids) >= shape.num_blocks:
            raise TransferError(
                f"{side} block ids {min(block_ids)}..{max(block_ids)} leave the pool of {shape.num_blocks} blocks"
            )
    written, fault = (
        (local_block_ids, "a read names a local block twice")
        if request.is_read
        else (remote_block_ids, "a write names a remote block twice")
    )
    if len(set(written)) != len(written):
        raise TransferError(fault)


def block_runs(local_block_ids: Sequence[int], remote_block_ids: Sequence[int]) -> list[BlockRun]:
    """The pairs of blocks as few runs, in order of local ids. Pools often allocate neighbours, though not in order."""
    runs: list[BlockRun] = []
    for local, remote in sorted(zip(local_block_ids, remote_block_ids, strict=True)):
        if runs:
            last = runs[-1]
            if local - last.local == remote - last.remote == last.num_blocks:
                runs[-1] = last._replace(num_blocks=last.num_blocks + 1)
                continue
        runs.append(BlockRun(local, remote, 1))
    return runs


def is_loopback(host: str) -> bool:
    """Whether this address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
