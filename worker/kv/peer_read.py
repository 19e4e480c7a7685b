"""Reads of a peer's blocks: leases on blocks of its pool or host memory, and the pieces that are read under each.

    reader                                   lender
      | ReadRequest(digests) ------------------> | takes references, brings blocks up from its host tier
      | <---------------- ReadGrant(block ids)   | keeps them until the reader is done, dead, or out of time
      | one-sided reads, piece by piece          | (takes no part)
      | ReadDone ------------------------------> | lets go; evicts its copy first, if the reader has one now

The worker's loop pumps both sides, and neither waits. A read is safe because of time. The proof:

1. The reader reads its clock at a moment A, adds the ttl and only then sends its request. Its lease ends at A + ttl.
2. The lender reads its clock after it has received the request, so after A, and lets go no sooner than 1.01 x ttl
   later. If the rates of the two clocks differ by less than a hundredth, that is after the reader's deadline.
3. The reader sees the end of a piece, and only then reads its clock. If that is before its deadline, the bytes were
   read while the lender held them. Any other piece is thrown away.

The clocks need not agree, but must run about equally fast. The reader's also counts the time for which its machine is
suspended. No clock reading is passed from one of these steps to another: time passes between any two lines.

A read that was given up may still write: its landing blocks stay out of the pool until the transport says it is over.

A long prompt is read under one lease after another, from its end to its front, as its pieces are: a lender keeps only a
part of its pool from eviction, and no lease has to outlast the whole transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from tandem.engine.device import Mark
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import KvPool
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.kv_transfer.transport.checksum import wrong_blocks
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import PeerAddress, ReadGrant
from tandem.scheduling.load_cost import LoadCost
from tandem.worker.kv.kv_source import Piece

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReadContext:
    """Context that all reads of one worker share."""

    engine: Engine
    transport: Transport
    links: PeerLinks
    config: TransferConfig
    clock: Callable[[], float]
    num_landing_blocks: int = 0  # of all pieces that are not placed or dropped yet


class PeerRead:
    """One lease on a peer's blocks."""

    def __init__(
        self,
        context: ReadContext,
        cost: LoadCost,
        read_id: int,
        peer: PeerAddress,
        digests: Sequence[bytes],
        first_block: int,
        now: float,
        moved_end: bytes,
    ) -> None:
        """`moved_end` is the last digest of a chain that the peer may drop once it is here; or empty."""
        self.cost = cost
        self.read_id = read_id
        self.peer = peer
        self.first_block = first_block
        self.end_block = first_block + len(digests)
        self.asked_at = now
        self.deadline = context.clock() + context.config.lease_ttl_s  # NOTE: before the request is sent
        self.block_ids: list[int] | None = None  # at the peer; None before the grant
        self.checksums: list[bytes] = []
        self.is_failed = False
        self.before: PeerRead | None = None  # whose pieces are placed before these, and so must land before them
        self._digests = digests
        self._moved_end = moved_end
        self.context = context
        self._pieces: list[PeerPiece] = []  # pieces that are not settled
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether no piece is under way, and none will be."""
        return self._is_closed and not self._pieces

    @property
    def is_late(self) -> bool:
        """Whether the lease has ended: what is seen now may have happened after the lender let go."""
        return self.context.clock() >= self.deadline

    @property
    def is_short(self) -> bool:
        """Whether the peer lent less than was asked for."""
        return self.end_block < self.first_block + len(self._digests)

    @property
    def is_waiting(self) -> bool:
        """Whether a piece has no landing blocks yet."""
        return any(not piece.landing and not piece.is_dropped for piece in self._pieces)

    @property
    def copied(self) -> bytes:
        """The last digest of the chain, if it was to move here and has; it has not if the request ended before."""
        return self._moved_end if self._moved_end in self.context.engine.pool else b""

    def begin(self, first_block: int, end_block: int, now: float) -> PeerPiece:
        """Read some of the blocks, once the peer has granted them and the link is up."""
        piece = PeerPiece(self, first_block, end_block, now)
        self._pieces.append(piece)
        return piece

    def close(self) -> None:
        """Begin no more pieces. The read is over when those under way are."""
        self._is_closed = True

    def grant(self, message: ReadGrant, now: float) -> None:
        """Take the blocks that the peer lends. A grant that does not fit the request ends the read."""
        num_blocks = len(message.block_ids)
        if num_blocks > len(self._digests) or len(message.checksums) not in (0, num_blocks):
            logger.warning("%s granted %d blocks, not what was asked for", self.peer.worker_id, num_blocks)
            self.fail()
        elif self.block_ids is None:
            self.block_ids, self.checksums = list(message.block_ids), list(message.checksums)
            self.end_block = self.first_block + len(self.block_ids)
            self.cost.observe_latency(now - self.asked_at)

    def fail(self) -> None:
        """End the read: nothing more is read."""
        self.is_failed = True

    def pump(self, now: float) -> None:
        """Start the waiting pieces, and settle those that are done."""
        if self.is_late:
            self.is_failed = True
        if self.num_stuck_blocks(now):  # they would wait forever, and so would the link
            self.context.links.reset(self.peer.process)
        is_ready = self.block_ids is not None and self.context.links.is_ready(self.peer)
        is_ready = is_ready and not (self.before is not None and self.before.is_waiting)
        for piece in self._pieces:
            if piece.transfer is None and not piece.is_dropped and not self.is_failed and is_ready:
                self._start(piece)
                # Otherwise a later piece would take the room that this one waits for.
                is_ready = bool(piece.landing) or piece.is_refused
        self._pieces = [piece for piece in self._pieces if not piece.settle()]

    def num_stuck_blocks(self, now: float) -> int:
        """Blocks that the transport has been writing for longer than any read may take."""
        config = self.context.config
        if now - self.asked_at < config.lease_ttl_s + config.handoff_timeout_s:
            return 0
        return sum(piece.num_blocks for piece in self._pieces if piece.is_moving)

    def _start(self, piece: PeerPiece) -> None:
        assert self.block_ids is not None
        remote = self.block_ids[piece.first_block - self.first_block : piece.end_block - self.first_block]
        engine = self.context.engine
        if not piece.landing:
            if len(remote) < piece.num_blocks:  # the peer lends less than was expected
                piece.is_refused = True
                return
            # A read must not preempt a sequence.
            has_room = piece.num_blocks <= engine.scheduler.admission.num_spare_blocks
            landing = engine.pool.try_allocate(piece.num_blocks) if has_room else None
            if landing is None:
                piece.is_refused = not self.context.num_landing_blocks  # else there will be room
                return
            piece.hold(landing)
            piece.allocated = engine.stream.record()
        if not engine.stream.is_done(piece.allocated):  # it may still use blocks that were freed
            return
        try:
            piece.transfer = self.context.transport.read_blocks(self.peer.worker_id, remote, piece.landing)
        except TransferError as exc:
            if isinstance(exc, PeerLost):
                self.context.links.broke(self.peer.process)
            self.is_failed = True


class PeerPiece(Piece):
    """Blocks that are read into landing blocks of our pool, which then replace a sequence's own."""

    kind = "peer"

    def __init__(self, read: PeerRead, first_block: int, end_block: int, begun_at: float) -> None:
        super().__init__(first_block, end_block, begun_at)
        self.transfer: Transfer | None = None
        self.landing: list[int] = []
        self.allocated: Mark | None = None  # recorded when they were taken from the pool
        self.is_refused = False  # whether this piece cannot be read; others may
        self.is_dropped = False
        self._read = read
        self._engine = read.context.engine
        self._is_done = False
        self._has_arrived = False

    def hold(self, landing: list[int]) -> None:
        """Land in these blocks from now on."""
        self._read.context.num_landing_blocks += len(landing) - len(self.landing)
        self.landing = landing

    @property
    def is_moving(self) -> bool:
        """Whether the transport is writing it."""
        return self.transfer is not None and not self.transfer.is_settled

    @property
    @override
    def is_done(self) -> bool:
        return self._is_done

    @property
    @override
    def is_complete(self) -> bool:
        return self._has_arrived

    def settle(self) -> bool:
        """Note the end of the transfer. Returns whether the transport will no longer touch the landing blocks."""
        if self.transfer is None:
            self._is_done = self._read.is_failed or self.is_refused or self.is_dropped
        elif self.transfer.is_settled:
            self._is_done = True
            if self.transfer.state is TransferState.LOST:
                self._read.is_failed = True
                self._read.context.links.broke(self._read.peer.process)
            # NOTE: its clock is read here, after the end was seen.
            is_good = self.transfer.state is TransferState.DONE and not self._read.is_late and not self.is_dropped
            self._has_arrived = is_good and not self._wrong_blocks()
        elif self._read.is_failed:
            return False
        if self._is_done and (self.is_dropped or not self._has_arrived):
            self._release()
        return self._is_done

    @override
    def learn(self) -> None:
        if self._has_arrived and self.transfer is not None and self.transfer.seconds is not None:
            self._read.cost.observe(self.num_blocks, self.transfer.seconds)

    @override
    def learn_late(self, now: float) -> None:
        cost, waited_s = self._read.cost, now - self._read.asked_at
        if self._read.block_ids is None:
            cost.latency_s = max(2 * cost.latency_s, waited_s)
        else:
            cost.observe_at_least(self.num_blocks, now - self.begun_at)

    @override
    def place(self, sequence: EngineSequence, first_block: int, kv: KvPool) -> int:
        """Swap blocks instead of copying them."""
        start = first_block - self.first_block
        replaced = sequence.blocks[first_block : self.end_block]
        sequence.blocks[first_block : self.end_block] = self.landing[start:]
        self.hold(self.landing[:start])
        self._engine.pool.release(replaced)
        self._release()
        return 0

    def take(self) -> list[int]:
        """Take the blocks of a complete piece, instead of `place`. The caller releases them."""
        blocks = self.landing
        self.hold([])
        return blocks

    @override
    def drop(self) -> None:
        self.is_dropped = True
        if self._is_done:
            self._release()

    def _release(self) -> None:
        self._engine.pool.release(self.take())

    def _wrong_blocks(self) -> list[int]:
        start = self.first_block - self._read.first_block
        checksums = self._read.checksums[start : start + self.num_blocks]
        wrong = wrong_blocks(self._engine.kv.shards, self.landing, checksums) if checksums else []
        if wrong:
            logger.warning("%d KV blocks read from %s are damaged", len(wrong), self._read.peer.worker_id)
        return wrong
