"""KV of one worker read by another: a prompt's blocks out of the pool, or the host memory, of the peer that has them.

    reader                                   holder
      | ReadRequest(digests) ------------------> | takes references, brings blocks up from its host tier
      | <---------------- ReadGrant(block ids)   | keeps them until the reader is done, dead, or out of time
      | one-sided reads, piece by piece          | (takes no part)
      | ReadDone ------------------------------> | lets go; evicts its copy first, if the reader has one now

Both sides are pumped by the worker's loop and never wait. What makes it safe is time, and this is the proof:

1. The reader reads its clock, adds the ttl and only then sends its request: the lease ends for it `ttl` after A.
2. The holder reads its clock after it has received the request, so after A, and lets go no sooner than 1.01 x ttl
   later. As long as the rates of two clocks differ by less than a hundredth, that is after the reader's deadline.
3. The reader sees the end of a piece, and only then reads its clock. Before the deadline, the bytes were read while the
   holder held them; any other piece is thrown away.

Clocks need to run about equally fast, not to agree. The reader's also counts the time its machine is suspended. No
reading of a clock is passed from one of these steps to another: time passes between any two lines.

A read moves a prefix: were both copies kept as long as any, pools would hold half as many prefixes. Until its room is
needed the holder's can still be found, and a block from which another chain hangs stays where it is in the order.

A read that was given up may still write: its landing blocks stay out of the pool until the transport says it is over.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.checksum import CHECKED_SHARE, block_checksums, wrong_blocks
from tandem.kv_transfer.fetch_planner import FetchSource
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.tiers import TierRead
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import KvHolder, PeerAddress, ReadDone, ReadGrant, ReadRequest
from tandem.worker.kv.kv_source import KvSource, LoadCost, LoadPrior, OpenSource, Piece

if TYPE_CHECKING:
    from tandem.worker.kv.cached_tier import CachedTier

__all__ = ["PeerHolder", "PeerReader"]

logger = logging.getLogger(__name__)

_PRIOR = LoadPrior(latency_s=5e-3, bytes_per_s=1e9)
_HELD_LONGER = 1.01  # times what the reader counts with: by so much the rates of two clocks may differ
# Of a holder's pool, the share that readers may keep from being evicted at one time.
_MAX_HELD_SHARE = 0.25


class PeerReader:
    """The reading side: what this worker knows of its peers' speed, and its reads under way."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        links: PeerLinks,
        config: TransferConfig,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.engine = engine
        self.transport = transport
        self.links = links
        self.config = config
        self.clock = clock
        self._dead: set[tuple[str, int]] = set()  # worker and epoch; requests may still name them
        self._costs: dict[str, LoadCost] = {}  # by worker, whatever its epoch: a restart does not change its speed
        self._reads: dict[int, _PeerRead] = {}
        self._num_stuck_blocks = 0
        self._numbers = itertools.count(1)

    @property
    def is_reading(self) -> bool:
        """Whether polling the transport often makes something finish sooner."""
        return bool(self._reads)

    def source(self, holder: KvHolder, *, is_moved: bool = True) -> KvSource:
        """The peer as a source of the prompt it was named for; without `is_moved` its copy is not one too many."""
        worker_id = holder.worker.worker_id
        if worker_id not in self._costs:
            self._costs[worker_id] = LoadCost(_PRIOR, self.engine.block_bytes)
        return _PeerSource(self, holder, self._costs[worker_id], is_moved)

    def ask(
        self,
        peer: PeerAddress,
        cost: LoadCost,
        digests: Sequence[bytes],
        first_block: int,
        end_block: int,
        now: float,
        *,
        is_moved: bool,
    ) -> _PeerRead:
        """Open a lease on a peer's blocks [first_block, end_block) of a chain, and the link to it.

        Of a peer that is known to be dead nothing can be read.
        """
        asked = digests[first_block:end_block]
        read = _PeerRead(self, cost, next(self._numbers), peer, asked, first_block, now, is_moved)
        self._reads[read.read_id] = read
        if (peer.worker_id, peer.epoch) in self._dead:
            read.fail()
            return read
        self.links.connect(peer, now)
        self.links.send(
            peer.worker_id,
            peer.epoch,
            ReadRequest(
                sender=self.links.me,
                read_id=read.read_id,
                digests=list(asked),
                parent=digests[first_block - 1] if first_block else None,
                ttl_s=self.ttl_s,
            ),
        )
        return read

    @property
    def ttl_s(self) -> float:
        """Length of a lease."""
        return self.config.lease_ttl_s

    def granted(self, message: ReadGrant, now: float) -> None:
        """Take a `ReadGrant`."""
        read = self._reads.get(message.read_id)
        if read is None:  # given up meanwhile: the holder need not wait for its own deadline
            done = ReadDone(sender=self.links.me, read_id=message.read_id)
            self.links.send(message.sender.worker_id, message.sender.epoch, done)
        elif read.peer == message.sender:
            read.grant(message, now)

    def peer_lost(self, worker_id: str, epoch: int) -> None:
        """The process of that epoch is given up or dead."""
        self._dead.add((worker_id, epoch))
        for read in self._reads.values():
            if (read.peer.worker_id, read.peer.epoch) == (worker_id, epoch):
                read.fail()

    @property
    def num_stuck_blocks(self) -> int:
        """Blocks into which a read may still write whose link was reset: the transport could not cancel it."""
        return self._num_stuck_blocks

    def pump(self, now: float) -> None:
        """Start what may be read, notice what is over."""
        for read in list(self._reads.values()):
            read.pump(now)
            if read.is_over:
                del self._reads[read.read_id]
                done = ReadDone(sender=self.links.me, read_id=read.read_id, has_copy=read.has_copy and read.is_moved)
                self.links.send(read.peer.worker_id, read.peer.epoch, done)
        if self._reads or self._num_stuck_blocks:
            self._num_stuck_blocks = sum(read.num_stuck_blocks(now) for read in self._reads.values())
            self.engine.scheduler.lost_blocks["peer reads"] = self._num_stuck_blocks

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
        peer = self._holder.worker
        return self._reader.ask(peer, self.cost, digests, first_block, end_block, now, is_moved=self._is_moved)


