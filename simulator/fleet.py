"""The router's picture of simulated workers: the product's registry, prefix index and bookings, fed in virtual time.

Simulated workers report here what real workers send over sockets. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.protocol.digest import join_digests
from tandem.protocol.messages import (
    POOL_PLACE,
    BlockEvents,
    PeerAddress,
    Role,
    StepStats,
    TierLoad,
    WorkerCard,
    WorkerState,
    holder_name,
)
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode

NAMESPACE = b"simulated worker"
_EPOCH = 1


@dataclass(eq=False)
class SimulatedFleet:
    """All workers as the router knows them, and its model of their costs."""

    registry: Registry = field(default_factory=Registry)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    costs: CostModel = field(default_factory=CostModel)
    _num_messages: dict[str, int] = field(default_factory=dict)
    _num_prompts: dict[str, int] = field(default_factory=dict)

    def join(self, card: WorkerCard, *, is_ready: bool = True) -> RegisteredWorker:
        """Add a worker, ready or still starting."""
        worker = self.registry.add(card, now=0.0)
        if is_ready:
            self.registry.set_state(worker.worker_id, WorkerState.READY, "simulated")
        self.index.add_worker(worker.worker_id, _EPOCH)
        self._num_messages[worker.worker_id] = self._num_prompts[worker.worker_id] = 0
        return worker

    def leave(self, worker_id: str) -> None:
        """Remove an idle worker, with everything that it cached."""
        self.registry.set_state(worker_id, WorkerState.DEAD, "simulated")
        self.index.remove_worker(worker_id)

    def num_prompts(self, worker: RegisteredWorker) -> int:
        """Requests whose prompt this worker has not computed yet."""
        return self._num_prompts[worker.worker_id]

    def num_in_flight(self, worker: RegisteredWorker) -> int:
        """Requests at this worker: prompts on a prefill worker, else unfinished sequences."""
        return worker.num_booked_seqs if can_decode(worker) else self.num_prompts(worker)

    def add_prompts(self, worker_id: str, change: int) -> None:
        """Change the number of prompts at a worker: +1 for a new one, -1 for a first token."""
        self._num_prompts[worker_id] += change

    def note_computed(self, worker_id: str, num_prompt_tokens: int) -> None:
        """Report prompt tokens that a worker's steps computed."""
        if num_prompt_tokens:
            self.registry.note_step(worker_id, StepStats(duration_s=0.0, num_prefill_tokens=num_prompt_tokens))

    def add_tier(self, worker_id: str, tier: TierLoad) -> None:
        """Give a worker a tier with this cost of loading, and follow what it holds."""
        holder = holder_name(worker_id, tier.name)
        self.index.add_worker(holder, _EPOCH)
        self._num_messages[holder] = 0
        self.registry.note_tiers(worker_id, [tier], None)

    def announce(
        self, worker_id: str, stored: Sequence[bytes], removed: Sequence[bytes], place: str = POOL_PLACE
    ) -> None:
        """Tell the index what a worker stored and evicted in this place since its last message."""
        if not stored and not removed:
            return
        holder = holder_name(worker_id, place)
        sequence = self._num_messages[holder] = self._num_messages[holder] + 1
        events = BlockEvents(
            worker_id=worker_id,
            epoch=_EPOCH,
            sequence=sequence,
            stored=join_digests(stored),
            removed=join_digests(removed),
            place=place,
        )
        is_lost = self.index.apply(events)
        assert not is_lost, f"the index missed a message of {worker_id} before number {sequence}"


def make_card(
    worker_id: str,
    role: Role,
    *,
    kind: str,
    num_blocks: int,
    block_size: int,
    block_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int = 0,
    namespace: bytes = NAMESPACE,
) -> WorkerCard:
    """A worker's description of itself. Workers of different namespaces cannot read each other's KV."""
    return WorkerCard(
        address=PeerAddress(worker_id=worker_id, epoch=_EPOCH, endpoint="", heartbeat_endpoint=""),
        role=role,
        kind=kind,
        model="simulated",
        max_model_len=num_blocks * block_size,
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        namespace=namespace,
        pid=0,
    )
