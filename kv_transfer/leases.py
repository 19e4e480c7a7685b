"""Leases on the blocks of a worker that receives KV. Pure: time is passed in, blocks to free are returned.

    grant ──► LIVE ── the sender is done before the deadline ──► LeaseReceived: the blocks are the caller's
               │
               ├── the sender gives up (`lease_closed`) or is dead (`sender_lost`) ──► LeaseReleased: blocks are free
               │
               └── deadline passed, cancelled, sender given up ──► FENCED: blocks in quarantine, writes may still land
                                                                    │
                       sender confirms, is done, or is dead ────────┴──► LeaseReleased

A block belongs to the table from `grant` until exactly one `LeaseReceived` or `LeaseReleased` names it. Messages that
name no such lease are late, repeated or foreign: they change nothing and are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.messages import FirstTokens, WorkerEpoch


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one sender to write the prompt's blocks from `first_block` on into `block_ids`."""

    request_id: str
    generation: int
    first_block: int
    block_ids: tuple[int, ...]
    sender: WorkerEpoch
    ttl_s: float


class LeaseReceived(NamedTuple):
    """The sender wrote everything: the blocks are the caller's, and no write to them can land any more.

    Notifications of one link keep their order. So if a chunk was not announced when the sender is done, its
    notification was lost or damaged. Then there are fewer checksums than blocks, and no block may be used.
    """

    lease: Lease
    first_token_ids: FirstTokens
    checksums: list[bytes]  # one per announced block, of its bytes as sent; b"" where the sender gave none

    @property
    def num_missing(self) -> int:
        """Blocks that were not announced."""
        return len(self.lease.block_ids) - len(self.checksums)


class LeaseFenced(NamedTuple):
    """The lease ended without its KV. The table keeps its blocks; send the sender `LeaseRevoked`."""

    lease: Lease
    reason: str


class LeaseReleased(NamedTuple):
    """The caller may free the lease's blocks: no write to them is or will be in flight."""

    lease: Lease
    reason: str


@dataclass(eq=False, slots=True)
class _LeaseState:
    lease: Lease
    deadline: float
    is_fenced: bool = False
    checksums: dict[int, bytes] = field(default_factory=dict)  # of the blocks that arrived, by index in the prompt