class _PeerRead(OpenSource):
    """One lease on a peer's blocks."""

    kind = "peer"

    def __init__(
        self,
        reader: PeerReader,
        cost: LoadCost,
        read_id: int,
        peer: PeerAddress,
        digests: Sequence[bytes],
        first_block: int,
        now: float,
        is_moved: bool,
    ) -> None:
        self.cost = cost
        self.read_id = read_id
        self.peer = peer
        self.first_block = first_block
        self.end_block = first_block + len(digests)
        self.is_moved = is_moved
        self.asked_at = now
        self._deadline = reader.clock() + reader.ttl_s  # NOTE: before the request is sent
        self.block_ids: list[int] | None = None  # at the peer; None until it has granted them
        self.checksums: list[bytes] = []
        self.is_failed = False
        self._digests = digests
        self._reader = reader
        self._pieces: list[_PeerPiece] = []  # those that are not settled
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is under way and nothing will be."""
        return self._is_closed and not self._pieces

    @property
    def is_late(self) -> bool:
        """Whether what is seen now may have happened after the holder let go."""
        return self._reader.clock() >= self._deadline

    @property
    def has_copy(self) -> bool:
        """Whether what the peer granted is findable here: it is not where the request ended before that."""
        return bool(self.block_ids) and self._digests[len(self.block_ids or []) - 1] in self._reader.engine.pool

    def begin(self, first_block: int, end_block: int, now: float) -> Piece:
        piece = _PeerPiece(self, self._reader.engine, first_block, end_block, now)
        self._pieces.append(piece)
        return piece

    def close(self) -> None:
        self._is_closed = True

    def grant(self, message: ReadGrant, now: float) -> None:
        """The peer holds these blocks for us. A grant that is no answer to what was asked ends the read."""
        num_blocks = len(message.block_ids)
        if num_blocks > len(self._digests) or len(message.checksums) not in (0, num_blocks):
            logger.warning("%s granted %d blocks, not what was asked for", self.peer.worker_id, num_blocks)
            self.fail()
        elif self.block_ids is None:
            self.block_ids, self.checksums = list(message.block_ids), list(message.checksums)
            self.end_block = self.first_block + len(self.block_ids)
            self.cost.observe_latency(now - self.asked_at)

    def fail(self) -> None:
        """Nothing more can be read."""
        self.is_failed = True

    def pump(self, now: float) -> None:
        """Start the pieces that wait, settle those that are over."""
        if self.is_late:
            self.is_failed = True
        if self.num_stuck_blocks(now):  # they, and the link, would wait for ever
            self._reader.links.reset(self.peer.worker_id, self.peer.epoch)
        is_ready = self.block_ids is not None and self._reader.links.is_ready(self.peer)
        for piece in self._pieces:
            if piece.transfer is None and not piece.is_dropped and not self.is_failed and is_ready:
                self._start(piece)
        self._pieces = [piece for piece in self._pieces if not piece.settle()]

    def num_stuck_blocks(self, now: float) -> int:
        """Blocks on which the transport has been at work for longer than anything may take."""
        config = self._reader.config
        if now - self.asked_at < config.lease_ttl_s + config.handoff_timeout_s:
            return 0
        return sum(piece.num_blocks for piece in self._pieces if piece.is_moving)

    def _start(self, piece: _PeerPiece) -> None:
        assert self.block_ids is not None
        remote = self.block_ids[piece.first_block - self.first_block : piece.end_block - self.first_block]
        engine = self._reader.engine
        has_room = piece.num_blocks <= engine.scheduler.num_spare_blocks  # what lands here must not preempt anybody
        landing = engine.pool.try_allocate(piece.num_blocks) if has_room and len(remote) == piece.num_blocks else None
        if landing is None:  # the peer has less than it was said to, or there is no room
            piece.is_refused = True
            return
        piece.landing = landing
        try:
            piece.transfer = self._reader.transport.read_blocks(self.peer.worker_id, remote, landing)
        except TransferError as exc:
            if isinstance(exc, PeerLost):
                self._reader.links.broke(self.peer.worker_id, self.peer.epoch)
            self.is_failed = True


class _PeerPiece(Piece):
    """Blocks that land in blocks of our pool, which take the places of a sequence's own."""

    kind = "peer"

    def __init__(self, read: _PeerRead, engine: Engine, first_block: int, end_block: int, begun_at: float) -> None:
        super().__init__(first_block, end_block, begun_at)
        self.transfer: Transfer | None = None
        self.landing: list[int] = []
        self.is_refused = False  # it cannot be read, other pieces may
        self.is_dropped = False
        self._read = read
        self._engine = engine
        self._is_done = False
        self._has_arrived = False

    @property
    def is_moving(self) -> bool:
        """Whether the transport is at work on it."""
        return self.transfer is not None and not self.transfer.is_settled

    @property
    def is_done(self) -> bool:
        return self._is_done

    @property
    def is_complete(self) -> bool:
        return self._has_arrived

    def settle(self) -> bool:
        """Whether the transport will not touch the landing blocks (any more)."""
        if self.transfer is None:
            self._is_done = self._read.is_failed or self.is_refused or self.is_dropped
        elif self.transfer.is_settled:
            self._is_done = True
            if self.transfer.state is TransferState.LOST:
                self._read.is_failed = True
                self._read._reader.links.broke(self._read.peer.worker_id, self._read.peer.epoch)
            # NOTE: its clock is read here, after the end was seen.
            is_good = self.transfer.state is TransferState.DONE and not self._read.is_late and not self.is_dropped
            self._has_arrived = is_good and not self._wrong_blocks()
        elif self._read.is_failed:
            return False
        if self._is_done and (self.is_dropped or not self._has_arrived):
            self._release()
        return self._is_done

    def learn(self) -> None:
        if self._has_arrived and self.transfer is not None and self.transfer.seconds is not None:
            self._read.cost.observe(self.num_blocks, self.transfer.seconds)

    def learn_late(self, now: float) -> None:
        cost, waited_s = self._read.cost, now - self._read.asked_at
        if self._read.block_ids is None:
            cost.latency_s = max(2 * cost.latency_s, waited_s)
        else:
            cost.observe_at_least(self.num_blocks, now - self.begun_at)

    def place(self, sequence: EngineSequence, first_block: int, kv: Tensor) -> int:
        """Swap blocks instead of copying them."""
        start = first_block - self.first_block
        replaced = sequence.blocks[first_block : self.end_block]
        sequence.blocks[first_block : self.end_block] = self.landing[start:]
        self.landing = self.landing[:start]
        self._engine.pool.release(replaced)
        self._release()
        return 0

    def drop(self) -> None:
        self.is_dropped = True
        if self._is_done:
            self._release()

    def _release(self) -> None:
        self._engine.pool.release(self.landing)
        self.landing = []

    def _wrong_blocks(self) -> list[int]:
        start = self.first_block - self._read.first_block
        checksums = self._read.checksums[start : start + self.num_blocks]
        wrong = wrong_blocks(self._engine.kv, self.landing, checksums) if checksums else []
        if wrong:
            logger.warning("%d KV blocks read from %s are damaged", len(wrong), self._read.peer.worker_id)
        return wrong


