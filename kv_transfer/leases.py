"""Leases on our blocks, seen from the worker that receives KV. Pure: time comes in, blocks to free come out.

    grant ──► LIVE ── the sender is done, deadline not passed ──► Received: the blocks are the caller's
               │
               ├── the sender gives up (`lease_closed`) or is dead (`sender_lost`) ──► Released: the blocks are free
               │
               └── deadline passed, cancelled, sender given up ──► FENCED: blocks in quarantine, writes may still land
                                                                    │
                       sender confirms, is done, or is dead ────────┴──► Released

A block belongs to the table from `grant` until exactly one `LeaseReceived` or `LeaseReleased` names it. Messages that
name no such lease are late, repeated or foreign: they change nothing and are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Lease", "LeaseFenced", "LeaseReceived", "LeaseReleased", "LeaseTable"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one sender to write the prompt's blocks from `first_block` on into `block_ids`."""

    request_id: str
    generation: int
    first_block: int
    block_ids: tuple[int, ...]
    sender_id: str
    sender_epoch: int
    ttl_s: float


class LeaseReceived(NamedTuple):
    """The sender wrote everything: the blocks are the caller's, and nobody writes them any more.

    Notifications of one link keep their order. So when the sender is done, a chunk that was not announced never will
    be: its notification was lost or damaged. Then there are fewer checksums than blocks, and no block may be used.
    """

    lease: Lease
    first_token_id: int
    checksums: list[bytes]  # of the bytes of each announced block as sent, b"" where the sender gave none

    @property
    def num_missing(self) -> int:
        """Blocks that were not announced."""
        return len(self.lease.block_ids) - len(self.checksums)


class LeaseFenced(NamedTuple):
    """The lease ended without its KV. Its blocks stay with the table; send the sender `LeaseRevoked`."""

    lease: Lease
    reason: str


class LeaseReleased(NamedTuple):
    """The lease's blocks are the caller's to free: no write to them is or will be in flight."""

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
        """Start from something that grows with each start of the process, so that no old message fits a new lease."""
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
        sender_id: str,
        sender_epoch: int,
        now: float,
        ttl_s: float,
        first_ttl_s: float | None = None,
    ) -> Lease:
        """Lend these blocks to the sender. At most one lease of a request is live at a time.

        The sender cannot vouch for a lease before it has read the grant, which may have to wait for the end of a long
        step: `first_ttl_s` is the time until then, `ttl_s` the one that each heartbeat gives.
        """
        assert request_id not in self._live, f"{request_id} has the live lease {self._live.get(request_id)}"
        lease = Lease(request_id, self._next_generation, first_block, tuple(block_ids), sender_id, sender_epoch, ttl_s)
        self._next_generation += 1
        deadline = now + (ttl_s if first_ttl_s is None else first_ttl_s)
        self._entries[lease.generation] = _LeaseState(lease, deadline)
        self._live[request_id] = lease.generation
        return lease

    def is_foreign(self, generation: int, sender_id: str, sender_epoch: int) -> bool:
        """Whether this lease is another sender's, who alone may say what was written under it."""
        entry = self._entries.get(generation)
        if entry is None or (entry.lease.sender_id, entry.lease.sender_epoch) == (sender_id, sender_epoch):
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
    ) -> None:
        """Note that these blocks of the prompt are in place."""
        entry = self._find(request_id, generation, "chunk")
        if entry is None or not self._is_usable(entry, now, "chunk"):
            return
        lease, end = entry.lease, first_block + num_blocks
        is_inside = lease.first_block <= first_block and end <= lease.first_block + len(lease.block_ids)
        if num_blocks < 0 or not is_inside or len(checksums) not in (0, num_blocks):
            self.ignored["chunk out of range"] += 1
            return
        for position, index in enumerate(range(first_block, end)):
            if index in entry.checksums:
                self.ignored["chunk repeated"] += 1
            else:
                entry.checksums[index] = checksums[position] if checksums else b""
        entry.deadline = min(entry.deadline, now + lease.ttl_s)  # the grant was read: heartbeats vouch for it now

    def handoff_done(
        self, request_id: str, generation: int, first_token_id: int, *, now: float
    ) -> LeaseReceived | LeaseReleased | None:
        """The sender wrote everything: what was received. For a fenced lease this confirms that no write is left."""
        entry = self._find(request_id, generation, "done")
        if entry is None:
            return None
        if entry.is_fenced:
            return self._release(entry, "the sender was done")
        if not self._is_usable(entry, now, "done"):
            return None
        self._remove(entry)
        checksums = [entry.checksums[index] for index in sorted(entry.checksums)]
        return LeaseReceived(entry.lease, first_token_id, checksums)

    def extend(self, sender_id: str, sender_epoch: int, handoffs: Iterable[tuple[str, int]], *, now: float) -> None:
        """Heartbeat: the sender still works on these (request id, generation). A lease that ended stays ended."""
        for request_id, generation in handoffs:
            entry = self._entries.get(generation)
            if entry is None or entry.is_fenced or now >= entry.deadline:
                continue  # heartbeats go to everyone, so foreign ones are no surprise
            lease = entry.lease
            if (lease.request_id, lease.sender_id, lease.sender_epoch) == (request_id, sender_id, sender_epoch):
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
        self, request_id: str, generation: int, sender_id: str, sender_epoch: int, reason: str = ""
    ) -> LeaseReleased | None:
        """The sender confirms that no write under this lease is in flight or will be started."""
        entry = self._find(request_id, generation, "closed")
        if entry is None:
            return None
        if (entry.lease.sender_id, entry.lease.sender_epoch) != (sender_id, sender_epoch):
            self.ignored["closed by another sender"] += 1
            return None
        return self._release(entry, reason or "closed by the sender")

    def give_up_sender(self, sender_id: str, sender_epoch: int) -> list[LeaseFenced]:
        """Fence all live leases of a sender that is to be ended. Until it is gone for certain it may write."""
        given_up = [entry for entry in self._of_sender(sender_id, sender_epoch) if not entry.is_fenced]
        return [self._fence(entry, f"{sender_id} was given up") for entry in given_up]

    def sender_lost(self, sender_id: str, sender_epoch: int) -> list[LeaseReleased]:
        """End all leases of a sender whose process is gone.

        NOTE: neither silence nor somebody's word is that. A process that was only stopped may run on and write; give
        such a sender up instead.
        """
        return [self._release(entry, f"{sender_id} died") for entry in self._of_sender(sender_id, sender_epoch)]

    @property
    def num_live(self) -> int:
        """Leases whose KV is awaited."""
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
        """Assert what must always hold."""
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

    def _of_sender(self, sender_id: str, sender_epoch: int) -> list[_LeaseState]:
        sender = (sender_id, sender_epoch)
        return [e for e in self._entries.values() if (e.lease.sender_id, e.lease.sender_epoch) == sender]

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
