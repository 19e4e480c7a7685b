"""The prefill role: compute prompts, push their blocks while the next chunk computes, hand over.

Runs inside a worker's loop and never waits. Once the decode worker has granted a lease, a prompt's KV leaves chunk by
chunk, and its first token goes to the router without waiting for the transfer. A token sent before the grant would be
followed by silence for as long as the decode worker has no seat or no room. The lease is requested as late as the
transfer allows: the room for a long prompt would stand empty on the decode worker while the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.engine.engine import Engine
from tandem.engine.sequence import Phase, Sequence
from tandem.engine.sequence_factory import CheckedPrompt
from tandem.engine.step_result import SequenceOutput, StepResult
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.outbox import HandoffEnded, Outbox
from tandem.kv_transfer.transport.base import TransferState, Transport
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.prefill_worker.block_writes import BlockWrites, SettledWrite
from tandem.protocol.config import TransferConfig
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.messages import (
    FINISHED_EARLY,
    HandoffDone,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    PeerAddress,
    Prefill,
    WorkerEpoch,
)

_CONFIRM_INTERVAL_S = 1.0  # between two looks at leases with lost writes
_WRITE_BYTES = 64 << 20  # of KV in one write


@dataclass(eq=False, slots=True)
class _Handoff:
    sequence: Sequence
    receiver: PeerAddress
    num_blocks: int
    answers: list[str]  # the names of the answers to the prompt, the first of which is the handoff's
    open: set[str]  # those of them that have not ended
    first_token_ids: dict[str, int] = field(default_factory=dict)  # of the answers that go on
    is_requested: bool = False  # whether the receiver was asked for a lease
    is_computed: bool = False
    exposed_bytes: int = 0  # written after the prompt was computed
    exposed_s: float = 0.0


class PrefillRole:
    """All handoffs that this worker sends.

    `on_failed(request_id, message, code)` is called for one that failed, `on_delivered(request_id)` when this worker
    has nothing more to do with a request.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        links: PeerLinks,
        config: TransferConfig,
        on_failed: Callable[[str, str, str], None],
        on_delivered: Callable[[str], None],
        wire: WireCodec | None = None,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self.writes = BlockWrites(engine, transport, links, config, wire)
        self.step_s = 0.0  # duration of the last step
        self._links = links
        self._config = config
        self._on_failed = on_failed
        self._on_delivered = on_delivered
        self._outbox = Outbox(max_write_blocks=max(_WRITE_BYTES // engine.block_bytes, 1))
        self._handoffs: dict[str, _Handoff] = {}
        self._by_answer: dict[str, _Handoff] = {}  # the same, by the names of all their answers
        self._held: dict[str, SequenceOutput] = {}  # first tokens of handoffs without a lease
        self._early_grants: dict[WorkerEpoch, list[LeaseGrant]] = {}  # the link is not up yet
        self._confirm_at = 0.0
        self._dead: set[WorkerEpoch] = set()  # last messages may come after its death

    @property
    def num_open(self) -> int:
        """Handoffs that still hold blocks here."""
        return len(self._handoffs)

    def has(self, request_id: str) -> bool:
        """Whether a handoff of this request is open here. It stays open until its writes have settled."""
        return request_id in self._by_answer

    @property
    def is_transferring(self) -> bool:
        """Whether frequent polling of the transport helps: writes are in flight."""
        return self.writes.num_in_flight > 0

    @property
    def num_held_tokens(self) -> int:
        """First tokens that wait for a lease of their handoff."""
        return len(self._held)

    @property
    def live_handoffs(self) -> list[tuple[str, int]]:
        """(request id, generation) pairs for the heartbeat that keeps their leases."""
        return self._outbox.heartbeat_handoffs

    def accept(self, request: Prefill, now: float, prompt: CheckedPrompt | None = None) -> None:
        """Queue the prompt and open its handoff. `prompt` is as of `SequenceFactory.sequence_of`.

        Raises RequestError if the engine cannot take it, PeerLost if the decode worker is known to be dead.
        """
        receiver = request.decode_worker
        if receiver.process in self._dead:
            raise PeerLost(f"decode worker {receiver.worker_id} died")
        sequence = self._engine.factory.sequence_of(request, now, Phase.PREFILL_ONLY, prompt)
        sequence.kv_holder, sequence.kv_receiver = request.kv_holder, receiver
        self._links.connect(receiver, now)
        num_blocks = self._engine.scheduler.blocks.num_needed(sequence)
        self._outbox.open(request.request_id, receiver.process, num_blocks=num_blocks)
        answers = request.request_ids
        handoff = self._handoffs[request.request_id] = _Handoff(sequence, receiver, num_blocks, answers, set(answers))
        self._by_answer |= dict.fromkeys(answers, handoff)
        self._engine.add(sequence)

    def granted(self, grant: LeaseGrant, now: float) -> None:
        """Take a lease that the decode worker granted. It is used once the link to that worker is up."""
        if grant.sender.process in self._dead:
            return
        if self._links.is_ready(grant.sender):
            self._apply_grant(grant, now)
        else:
            self._links.connect(grant.sender, now)  # it may have broken since the request came
            self._early_grants.setdefault(grant.sender.process, []).append(grant)

    def link_ready(self, peer: PeerAddress, now: float) -> None:
        """Use the grants that were waiting for the link to this peer."""
        for grant in self._early_grants.pop(peer.process, []):
            self._apply_grant(grant, now)

    def link_refused(self, peer: PeerAddress, reason: str) -> None:
        """Fail the handoffs to a worker that differs from this one: the two never exchange KV."""
        self._fail_receiver(peer.process, reason)

    def queued(self, message: LeaseQueued, now: float) -> None:
        """Extend the deadlines of handoffs that wait for room at the decode worker: they are not late."""
        sender, deadline = message.sender, now + self._config.handoff_timeout_s
        for request_id in message.request_ids:
            self._outbox.queued(request_id, sender.process, grant_deadline=deadline)

    def refused(self, message: LeaseRefused) -> None:
        """Fail a handoff for which the decode worker will grant no lease."""
        self._outbox.refused(message.request_id, message.sender.process, message.reason)

    def revoked(self, message: LeaseRevoked) -> None:
        """Note that the decode worker ended the lease. The outbox confirms that once nothing is in flight."""
        self._outbox.revoked(message.request_id, message.sender.process, message.generation)

    def cancel(self, request_id: str) -> bool:
        """Stop computing and sending this request, unless other answers need its prompt. Returns whether it is here."""
        handoff = self._by_answer.get(request_id)
        if handoff is None:
            return False
        handoff.open.discard(request_id)
        if not handoff.open:
            self._engine.withdraw(handoff.sequence)
            self._outbox.cancel(handoff.sequence.request_id)
        return True

    def peer_lost(self, peer: WorkerEpoch) -> None:
        """Fail all handoffs to a process that is known to be dead. Writes to it that are in flight settle as lost."""
        self._dead.add(peer)
        self._fail_receiver(peer, f"decode worker {peer.worker_id} died")
        self._outbox.receiver_lost(peer)
        self.writes.forget(peer.worker_id)

    def after_step(self, result: StepResult) -> list[SequenceOutput]:
        """Give what the step computed to the outbox. Returns the outputs to send to the router now.

        The first tokens of handoffs without a lease are kept for `take_first_tokens`.
        """
        self._settle()  # before `is_computed` is set: writes that ended while the step ran are not exposed
        self.step_s = result.stats.duration_s
        for chunk in result.chunks:
            sequence = chunk.sequence
            if sequence.phase is Phase.PREFILL_ONLY and sequence.request_id in self._handoffs:
                # Later chunks may have been launched: only what is published is known to be in memory.
                num_final = len(sequence.blocks) if chunk.samples else sequence.num_published_blocks
                self._outbox.blocks_computed(sequence.request_id, sequence.blocks, num_final)
        outputs, computed = [], dict[str, _Handoff]()
        for output in result.outputs:
            sequence = output.sequence
            handoff = self._by_answer.get(sequence.request_id)
            if sequence.phase is not Phase.PREFILL_ONLY or handoff is None:
                outputs.append(output)
                continue
            computed[handoff.sequence.request_id] = handoff
            if sequence.finish_reason is None:
                handoff.first_token_ids[sequence.request_id] = output.token_id
                self._held[sequence.request_id] = output
            else:  # the first token was also the last: nothing of this answer is handed over
                handoff.open.discard(sequence.request_id)
                outputs.append(output)
        for request_id, handoff in computed.items():
            self._note_computed(request_id, handoff)
        return outputs + self.take_first_tokens()

    def take_first_tokens(self) -> list[SequenceOutput]:
        """First tokens whose handoffs have a lease now, for the router. Call it before `pump` ends handoffs."""
        due = [output for output in self._held.values() if self._has_lease(output.sequence.request_id)]
        for output in due:
            del self._held[output.sequence.request_id]
        return due

    def expire(self, now: float) -> None:
        """Give up what is too late. Read all messages before calling this: a grant may be among them."""
        self._settle()
        self._give_up_late_writes(now)
        self.writes.reset_stuck_links(now)
        self._settle()
        self._confirm_lost_writes(now)
        self._outbox.expire(now)

    def request_leases(self, now: float) -> None:
        """Request the leases that are needed soon. Call it also right before a step, which may admit prompts."""
        if all(handoff.is_requested for handoff in self._handoffs.values()):
            return
        for handoff in [handoff for handoff in self._due() if not handoff.is_requested]:
            handoff.is_requested = True
            request_id, receiver = handoff.sequence.request_id, handoff.receiver
            if (timeline := handoff.sequence.timeline) is not None:
                timeline.mark("lease_requested", now)
            self._outbox.requested(request_id, grant_deadline=now + self._config.handoff_timeout_s)
            message = LeaseRequest(sender=self._links.me, request_id=request_id)
            self._links.send(receiver.process, message)

    def pump(self, now: float) -> None:
        """Start writes that are due, handle those that settled, free the blocks of handoffs that are over."""
        self._settle()
        self.request_leases(now)
        for write in self._outbox.next_writes():
            if not self.writes.start(write, self._handoffs[write.notification.request_id].receiver, now):
                self._outbox.write_settled(write, TransferState.FAILED)
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
                    first_token_ids=ended.first_token_ids,
                )
                self._links.send(ended.receiver, closed)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the books agree; with `idle`, nothing may be open."""
        self._outbox.check_integrity()
        assert self._held.keys() <= self._by_answer.keys(), "a first token is held of a handoff that is over"
        answers = {name: handoff for handoff in self._handoffs.values() for name in handoff.answers}
        assert answers == self._by_answer, "the handoffs by answer differ"
        if idle:
            assert not self._handoffs, f"handoffs still open: {sorted(self._handoffs)}"
            assert not self.writes.num_in_flight, f"{self.writes.num_in_flight} writes still in flight"
            assert self._outbox.num_open == 0, f"{self._outbox.num_open} handoffs still in the outbox"

    def _note_computed(self, request_id: str, handoff: _Handoff) -> None:
        """Hand the prompt over if any of its answers goes on. All of them are sampled in one step."""
        if handoff.first_token_ids:
            self._outbox.first_tokens(request_id, tuple(map(handoff.first_token_ids.get, handoff.answers)))
            handoff.is_computed = True
        else:
            self._outbox.cancel(request_id, FINISHED_EARLY)

    def _has_lease(self, request_id: str) -> bool:
        handoff = self._by_answer[request_id]
        return self._outbox.has_lease(handoff.sequence.request_id, handoff.receiver.process)

    def _due(self) -> list[_Handoff]:
        """Handoffs that need their lease now, whether or not it has been requested.

        Grants are read between two steps. To write while the prompt's last step computes, the lease must be requested
        before the step ahead of that one, and still earlier if the transfer takes longer than the last step.
        """
        due = [handoff for handoff in self._handoffs.values() if handoff.is_computed]
        step_tokens, num_tokens = self._engine.config.max_num_batched_tokens, 0
        for sequence in self._engine.scheduler.running:
            num_tokens += sequence.num_uncomputed_tokens
            handoff = self._handoffs.get(sequence.request_id)
            if handoff is not None:
                num_later_steps = -(-num_tokens // step_tokens) - 1  # after the next one
                transfer_s = self.writes.seconds_to_send(handoff.receiver.worker_id, handoff.num_blocks)
                if num_later_steps <= 1 or num_later_steps * self.step_s <= transfer_s:
                    due.append(handoff)
        return due

    def _apply_grant(self, grant: LeaseGrant, now: float) -> None:
        handoff = self._handoffs.get(grant.request_id)
        if handoff is not None and (timeline := handoff.sequence.timeline) is not None:
            timeline.mark("lease_granted", now)
        self._outbox.granted(
            grant.request_id,
            grant.sender.process,
            generation=grant.generation,
            first_block=grant.first_block,
            block_ids=grant.block_ids,
            ttl_s=grant.ttl_s,
            now=now,
        )

    def _settle(self) -> None:
        for settled in self.writes.take_settled():
            if settled.state is TransferState.DONE:
                self._note_exposed(settled)
            self._outbox.write_settled(settled.write, settled.state)

    def _note_exposed(self, settled: SettledWrite) -> None:
        """Count a write that ended after its prompt was computed: the request waits for it."""
        handoff = self._handoffs[settled.write.notification.request_id]
        if not handoff.is_computed:
            return
        handoff.exposed_bytes += settled.num_bytes
        handoff.exposed_s += settled.seconds
        if isinstance(settled.write.notification, HandoffDone):  # the last one of its handoff
            totals = self.writes.totals[settled.write.receiver_id]
            totals.num_handoffs += 1
            totals.exposed_bytes += handoff.exposed_bytes
            totals.exposed_s += handoff.exposed_s

    def _give_up_late_writes(self, now: float) -> None:
        """Cancel handoffs with a write that takes too long. Heartbeats stop naming them, so their leases run out."""
        for write in self.writes.late(now):
            reason = f"a write to {write.receiver_id} took over {self._config.handoff_timeout_s} s"
            self._outbox.cancel(write.notification.request_id, reason)

    def _confirm_lost_writes(self, now: float) -> None:
        """Confirm the end of leases with lost writes once these cannot land any more; an open link may prove that."""
        if now < self._confirm_at:
            return
        self._confirm_at = now + _CONFIRM_INTERVAL_S
        for receiver in self._outbox.receivers_with_lost_writes:
            self._links.reopen(receiver, now)
            if self._transport.is_quiet(receiver.worker_id):
                self._outbox.confirm_lost_writes(receiver)

    def _finish(self, ended: HandoffEnded) -> None:
        handoff = self._handoffs.pop(ended.request_id)
        for name in handoff.answers:
            del self._by_answer[name]
            self._held.pop(name, None)
        self._engine.withdraw(handoff.sequence)
        self._engine.scheduler.blocks.release(handoff.sequence)
        for name in filter(handoff.open.__contains__, handoff.answers):
            if ended.is_delivered:
                self._on_delivered(name)
            else:
                self._on_failed(name, f"KV handoff failed: {ended.reason}", TransferError.code or "")

    def _fail_receiver(self, receiver: WorkerEpoch, reason: str) -> None:
        self._early_grants.pop(receiver, None)
        for request_id, handoff in list(self._handoffs.items()):
            if handoff.receiver.process == receiver:
                self._outbox.cancel(request_id, reason)
