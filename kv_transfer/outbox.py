"""Handoffs on their way out, seen from the worker that sends KV. Pure: it says what to write, others write it.

Three things come in any order: the receiver's grant, computed blocks, and the first token. As soon as a block is both
granted and computed it is written; behind the last one goes `HandoffDone`.

    prompt blocks of one handoff
    [0, first_block)              cached at the receiver: never sent
    [first_block, num_submitted)  given to the transport; settled or in flight
    [num_submitted, computed)     the next write
    [computed, num_blocks)        prefill still runs

A handoff ends when nothing of it is in flight and it was delivered or has failed. Only then may its local blocks be
unpinned, and only then is the receiver told that its blocks are safe. A lost write may still land: its lease is
confirmed once the transport proves that it cannot any more (`confirm_lost_writes`). Without that proof the receiver
keeps the blocks until this process is gone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tandem.kv_transfer.transport.base import TransferState
from tandem.protocol.errors import TransferError
from tandem.protocol.messages import ChunkArrived, HandoffDone

__all__ = ["BlockWrite", "HandoffEnded", "LeaseEnded", "Outbox"]

# Generations that ended here are remembered so that a grant which comes late or twice revives none of them, and so are
# handoffs that ended ungranted: a grant that comes late is answered at once. Links are ordered, so a few would do.
_NUM_REMEMBERED = 4096
_REVOKED = "revoked by the receiver: the KV did not arrive in time, or the request has ended"

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class HandoffEnded(NamedTuple):
    """The handoff is over: unpin its blocks."""

    handoff_id: int
    request_id: str
    is_delivered: bool
    reason: str  # why not, else ""


class LeaseEnded(NamedTuple):
    """Send `LeaseClosed`: no write under this lease is in flight or will be started."""

    receiver_id: str
    receiver_epoch: int
    request_id: str
    generation: int
    reason: str
    first_token_id: int | None = None  # if the handoff was delivered: the receiver may have missed it


class _LeaseKey(NamedTuple):
    receiver_id: str
    receiver_epoch: int
    generation: int


class _HandoffKey(NamedTuple):
    request_id: str
    receiver_id: str
    receiver_epoch: int


class _Grant(NamedTuple):
    lease: _LeaseKey
    first_block: int
    block_ids: tuple[int, ...]
    deadline: float


@dataclass(eq=False, slots=True)
class _OutgoingHandoff:
    handoff_id: int
    key: _HandoffKey
    num_blocks: int
    grant_deadline: float
    grant: _Grant | None = None
    local_block_ids: list[int] = field(default_factory=list)
    num_submitted: int = 0
    first_token_id: int | None = None
    num_in_flight: int = 0
    is_done_submitted: bool = False
    is_done_settled: bool = False
    has_failed_write: bool = False
    has_lost_write: bool = False  # its blocks may still land
    is_revoked: bool = False
    is_receiver_lost: bool = False
    is_ended: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWrite:
    """Arguments of one `Transport.write_blocks`; report its end by `Outbox.write_settled`."""

    receiver_id: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    notification: ChunkArrived | HandoffDone  # add the checksums of `local_block_ids`, if they are on
    handoff: _OutgoingHandoff

    @property
    def receiver_epoch(self) -> int:
        """The epoch of the receiver that granted the blocks."""
        return self.handoff.key.receiver_epoch


class Outbox:
    """All handoffs of one sending worker."""

    def __init__(self) -> None:
        self._num_opened = 0
        self._active: dict[_HandoffKey, _OutgoingHandoff] = {}  # until delivered or failed
        self._by_request: dict[str, list[_OutgoingHandoff]] = {}  # the same, mostly one to a request
        self._by_lease: dict[_LeaseKey, _OutgoingHandoff] = {}  # granted, until ended
        self._early_grants: dict[_HandoffKey, _Grant] = {}  # came before their `open`
        self._past: OrderedDict[_LeaseKey, int | None] = OrderedDict()  # the first token of those delivered
        self._ungranted: OrderedDict[_HandoffKey, str] = OrderedDict()  # ended before their grant came: why
        self._unsure: dict[_LeaseKey, _HandoffKey] = {}  # ended with a lost write
        self._ended: list[HandoffEnded | LeaseEnded] = []

    def open(
        self,
        request_id: str,
        receiver_id: str,
        receiver_epoch: int,
        *,
        num_blocks: int,
        grant_deadline: float = math.inf,
    ) -> int:
        """Start a handoff of `num_blocks` prompt blocks (a partial last one included); its id.

        It fails without a grant by `grant_deadline`, which may be set later by `requested`.
        """
        key = _HandoffKey(request_id, receiver_id, receiver_epoch)
        if key in self._active:
            raise TransferError(f"{request_id} is already being handed off to {receiver_id}")
        self._num_opened += 1
        handoff = _OutgoingHandoff(self._num_opened, key, num_blocks, grant_deadline)
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

    def queued(self, request_id: str, receiver_id: str, receiver_epoch: int, *, grant_deadline: float) -> None:
        """The receiver says that the handoff is in line for room there."""
        handoff = self._active.get(_HandoffKey(request_id, receiver_id, receiver_epoch))
        if handoff is not None and handoff.grant is None:
            handoff.grant_deadline = grant_deadline

    def granted(
        self,
        request_id: str,
        receiver_id: str,
        receiver_epoch: int,
        *,
        generation: int,
        first_block: int,
        block_ids: Sequence[int],
        ttl_s: float,
        now: float,
    ) -> None:
        """Take a `LeaseGrant`, also one that comes before its handoff is opened, late or twice."""
        key = _HandoffKey(request_id, receiver_id, receiver_epoch)
        lease = _LeaseKey(receiver_id, receiver_epoch, generation)
        if lease in self._past or lease in self._unsure or lease in self._by_lease:
            return
        grant = _Grant(lease, first_block, tuple(block_ids), now + ttl_s)
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

    def has_lease(self, request_id: str, receiver_id: str, receiver_epoch: int) -> bool:
        """Whether the receiver has granted the handoff its blocks, and it has not ended."""
        handoff = self._active.get(_HandoffKey(request_id, receiver_id, receiver_epoch))
        return handoff is not None and handoff.grant is not None

    def refused(self, request_id: str, receiver_id: str, receiver_epoch: int, reason: str) -> None:
        """No grant will come."""
        handoff = self._active.get(_HandoffKey(request_id, receiver_id, receiver_epoch))
        if handoff is not None and handoff.grant is None:
            self._fail(handoff, reason)

    def blocks_computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The leading blocks of the prompt whose bytes are final, all of them so far."""
        for handoff in self._of_request(request_id):
            assert len(block_ids) <= handoff.num_blocks, f"{len(block_ids)} of {handoff.num_blocks} blocks computed"
            handoff.local_block_ids.extend(block_ids[len(handoff.local_block_ids) :])

    def first_token(self, request_id: str, token_id: int) -> None:
        """Prefill is complete. With all blocks written this ends the handoff."""
        for handoff in self._of_request(request_id):
            handoff.first_token_id = token_id

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """Start no more writes for this request."""
        for handoff in self._of_request(request_id):
            self._fail(handoff, reason)

    def revoked(self, request_id: str, receiver_id: str, receiver_epoch: int, generation: int) -> None:
        """Take a `LeaseRevoked`. It is confirmed by a `LeaseEnded`, at once or when in-flight writes have settled."""
        key = _HandoffKey(request_id, receiver_id, receiver_epoch)
        lease = _LeaseKey(receiver_id, receiver_epoch, generation)
        handoff = self._by_lease.get(lease)
        if handoff is not None:
            handoff.is_revoked = True
            self._fail(handoff, _REVOKED)
            return
        early = self._early_grants.get(key)
        if early is not None and early.lease == lease:
            del self._early_grants[key]
        if lease not in self._unsure:
            self._end_lease(key, lease, _REVOKED)

    def receiver_lost(self, receiver_id: str, receiver_epoch: int) -> None:
        """The receiver is dead, and its leases with it. Call `Transport.remove_peer` to settle what is in flight."""
        receiver = (receiver_id, receiver_epoch)
        for key in [key for key in self._early_grants if key[1:] == receiver]:
            del self._early_grants[key]
        for handoff in [*self._active.values(), *self._by_lease.values()]:
            if handoff.key[1:] == receiver:
                handoff.is_receiver_lost = True
                self._fail(handoff, f"{receiver_id} is gone")
        self._unsure = {lease: key for lease, key in self._unsure.items() if lease[:2] != receiver}

    @property
    def receivers_with_lost_writes(self) -> set[tuple[str, int]]:
        """Receivers (and their epochs) of leases that are not confirmed, as writes under them were lost."""
        return {(lease.receiver_id, lease.receiver_epoch) for lease in self._unsure}

    def confirm_lost_writes(self, receiver_id: str, receiver_epoch: int) -> None:
        """Nothing that was lost on the way to this receiver can land any more: confirm those leases."""
        for lease, key in list(self._unsure.items()):
            if (lease.receiver_id, lease.receiver_epoch) == (receiver_id, receiver_epoch):
                del self._unsure[lease]
                self._end_lease(key, lease, "a write was lost")

    def expire(self, now: float) -> None:
        """Give up handoffs without a grant and grants without a handoff whose time is over."""
        for handoff in [handoff for handoff in self._active.values() if handoff.grant is None]:
            if now >= handoff.grant_deadline:
                self._fail(handoff, f"no word from {handoff.key.receiver_id} of the lease it was asked for")
        for key, grant in list(self._early_grants.items()):
            if now >= grant.deadline:
                del self._early_grants[key]
                self._end_lease(key, grant.lease, "the request did not come in time")

    def next_writes(self) -> list[BlockWrite]:
        """Writes to start now, in this order. Each counts as in flight until it is reported as settled."""
        writes: list[BlockWrite] = []
        for handoff in self._active.values():
            if handoff.grant is not None:
                writes += _next_writes(handoff, handoff.grant)
        return writes

    def write_settled(self, write: BlockWrite, state: TransferState) -> None:
        """A write is over. One that could not even be started (`write_blocks` raised) is FAILED."""
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
        """The (request id, generation) worked on, for `Heartbeat.handoffs`; generation 0 before the grant."""
        return [(h.key.request_id, h.grant.lease.generation if h.grant else 0) for h in self._active.values()]

    @property
    def num_open(self) -> int:
        """Handoffs that have not ended, those that only wait for in-flight writes included."""
        return len(set(self._active.values()) | set(self._by_lease.values()))

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        for key, handoff in self._active.items():
            assert handoff.key == key, f"{handoff} is filed under {key}"
            assert not handoff.failure, f"{handoff} has failed but is active"
            assert not handoff.is_ended, f"{handoff} has ended but is active"
            assert key not in self._early_grants, f"{key} is open and has an early grant"
        filed = [handoff for handoffs in self._by_request.values() for handoff in handoffs]
        assert all(self._by_request.values()), "a request without handoffs is kept"
        assert len(filed) == len(self._active), f"{len(filed)} handoffs by request, {len(self._active)} active"
        assert set(filed) == set(self._active.values()), "the handoffs by request are others than the active ones"
        for lease, handoff in self._by_lease.items():
            assert handoff.grant is not None, f"{handoff} is filed under {lease} without a grant"
            assert handoff.grant.lease == lease, f"{handoff} is filed under {lease}"
            assert lease not in self._past, f"{lease} is past and open"
            assert handoff.num_in_flight > 0 or handoff.key in self._active, f"{handoff} should have ended"

    def _of_request(self, request_id: str) -> list[_OutgoingHandoff]:
        return list(self._by_request.get(request_id, ()))  # a copy: those that fail are taken out

    def _apply_grant(self, handoff: _OutgoingHandoff, grant: _Grant) -> None:
        handoff.grant = grant
        handoff.num_submitted = grant.first_block
        self._by_lease[grant.lease] = handoff
        if grant.first_block < 0 or grant.first_block + len(grant.block_ids) != handoff.num_blocks:
            self._fail(
                handoff,
                f"granted {len(grant.block_ids)} blocks from {grant.first_block} on for {handoff.num_blocks} blocks",
            )

    def _fail(self, handoff: _OutgoingHandoff, reason: str) -> None:
        handoff.failure = handoff.failure or reason
        self._deactivate(handoff)
        self._end_if_settled(handoff)

    def _end_if_settled(self, handoff: _OutgoingHandoff) -> None:
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
        self._ended.append(
            HandoffEnded(
                handoff.handoff_id, handoff.key.request_id, is_delivered, "" if is_delivered else handoff.failure
            )
        )

    def _end_grant(self, handoff: _OutgoingHandoff, lease: _LeaseKey, is_delivered: bool) -> None:
        del self._by_lease[lease]
        if handoff.is_receiver_lost:
            return
        if handoff.has_lost_write:
            self._unsure[lease] = handoff.key
        elif is_delivered and not handoff.is_revoked:
            _remember(self._past, lease, handoff.first_token_id)  # `HandoffDone` told the receiver
        else:
            self._end_lease(handoff.key, lease, handoff.failure, handoff.first_token_id if is_delivered else None)

    def _deactivate(self, handoff: _OutgoingHandoff) -> None:
        if self._active.get(handoff.key) is handoff:  # a later handoff may have taken the key
            del self._active[handoff.key]
            siblings = self._by_request[handoff.key.request_id]
            siblings.remove(handoff)
            if not siblings:
                del self._by_request[handoff.key.request_id]

    def _end_lease(self, key: _HandoffKey, lease: _LeaseKey, reason: str, first_token_id: int | None = None) -> None:
        first_token_id = self._past.get(lease, first_token_id)
        _remember(self._past, lease, first_token_id)
        self._ended.append(LeaseEnded(*key[1:], key.request_id, lease.generation, reason, first_token_id))


