"""The one-sided writes of a prefill worker: those in flight, what each link has carried, and stalled links."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import msgspec

from tandem.engine.engine import Engine
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.kv_transfer.transport.checksum import append_checksum, block_checksums
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import ChunkArrived, LinkLoad, PeerAddress, WorkerEpoch, WriteBegun, encode_message

logger = logging.getLogger(__name__)

_STUCK_FACTOR = 20.0  # a link is stuck when a write takes this many times the expected duration
_LEAST_STUCK_S = 10.0  # a live worker may pause for less than `worker_timeout_s` (8 s), and its links pause with it
_KEPT_SHARE = 0.9  # each new write leaves the older ones this share of their weight
_NUM_RECENT = 16  # writes of which the fastest tells a link's speed


@dataclass(eq=False, slots=True)
class LinkTotals:
    """What was written to one peer since the start, as in `LinkLoad`."""

    num_transfers: int = 0
    num_bytes: int = 0
    num_saved_bytes: int = 0
    seconds: float = 0.0
    num_handoffs: int = 0
    exposed_bytes: int = 0
    exposed_s: float = 0.0
    num_lost: int = 0
    num_resets: int = 0


@dataclass(eq=False, slots=True)
class RecentPace:
    """Bytes and seconds of a link's writes. Recent writes count more, because a link may become slow."""

    num_bytes: float = 0.0
    seconds: float = 0.0
    block_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))  # of blocks on the link

    @property
    def link_block_s(self) -> float:
        """Seconds for a block on the link, without latency; 0 before the first write."""
        return min(self.block_s, default=0.0)

    def note(self, num_bytes: int, seconds: float) -> None:
        """Count a write."""
        self.num_bytes = _KEPT_SHARE * self.num_bytes + num_bytes
        self.seconds = _KEPT_SHARE * self.seconds + seconds


class SettledWrite(NamedTuple):
    """A write that has ended: the transport no longer reads its blocks."""

    write: BlockWrite
    state: TransferState
    num_bytes: int  # of KV: packed blocks count as what they hold
    seconds: float  # to pack it, and on the link


class _Flight(NamedTuple):
    write: BlockWrite
    transfer: Transfer
    deadline: float
    spare: list[int]  # blocks that hold the packed ones; none if they are not packed
    pack_s: float


@dataclass(eq=False, slots=True)
class _OldestWrite:
    """A link's oldest write, the time since when it is the oldest, and the time at which the link counts as stuck."""

    transfer: Transfer
    since: float
    deadline: float