class LeaseTable:
    """Grants and ends the leases of one worker. Generations never repeat within a table."""

    def __init__(self, *, first_generation: int = 1) -> None:
        """`first_generation` must grow with each start of the process, so that no old message fits a new lease."""
        self._next_generation = first_generation
        self._entries: dict[int, _LeaseState] = {}  # by generation; live and fenced
        self._live: dict[str, int] = {}  # request id -> generation
        self.ignored: Counter[str] = Counter()

    def grant(
        self,
        request_id: str,
        block_ids: Sequence[int],
        *,
        first_block: int,
        sender: WorkerEpoch,
        now: float,
        ttl_s: float,
        first_ttl_s: float | None = None,
    ) -> Lease:
        """Lend these blocks to the sender. At most one lease of a request is live at a time.

        Each heartbeat of the sender extends the lease to `ttl_s`. It cannot name the lease before it has read the
        grant, which may wait for the end of a long step: until then `first_ttl_s` applies.
        """
        assert request_id not in self._live, f"{request_id} has the live lease {self._live.get(request_id)}"
        lease = Lease(request_id, self._next_generation, first_block, tuple(block_ids), sender, ttl_s)
        self._next_generation += 1
        deadline = now + (ttl_s if first_ttl_s is None else first_ttl_s)
        self._entries[lease.generation] = _LeaseState(lease, deadline)
        self._live[request_id] = lease.generation
        return lease

    def is_foreign(self, generation: int, sender: WorkerEpoch) -> bool:
        """Whether this lease belongs to another sender. Only its own sender may report writes under it."""
        entry = self._entries.get(generation)
        if entry is None or entry.lease.sender == sender:
            return False
        self.ignored["written by another sender"] += 1
        return True

    def chunk_arrived(
        self,
        request_id: str,
        generation: int,
        first_block: int,
        num_blocks: int,
        checksums: Sequence[bytes],
        *,
        now: float,
    ) -> Sequence[int]:
        """Note that these blocks of the prompt are in place. Returns them; none if the chunk changes nothing."""
        entry = self._find(request_id, generation, "chunk")
        if entry is None or not self._is_usable(entry, now, "chunk"):
            return ()
        # Blocks are counted from the prompt's beginning; the lease has those from `lease.first_block` on.
        lease, end = entry.lease, first_block + num_blocks
        is_inside = lease.first_block <= first_block and end <= lease.first_block + len(lease.block_ids)
        if num_blocks < 0 or not is_inside or len(checksums) not in (0, num_blocks):
            self.ignored["chunk out of range"] += 1
            return ()
        if not entry.checksums.keys().isdisjoint(range(first_block, end)):
            self.ignored["chunk repeated"] += 1
            return ()
        for position, index in enumerate(range(first_block, end)):
            entry.checksums[index] = checksums[position] if checksums else b""
        entry.deadline = min(entry.deadline, now + lease.ttl_s)  # the grant was read: heartbeats extend the lease now
        return lease.block_ids[first_block - lease.first_block : end - lease.first_block]

    def handoff_done(
        self, request_id: str, generation: int, first_token_ids: FirstTokens, *, now: float
    ) -> LeaseReceived | LeaseReleased | None:
        """The sender wrote everything. For a fenced lease this confirms that no write is left."""
        entry = self._find(request_id, generation, "done")
        if entry is None:
            return None
        if entry.is_fenced:
            return self._release(entry, "the sender was done")
        if not self._is_usable(entry, now, "done"):
            return None
        self._remove(entry)
        checksums = [entry.checksums[index] for index in sorted(entry.checksums)]
        return LeaseReceived(entry.lease, first_token_ids, checksums)

    def extend(self, sender: WorkerEpoch, handoffs: Iterable[tuple[str, int]], *, now: float) -> None:
        """Heartbeat: the sender still works on these (request id, generation). Ended leases stay ended."""
        for request_id, generation in handoffs:
            entry = self._entries.get(generation)
            if entry is None or entry.is_fenced or now >= entry.deadline:
                continue  # heartbeats go to every worker, so foreign ones are expected
            lease = entry.lease
            if (lease.request_id, lease.sender) == (request_id, sender):
                entry.deadline = now + lease.ttl_s

    def expire(self, now: float) -> list[LeaseFenced]:
        """Fence the live leases whose deadline has passed."""
        late = [entry for entry in self._entries.values() if not entry.is_fenced and now >= entry.deadline]
        return [self._fence(entry, "the lease expired") for entry in late]

    def cancel(self, request_id: str, reason: str = "cancelled") -> LeaseFenced | None:
        """Fence the request's live lease, if there is one."""
        generation = self._live.get(request_id)
        return None if generation is None else self._fence(self._entries[generation], reason)

    def lease_closed(
        self, request_id: str, generation: int, sender: WorkerEpoch, reason: str = ""
    ) -> LeaseReleased | None:
        """The sender confirms that no write under this lease is in flight or will be started."""
        entry = self._find(request_id, generation, "closed")
        if entry is None:
            return None
        if entry.lease.sender != sender:
            self.ignored["closed by another sender"] += 1
            return None
        return self._release(entry, reason or "closed by the sender")

    def give_up_sender(self, sender: WorkerEpoch) -> list[LeaseFenced]:
        """Fence all live leases of a sender that will be killed. It may write until it is certainly gone."""
        given_up = [entry for entry in self._of_sender(sender) if not entry.is_fenced]
        return [self._fence(entry, f"{sender.worker_id} was given up") for entry in given_up]

    def sender_lost(self, sender: WorkerEpoch) -> list[LeaseReleased]:
        """End all leases of a sender whose process is gone.

        NOTE: call this only on proof. A silent process may only be stopped, and later run on and write; for such a
        sender call `give_up_sender`.
        """
        return [self._release(entry, f"{sender.worker_id} died") for entry in self._of_sender(sender)]

    @property
    def num_live(self) -> int:
        """Leases whose KV has not arrived yet."""
        return len(self._live)

    @property
    def fenced(self) -> list[Lease]:
        """Leases that wait for their sender's confirmation; `LeaseRevoked` may be sent again for them."""
        return [entry.lease for entry in self._entries.values() if entry.is_fenced]

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of fenced leases."""
        return sum(len(lease.block_ids) for lease in self.fenced)

    @property
    def held_block_ids(self) -> list[int]:
        """Blocks of all leases, live and fenced."""
        return [block_id for entry in self._entries.values() for block_id in entry.lease.block_ids]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the maps agree and no block is in two leases."""
        held = self.held_block_ids
        assert len(held) == len(set(held)), f"a block is in two leases: {sorted(held)}"
        live = {
            entry.lease.request_id: generation for generation, entry in self._entries.items() if not entry.is_fenced
        }
        assert live == self._live, f"live leases {live} but by request {self._live}"
        for generation, entry in self._entries.items():
            lease = entry.lease
            expected = range(lease.first_block, lease.first_block + len(lease.block_ids))
            assert lease.generation == generation, f"{lease} is filed under {generation}"
            assert all(index in expected for index in entry.checksums), f"{lease} has blocks {sorted(entry.checksums)}"

    def _of_sender(self, sender: WorkerEpoch) -> list[_LeaseState]:
        return [entry for entry in self._entries.values() if entry.lease.sender == sender]

    def _find(self, request_id: str, generation: int, what: str) -> _LeaseState | None:
        entry = self._entries.get(generation)
        if entry is None or entry.lease.request_id != request_id:
            self.ignored[f"{what} of no lease"] += 1
            return None
        return entry

    def _is_usable(self, entry: _LeaseState, now: float, what: str) -> bool:
        if entry.is_fenced or now >= entry.deadline:
            self.ignored[f"{what} too late"] += 1
            return False
        return True

    def _fence(self, entry: _LeaseState, reason: str) -> LeaseFenced:
        entry.is_fenced = True
        del self._live[entry.lease.request_id]
        return LeaseFenced(entry.lease, reason)

    def _release(self, entry: _LeaseState, reason: str) -> LeaseReleased:
        self._remove(entry)
        return LeaseReleased(entry.lease, reason)

    def _remove(self, entry: _LeaseState) -> None:
        del self._entries[entry.lease.generation]
        if not entry.is_fenced:
            del self._live[entry.lease.request_id]
