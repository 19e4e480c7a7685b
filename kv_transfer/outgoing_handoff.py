"""One handoff on its way out: which blocks were granted, computed and written. Pure.

prompt blocks of one handoff
[0, first_block)              cached at the receiver: never sent
[first_block, num_submitted)  given to the transport; settled or in flight
[num_submitted, computed)     the next write
[computed, num_blocks)        prefill still runs
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.messages import ChunkArrived, FirstTokens, HandoffDone, WorkerEpoch


class LeaseKey(NamedTuple):
    """Names a receiver's lease."""

    receiver: WorkerEpoch
    generation: int


class HandoffKey(NamedTuple):
    """Names a handoff before it has a lease."""

    request_id: str
    receiver: WorkerEpoch


class GrantedBlocks(NamedTuple):
    """The receiver's blocks for the prompt's blocks from `first_block` on."""

    lease: LeaseKey
    first_block: int
    block_ids: tuple[int, ...]
    deadline: float


@dataclass(eq=False, slots=True)
class OutgoingHandoff:
    """The state of one handoff. Only its outbox changes it."""

    handoff_id: int
    key: HandoffKey
    num_blocks: int
    grant_deadline: float
    grant: GrantedBlocks | None = None
    local_block_ids: list[int] = field(default_factory=list)  # computed so far
    num_submitted: int = 0
    first_token_ids: FirstTokens = ()
    num_in_flight: int = 0
    is_done_submitted: bool = False
    is_done_settled: bool = False
    has_failed_write: bool = False
    has_lost_write: bool = False  # whether a write was lost: its blocks may still land
    is_revoked: bool = False
    is_receiver_lost: bool = False
    is_ended: bool = False
    failure: str = ""

    def take_writes(self, max_blocks: int) -> list[BlockWrite]:
        """Writes to start now: the blocks computed since the last call, at most `max_blocks` in each write.

        `HandoffDone` comes after the last block.
        """
        if self.grant is None:
            return []
        request_id, generation = self.key.request_id, self.grant.lease.generation
        writes: list[BlockWrite] = []
        # blocks of the prompt
        # [0, first)         not sent: the receiver has them
        # [first, start)     submitted by earlier calls
        # [start, end)       computed since then: sent now, into the granted blocks from number `start - first` on
        # [end, num_blocks)  not computed yet
        first, num_computed = self.grant.first_block, len(self.local_block_ids)
        for start in range(self.num_submitted, num_computed, max_blocks):
            end = min(start + max_blocks, num_computed)
            chunk = ChunkArrived(
                request_id=request_id, generation=generation, first_block=start, num_blocks=end - start
            )
            remote_block_ids = list(self.grant.block_ids[start - first : end - first])
            writes.append(
                BlockWrite(self.key.receiver.worker_id, self.local_block_ids[start:end], remote_block_ids, chunk, self)
            )
            self.num_submitted = end
        is_complete = self.num_submitted == self.num_blocks
        if is_complete and self.first_token_ids and not self.is_done_submitted:
            done = HandoffDone(request_id=request_id, generation=generation, first_token_ids=self.first_token_ids)
            writes.append(BlockWrite(self.key.receiver.worker_id, [], [], done, self))
            self.is_done_submitted = True
        self.num_in_flight += len(writes)
        return writes


@dataclass(frozen=True, slots=True, eq=False)
class BlockWrite:
    """Arguments of one `Transport.write_blocks`; report its end by `Outbox.write_settled`."""

    receiver_id: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    notification: ChunkArrived | HandoffDone  # the caller adds the checksums of `local_block_ids`, if they are on
    handoff: OutgoingHandoff

    @property
    def receiver(self) -> WorkerEpoch:
        """The process that granted the blocks."""
        return self.handoff.key.receiver