class BlockWrites:
    """All writes of one worker. Knows receivers and blocks, but no prompts. Without `wire` nothing is packed."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        links: PeerLinks,
        config: TransferConfig,
        wire: WireCodec | None = None,
    ) -> None:
        self.totals: dict[str, LinkTotals] = {}  # by receiver
        self.paces: dict[str, RecentPace] = {}  # by receiver
        self.last_begun = -math.inf  # when a write began last that ends only with polls
        self._engine = engine
        self._transport = transport
        self._links = links
        self._config = config
        self._wire = wire
        self._in_flight: list[_Flight] = []
        self._oldest: dict[WorkerEpoch, _OldestWrite] = {}  # by receiver

    @property
    def num_in_flight(self) -> int:
        """Writes in flight, as far as the last `take_settled` saw."""
        return len(self._in_flight)

    @property
    def loads(self) -> list[LinkLoad]:
        """What was written to each peer, for the heartbeat."""
        return [LinkLoad(peer_id=peer_id, **asdict(totals)) for peer_id, totals in self.totals.items()]

    def seconds_to_send(self, receiver_id: str, num_blocks: int) -> float:
        """Predicted seconds to write blocks to a peer; infinite before the first write to it."""
        pace = self.paces.get(receiver_id)
        if pace is None or pace.num_bytes == 0:
            return math.inf
        return num_blocks * self._engine.block_bytes * pace.seconds / pace.num_bytes

    def start(self, write: BlockWrite, receiver: PeerAddress, now: float) -> bool:
        """Start a write. Returns False, and writes nothing, if the link is not ready or the transport refuses."""
        # NOTE: the transport knows peers only by name. After a restart the same name is another process, in which the
        # granted block ids belong to other requests.
        if not self._links.is_ready(receiver):
            return False
        began = time.perf_counter()
        spare = self._pack(write, receiver)
        pack_s = time.perf_counter() - began if spare else 0.0
        local = spare or write.local_block_ids
        remote, payload = write.remote_block_ids[: len(local)], self._payload(write, is_packed=bool(spare))
        try:
            transfer = self._transport.write_blocks(write.receiver_id, local, remote, payload)
        except TransferError as exc:
            self._engine.pool.release(spare)
            if isinstance(exc, PeerLost):
                self._links.broke(write.receiver)
            return False
        self._in_flight.append(_Flight(write, transfer, now + self._config.handoff_timeout_s, spare, pack_s))
        if self._transport.waker is None:
            self.last_begun = now
            self._links.send(write.receiver, WriteBegun(sender=self._links.me))
        return True

    def take_settled(self) -> list[SettledWrite]:
        """The writes that have settled since the last call."""
        if not self._in_flight:
            return []
        settled = [flight for flight in self._in_flight if flight.transfer.is_settled]
        if settled:
            self._in_flight = [flight for flight in self._in_flight if not flight.transfer.is_settled]
        for flight in settled:
            self._engine.pool.release(flight.spare)
        return [self._count(flight) for flight in settled]

    def late(self, now: float) -> list[BlockWrite]:
        """Writes that have been in flight for `handoff_timeout_s` or longer."""
        return [flight.write for flight in self._in_flight if now >= flight.deadline]

    def reset_stuck_links(self, now: float) -> None:
        """Reset links whose oldest write is stuck, because the link's other writes wait behind it."""
        oldest: dict[WorkerEpoch, _Flight] = {}
        for flight in self._in_flight:
            oldest.setdefault(flight.write.receiver, flight)
        self._oldest = {
            receiver: known
            if (known := self._oldest.get(receiver)) is not None and known.transfer is flight.transfer
            else _OldestWrite(flight.transfer, now, now + self._stuck_after_s(flight.write))
            for receiver, flight in oldest.items()
        }
        for receiver, write in self._oldest.items():
            if now >= write.deadline:
                waited_s = now - write.since
                logger.warning("nothing moved to %s for %.0f s: the link is reset", receiver.worker_id, waited_s)
                self._totals_of(receiver.worker_id).num_resets += 1
                if write.transfer.num_bytes:  # the link may be slow, not stuck: the next write gets twice the time
                    self.paces[receiver.worker_id] = RecentPace(write.transfer.num_bytes, 2 * waited_s / _STUCK_FACTOR)
                self._links.reset(receiver)

    def forget(self, receiver_id: str) -> None:
        """Forget the totals and the pace of a worker that is gone."""
        self.totals.pop(receiver_id, None)
        self.paces.pop(receiver_id, None)

    def _stuck_after_s(self, write: BlockWrite) -> float:
        """Seconds that a link may spend on this write before it counts as stuck."""
        expected_s = self.seconds_to_send(write.receiver_id, len(write.local_block_ids))
        return min(max(_STUCK_FACTOR * expected_s, _LEAST_STUCK_S), self._config.handoff_timeout_s)

    def _pack(self, write: BlockWrite, receiver: PeerAddress) -> list[int]:
        """Blocks that hold those of a write in packed form; none if it is sent as it is.

        They are taken for the time of the write, if no sequence is expected to need them.
        """
        wire, unpack_block_s = self._wire, self._links.unpack_block_s(receiver)
        pace, num_blocks = self.paces.get(write.receiver_id, RecentPace()), len(write.local_block_ids)
        if wire is None or unpack_block_s is None or not wire.pays(num_blocks, pace.link_block_s, unpack_block_s):
            return []
        num_packed, pool = wire.num_packed(num_blocks), self._engine.pool
        has_room = self._engine.scheduler.admission.num_spare_blocks >= num_packed
        spare = (pool.try_allocate(num_packed) if has_room else None) or []
        if spare and not wire.pack(write.local_block_ids, spare):
            pool.release(spare)
            return []
        return spare

    def _payload(self, write: BlockWrite, *, is_packed: bool) -> bytes:
        """The encoded notification of a write, with its blocks' checksums if these are on."""
        notification = write.notification
        if isinstance(notification, ChunkArrived):
            checks = self._config.checksums == "all"
            notification = msgspec.structs.replace(
                notification,
                checksums=block_checksums(self._engine.kv.shards, write.local_block_ids) if checks else [],
                codec=self._wire.name if is_packed and self._wire is not None else "",
            )
        return append_checksum(encode_message(notification))

    def _count(self, flight: _Flight) -> SettledWrite:
        """Add a settled write to its link's totals.

        Its seconds on the link (`Transfer.seconds`) are the time for which it kept the link busy. They exclude the wait
        for the grant, for writes of other handoffs and for the receiver's next step.
        """
        write, transfer = flight.write, flight.transfer
        link_s, num_blocks = transfer.seconds or 0.0, len(write.local_block_ids)
        seconds, num_bytes = flight.pack_s + link_s, num_blocks * self._engine.block_bytes
        if transfer.state is TransferState.LOST:
            self._totals_of(write.receiver_id).num_lost += 1
            self._links.broke(write.receiver)
        elif transfer.state is TransferState.DONE:
            totals = self._totals_of(write.receiver_id)
            totals.num_transfers += 1
            totals.num_bytes += num_bytes
            totals.num_saved_bytes += num_bytes - transfer.num_bytes
            totals.seconds += seconds
            pace = self.paces.setdefault(write.receiver_id, RecentPace())
            pace.note(num_bytes, seconds)
            if num_blocks:
                pace.block_s.append(link_s / (len(flight.spare) or num_blocks))
        return SettledWrite(write, transfer.state, num_bytes, seconds)

    def _totals_of(self, receiver_id: str) -> LinkTotals:
        return self.totals.setdefault(receiver_id, LinkTotals())