class _ReadKey(NamedTuple):
    worker_id: str
    epoch: int
    read_id: int


@dataclass(eq=False, slots=True)
class _Held:
    """Blocks kept for one reader. With `load` set those at the end are still on their way up from the host tier."""

    reader: PeerAddress
    digests: list[bytes]
    parent: bytes | None
    blocks: list[int]
    deadline: float
    ttl_s: float
    num_resident: int
    load: TierRead | None = None
    data: Tensor = field(default_factory=lambda: torch.empty(0))


class PeerHolder:
    """The side that is read: blocks of this worker's pool that must stay as they are for a while."""

    def __init__(self, engine: Engine, host_tier: CachedTier | None, links: PeerLinks, config: TransferConfig) -> None:
        self._engine = engine
        self._host_tier = host_tier
        self._links = links
        self._config = config
        self._held: dict[_ReadKey, _Held] = {}
        self.num_lent_blocks = 0

    @property
    def num_open(self) -> int:
        """Readers that blocks are held for."""
        return len(self._held)

    def requested(self, message: ReadRequest, now: float) -> None:
        """Take references on what is here of the chain and say where it lies, once it is all in the pool.

        `now` was read after the request was received.
        """
        key = _ReadKey(message.sender.worker_id, message.sender.epoch, message.read_id)
        if key in self._held:
            return
        pool = self._engine.pool
        room = max(int(pool.num_blocks * _MAX_HELD_SHARE) - sum(len(held.blocks) for held in self._held.values()), 0)
        digests = message.digests[:room]
        blocks = pool.acquire_cached(digests)
        ttl_s = _HELD_LONGER * message.ttl_s
        held = _Held(message.sender, digests, message.parent, blocks, now + ttl_s, ttl_s, len(blocks))
        self._held[key] = held
        if not self._begin_bringing_up(held):
            self._grant(key, held, now)

    def done(self, message: ReadDone) -> None:
        """The reader needs them no more. If it has them now, its next turn finds them there, and ours can go."""
        held = self._let_go(_ReadKey(message.sender.worker_id, message.sender.epoch, message.read_id))
        if held is not None and held.blocks and message.has_copy:
            self._engine.pool.demote(held.digests[len(held.blocks) - 1])

    def peer_lost(self, worker_id: str, epoch: int) -> None:
        """That reader is dead."""
        for key in [key for key in self._held if key[:2] == (worker_id, epoch)]:
            self._let_go(key)

    def pump(self, now: float) -> None:
        """Grant what has come up from the host tier, let go of what is out of time."""
        for key, held in list(self._held.items()):
            if held.load is not None and held.load.is_done:
                self._finish_bringing_up(held)
                self._grant(key, held, now)
            elif now >= held.deadline:
                self._let_go(key)

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if anything is held."""
        assert not (idle and self._held), f"blocks are held for {len(self._held)} readers"

    def _grant(self, key: _ReadKey, held: _Held, now: float) -> None:
        held.deadline = now + held.ttl_s
        share = CHECKED_SHARE[self._config.checksums]
        grant = ReadGrant(
            sender=self._links.me,
            read_id=key.read_id,
            block_ids=held.blocks,
            checksums=block_checksums(self._engine.kv, held.blocks, share=share) if share > 0 else [],
        )
        self._links.send(key.worker_id, key.epoch, grant)
        self.num_lent_blocks += len(held.blocks)

    def _let_go(self, key: _ReadKey) -> _Held | None:
        held = self._held.pop(key, None)
        if held is None:
            return None
        if held.load is not None:
            held.load.abandon()
        self._engine.pool.release(held.blocks)
        return held

    def _begin_bringing_up(self, held: _Held) -> bool:
        """Load what is in the host tier only into blocks of the pool; False if there is nothing, or no room."""
        tier, pool = self._host_tier, self._engine.pool
        missing = held.digests[len(held.blocks) :]
        num_blocks = 0 if tier is None else tier.tier.count_present(missing)
        num_blocks = min(num_blocks, self._engine.scheduler.num_spare_blocks)
        fresh = pool.try_allocate(num_blocks) if num_blocks > 0 else None
        if tier is None or fresh is None:
            return False
        held.data, held.load = tier.begin_load(missing[:num_blocks])
        held.blocks = [*held.blocks, *fresh]
        return True

    def _finish_bringing_up(self, held: _Held) -> None:
        """Put what was loaded in place and make it findable; give back the blocks of what was not."""
        assert held.load is not None
        assert self._host_tier is not None
        engine, num_loaded = self._engine, held.load.num_loaded
        end = held.num_resident + num_loaded
        engine.pool.release(held.blocks[end:])
        held.blocks = held.blocks[:end]
        fresh = held.blocks[held.num_resident :]
        self._host_tier.decode_into(engine.kv, fresh, held.data[:num_loaded])
        engine.pool.publish_chain(fresh, held.digests, held.num_resident, held.parent)
        held.load, held.data = None, torch.empty(0)