def _remember(memory: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    memory[key] = value
    while len(memory) > _NUM_REMEMBERED:
        memory.popitem(last=False)


def _next_writes(handoff: _OutgoingHandoff, grant: _Grant) -> list[BlockWrite]:
    """What can go now: the blocks computed since the last write, and `HandoffDone` behind the last block."""
    request_id, generation = handoff.key.request_id, grant.lease.generation
    writes: list[BlockWrite] = []
    start, end = handoff.num_submitted, len(handoff.local_block_ids)
    if start < end:
        writes.append(
            BlockWrite(
                handoff.key.receiver_id,
                handoff.local_block_ids[start:end],
                list(grant.block_ids[start - grant.first_block : end - grant.first_block]),
                ChunkArrived(request_id=request_id, generation=generation, first_block=start, num_blocks=end - start),
                handoff,
            )
        )
        handoff.num_submitted = end
    is_complete = handoff.num_submitted == handoff.num_blocks and handoff.first_token_id is not None
    if is_complete and not handoff.is_done_submitted:
        assert handoff.first_token_id is not None
        done = HandoffDone(request_id=request_id, generation=generation, first_token_id=handoff.first_token_id)
        writes.append(BlockWrite(handoff.key.receiver_id, [], [], done, handoff))
        handoff.is_done_submitted = True
    handoff.num_in_flight += len(writes)
    return writes
