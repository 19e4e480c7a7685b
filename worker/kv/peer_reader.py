"""The reading side of reads between workers: what is known about the peers' speed, and the reads under way.

`tandem.worker.kv.peer_read` describes the protocol and why it is safe; the other side is
`tandem.worker.kv.peer_lender`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from tandem.engine.engine import Engine
from tandem.kv_transfer.fetch_planner import FetchSource
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.base import Transport
from tandem.protocol.config import TransferConfig
from tandem.protocol.load_prior import LoadPrior
from tandem.protocol.messages import KvHolder, PeerAddress, ReadDone, ReadGrant, ReadRequest, WorkerEpoch
from tandem.scheduling.load_cost import LoadCost
from tandem.worker.kv.kv_source import PIECES_IN_FLIGHT, KvSource, OpenSource, Piece
from tandem.worker.kv.peer_read import PeerRead, ReadContext

_PRIOR = LoadPrior(latency_s=5e-3, bytes_per_s=1e9)
_LEASE_SHARE = 1 / 8  # of the pool: a prompt has two leases open, and a peer lends a quarter of its pool


class PeerReader:
    """All reads of this worker from its peers."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        links: PeerLinks,
        config: TransferConfig,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._context = ReadContext(engine, transport, links, config, clock)
        self._dead: set[WorkerEpoch] = set()  # requests may still name them
        self._costs: dict[str, LoadCost] = {}  # by worker, whatever its epoch: a restart does not change its speed
        self._reads: dict[int, PeerRead] = {}
        self._num_stuck_blocks = 0
        self._numbers = itertools.count(1)

    @property
    def lease_blocks(self) -> int:
        """Blocks of one lease, for a lender whose pool is as large as ours."""
        return max(int(self._context.engine.pool.num_blocks * _LEASE_SHARE), 1)

    @property
    def is_reading(self) -> bool:
        """Whether frequent polling of the transport helps: a read is open."""
        return bool(self._reads)

    @property
    def deadlines(self) -> list[float]:
        """When each lease ends, by this worker's clock."""
        return [read.deadline for read in self._reads.values()]

    def source(self, holder: KvHolder, *, is_moved: bool = True) -> KvSource:
        """The peer as a source of the prompt it was named for. With `is_moved` the peer's copy goes first."""
        return _PeerSource(self, holder, self._cost(holder.worker.worker_id), is_moved)

    def copy(self, peer: PeerAddress, digests: Sequence[bytes], first_block: int, now: float) -> PeerRead:
        """Request a lease on a peer's blocks of a chain, from `first_block` on, which the peer keeps."""
        return self.ask(peer, self._cost(peer.worker_id), digests, first_block, len(digests), now)

    def ask(
        self,
        peer: PeerAddress,
        cost: LoadCost,
        digests: Sequence[bytes],
        first_block: int,
        end_block: int,
        now: float,
        moved_end: bytes = b"",
    ) -> PeerRead:
        """Request a lease on a peer's blocks [first_block, end_block) of a chain; from a dead peer it fails at once."""
        self.pump(now)  # what is over no longer counts in what the peer lends
        asked = digests[first_block:end_block]
        read = PeerRead(self._context, cost, next(self._numbers), peer, asked, first_block, now, moved_end)
        self._reads[read.read_id] = read
        if peer.process in self._dead:
            read.fail()
            return read
        self._context.links.connect(peer, now)
        self._context.links.send(
            peer.process,
            ReadRequest(
                sender=self._context.links.me,
                read_id=read.read_id,
                digests=list(asked),
                parent=digests[first_block - 1] if first_block else None,
                ttl_s=self._context.config.lease_ttl_s,
            ),
        )
        return read

    def granted(self, message: ReadGrant, now: float) -> None:
        """Handle a grant of blocks."""
        read = self._reads.get(message.read_id)
        if read is None:  # given up meanwhile: the lender need not wait for its deadline
            done = ReadDone(sender=self._context.links.me, read_id=message.read_id)
            self._context.links.send(message.sender.process, done)
        elif read.peer == message.sender:
            read.grant(message, now)

    def peer_lost(self, peer: WorkerEpoch) -> None:
        """Fail all reads from a process that is given up or dead."""
        self._dead.add(peer)
        for read in self._reads.values():
            if read.peer.process == peer:
                read.fail()

    @property
    def num_stuck_blocks(self) -> int:
        """Landing blocks of reads that the transport could not cancel when their link was reset."""
        return self._num_stuck_blocks

    def pump(self, now: float) -> None:
        """Start reads that were granted, and end those that are over."""
        for read in list(self._reads.values()):
            read.pump(now)
            if read.is_over:
                del self._reads[read.read_id]
                done = ReadDone(sender=self._context.links.me, read_id=read.read_id, copied=read.copied)
                self._context.links.send(read.peer.process, done)
        if self._reads or self._num_stuck_blocks:
            self._num_stuck_blocks = sum(read.num_stuck_blocks(now) for read in self._reads.values())
            self._context.engine.scheduler.admission.lost_blocks["peer reads"] = self._num_stuck_blocks

    def _cost(self, worker_id: str) -> LoadCost:
        if worker_id not in self._costs:
            self._costs[worker_id] = LoadCost(_PRIOR, self._context.engine.block_bytes)
        return self._costs[worker_id]

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if anything is being read."""
        assert not (idle and self._reads), f"{len(self._reads)} reads from peers are open"


class _PeerSource(KvSource):
    kind = "peer"

    def __init__(self, reader: PeerReader, holder: KvHolder, cost: LoadCost, is_moved: bool) -> None:
        self.name = f"peer:{holder.worker.worker_id}"
        self.cost = cost
        self._reader = reader
        self._holder = holder
        self._is_moved = is_moved

    def look_up(self, first_block: int, digests: Sequence[bytes]) -> FetchSource:
        end_block = min(self._holder.num_blocks, len(digests))
        return FetchSource(self.name, max(end_block, first_block), self.cost.latency_s, self.cost.block_s)

    def open(self, digests: Sequence[bytes], first_block: int, end_block: int, now: float) -> OpenSource:
        moved_end = digests[end_block - 1] if self._is_moved else b""

        def ask(first_block: int, end_block: int, now: float) -> PeerRead:
            return self._reader.ask(self._holder.worker, self.cost, digests, first_block, end_block, now, moved_end)

        return _OpenPeer(ask, first_block, self._reader.lease_blocks)


class _OpenPeer(OpenSource):
    """The blocks that a prompt reads from a peer, under one lease after another, from their end to their front.

    The holder drops its copy after the last lease: only then is the chain whole here.
    """

    kind = "peer"

    def __init__(self, ask: Callable[[int, int, float], PeerRead], first_block: int, lease_blocks: int) -> None:
        self._ask = ask
        self._first_block = first_block
        self._lease_blocks = lease_blocks
        self.most_blocks = max(lease_blocks // PIECES_IN_FLIGHT, 1)  # else more than two leases would be open
        self._leases: list[PeerRead] = []

    @property
    def end_block(self) -> int | None:
        return min((lease.end_block for lease in self._leases if lease.is_short), default=None)

    def begin(self, first_block: int, end_block: int, now: float) -> Piece:
        lease = self._leases[-1] if self._leases else None
        if lease is None or first_block < lease.first_block:
            self.close()
            first = max(self._first_block, min(first_block, end_block - self._lease_blocks))
            before, lease = lease, self._ask(first, end_block, now)
            lease.before = before
            self._leases.append(lease)
        return lease.begin(first_block, end_block, now)

    def close(self) -> None:
        if self._leases:
            self._leases[-1].close()
