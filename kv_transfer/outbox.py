"""All handoffs of a worker that sends KV. Pure: it decides what to write, others write it.

Three things come in any order: the receiver's grant, computed blocks, and the first token. As soon as a block is both
granted and computed it is written; `HandoffDone` follows the last one.

A handoff ends when nothing of it is in flight and it was delivered or has failed. Only then may its local blocks be
unpinned, and only then is the receiver told that its blocks are safe. A lost write may still land: its lease is
confirmed once the transport proves that it cannot any more (`confirm_lost_writes`). Without that proof the receiver
keeps the blocks until this process is gone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tandem.kv_transfer.outgoing_handoff import BlockWrite, GrantedBlocks, HandoffKey, LeaseKey, OutgoingHandoff
from tandem.kv_transfer.transport.base import TransferState
from tandem.protocol.errors import TransferError
from tandem.protocol.messages import FirstTokens, HandoffDone, WorkerEpoch

# Ended generations are remembered, so that a grant that comes late or twice revives none of them. Handoffs that ended
# without a grant are remembered too: a grant that comes late is answered at once. Links are ordered, so a few would do.
_NUM_REMEMBERED = 4096
_REVOKED = "revoked by the receiver: the KV did not arrive in time, or the request has ended"

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class HandoffEnded(NamedTuple):
    """The handoff is over: unpin its blocks."""

    handoff_id: int
    request_id: str
    is_delivered: bool
    reason: str  # why it was not delivered, else ""


class LeaseEnded(NamedTuple):
    """Send `LeaseClosed`: no write under this lease is in flight or will be started."""

    receiver: WorkerEpoch
    request_id: str
    generation: int
    reason: str
    first_token_ids: FirstTokens = ()  # of a delivered handoff, because the receiver may have missed them


class Outbox:
    """The handoffs of one sending worker."""

    def __init__(self, max_write_blocks: int = 1 << 30) -> None:
        """`max_write_blocks` bounds a single write."""
        self._max_write_blocks = max_write_blocks
        self._num_opened = 0
        self._active: dict[HandoffKey, OutgoingHandoff] = {}  # until delivered or failed
        self._by_request: dict[str, list[OutgoingHandoff]] = {}  # the same; usually one per request
        self._by_lease: dict[LeaseKey, OutgoingHandoff] = {}  # granted, until ended
        self._early_grants: dict[HandoffKey, GrantedBlocks] = {}  # came before their `open`
        self._past: OrderedDict[LeaseKey, FirstTokens] = OrderedDict()  # ended; the first tokens of those delivered
        self._ungranted: OrderedDict[HandoffKey, str] = OrderedDict()  # why they ended before their grant came
        self._lost_leases: dict[LeaseKey, HandoffKey] = {}  # ended with a lost write
        self._ended: list[HandoffEnded | LeaseEnded] = []

    def open(
        self,
        request_id: str,
        receiver: WorkerEpoch,
        *,
        num_blocks: int,
        grant_deadline: float = math.inf,
    ) -> int:
        """Start a handoff of `num_blocks` prompt blocks (a partial last one included). Returns its id.

        It fails if no grant comes by `grant_deadline`, which `requested` may set later.
        """
        key = HandoffKey(request_id, receiver)
        if key in self._active:
            raise TransferError(f"{request_id} is already being handed off to {receiver.worker_id}")
        self._num_opened += 1
        handoff = OutgoingHandoff(self._num_opened, key, num_blocks, grant_deadline)
        self._active[key] = handoff
        self._by_request.setdefault(request_id, []).append(handoff)
        self._ungranted.pop(key, None)
        early = self._early_grants.pop(key, None)
        if early is not None:
            self._apply_grant(handoff, early)
        return handoff.handoff_id

    def requested(self, request_id: str, *, grant_deadline: float) -> None:
        """The receiver was asked for a lease."""
        for handoff in self._of_request(request_id):
            handoff.grant_deadline = grant_deadline

    def queued(self, request_id: str, receiver: WorkerEpoch, *, grant_deadline: float) -> None:
        """The receiver says that the handoff waits for room there."""
        handoff = self._active.get(HandoffKey(request_id, receiver))
        if handoff is not None and handoff.grant is None:
            handoff.grant_deadline = grant_deadline

    def granted(
        self,
        request_id: str,
        receiver: WorkerEpoch,
        *,
        generation: int,
        first_block: int,
        block_ids: Sequence[int],
        ttl_s: float,
        now: float,
    ) -> None:
        """Handle a `LeaseGrant`, which may come before its handoff is opened, late or twice."""
        key = HandoffKey(request_id, receiver)
        lease = LeaseKey(receiver, generation)
        if lease in self._past or lease in self._lost_leases or lease in self._by_lease:
            return
        grant = GrantedBlocks(lease, first_block, tuple(block_ids), now + ttl_s)
        handoff = self._active.get(key)
        if handoff is not None and handoff.grant is None:
            self._apply_grant(handoff, grant)
        elif handoff is not None:
            self._end_lease(key, lease, "the request has another lease")
        elif key in self._ungranted:
            self._end_lease(key, lease, self._ungranted.pop(key))
        else:
            former = self._early_grants.get(key)
            if former is not None and former.lease != lease:
                self._end_lease(key, former.lease, "replaced by another lease")
            self._early_grants[key] = grant

    def has_lease(self, request_id: str, receiver: WorkerEpoch) -> bool:
        """Whether the receiver has granted blocks to the handoff, and it has not ended."""
        handoff = self._active.get(HandoffKey(request_id, receiver))
        return handoff is not None and handoff.grant is not None

    def refused(self, request_id: str, receiver: WorkerEpoch, reason: str) -> None:
        """Fail a handoff: no grant will come."""
        handoff = self._active.get(HandoffKey(request_id, receiver))
        if handoff is not None and handoff.grant is None:
            self._fail(handoff, reason)

    def blocks_computed(self, request_id: str, block_ids: Sequence[int], num_final: int) -> None:
        """The bytes of the prompt's first `num_final` blocks are final. `block_ids` are at least those."""
        for handoff in self._of_request(request_id):
            assert num_final <= handoff.num_blocks, f"{num_final} of {handoff.num_blocks} blocks computed"
            handoff.local_block_ids.extend(block_ids[len(handoff.local_block_ids) : num_final])

    def first_tokens(self, request_id: str, token_ids: FirstTokens) -> None:
        """Prefill is complete. Once all blocks are written the handoff ends."""
        for handoff in self._of_request(request_id):
            handoff.first_token_ids = token_ids

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """Start no more writes for this request."""
        for handoff in self._of_request(request_id):
            self._fail(handoff, reason)

    def revoked(self, request_id: str, receiver: WorkerEpoch, generation: int) -> None:
        """Handle a `LeaseRevoked`. A `LeaseEnded` confirms it, at once or when in-flight writes have settled."""
        key = HandoffKey(request_id, receiver)
        lease = LeaseKey(receiver, generation)
        handoff = self._by_lease.get(lease)
        if handoff is not None:
            handoff.is_revoked = True
            self._fail(handoff, _REVOKED)
            return
        early = self._early_grants.get(key)
        if early is not None and early.lease == lease:
            del self._early_grants[key]
        if lease not in self._lost_leases:
            self._end_lease(key, lease, _REVOKED)

    def receiver_lost(self, receiver: WorkerEpoch) -> None:
        """The receiver is dead, and so are its leases. Call `Transport.remove_peer` to settle what is in flight."""
        for key in [key for key in self._early_grants if key.receiver == receiver]:
            del self._early_grants[key]
        for handoff in self.open_handoffs:
            if handoff.key.receiver == receiver:
                handoff.is_receiver_lost = True
                self._fail(handoff, f"{receiver.worker_id} is gone")
        self._lost_leases = {lease: key for lease, key in self._lost_leases.items() if lease.receiver != receiver}

    @property
    def receivers_with_lost_writes(self) -> set[WorkerEpoch]:
        """Receivers of the leases that are not confirmed because writes under them were lost."""
        return {lease.receiver for lease in self._lost_leases}

    def confirm_lost_writes(self, receiver: WorkerEpoch) -> None:
        """Confirm the leases with lost writes to this receiver: none of these can land any more."""
        for lease, key in list(self._lost_leases.items()):
            if lease.receiver == receiver:
                del self._lost_leases[lease]
                self._end_lease(key, lease, "a write was lost")

    def expire(self, now: float) -> None:
        """Give up handoffs without a grant, and grants without a handoff, whose time is over."""
        for handoff in [handoff for handoff in self.active_handoffs if handoff.grant is None]:
            if now >= handoff.grant_deadline:
                self._fail(handoff, f"no word from {handoff.key.receiver.worker_id} of the lease it was asked for")
        for key, grant in list(self._early_grants.items()):
            if now >= grant.deadline:
                del self._early_grants[key]
                self._end_lease(key, grant.lease, "the request did not come in time")

    def next_writes(self) -> list[BlockWrite]:
        """Writes to start now, in this order. Each counts as in flight until it is reported as settled."""
        writes: list[BlockWrite] = []
        for handoff in self._active.values():
            writes += handoff.take_writes(self._max_write_blocks)
        return writes

    def write_settled(self, write: BlockWrite, state: TransferState) -> None:
        """A write is over. If `write_blocks` raised, report FAILED."""
        handoff = write.handoff
        handoff.num_in_flight -= 1
        if state is TransferState.DONE:
            handoff.is_done_settled |= isinstance(write.notification, HandoffDone)
            self._end_if_settled(handoff)
        else:
            handoff.has_failed_write = True
            handoff.has_lost_write |= state is TransferState.LOST and bool(write.remote_block_ids)
            self._fail(handoff, f"a write to {write.receiver_id} is {state.value}")

    def take_ended(self) -> list[HandoffEnded | LeaseEnded]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def heartbeat_handoffs(self) -> list[tuple[str, int]]:
        """(request id, generation) of the open handoffs, for `Heartbeat.handoffs`; generation 0 before the grant."""
        return [(h.key.request_id, h.grant.lease.generation if h.grant else 0) for h in self._active.values()]

    @property
    def active_handoffs(self) -> list[OutgoingHandoff]:
        """Handoffs that are neither delivered nor failed, in the order in which they were opened."""
        return list(self._active.values())

    @property
    def open_handoffs(self) -> list[OutgoingHandoff]:
        """Handoffs that have not ended: the active ones, and those that only wait for in-flight writes."""
        return list(dict.fromkeys([*self._active.values(), *self._by_lease.values()]))

    @property
    def num_open(self) -> int:
        """Handoffs that have not ended."""
        return len(self.open_handoffs)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the maps agree."""
        for key, handoff in self._active.items():
            assert handoff.key == key, f"{handoff} is filed under {key}"
            assert not handoff.failure, f"{handoff} has failed but is active"
            assert not handoff.is_ended, f"{handoff} has ended but is active"
            assert key not in self._early_grants, f"{key} is open and has an early grant"
        filed = [handoff for handoffs in self._by_request.values() for handoff in handoffs]
        assert all(self._by_request.values()), "a request without handoffs is kept"
        assert len(filed) == len(self._active), f"{len(filed)} handoffs by request, {len(self._active)} active"
        assert set(filed) == set(self._active.values()), "the handoffs by request differ from the active ones"
        for lease, handoff in self._by_lease.items():
            assert handoff.grant is not None, f"{handoff} is filed under {lease} without a grant"
            assert handoff.grant.lease == lease, f"{handoff} is filed under {lease}"
            assert lease not in self._past, f"{lease} is past and open"
            assert handoff.num_in_flight > 0 or handoff.key in self._active, f"{handoff} should have ended"

    def _of_request(self, request_id: str) -> list[OutgoingHandoff]:
        return list(self._by_request.get(request_id, ()))  # a copy: failing ones are removed

    def _apply_grant(self, handoff: OutgoingHandoff, grant: GrantedBlocks) -> None:
        handoff.grant = grant
        handoff.num_submitted = grant.first_block
        self._by_lease[grant.lease] = handoff
        if grant.first_block < 0 or grant.first_block + len(grant.block_ids) != handoff.num_blocks:
            self._fail(
                handoff,
                f"granted {len(grant.block_ids)} blocks from {grant.first_block} on for {handoff.num_blocks} blocks",
            )

    def _fail(self, handoff: OutgoingHandoff, reason: str) -> None:
        handoff.failure = handoff.failure or reason
        self._deactivate(handoff)
        self._end_if_settled(handoff)

    def _end_if_settled(self, handoff: OutgoingHandoff) -> None:
        is_over = handoff.failure or handoff.is_done_settled
        if handoff.num_in_flight > 0 or handoff.is_ended or not is_over:
            return
        handoff.is_ended = True
        self._deactivate(handoff)
        is_delivered = handoff.is_done_settled and not handoff.has_failed_write
        if handoff.grant is not None:
            self._end_grant(handoff, handoff.grant.lease, is_delivered)
        elif not handoff.is_receiver_lost:
            _remember(self._ungranted, handoff.key, handoff.failure)
        reason = "" if is_delivered else handoff.failure
        self._ended.append(HandoffEnded(handoff.handoff_id, handoff.key.request_id, is_delivered, reason))

    def _end_grant(self, handoff: OutgoingHandoff, lease: LeaseKey, is_delivered: bool) -> None:
        del self._by_lease[lease]
        if handoff.is_receiver_lost:
            return
        if handoff.has_lost_write:
            self._lost_leases[lease] = handoff.key
        elif is_delivered and not handoff.is_revoked:
            _remember(self._past, lease, handoff.first_token_ids)  # `HandoffDone` told the receiver
        else:
            self._end_lease(handoff.key, lease, handoff.failure, handoff.first_token_ids if is_delivered else ())

    def _deactivate(self, handoff: OutgoingHandoff) -> None:
        if self._active.get(handoff.key) is handoff:  # a later handoff may have taken the key
            del self._active[handoff.key]
            of_request = self._by_request[handoff.key.request_id]
            of_request.remove(handoff)
            if not of_request:
                del self._by_request[handoff.key.request_id]

    def _end_lease(self, key: HandoffKey, lease: LeaseKey, reason: str, first_token_ids: FirstTokens = ()) -> None:
        first_token_ids = self._past.get(lease, first_token_ids)
        _remember(self._past, lease, first_token_ids)
        self._ended.append(LeaseEnded(key.receiver, key.request_id, lease.generation, reason, first_token_ids))


def _remember(memory: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    memory[key] = value
    while len(memory) > _NUM_REMEMBERED:
        memory.popitem(last=False)
