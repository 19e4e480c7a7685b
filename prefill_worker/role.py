"""The prefill role: compute prompts, push their blocks while the next chunk computes, hand over.

Runs inside a worker's loop and never waits. A prompt's KV leaves chunk by chunk as soon as the decode worker's grant
is here; the first token goes to the router then, without waiting for the transfer. Sent before, it would be followed by
silence for as long as the decode worker has no seat or no room. The grant is asked for as late as the transfer allows:
the room of a long prompt would stand empty on the decode worker for as long as it is computed.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from tandem.engine.engine import Engine, SequenceOutput, StepResult
from tandem.engine.sequence import Phase, Sequence
from tandem.kv_transfer.checksum import CHECKED_SHARE, append_checksum, block_checksums
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.outbox import HandoffEnded, Outbox
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import (
    FINISHED_EARLY,
    ChunkArrived,
    HandoffDone,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    LinkLoad,
    PeerAddress,
    Prefill,
    encode_message,
)

__all__ = ["PrefillRole"]

logger = logging.getLogger(__name__)

_VOUCH_INTERVAL_S = 1.0  # between two looks at leases with lost writes


class _Flight(NamedTuple):
    write: BlockWrite
    transfer: Transfer
    deadline: float


@dataclass(eq=False, slots=True)
class _Stall:
    """The oldest write of a link, and since when it has been that."""

    transfer: Transfer
    since: float


@dataclass(eq=False, slots=True)
class _Handoff:
    sequence: Sequence
    receiver: PeerAddress
    num_blocks: int
    is_requested: bool = False  # the receiver was asked for a lease
    is_computed: bool = False
    exposed_bytes: int = 0  # written since
    exposed_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Written:
    """Totals of one link, as in `LinkLoad`."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_handoffs: int = 0
    exposed_bytes: int = 0
    exposed_s: float = 0.0
    num_lost: int = 0
    num_resets: int = 0


