"""Decides which tokens of which sequences the next step computes. Plain values; no tensors, no clock.

Steps are mixed: every decoding sequence gets its one token first, then prompts get chunks of the remaining token
budget, in priority order. A later prompt of higher priority may overtake one that is half computed, which keeps its KV.
A prompt that another one waits for, to share its prefix, takes that one's priority if it is higher.

When a decoding sequence finds no block, the prompt of the lowest priority is preempted, or the latest sequence if all
decode: its blocks are taken back and it is computed again later (mostly from the cache). To make this rare,
`PoolAdmission` reserves blocks for all sequences that will grow. A sequence that was received has its room reserved: it
needs at most one block, and waits for no other sequence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from tandem.engine.block_pool import BlockPool
from tandem.engine.output_lengths import OutputLengths
from tandem.engine.pool_admission import PoolAdmission
from tandem.engine.pool_forecast import PoolForecast
from tandem.engine.pool_slots import pool_slots
from tandem.engine.queues import SequenceQueues
from tandem.engine.receive_queue import ReceiveQueue, Reservation
from tandem.engine.sequence import Phase, ScheduledChunk, Sequence, SequenceStatus
from tandem.engine.sequence_blocks import SchedulerListener, SequenceBlocks
from tandem.engine.tenant_room import TenantRoom
from tandem.protocol.digest import extend_digests
from tandem.protocol.messages import MAX_ACTIONS, PoolSlots, Preemption, WorkerPriority

_MAX_PASSED = 8  # waiting sequences without room or prefix that others may pass: each is looked at every time


@dataclass(slots=True)
class _Step:
    """A step that is being put together."""

    chunks: list[ScheduledChunk]
    budget: int  # tokens that still fit
    num_prompt_tokens: int = 0
    num_scored: int = 0  # prompt tokens whose logits are needed
    line: Iterator[Sequence] = field(default_factory=lambda: iter(()))  # waiting sequences, in the order of their turns
    first: Sequence | None = None  # of those in line that were neither admitted nor passed
    # Sequences in line that were passed because they lack room, or because their prefix is being computed. A seat is
    # reserved for each of them, and for the latter also their blocks.
    num_passed: int = 0
    num_refused: int = 0  # how many of them lack more than a seat or a block
    forecast: PoolForecast | None = None  # made when the first sequence needs room
    has_counted_awaiting: bool = False
    num_forks: int = 0  # seats for the forks of the prompts that are computed


def _copy_nothing(source: int, target: int) -> None:
    """There is no KV, only its bookkeeping."""


class Scheduler:
    """Queues and step assembly. Only the scheduler and its parts give blocks to sequences and take them back."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_scored: int = 512,
        lengths: OutputLengths | None = None,
        copy_block: Callable[[int, int], None] = _copy_nothing,
    ) -> None:
        """`max_num_scored` bounds the prompt tokens of a step that are scored: each takes the logits of a vocabulary.

        `lengths` predicts how long answers will be; by default it learns that from those that end.
        `copy_block(source, target)` copies the KV of a block that several sequences share for one that writes to it.
        """
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_scored = max_num_scored
        self.preemptions_by_reason: Counter[str] = Counter()
        self.latest_preemptions: deque[Preemption] = deque(maxlen=MAX_ACTIONS)
        self._listeners: list[SchedulerListener] = []
        self._queues = queues = SequenceQueues()
        self.waiting, self.running = queues.waiting, queues.running
        self.awaiting_room, self.receiving = queues.awaiting_room, queues.receiving
        self.blocks = SequenceBlocks(pool, block_size, self._listeners, copy_block)
        self.admission = PoolAdmission(
            queues, self.blocks, max_num_seqs=max_num_seqs, lengths=lengths or OutputLengths()
        )
        self.tenant_room = TenantRoom(queues, self.blocks, self.admission, self._give_way)
        self.receive_queue = ReceiveQueue(queues, self.blocks, self.admission, self.tenant_room)
        self._lacked_room = False  # whether a waiting sequence found no room or seat in the latest step

    @property
    def num_waiting_for_room(self) -> int:
        """Preempted sequences, and prompts that wait to be received."""
        return len(self.awaiting_room) + sum(1 for _ in self._queues.preempted())

    @property
    def pool_slots(self) -> PoolSlots:
        """What the pool's token slots are used for."""
        return pool_slots(self.pool, self._queues, self.block_size)

    def listen(self, listener: SchedulerListener) -> None:
        """Add a listener; listeners are called in the order in which they were added."""
        self._listeners.append(listener)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It may already own blocks whose KV was received (`num_computed_tokens` > 0)."""
        extend_digests(sequence.digests, sequence.root, sequence.token_ids, self.block_size)
        self.receive_queue.arrived(sequence)
        self._queues.note_arrival(sequence)
        self._queues.wait(sequence)

    def request_room(self, sequence: Sequence) -> None:
        """Let a prompt that a peer computes wait for room. `stop_receiving` or `add` ends that."""
        self._queues.note_arrival(sequence)
        self.awaiting_room[sequence] = None

    def reserve(self) -> list[Reservation]:
        """Give room to the prompts that requested it, in order, as long as there is room."""
        return self.receive_queue.reserve()

    def stop_receiving(self, sequence: Sequence) -> None:
        """End the reservation of a prompt that will not be received. The reserved blocks belong to the caller."""
        self.awaiting_room.pop(sequence, None)
        self.receiving.pop(sequence, None)

    def fork(self, sequence: Sequence) -> None:
        """Let the forks of a computed prompt, each with its first token, go on as sequences that share its blocks.

        They take seats as sequences do that were received. A prompt that is handed over keeps its blocks for itself:
        its forks go on where it goes.
        """
        for fork in sequence.take_forks():
            fork.num_cached_tokens = fork.num_prompt_tokens
            if not fork.decodes_here:
                continue
            self._queues.note_arrival(fork)
            self.blocks.fork(sequence, fork)
            if len(self.running) < self.max_num_seqs:
                fork.status = SequenceStatus.RUNNING
                self.running.append(fork)
            else:
                fork.status = SequenceStatus.WAITING
                self._queues.wait(fork)

    def remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Take a sequence out for good; without `keep_blocks` its references are dropped now."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.decodes_here and sequence.has_first_token:
            self.admission.lengths.note(sequence.num_output_tokens, sequence.sampling.max_tokens)
        sequence.status = SequenceStatus.FINISHED
        sequence.onboarding = None
        if not keep_blocks:
            self.blocks.release(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, decoding sequences first; empty when there is nothing to do."""
        is_shared = self._lacked_room and self.tenant_room.is_shared
        if is_shared:
            self.tenant_room.make_room()
        chunks: list[ScheduledChunk] = []
        num_preemptions, running = self.num_preemptions, SequenceStatus.RUNNING
        for sequence in [one for one in self.running if _takes_tokens(one)]:
            if sequence.status is not running:  # a sequence before it has preempted it
                continue
            has_room = self.blocks.try_extend(sequence) or self._grow(sequence)
            if has_room and sequence.is_decoding:  # more than one token (forced, or computed again) is a prompt's chunk
                chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, 1, True))
        if self.num_preemptions > num_preemptions:  # victims are chosen by arrival, so some may have got their chunk
            chunks = [chunk for chunk in chunks if chunk.sequence.status is running]
        self._queues.step_number += bool(chunks)
        step = _Step(chunks, self.max_num_batched_tokens - len(chunks), num_forks=self._queues.num_forks)
        prompts = self._prefill_order(chunks)  # those that are admitted from here on get their chunks at once
        self._admit_received(step)
        step.line = self.tenant_room.in_turn(self.waiting) if is_shared else iter(list(self.waiting))
        step.first = next(step.line, None)
        for sequence, priority in prompts:
            self._admit(step, before=priority.order)
            self._add_prefill(step, sequence, priority)
        self._admit(step, before=math.inf)
        if step.budget > 0:  # otherwise what waits may lack no more than a step's tokens
            self._lacked_room = any(not sequence.blocks for sequence in self.waiting)
        return chunks

    @property
    def num_preemptions(self) -> int:
        """Since the start, for all reasons."""
        return self.preemptions_by_reason.total()

    def preempt(self, sequence: Sequence, reason: str = "no free block") -> None:
        """Take a sequence's blocks back and let it wait."""
        num_blocks, num_tokens = len(sequence.blocks), sequence.num_computed_tokens
        self.preemptions_by_reason[reason] += 1
        self.latest_preemptions.append(
            Preemption(request_id=sequence.request_id, reason=reason, num_blocks=num_blocks, num_tokens=num_tokens)
        )
        self.blocks.take_back(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            sequence.status = SequenceStatus.WAITING
            self._queues.wait(sequence)

    def _give_way(self, sequence: Sequence) -> None:
        """Preempt a sequence for another tenant."""
        sequence.gave_way = True
        self.preempt(sequence, "room for another tenant")

    def _prefill_order(self, chunks: list[ScheduledChunk]) -> list[tuple[Sequence, WorkerPriority]]:
        """The running prompts in the order in which they are computed, each with its priority. `chunks` decode.

        A prompt that computes the prefix of a waiting one has that one's priority, if it is higher. Otherwise prompts
        between the two would overtake both, and short steps would delay the prompt for which they are made.
        """
        if len(chunks) == len(self.running):  # none is a prompt
            return []
        priorities = {s: s.current_priority for s in self.running if not s.is_decoding}
        last = max((priority.order for priority in priorities.values()), default=-math.inf)
        for sequence in islice(self.waiting, _MAX_PASSED):
            if sequence.order >= last:
                break
            awaited = self._awaited(sequence)
            if awaited in priorities and sequence.order < priorities[awaited].order:
                priorities[awaited] = sequence.current_priority
        return sorted(priorities.items(), key=lambda item: item[1].order)

    def _admit_received(self, step: _Step) -> None:
        """Admit sequences that were received. While others run, a seat is kept for each preempted sequence."""
        received = [sequence for sequence in self._queues.received() if not sequence.has_last_token]
        num_kept = sum(not sequence.gave_way for sequence in self._queues.preempted())
        for sequence in received:
            if step.budget <= 0 or (self.running and len(self.running) + num_kept >= self.max_num_seqs):
                break
            if self.blocks.try_extend(sequence):
                self._run(step, sequence)
        if not self.running and received and (len(received) > 1 or self.admission.is_hopeless(received[-1])):
            # All of them lack a block, and no running sequence will give one back.
            self.preempt(received[-1], "nothing else can run")
            self._admit_received(step)

    def _admit(self, step: _Step, *, before: float) -> None:
        """Admit waiting sequences of an order before this one, while there is room.

        Those that wait for a prefix are passed, and so are those that lack room unless they were preempted.
        """
        while (
            step.budget > 0
            and (sequence := step.first) is not None
            and sequence.order < before
            and len(self.running) + step.num_passed + self._num_reserved_seats(step, sequence) < self.max_num_seqs
        ):
            if not sequence.blocks and not sequence.num_pending_tokens:  # otherwise it may turn out to be at its end
                if step.num_refused == _MAX_PASSED:
                    break
                if self._try_admit(step, sequence):
                    step.first = next(step.line, None)
                    continue
                step.num_refused += not self.admission.is_hopeless(sequence)
            step.num_passed += 1
            step.first = next(step.line, None)

    def _num_reserved_seats(self, step: _Step, sequence: Sequence) -> int:
        """Seats that a sequence may not take because prompts being received have them, or forks will."""
        return 0 if sequence.has_first_token and not sequence.gave_way else len(self.receiving) + step.num_forks

    def _try_admit(self, step: _Step, sequence: Sequence) -> bool:
        """Give a waiting sequence its prefix and room for all its tokens so far, or change nothing."""
        admission = self.admission
        forecast = step.forecast = step.forecast or admission.forecast()
        if not sequence.has_first_token and not step.has_counted_awaiting:
            step.has_counted_awaiting = True
            for other in islice(self.awaiting_room, _MAX_PASSED):
                admission.find_room(forecast, other)
        if (awaited := self._awaited(sequence)) is not None:
            # It is admitted once the prefix is computed: reserve the blocks that it will need then.
            admission.find_room(forecast, sequence, _num_shared(sequence.digests, awaited.digests))
            return False
        if not admission.find_room(forecast, sequence):
            return False
        fresh = admission.take_blocks(forecast, sequence)
        sequence.num_computed_tokens = len(sequence.blocks) * self.block_size
        sequence.num_published_blocks = len(sequence.blocks)
        if not sequence.is_admitted_before:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.blocks += fresh
        for listener in self._listeners:
            listener.admitted(sequence)
        self._run(step, sequence)
        return True

    def _run(self, step: _Step, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.is_admitted_before = True
        sequence.gave_way = False
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        step.num_forks += len(sequence.forks) if sequence.decodes_here else 0
        self._add_prefill(step, sequence, sequence.current_priority)

    def _add_prefill(self, step: _Step, sequence: Sequence, priority: WorkerPriority) -> None:
        num_tokens = min(step.budget, sequence.num_uncomputed_tokens - (not sequence.can_sample))
        if priority.max_step_tokens:
            num_tokens = min(num_tokens, priority.max_step_tokens - step.num_prompt_tokens)
        if sequence.is_scored:
            num_tokens = min(num_tokens, self.max_num_scored - step.num_scored)
        onboarding = sequence.onboarding
        if onboarding is not None:
            limit = onboarding.start if onboarding.hold_at is None else min(onboarding.hold_at, onboarding.start)
            num_tokens = min(num_tokens, limit - sequence.num_computed_tokens)
        if num_tokens <= 0:
            return
        samples = num_tokens == sequence.num_uncomputed_tokens
        num_scored = _num_scored(sequence, sequence.num_computed_tokens + num_tokens - samples)
        step.chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens, samples, num_scored))
        step.num_scored += num_scored
        step.budget -= num_tokens
        step.num_prompt_tokens += num_tokens
        if priority.max_step_tokens:  # later prompts must not lengthen the step either
            step.budget = min(step.budget, priority.max_step_tokens - step.num_prompt_tokens)

    def _awaited(self, sequence: Sequence) -> Sequence | None:
        """The running prompt that computes the next block of this one: waiting saves computing it twice."""
        if sequence.blocks:
            return None
        num_cached = len(self.blocks.cached_blocks(sequence))
        if num_cached == self.blocks.num_usable(sequence):
            return None
        needed = sequence.digests[num_cached]
        awaited = (
            other
            for other in self.running
            if len(other.digests) > num_cached
            and other.digests[num_cached] == needed
            and other.num_published_blocks <= num_cached
        )
        return next(awaited, None)

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure there is a slot for each of its tokens; False if the sequence itself had to be preempted."""
        while not self.blocks.try_extend(sequence):
            # A prompt that is being handed over is never a victim: a transfer may be reading its blocks right now.
            holding = (*self.running, *self._queues.received())
            victim = self.tenant_room.last_of(other for other in holding if other.phase is Phase.WHOLE)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True


def _takes_tokens(sequence: Sequence) -> bool:
    """Whether a sequence with its first token has others that a step may compute: it may wait for its next mask."""
    if sequence.has_last_token or len(sequence.token_ids) <= sequence.num_prompt_tokens:
        return False
    return sequence.matcher is None or sequence.can_sample or sequence.num_uncomputed_tokens > 1


def _num_shared(digests: list[bytes], others: list[bytes]) -> int:
    """Leading blocks that two chains share. If two digests are equal, so are all before them."""
    return bisect_left(range(min(len(digests), len(others))), True, key=lambda idx: digests[idx] != others[idx])


def _num_scored(sequence: Sequence, end: int) -> int:
    """How many of the tokens computed now, before `end`, have logits that score the next token for the first time."""
    scores = sequence.prompt_scores
    if scores is None or not sequence.is_scored:
        return 0
    return max(end - max(scores.num_launched, sequence.num_computed_tokens), 0)
