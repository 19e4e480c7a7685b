"""The decode role: reserve blocks under a lease, receive the prompt's KV into them, join the batch.

Runs inside a worker's loop and never waits. Nothing is decoded from blocks that did not arrive whole, under their
lease's generation and before its deadline. If the sender was done, but the KV arrived damaged, late or in part, the
prompt is computed again here. It continues from the first token that the sender sampled, which the client may have.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from tandem.engine.device import Mark
from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence, SequenceStatus
from tandem.engine.sequence_factory import CheckedPrompt
from tandem.kv_transfer.leases import Lease, LeaseReceived, LeaseReleased, LeaseTable
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.base import Notification
from tandem.kv_transfer.transport.checksum import strip_checksum, wrong_blocks
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.protocol.config import TransferConfig
from tandem.protocol.digest import extend_digests
from tandem.protocol.errors import PeerLost, TransferError, TransferTimeout
from tandem.protocol.messages import (
    FINISHED_EARLY,
    ChunkArrived,
    Decode,
    FirstTokens,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    PeerAddress,
    Quarantine,
    WorkerEpoch,
    WriteMessage,
    decode_write_message,
)

logger = logging.getLogger(__name__)

_REMIND_S = 1.0  # between two messages to a sender about prompts in line, and about leases whose end it must confirm
_LATE = "the prompt's KV did not arrive in time"
_MAX_EARLY = 4096  # lease requests kept because they overtook their request, which comes over another connection


@dataclass(eq=False, slots=True)
class _Pending:
    """A request whose KV is not here yet."""

    sequence: Sequence
    answers: dict[str, Sequence | None]  # to the prompt, by name; None for those that are cancelled
    sender: PeerAddress
    deadline: float  # for a message from the sender about this request; waiting for room has no deadline
    is_requested: bool = False
    num_matched_blocks: int = 0
    generation: int = 0  # the lease's, once it is granted
    is_late: bool = False  # whether the lease expired, and the sender was asked if it was done


class DecodeRole:
    """All handoffs that this worker receives. `on_failed(request_id, message, code)` is called for a failed one.

    Two things may take long, and each has its own rule. A request fails if its sender says nothing about it for
    `handoff_timeout_s`. A full pool fails no request: the sender keeps the prompt's KV and is told that the request
    is in line, until there is room or the router gives the request up.

    `num_recomputed` counts prompts that were computed again.
    """

    def __init__(
        self,
        engine: Engine,
        links: PeerLinks,
        config: TransferConfig,
        on_failed: Callable[[str, str, str], None],
        *,
        first_generation: int,
        wire: WireCodec | None = None,
    ) -> None:
        self._engine = engine
        self._wire = wire
        self._links = links
        self._config = config
        self._on_failed = on_failed
        self._leases = LeaseTable(first_generation=first_generation)
        self._pending: dict[str, _Pending] = {}  # by request, in the order of lease requests
        self._by_answer: dict[str, _Pending] = {}  # the same, by the names of all their answers
        self._early: OrderedDict[tuple[str, WorkerEpoch], None] = OrderedDict()  # request and sender
        self._unsent: deque[tuple[Mark, _Pending, LeaseGrant]] = deque()  # the device may still use their blocks
        self._remind_at = 0.0
        self._fenced_at: dict[int, float] = {}  # by generation, when a lease was first seen to be fenced
        self._dead: set[WorkerEpoch] = set()  # requests may still name them
        self.num_recomputed = 0
        self.last_begun = -math.inf  # when a peer said last that it began to write here

    @property
    def num_open(self) -> int:
        """Requests that wait for room or for their KV."""
        return len(self._pending)

    @property
    def num_leases(self) -> int:
        """Leases that hold blocks, live and fenced."""
        return self._leases.num_live + len(self._leases.fenced)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of leases that ended without their senders' confirmation."""
        return self._leases.num_quarantined_blocks

    def quarantines(self, now: float) -> list[Quarantine]:
        """By sender, how many blocks are in quarantine and for how long."""
        quarantines: dict[WorkerEpoch, Quarantine] = {}
        for lease in self._leases.fenced:
            sender, age_s = lease.sender, now - self._fenced_at.get(lease.generation, now)
            former = quarantines.get(sender, Quarantine(sender, 0, 0.0))
            num_blocks = former.num_blocks + len(lease.block_ids)
            quarantines[sender] = Quarantine(sender, num_blocks, max(former.oldest_s, age_s))
        return list(quarantines.values())

    @property
    def is_transferring(self) -> bool:
        """Whether frequent polling of the transport helps: a sender may be writing."""
        return self.num_leases > 0

    def accept(self, request: Decode, now: float, prompt: CheckedPrompt | None = None) -> None:
        """Expect the KV of this request's prompt. `prompt` is as of `SequenceFactory.sequence_of`.

        Raises RequestError if the engine cannot take it, PeerLost if the prefill worker is known to be dead: it would
        never confirm the end of a lease.
        """
        sender = request.prefill_worker
        if sender.process in self._dead:
            raise PeerLost(f"prefill worker {sender.worker_id} died")
        sequence = self._engine.factory.sequence_of(request, now, prompt=prompt)
        sequence.prompt_scores = None  # the prefill worker has them
        extend_digests(sequence.digests, sequence.root, sequence.token_ids, self._engine.config.block_size)
        self._links.remember(sender)
        deadline = now + self._config.handoff_timeout_s
        answers: dict[str, Sequence | None] = {one.request_id: one for one in (sequence, *sequence.forks)}
        pending = self._pending[request.request_id] = _Pending(sequence, answers, sender, deadline)
        self._by_answer |= dict.fromkeys(answers, pending)
        early = (request.request_id, sender.process)
        if early in self._early:
            del self._early[early]
            self._ask(pending)

    def requested(self, message: LeaseRequest, now: float) -> None:
        """Let the request wait for room from now on: its KV comes soon. Room reserved earlier would stand empty."""
        sender = message.sender.process
        pending = self._pending.get(message.request_id)
        if pending is None or pending.sender.process != sender:
            self._early[message.request_id, sender] = None
            if len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
        elif not pending.is_requested:
            self._ask(pending)
            pending.deadline = now + self._config.handoff_timeout_s

    def cancel(self, request_id: str) -> None:
        """Drop a request whose KV is not here yet. Its lease is fenced: blocks wait for the sender's confirmation.

        If it has other answers they go on, and the KV is received for them.
        """
        pending = self._by_answer.get(request_id)
        if pending is None:
            return
        cancelled, pending.answers[request_id] = pending.answers[request_id], None
        if any(pending.answers.values()):
            if cancelled in pending.sequence.forks:
                pending.sequence.forks.remove(cancelled)
            return
        request_id = pending.sequence.request_id
        self._drop(request_id)
        fenced = self._leases.cancel(request_id)
        if fenced is not None:
            self._revoke(fenced.lease)
        elif not pending.generation:
            self._refuse(pending, "cancelled")

    def heartbeat(self, sender: WorkerEpoch, handoffs: list[tuple[str, int]], now: float) -> None:
        """Extend leases and deadlines of the handoffs that a living sender works on."""
        self._leases.extend(sender, handoffs, now=now)
        for request_id, generation in handoffs:
            pending = self._pending.get(request_id) if generation == 0 else None
            if pending is None or pending.generation:
                continue
            if pending.sender.process == sender:
                pending.deadline = now + self._config.handoff_timeout_s

    def notified(self, notification: Notification, now: float) -> None:
        """Handle a notification that follows a write. A damaged one is dropped: its chunk will be missing."""
        message = _decode(notification)
        if message is None:
            logger.warning("dropped a notification from %s: it was damaged in transit", notification.worker_id)
            return
        if self._leases.is_foreign(message.generation, notification.sender):
            return
        if isinstance(message, ChunkArrived):
            self._chunk_arrived(message, now)
            return
        ended = self._leases.handoff_done(message.request_id, message.generation, message.first_token_ids, now=now)
        if isinstance(ended, LeaseReceived):
            self._join(ended, now)
        elif ended is not None:
            self._release(ended, first_token_ids=message.first_token_ids)

    def closed(self, message: LeaseClosed) -> None:
        """Free the blocks of a lease under which the sender will write no more."""
        released = self._leases.lease_closed(
            message.request_id, message.generation, message.sender.process, message.reason
        )
        if released is None:
            return
        if message.reason == FINISHED_EARLY:  # the router has the whole answer, or will have it soon
            self._drop(message.request_id)
        self._release(released, first_token_ids=message.first_token_ids)

    def peer_given_up(self, peer: WorkerEpoch) -> None:
        """Fail the requests of a process that is about to be ended. Blocks that it may still write to stay reserved."""
        self._dead.add(peer)
        self._leases.give_up_sender(peer)
        for request_id, pending in list(self._pending.items()):
            if pending.sender.process == peer:
                self._fail(request_id, f"prefill worker {peer.worker_id} died", PeerLost.code)

    def peer_lost(self, peer: WorkerEpoch) -> None:
        """Free the blocks that a process could write to until it was gone."""
        self.peer_given_up(peer)  # otherwise a request in line would get blocks that nobody frees
        for released in self._leases.sender_lost(peer):
            self._release(released, code=PeerLost.code)

    def expire(self, now: float) -> None:
        """End what is too late. Read all messages before calling this: a heartbeat may be among them."""
        for fenced in self._leases.expire(now):
            pending = self._pending[fenced.lease.request_id]
            pending.is_late, pending.deadline = True, now + self._config.handoff_timeout_s
            self._revoke(fenced.lease)
        for request_id, pending in list(self._pending.items()):
            if pending.is_late and now >= pending.deadline:
                self._fail(request_id, _LATE, TransferTimeout.code)
            elif not pending.generation and now >= pending.deadline:
                self._refuse(pending, "no heartbeat named the request")
                reason = f"prefill worker {pending.sender.worker_id} was silent for {self._config.handoff_timeout_s} s"
                self._fail(request_id, reason, TransferTimeout.code)

    def pump(self, now: float) -> None:
        """Grant leases while there is room, in the order of the requests for them."""
        if reservations := self._engine.scheduler.reserve():
            mark = self._engine.stream.record()
            for sequence, block_ids in reservations:
                pending = self._pending[sequence.request_id]
                self._unsent.append((mark, pending, self._grant(pending, block_ids, now)))
        self._send_grants()
        if now >= self._remind_at:
            self._remind_at = now + min(_REMIND_S, self._config.handoff_timeout_s / 4)
            fenced, fenced_at = self._leases.fenced, self._fenced_at
            self._fenced_at = {lease.generation: fenced_at.get(lease.generation, now) for lease in fenced}
            self._engine.scheduler.admission.lost_blocks["leases"] = sum(
                len(lease.block_ids)
                for lease in fenced
                if now - self._fenced_at[lease.generation] >= self._config.handoff_timeout_s
            )
            for lease in fenced:
                self._revoke(lease)
            self._tell_queued()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the books agree; with `idle`, no lease may be open."""
        self._leases.check_integrity()
        pending = {one.sequence for one in self._pending.values()}
        answers = {name: one for one in self._pending.values() for name in one.answers}
        assert answers == self._by_answer, "the pending requests by answer differ"
        promised = self._engine.scheduler.receiving.keys()
        assert promised <= pending, f"{len(promised - pending)} seats are promised to requests that are gone"
        if idle:
            assert not self._pending, f"requests still wait for their KV: {sorted(self._pending)}"
            assert self.num_leases == 0, f"{self._leases.num_live} live and {len(self._leases.fenced)} fenced leases"

    def _chunk_arrived(self, message: ChunkArrived, now: float) -> None:
        """Note what arrived, and unpack it. What is packed as nobody asked for is missing."""
        if message.codec and (self._wire is None or message.codec != self._wire.name):
            logger.warning("request %s: blocks came packed as %r", message.request_id, message.codec)
            return
        blocks = self._leases.chunk_arrived(
            message.request_id, message.generation, message.first_block, message.num_blocks, message.checksums, now=now
        )
        if message.codec and blocks and self._wire is not None:
            self._wire.unpack(blocks)

    def _ask(self, pending: _Pending) -> None:
        pending.is_requested = True
        self._engine.scheduler.request_room(pending.sequence)

    def _grant(self, pending: _Pending, reserved: list[int], now: float) -> LeaseGrant:
        """Grant the sender a lease on blocks for the part of the prompt that is not cached here."""
        sequence = pending.sequence
        pending.num_matched_blocks = len(sequence.blocks)
        if sequence.timeline is not None:
            sequence.timeline.mark("lease_granted", now)
        lease = self._leases.grant(
            sequence.request_id,
            reserved,
            first_block=pending.num_matched_blocks,
            sender=pending.sender.process,
            now=now,
            ttl_s=self._config.lease_ttl_s,
            first_ttl_s=self._config.handoff_timeout_s,
        )
        pending.generation = lease.generation
        return LeaseGrant(
            sender=self._links.me,
            request_id=lease.request_id,
            generation=lease.generation,
            first_block=lease.first_block,
            block_ids=reserved,
            ttl_s=self._config.handoff_timeout_s,
        )

    def _send_grants(self) -> None:
        """Send the grants whose blocks the device has finished with: the sender's writes do not wait for the device."""
        while self._unsent and self._engine.stream.is_done(self._unsent[0][0]):
            _, pending, grant = self._unsent.popleft()
            if self._pending.get(grant.request_id) is pending:  # otherwise its sender was told that the lease has ended
                self._links.send(pending.sender.process, grant)

    def _join(self, received: LeaseReceived, now: float) -> None:
        """Let the sequence run if all blocks arrived as they were sent; otherwise compute its prompt here."""
        lease = received.lease
        wrong = wrong_blocks(self._engine.kv.shards, lease.block_ids, received.checksums)
        if wrong:
            self._engine.pool.release(lease.block_ids)
            is_damaged = f"{len(wrong)} KV blocks arrived damaged"
            reason = f"{received.num_missing} KV blocks were not announced" if received.num_missing else is_damaged
            self._recompute(lease.request_id, received.first_token_ids, reason)
            return
        pending = self._take(lease.request_id)
        sequence = pending.sequence
        sequence.blocks += lease.block_ids
        sequence.num_published_blocks = pending.num_matched_blocks
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.num_cached_tokens = pending.num_matched_blocks * self._engine.config.block_size
        if sequence.timeline is not None:
            sequence.timeline.mark("all_blocks", now)
            sequence.timeline.count("blocks", len(lease.block_ids))
            sequence.timeline.count("bytes", len(lease.block_ids) * self._engine.block_bytes)
        blocks = self._engine.scheduler.blocks
        blocks.publish_computed(sequence)
        going_on = _going_on(pending, received.first_token_ids)
        for fork in going_on:
            if fork is not sequence:
                blocks.fork(sequence, fork)
        if sequence not in going_on:
            self._give_up(sequence)
        self._go_on(going_on)

    def _recompute(self, request_id: str, first_token_ids: FirstTokens, reason: str) -> None:
        """Compute a prompt whose KV did not arrive and go on from the first token, as if it had been preempted."""
        pending = self._take(request_id)
        sequence = pending.sequence
        sender_id = pending.sender.worker_id
        logger.warning("request %s from %s: %s; the prompt is computed here", request_id, sender_id, reason)
        self.num_recomputed += 1
        if sequence.timeline is not None:
            sequence.timeline.count("recomputed_prompts", 1)
        self._give_up(sequence)
        self._go_on(_going_on(pending, first_token_ids))

    def _go_on(self, answers: Iterable[Sequence]) -> None:
        """Let the answers to a prompt run, as sequences of their own."""
        for sequence in answers:
            sequence.status = SequenceStatus.WAITING
            sequence.is_admitted_before = True
            self._engine.add(sequence)

    def _release(
        self, released: LeaseReleased, *, code: str | None = TransferError.code, first_token_ids: FirstTokens = ()
    ) -> None:
        """Free the blocks of a lease. A request that waited for them is computed here if its first tokens are known."""
        lease = released.lease
        self._engine.pool.release(lease.block_ids)
        pending = self._pending.get(lease.request_id)
        if pending is None or pending.generation != lease.generation:
            return
        if first_token_ids:
            self._recompute(lease.request_id, first_token_ids, _LATE)
        elif pending.is_late:
            self._fail(lease.request_id, _LATE, TransferTimeout.code)
        else:
            self._fail(lease.request_id, released.reason, code)

    def _take(self, request_id: str) -> _Pending:
        """Take a pending request out of the books."""
        pending = self._pending.pop(request_id)
        for name in pending.answers:
            del self._by_answer[name]
        return pending

    def _drop(self, request_id: str) -> list[str]:
        """Forget a pending request and free its cached prefix. Returns its answers that were open."""
        if request_id not in self._pending:
            return []
        pending = self._take(request_id)
        self._give_up(pending.sequence)
        return [name for name, sequence in pending.answers.items() if sequence is not None]

    def _give_up(self, sequence: Sequence) -> None:
        """Stop receiving this sequence. Blocks under a lease stay with the lease."""
        self._engine.scheduler.stop_receiving(sequence)
        self._engine.scheduler.blocks.release(sequence)

    def _fail(self, request_id: str, reason: str, code: str | None) -> None:
        for name in self._drop(request_id):
            self._on_failed(name, f"KV handoff failed: {reason}", code or "")

    def _tell_queued(self) -> None:
        """Tell senders which requests are in line for room, so that they can tell a full pool from a dead worker."""
        queued: dict[WorkerEpoch, list[str]] = {}
        for sequence in self._engine.scheduler.awaiting_room:
            sender = self._pending[sequence.request_id].sender.process
            queued.setdefault(sender, []).append(sequence.request_id)
        for sender, request_ids in queued.items():
            self._links.send(sender, LeaseQueued(sender=self._links.me, request_ids=request_ids))

    def _refuse(self, pending: _Pending, reason: str) -> None:
        message = LeaseRefused(sender=self._links.me, request_id=pending.sequence.request_id, reason=reason)
        self._links.send(pending.sender.process, message)

    def _revoke(self, lease: Lease) -> None:
        message = LeaseRevoked(sender=self._links.me, request_id=lease.request_id, generation=lease.generation)
        self._links.send(lease.sender, message)


def _going_on(pending: _Pending, first_token_ids: FirstTokens) -> list[Sequence]:
    """The answers that have not ended, each with its first token."""
    pending.sequence.take_forks()
    going_on = []
    for sequence, token_id in zip(pending.answers.values(), first_token_ids, strict=False):
        if sequence is not None and token_id is not None:
            sequence.token_ids.append(token_id)
            going_on.append(sequence)
    return going_on


def _decode(notification: Notification) -> WriteMessage | None:
    """The message that a sender attached to its write; None if it was damaged in transit."""
    payload = strip_checksum(notification.payload)
    try:
        return None if payload is None else decode_write_message(payload)
    except msgspec.MsgspecError:
        return None