class PrefillRole:
    """All handoffs this worker sends.

    `on_failed(request_id, message, code)` tells the router of one that failed, `on_delivered(request_id)` says that
    this worker has nothing more to do with the request.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        links: PeerLinks,
        config: TransferConfig,
        on_failed: Callable[[str, str, str], None],
        on_delivered: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._links = links
        self._config = config
        self._on_failed = on_failed
        self._on_delivered = on_delivered
        self._outbox = Outbox()
        self._handoffs: dict[str, _Handoff] = {}
        self._held: dict[str, SequenceOutput] = {}  # first tokens of handoffs without a lease
        self._early_grants: dict[tuple[str, int], list[LeaseGrant]] = {}  # by worker and epoch: the link is not up yet
        self._in_flight: list[_Flight] = []
        self._stalls: dict[tuple[str, int], _Stall] = {}  # by receiver and its epoch, while writes are in flight
        self._vouch_at = 0.0
        self._written: dict[str, _Written] = {}  # by receiver
        self._dead: set[tuple[str, int]] = set()  # worker and epoch; its last messages may come after its death
        self._step_s = 0.0  # of the last step
        self._draw = random.Random(0).random  # of the blocks to check

    @property
    def num_open(self) -> int:
        """Handoffs that still hold blocks here."""
        return len(self._handoffs)

    def has(self, request_id: str) -> bool:
        """Whether a handoff of this request is still open here, if only until its writes have settled."""
        return request_id in self._handoffs

    @property
    def is_transferring(self) -> bool:
        """Whether polling the transport often makes something finish sooner."""
        return bool(self._in_flight)

    @property
    def live_handoffs(self) -> list[tuple[str, int]]:
        """(request id, generation) pairs for the heartbeat that keeps their leases."""
        return self._outbox.heartbeat_handoffs

    @property
    def link_loads(self) -> list[LinkLoad]:
        """What was written to each peer, for the heartbeat."""
        return [LinkLoad(peer_id=peer_id, **asdict(written)) for peer_id, written in self._written.items()]

    def accept(self, request: Prefill, now: float) -> None:
        """Queue the prompt and open its handoff.

        Raises RequestError if the engine cannot take it, PeerLost if the decode worker is known to be dead.
        """
        receiver = request.decode_worker
        if (receiver.worker_id, receiver.epoch) in self._dead:
            raise PeerLost(f"decode worker {receiver.worker_id} died")
        sequence = self._engine.make_sequence(
            request.request_id,
            request.token_ids,
            request.sampling,
            cache_salt=request.cache_salt,
            phase=Phase.PREFILL_ONLY,
            priority=request.priority,
        )
        sequence.kv_holder, sequence.kv_receiver = request.kv_holder, receiver
        self._links.connect(receiver, now)
        num_blocks = -(-len(request.token_ids) // self._engine.config.block_size)
        self._outbox.open(request.request_id, receiver.worker_id, receiver.epoch, num_blocks=num_blocks)
        self._handoffs[request.request_id] = _Handoff(sequence, receiver, num_blocks)
        self._engine.add(sequence)

    def granted(self, grant: LeaseGrant, now: float) -> None:
        """The decode worker reserved blocks. Held back while the link to it is not up."""
        if (grant.sender.worker_id, grant.sender.epoch) in self._dead:
            return
        if self._links.is_ready(grant.sender):
            self._apply_grant(grant, now)
        else:
            self._links.connect(grant.sender, now)  # it may have broken since the request came
            self._early_grants.setdefault((grant.sender.worker_id, grant.sender.epoch), []).append(grant)

    def link_ready(self, peer: PeerAddress, now: float) -> None:
        """The peer may be written to from now on: use the grants that were waiting for that."""
        for grant in self._early_grants.pop((peer.worker_id, peer.epoch), []):
            self._apply_grant(grant, now)

    def link_refused(self, peer: PeerAddress, reason: str) -> None:
        """Workers that disagree never exchange KV: their handoffs fail with the reason."""
        self._fail_receiver(peer.worker_id, peer.epoch, reason)

    def queued(self, message: LeaseQueued, now: float) -> None:
        """The decode worker is alive and these wait there for room: however long that takes, nobody is late."""
        sender, deadline = message.sender, now + self._config.handoff_timeout_s
        for request_id in message.request_ids:
            self._outbox.queued(request_id, sender.worker_id, sender.epoch, grant_deadline=deadline)

    def refused(self, message: LeaseRefused) -> None:
        """No grant will come."""
        self._outbox.refused(message.request_id, message.sender.worker_id, message.sender.epoch, message.reason)

    def revoked(self, message: LeaseRevoked) -> None:
        """The decode worker ended the lease; the outbox confirms once nothing is in flight."""
        self._outbox.revoked(message.request_id, message.sender.worker_id, message.sender.epoch, message.generation)

    def cancel(self, request_id: str) -> None:
        """Stop computing and sending this request."""
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            return
        self._withdraw(handoff.sequence)
        self._outbox.cancel(request_id)

    def peer_lost(self, worker_id: str, epoch: int) -> None:
        """The process of that epoch is known to be dead: its handoffs fail, in-flight writes settle as lost."""
        self._dead.add((worker_id, epoch))
        self._fail_receiver(worker_id, epoch, f"decode worker {worker_id} died")
        self._outbox.receiver_lost(worker_id, epoch)
        self._written.pop(worker_id, None)

    def after_step(self, result: StepResult) -> list[SequenceOutput]:
        """Offer what the step computed to the outbox, first tokens included; the outputs to send to the router now.

        The first tokens of handoffs without a lease are kept for `take_first_tokens`.
        """
        self._settle()  # what was written while the step ran is not exposed
        self._step_s = result.stats.duration_s
        size = self._engine.config.block_size
        for chunk in result.chunks:
            sequence = chunk.sequence
            if sequence.phase is Phase.PREFILL_ONLY and sequence.request_id in self._handoffs:
                is_complete = sequence.num_computed_tokens >= sequence.num_prompt_tokens
                num_final = len(sequence.blocks) if is_complete else sequence.num_computed_tokens // size
                self._outbox.blocks_computed(sequence.request_id, sequence.blocks[:num_final])
        outputs = []
        for output in result.outputs:
            sequence = output.sequence
            handoff = self._handoffs.get(sequence.request_id)
            if sequence.phase is not Phase.PREFILL_ONLY or handoff is None:
                outputs.append(output)
            elif sequence.finish_reason is None:
                self._outbox.first_token(sequence.request_id, output.token_id)
                handoff.is_computed = True
                self._held[sequence.request_id] = output
            else:  # the first token was the last: there is nothing to hand over
                self._outbox.cancel(sequence.request_id, FINISHED_EARLY)
                outputs.append(output)
        return outputs + self.take_first_tokens()

    def take_first_tokens(self) -> list[SequenceOutput]:
        """First tokens to send to the router, as their handoffs have a lease now. Call it before `pump` ends these."""
        due = [output for output in self._held.values() if self._has_lease(output.sequence.request_id)]
        for output in due:
            del self._held[output.sequence.request_id]
        return due

    def expire(self, now: float) -> None:
        """Give up what is too late. Only for a caller that has read all that came: a grant may be among it."""
        self._settle()
        self._give_up_stalled(now)
        self._reset_stalled_links(now)
        self._vouch_for_lost(now)
        self._outbox.expire(now)

    def request_leases(self, now: float) -> None:
        """Ask for the room that is needed before long. Also right before a step, for what was just admitted to it."""
        if all(handoff.is_requested for handoff in self._handoffs.values()):
            return
        for handoff in [handoff for handoff in self._due() if not handoff.is_requested]:
            handoff.is_requested = True
            request_id, receiver = handoff.sequence.request_id, handoff.receiver
            self._outbox.requested(request_id, grant_deadline=now + self._config.handoff_timeout_s)
            message = LeaseRequest(sender=self._links.me, request_id=request_id)
            self._links.send(receiver.worker_id, receiver.epoch, message)

    def pump(self, now: float) -> None:
        """Start what can be written, notice what finished, give back the blocks of handoffs that are over."""
        self._settle()
        self.request_leases(now)
        for write in self._outbox.next_writes():
            self._start(write, now)
        self._settle()
        for ended in self._outbox.take_ended():
            if isinstance(ended, HandoffEnded):
                self._finish(ended)
            else:
                closed = LeaseClosed(
                    sender=self._links.me,
                    request_id=ended.request_id,
                    generation=ended.generation,
                    reason=ended.reason,
                    first_token_id=ended.first_token_id,
                )
                self._links.send(ended.receiver_id, ended.receiver_epoch, closed)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the books agree; with `idle`, nothing may be open."""
        self._outbox.check_integrity()
        assert self._held.keys() <= self._handoffs.keys(), "a first token is held of a handoff that is over"
        if idle:
            assert not self._handoffs, f"handoffs still open: {sorted(self._handoffs)}"
            assert not self._in_flight, f"{len(self._in_flight)} writes still in flight"
            assert self._outbox.num_open == 0, f"{self._outbox.num_open} handoffs still in the outbox"

    def _has_lease(self, request_id: str) -> bool:
        receiver = self._handoffs[request_id].receiver
        return self._outbox.has_lease(request_id, receiver.worker_id, receiver.epoch)

    def _due(self) -> list[_Handoff]:
        """Handoffs that need their lease by now, whether or not it was asked for.

        It is read between two steps, so to write while the prompt's last step computes it must be asked for before the
        step ahead of that, or as much sooner as the transfer takes longer than the last step.
        """
        due = [handoff for handoff in self._handoffs.values() if handoff.is_computed]
        step_tokens, num_tokens = self._engine.config.max_num_batched_tokens, 0
        for sequence in self._engine.scheduler.running:
            num_tokens += sequence.num_uncomputed_tokens
            handoff = self._handoffs.get(sequence.request_id)
            if handoff is not None:
                num_later_steps = -(-num_tokens // step_tokens) - 1  # behind the next one
                if num_later_steps <= 1 or num_later_steps * self._step_s <= self._transfer_s(handoff):
                    due.append(handoff)
        return due

    def _transfer_s(self, handoff: _Handoff) -> float:
        """Seconds to send the prompt's KV; for ever where none was sent to that worker yet."""
        written = self._written.get(handoff.receiver.worker_id)
        if written is None or written.num_bytes == 0:
            return math.inf
        return handoff.num_blocks * self._engine.block_bytes * written.seconds / written.num_bytes

    def _apply_grant(self, grant: LeaseGrant, now: float) -> None:
        self._outbox.granted(
            grant.request_id,
            grant.sender.worker_id,
            grant.sender.epoch,
            generation=grant.generation,
            first_block=grant.first_block,
            block_ids=grant.block_ids,
            ttl_s=grant.ttl_s,
            now=now,
        )

    def _start(self, write: BlockWrite, now: float) -> None:
        notification = write.notification
        # NOTE: the transport knows peers by name alone. After a restart that name leads to another process, and the
        # blocks granted by the old one are somebody else's there.
        if not self._links.is_ready(self._handoffs[notification.request_id].receiver):
            self._outbox.write_settled(write, TransferState.FAILED)
            return
        share = CHECKED_SHARE[self._config.checksums]
        if share > 0 and isinstance(notification, ChunkArrived):
            notification = ChunkArrived(
                request_id=notification.request_id,
                generation=notification.generation,
                first_block=notification.first_block,
                num_blocks=notification.num_blocks,
                checksums=block_checksums(self._engine.kv, write.local_block_ids, share=share, draw=self._draw),
            )
        payload = append_checksum(encode_message(notification))
        try:
            transfer = self._transport.write_blocks(
                write.receiver_id, write.local_block_ids, write.remote_block_ids, payload
            )
        except TransferError as exc:  # nothing was written
            if isinstance(exc, PeerLost):
                self._links.broke(write.receiver_id, write.receiver_epoch)
            self._outbox.write_settled(write, TransferState.FAILED)
        else:
            self._in_flight.append(_Flight(write, transfer, now + self._config.handoff_timeout_s))

    def _settle(self) -> None:
        if not self._in_flight:
            return
        settled = [flight for flight in self._in_flight if flight.transfer.is_settled]
        if settled:
            self._in_flight = [flight for flight in self._in_flight if not flight.transfer.is_settled]
            for write, transfer, _ in settled:
                if transfer.state is TransferState.LOST:
                    self._written.setdefault(write.receiver_id, _Written()).num_lost += 1
                    self._links.broke(write.receiver_id, write.receiver_epoch)
                elif transfer.state is TransferState.DONE:
                    self._count(write, transfer)
                self._outbox.write_settled(write, transfer.state)

    def _count(self, write: BlockWrite, transfer: Transfer) -> None:
        """Add up a write that succeeded.

        Measured is the time the link was busy: from the start of a write, or from the end of the one before it, to the
        poll of ours that saw its end and told the receiver. Waiting for the grant, for the writes of other handoffs
        and, at the receiver, for its next step is not in it.
        """
        seconds = transfer.seconds or 0.0
        written = self._written.setdefault(write.receiver_id, _Written())
        written.num_transfers += 1
        written.num_bytes += transfer.num_bytes
        written.seconds += seconds
        handoff = self._handoffs[write.notification.request_id]
        if not handoff.is_computed:
            return
        handoff.exposed_bytes += transfer.num_bytes
        handoff.exposed_s += seconds
        if isinstance(write.notification, HandoffDone):
            written.num_handoffs += 1
            written.exposed_bytes += handoff.exposed_bytes
            written.exposed_s += handoff.exposed_s

    def _give_up_stalled(self, now: float) -> None:
        """Stop vouching for handoffs with a write that takes too long: without heartbeats their leases run out."""
        for flight in self._in_flight:
            if now >= flight.deadline:
                reason = f"a write to {flight.write.receiver_id} took over {self._config.handoff_timeout_s} s"
                self._outbox.cancel(flight.write.notification.request_id, reason)

    def _reset_stalled_links(self, now: float) -> None:
        """Tear down links whose oldest write has not settled for long: all others would wait behind it for ever."""
        oldest: dict[tuple[str, int], Transfer] = {}
        for flight in self._in_flight:
            oldest.setdefault((flight.write.receiver_id, flight.write.receiver_epoch), flight.transfer)
        self._stalls = {
            receiver: stall
            if (stall := self._stalls.get(receiver)) is not None and stall.transfer is transfer
            else _Stall(transfer, now)
            for receiver, transfer in oldest.items()
        }
        for (worker_id, epoch), stall in self._stalls.items():
            if now - stall.since >= self._config.handoff_timeout_s:
                logger.warning("nothing moved to %s for %.0f s: the link is reset", worker_id, now - stall.since)
                self._written.setdefault(worker_id, _Written()).num_resets += 1
                self._links.reset(worker_id, epoch)
        self._settle()

    def _vouch_for_lost(self, now: float) -> None:
        """Confirm leases with lost writes once these cannot land; an open link may be what proves it."""
        if now < self._vouch_at:
            return
        self._vouch_at = now + _VOUCH_INTERVAL_S
        for worker_id, epoch in self._outbox.receivers_with_lost_writes:
            self._links.reopen(worker_id, epoch, now)
            if self._transport.is_quiet(worker_id):
                self._outbox.confirm_lost_writes(worker_id, epoch)

    def _finish(self, ended: HandoffEnded) -> None:
        handoff = self._handoffs.pop(ended.request_id)
        self._held.pop(ended.request_id, None)
        self._withdraw(handoff.sequence)
        self._engine.scheduler.blocks.release(handoff.sequence)
        if ended.is_delivered:
            self._on_delivered(ended.request_id)
        elif handoff.sequence.finish_reason is None:
            self._on_failed(ended.request_id, f"KV handoff failed: {ended.reason}", TransferError.code or "")

    def _withdraw(self, sequence: Sequence) -> None:
        """Take the prompt out of the engine, if it is still there, with its blocks: a write may be reading them."""
        if self._engine.sequences.pop(sequence.request_id, None) is not None:
            self._engine.scheduler.remove(sequence, keep_blocks=True)

    def _fail_receiver(self, worker_id: str, epoch: int, reason: str) -> None:
        self._early_grants.pop((worker_id, epoch), None)
        for request_id, handoff in list(self._handoffs.items()):
            if (handoff.receiver.worker_id, handoff.receiver.epoch) == (worker_id, epoch):
                self._outbox.cancel(request_id, reason)
