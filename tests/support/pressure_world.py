"""A decode worker under load, without a model: real DecodeRole, LeaseTable, Scheduler and BlockPool; a step costs time.

Requests come at random. Their prompts are computed elsewhere at once, written as soon as a lease is granted, and every
sampled token is one of a stream: when each came is noted, so gaps can be told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tandem.decode_worker.role import DecodeRole
from tandem.engine.block_pool import BlockPool
from tandem.engine.device import HostStream
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sequence
from tandem.engine.sequence_factory import CheckedPrompt
from tandem.engine.token_array import token_array
from tandem.kv_transfer.transport.base import Notification
from tandem.kv_transfer.transport.checksum import append_checksum
from tandem.protocol.config import TransferConfig
from tandem.protocol.messages import (
    ChunkArrived,
    Decode,
    HandoffDone,
    LeaseClosed,
    LeaseGrant,
    LeaseRequest,
    LeaseRevoked,
    Message,
    PeerAddress,
    WorkerEpoch,
    WorkerPriority,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams

BLOCK_SIZE = 16
STEP_S = 0.025
P, D = PeerAddress("p", 1, "", ""), PeerAddress("d", 1, "", "")


@dataclass
class Request:
    request_id: str
    prompt: list[int]
    num_outputs: int
    max_tokens: int
    came: float
    first_s: float | None = None  # time of its first token, sent with the lease or sampled here
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    num_tokens: int = 0
    ended_s: float | None = None


class PressureWorld:
    """One decode worker. `P` and others are prefill workers, of which only the messages exist."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 512,
        handoff_timeout_s: float = 30.0,
        lease_ttl_s: float = 10.0,
        first_generation: int = 1,
        transfer_steps: int = 1,
    ) -> None:
        self.now = 0.0
        self.num_steps = 0
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.sequences: dict[str, Sequence] = {}
        engine: Any = SimpleNamespace(
            config=SimpleNamespace(block_size=BLOCK_SIZE),
            kv=SimpleNamespace(shards=()),
            stream=HostStream(),
            scheduler=self.scheduler,
            pool=self.pool,
            factory=SimpleNamespace(sequence_of=self._sequence_of),
            add=self.add,
        )
        links: Any = SimpleNamespace(me=D, remember=lambda peer: None, send=self._sent)
        self.failed: list[tuple[str, str, str]] = []
        config = TransferConfig(handoff_timeout_s=handoff_timeout_s, lease_ttl_s=lease_ttl_s)
        self.role = DecodeRole(
            engine, links, config, lambda *failed: self.failed.append(failed), first_generation=first_generation
        )
        self.requests: dict[str, Request] = {}
        self.handoffs: dict[str, tuple[PeerAddress, int]] = {}  # named by the senders' heartbeats
        self.grants: list[tuple[str, LeaseGrant]] = []
        self.transfer_steps = transfer_steps  # steps from a grant until its KV has arrived
        self.transfers: list[tuple[int, LeaseGrant]] = []  # each with the step in which its KV arrives
        self.is_silent = lambda worker_id: False
        self.output_tokens = 0

    def _sequence_of(self, request: Decode, now: float, *, prompt: CheckedPrompt | None) -> Sequence:
        assert prompt is None, "its prompts are short"
        return self.make_sequence(
            request.request_id, request.token_ids, request.sampling, request.output_ids, request.priority
        )

    def make_sequence(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        output_ids: Seq[int] = (),
        priority: WorkerPriority = WorkerPriority(),
    ) -> Sequence:
        tokens = token_array([*token_ids, *output_ids])
        return Sequence(request_id, tokens, len(token_ids), sampling, root=b"root", priority=priority)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        self.scheduler.add(sequence)

    def _sent(self, process: WorkerEpoch, message: Message) -> None:
        if isinstance(message, LeaseGrant):
            self.handoffs[message.request_id] = (self.handoffs[message.request_id][0], message.generation)
            self.grants.append((process.worker_id, message))
            request = self.requests[message.request_id]
            request.first_s = request.last_s = self.now  # the prefill worker lets the first token go
        elif isinstance(message, LeaseRevoked) and not self.is_silent(process.worker_id):
            sender = self.handoffs.pop(message.request_id, (P, 0))[0]
            closed = LeaseClosed(sender=sender, request_id=message.request_id, generation=message.generation)
            self.role.closed(closed)

    def hand_over(
        self,
        request_id: str,
        prompt: list[int],
        num_outputs: int,
        max_tokens: int = 0,
        sender: PeerAddress = P,
        priority: WorkerPriority = WorkerPriority(),
    ) -> Request:
        """A request whose prompt a prefill worker has computed."""
        max_tokens = max_tokens or num_outputs
        request = self.requests[request_id] = Request(request_id, prompt, num_outputs, max_tokens, self.now)
        sampling = SamplingParams(max_tokens=max_tokens)
        self.role.accept(
            Decode(
                request_id=request_id, token_ids=prompt, sampling=sampling, prefill_worker=sender, priority=priority
            ),
            self.now,
        )
        self.handoffs[request_id] = (sender, 0)
        self.role.requested(LeaseRequest(sender=sender, request_id=request_id), self.now)
        return request

    def compute_here(
        self,
        request_id: str,
        prompt: list[int],
        num_outputs: int,
        max_tokens: int = 0,
        priority: WorkerPriority = WorkerPriority(),
    ) -> Request:
        """A request that only this worker computes."""
        max_tokens = max_tokens or num_outputs
        request = self.requests[request_id] = Request(request_id, prompt, num_outputs, max_tokens, self.now)
        sampling = SamplingParams(max_tokens=max_tokens)
        self.add(self.make_sequence(request_id, prompt, sampling, priority=priority))
        return request

    def cancel(self, request_id: str) -> None:
        self.role.cancel(request_id)
        self.handoffs.pop(request_id, None)
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)
        del self.requests[request_id]

    def step(self) -> None:
        """One iteration of the worker's loop: messages, then a step."""
        for worker_id in {sender.worker_id for sender, _ in self.handoffs.values()}:
            if not self.is_silent(worker_id):
                vouched = [
                    (name, gen) for name, (sender, gen) in self.handoffs.items() if sender.worker_id == worker_id
                ]
                self.role.heartbeat(WorkerEpoch(worker_id, 1), vouched, self.now)
        grants, self.grants = self.grants, []
        for worker_id, grant in grants:
            if not self.is_silent(worker_id):
                self.transfers.append((self.num_steps + self.transfer_steps - 1, grant))
        while self.transfers and self.transfers[0][0] <= self.num_steps:
            self._write(self.transfers.pop(0)[1])
        self.role.expire(self.now)
        self.role.pump(self.now)
        chunks = self.scheduler.schedule()
        self.now += STEP_S
        self.num_steps += 1
        for chunk in chunks:
            self.scheduler.blocks.advance(chunk)
            self.scheduler.blocks.publish_computed(chunk.sequence)
        for chunk in chunks:
            if chunk.samples:
                self._sample(chunk.sequence)
        self.role.pump(self.now)

    def _write(self, grant: LeaseGrant) -> None:
        request_id, generation = grant.request_id, grant.generation
        num_blocks = len(grant.block_ids)
        chunk = ChunkArrived(
            request_id=request_id,
            generation=generation,
            first_block=grant.first_block,
            num_blocks=num_blocks,
            checksums=[],
        )
        self.handoffs.pop(request_id, None)
        for message in (chunk, HandoffDone(request_id=request_id, generation=generation, first_token_ids=(7,))):
            self.role.notified(Notification("p", 1, append_checksum(encode_message(message))), self.now)

    def _sample(self, sequence: Sequence) -> None:
        sequence.token_ids.append(7)
        request = self.requests[sequence.request_id]
        self.output_tokens += 1
        request.num_tokens += 1
        if request.first_s is None:
            request.first_s = self.now
        else:
            request.longest_gap_s = max(request.longest_gap_s, self.now - request.last_s)
        request.last_s = self.now
        if sequence.num_output_tokens >= request.num_outputs:
            request.ended_s = self.now
            self.scheduler.remove(sequence)
            del self.sequences[sequence.request_id]

    def check(self, *, idle: bool = False) -> None:
        self.pool.check_integrity(idle=idle)
        self.role.check_integrity(idle=idle)

    def run(self, num_steps: int) -> None:
        """Run this many steps without new requests."""
        for _ in range(num_steps):
            self.step()

    def drain(self, limit: int = 40_000) -> None:
        """Run until every request has ended; fail if that never happens."""
        until = self.num_steps + limit
        while any(request.ended_s is None for request in self.requests.values()) and not self.failed:
            assert self.num_steps < until, f"{self.num_unended} requests have not ended after {limit} steps"
            self.step()

    @property
    def num_without_a_seat(self) -> int:
        """Sequences whose KV has arrived but that do not run."""
        return sum(1 for sequence in self.scheduler.waiting if sequence.num_output_tokens)

    @property
    def num_unended(self) -> int:
        """Requests that wait or run."""
        return len(self.requests) - self.num_ended

    @property
    def longest_gap_s(self) -> float:
        return max((request.longest_gap_s for request in self.requests.values()), default=0.0)

    @property
    def num_ended(self) -> int:
        return sum(request.ended_s is not None for request in self.requests.values())
