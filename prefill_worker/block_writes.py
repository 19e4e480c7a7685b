"""The one-sided writes of a prefill worker: those in flight, what each link has carried, and stalled links."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from tandem.engine.engine import Engine
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.kv_transfer.transport.checksum import append_checksum, block_checksums
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import ChunkArrived, LinkLoad, PeerAddress, WorkerEpoch, WriteBegun, encode_message

logger = logging.getLogger(__name__)

_STUCK_FACTOR = 20.0  # a link is stuck when a write takes this many times the expected duration
_LEAST_STUCK_S = 10.0  # a live worker may pause for less than `worker_timeout_s` (8 s), and its links pause with it
_KEPT_SHARE = 0.9  # each new write leaves the older ones this share of their weight


@dataclass(eq=False, slots=True)
class LinkTotals:
    """What was written to one peer since the start, as in `LinkLoad`."""

    num_transfers: int = 0
    num_bytes: int = 0
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

    def note(self, num_bytes: int, seconds: float) -> None:
        """Count a write."""
        self.num_bytes = _KEPT_SHARE * self.num_bytes + num_bytes
        self.seconds = _KEPT_SHARE * self.seconds + seconds


class SettledWrite(NamedTuple):
    """A write that has ended: the transport no longer reads its blocks."""

    write: BlockWrite
    state: TransferState
    num_bytes: int
    seconds: float


class _Flight(NamedTuple):
    write: BlockWrite
    transfer: Transfer
    deadline: float


@dataclass(eq=False, slots=True)
class _OldestWrite:
    """A link's oldest write, the time since when it is the oldest, and the time at which the link counts as stuck."""

    transfer: Transfer
    since: float
    deadline: float


class BlockWrites:
    """All writes of one worker. Knows receivers and blocks, but no prompts."""

    def __init__(self, engine: Engine, transport: Transport, links: PeerLinks, config: TransferConfig) -> None:
        self.totals: dict[str, LinkTotals] = {}  # by receiver
        self.paces: dict[str, RecentPace] = {}  # by receiver
        self.last_begun = -math.inf  # when a write began last that ends only with polls
        self._engine = engine
        self._transport = transport
        self._links = links
        self._config = config
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
        try:
            transfer = self._transport.write_blocks(
                write.receiver_id, write.local_block_ids, write.remote_block_ids, self._payload(write)
            )
        except TransferError as exc:
            if isinstance(exc, PeerLost):
                self._links.broke(write.receiver)
            return False
        self._in_flight.append(_Flight(write, transfer, now + self._config.handoff_timeout_s))
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
        return [self._count(flight.write, flight.transfer) for flight in settled]

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

    def _payload(self, write: BlockWrite) -> bytes:
        """The encoded notification of a write, with its blocks' checksums if these are on."""
        notification = write.notification
        if self._config.checksums == "all" and isinstance(notification, ChunkArrived):
            notification = ChunkArrived(
                request_id=notification.request_id,
                generation=notification.generation,
                first_block=notification.first_block,
                num_blocks=notification.num_blocks,
                checksums=block_checksums(self._engine.kv.shards, write.local_block_ids),
            )
        return append_checksum(encode_message(notification))

    def _count(self, write: BlockWrite, transfer: Transfer) -> SettledWrite:
        """Add a settled write to its link's totals.

        Its seconds (`Transfer.seconds`) are the time for which it kept the link busy. They exclude the wait for the
        grant, for writes of other handoffs and for the receiver's next step.
        """
        seconds = transfer.seconds or 0.0
        if transfer.state is TransferState.LOST:
            self._totals_of(write.receiver_id).num_lost += 1
            self._links.broke(write.receiver)
        elif transfer.state is TransferState.DONE:
            totals = self._totals_of(write.receiver_id)
            totals.num_transfers += 1
            totals.num_bytes += transfer.num_bytes
            totals.seconds += seconds
            self.paces.setdefault(write.receiver_id, RecentPace()).note(transfer.num_bytes, seconds)
        return SettledWrite(write, transfer.state, transfer.num_bytes, seconds)

    def _totals_of(self, receiver_id: str) -> LinkTotals:
        return self.totals.setdefault(receiver_id, LinkTotals())
