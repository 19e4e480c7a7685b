"""Decides which tokens of which sequences the next step computes. Plain values; no tensors, no clock.

Mixed steps: every running sequence that decodes gets its one token first, then prompts get chunks of what is left of
the token budget, in the order of their turns: one that comes later may overtake one that is half computed, whose KV so
far stays. A prompt that another one waits for, to share its prefix, is computed at that one's turn if it is earlier.
When a decoding sequence finds no block, the prompt whose turn comes last is preempted, or where all decode the sequence
that came last: its blocks go back and it is computed again later (mostly from the cache).

So that this is rare, blocks are promised in one place (`PoolForecast`) to all who will grow, in this order: sequences
that were preempted, prompts that a peer has computed and that ask for room to receive them (`asking`), prompts to
compute here.
Whoever lacks room is passed by those that do not make it wait longer, and by no more than a pool's worth of them. One
that was received has its room: it needs at most a block, and waits for nobody.

Seats (`max_num_seqs`) are promised with the blocks: to what runs, what has its first token, and what is being received.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple, Protocol

from tandem.engine.block_pool import BlockPool
from tandem.engine.output_lengths import OutputLengths
from tandem.engine.pool_forecast import BlockDemand, PoolForecast
from tandem.engine.sequence import Phase, Sequence, SequenceStatus
from tandem.protocol.digest import extend_digests
from tandem.protocol.messages import PrefillPriority

__all__ = ["Reservation", "ScheduledChunk", "Scheduler", "SchedulerListener"]

_MAX_PASSED = 8  # sequences waiting for a prefix or for room that others go past: each is looked at every time
# Steps that one which was preempted must have room for to come back: its stream stands still, and will again if all run
# longer than there is room for.
_SURE_STEPS = 128
_NUM_LEADS = 32  # latest leases, to tell how long the next one will take
_AT_ONCE = PrefillPriority(order=-math.inf)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens [start, start + num_tokens) of a sequence; `samples` if that reaches its end.

    NOTE: `samples` is stored, because the sequence's end moves as soon as the sampled token is appended.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class _ReceivingPrompt(NamedTuple):
    """What a prompt that is being received was promised, beside a seat."""

    num_blocks: int  # cached ones included
    step: int  # in which that was


class Reservation(NamedTuple):
    """Room for a prompt whose KV is to be received. `sequence.blocks` is the prefix of it that is cached here."""

    sequence: Sequence
    block_ids: list[int]  # for the rest


@dataclass(slots=True)
class _Step:
    """A step that is being put together."""

    chunks: list[ScheduledChunk]
    budget: int  # tokens it has room for
    num_prompt_tokens: int = 0
    # So many at the head of the queue were passed, as they wait for room, or for a prefix, which they cannot get within
    # the step. A seat each is kept for them, and for the latter the blocks they will lack.
    num_passed: int = 0
    num_refused: int = 0  # of these, those that do not wait for a seat or a block alone
    room: PoolForecast | None = None  # once somebody needs some
    has_counted_asking: bool = False


class SchedulerListener(Protocol):
    """Something that keeps KV beyond the pool. Its methods are called within a step and must not wait."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has just got its blocks. Before this returns it may be given an onboarding."""

    def published(self, sequence: Sequence, first_block: int, end_block: int) -> None:
        """Blocks [first_block, end_block) of the sequence hold their final KV."""


class Scheduler:
    """Queues, admission and block tables. The one place that gives blocks to sequences and takes them back."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()  # by order, then by arrival
        self.running: list[Sequence] = []  # in order of admission
        self.asking: dict[Sequence, None] = {}  # for room to receive their KV, in order
        self.receiving: dict[Sequence, _ReceivingPrompt] = {}  # have that room
        self.lengths = OutputLengths()
        self.num_preemptions = 0
        self.lost_blocks: dict[str, int] = {}  # by who holds them and tells: nobody can say when they will be free
        self._num_arrived = 0
        self._step_number = 0  # of steps in which something decodes
        self._leads: deque[int] = deque(maxlen=_NUM_LEADS)  # steps from a reservation until its KV was here
        self._lacks_seats = False  # those that ask, as of the latest `reserve`
        self._reserved_at: tuple[tuple[int, ...], int] = ((), 0)
        self._head: Sequence | None = None  # the first in line that finds no room, of the latest `PoolForecast`
        self._listeners: list[SchedulerListener] = []

    @property
    def num_waiting_for_room(self) -> int:
        """Sequences that were preempted, and prompts that wait to be received."""
        return len(self.asking) + sum(1 for _ in self._preempted())

    @property
    def num_free_seats(self) -> int:
        """Seats that nobody has and nobody was promised."""
        return self.max_num_seqs - len(self.running) - len(self.receiving) - sum(1 for _ in self._begun())

    @property
    def num_lost_blocks(self) -> int:
        """Blocks of which nobody can say when they will be free."""
        return sum(self.lost_blocks.values())

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that may be lent for a while: nobody who runs, waits or asks is expected to need them."""
        room = self._open_room()
        for sequence in (*self.asking, *self.waiting):
            if not sequence.blocks and not room.try_take(self._claim(sequence), grows=_grows(sequence)):
                return 0
        return room.num_spare

    def listen(self, listener: SchedulerListener) -> None:
        """Tell one more listener of what follows; listeners are called in the order in which they came."""
        self._listeners.append(listener)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It may already own blocks whose KV was received (`num_computed_tokens` > 0)."""
        extend_digests(sequence.digests, sequence.root, sequence.token_ids, self.block_size)
        promise = self.receiving.pop(sequence, None)
        if promise is not None:
            self._leads.append(self._step_number - promise.step)
        self._note_arrival(sequence)
        insort(self.waiting, sequence, key=_place)

    def ask(self, sequence: Sequence) -> None:
        """Put a prompt that a peer computes in line for room. It leaves by `stop_receiving` or by `add`."""
        self._note_arrival(sequence)
        self.asking[sequence] = None

    def stop_receiving(self, sequence: Sequence) -> None:
        """Nothing of it will be received: what it was promised is not kept. A reservation's blocks are the caller's."""
        self.asking.pop(sequence, None)
        self.receiving.pop(sequence, None)

    def reserve(self) -> list[Reservation]:
        """Give room to those that ask for it, as far as there is some, in order."""
        if not self.asking or not self._may_have_room():
            return []
        num_seats = self.num_free_seats
        if num_seats <= 0:
            num_seats += self._num_ending()
        reserved = self._reserve(num_seats) if num_seats > 0 else []
        self._lacks_seats = bool(self.asking) and len(reserved) >= num_seats
        self._reserved_at = self._line(), self.pool.num_available
        return reserved

    def _reserve(self, num_seats: int) -> list[Reservation]:
        room, num_refused = self._open_room(), 0
        reserved: list[Reservation] = []
        for sequence in self._preempted():
            self._find_room(room, sequence)
        for sequence in list(self.asking):
            if len(reserved) == num_seats:
                break
            if self._find_room(room, sequence):
                del self.asking[sequence]
                reserved.append(Reservation(sequence, self._take_blocks(room, sequence)))
                self.receiving[sequence] = _ReceivingPrompt(self._num_blocks(sequence), self._step_number)
            elif not self._is_hopeless(sequence) and (num_refused := num_refused + 1) > _MAX_PASSED:
                break
        return reserved

    def _num_ending(self) -> int:
        """Running sequences that are expected to end before the KV arrives of one that gets its lease now.

        A seat that is promised only once it is free stands empty meanwhile: where that takes 16 steps and answers have
        50 tokens it costs a quarter of the throughput. The median, as one slow sender says nothing of the others.
        """
        if not self._leads:
            return 0
        lead = sorted(self._leads)[len(self._leads) // 2]
        running = ((s.num_output_tokens, s.sampling.max_tokens) for s in self.running if s.is_decoding)
        return int(sum(self.lengths.share_ending(num_tokens, lead, most) for num_tokens, most in running))

    def _may_have_room(self) -> bool:
        """Whether anything came, ended or gave blocks back since room was last given; a forecast takes 0.2 ms.

        Where seats are short each step brings some sequences nearer to their end.
        """
        line, num_available = self._reserved_at
        return self.pool.num_available > num_available or self._line() != line

    def _line(self) -> tuple[int, ...]:
        lengths = len(self.asking), len(self.receiving), len(self.waiting), len(self.running)
        step = self._step_number if self._lacks_seats else 0
        return *lengths, self._num_arrived, self.num_lost_blocks, step

    def remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Take a sequence out for good; without `keep_blocks` its references are dropped now."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if _grows(sequence) and sequence.num_output_tokens:
            self.lengths.note(sequence.num_output_tokens, sequence.sampling.max_tokens)
        sequence.status = SequenceStatus.FINISHED
        sequence.onboarding = None
        if not keep_blocks:
            self.release_blocks(sequence)

    def release_blocks(self, sequence: Sequence) -> None:
        """Drop the sequence's references; cached blocks stay findable until evicted."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, decoding sequences first; empty when there is nothing to do."""
        chunks: list[ScheduledChunk] = []
        num_preemptions = self.num_preemptions
        for sequence in [s for s in self.running if s.is_decoding]:
            # Another one may have preempted it by now.
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence, len(sequence.token_ids)):
                chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, 1, samples=True))
        if self.num_preemptions > num_preemptions:  # victims may have got their chunk: they go by arrival, not as here
            chunks = [chunk for chunk in chunks if chunk.sequence.status is SequenceStatus.RUNNING]
        self._step_number += bool(chunks)
        step = _Step(chunks, self.max_num_batched_tokens - len(chunks))
        self._admit_received(step)
        for sequence, priority in self._turns():
            self._admit(step, before=priority.order)
            self._add_prefill(step, sequence, priority)
        self._admit(step, before=math.inf)
        return chunks

    def advance(self, chunk: ScheduledChunk) -> None:
        """The chunk's KV is in place: count it and make newly full blocks findable."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        self._join_loaded(sequence)
        self.publish_computed(sequence)

    def onboard(self, sequence: Sequence, start: int, end: int) -> bool:
        """The KV of tokens [start, end), whole blocks, is in place in a running sequence's blocks.

        Pieces come from the back: each ends where the one before it starts. False, and nothing changes, when computing
        has got there already.
        """
        onboarding = sequence.onboarding
        if onboarding is None or start < sequence.num_computed_tokens:
            return False
        assert end == onboarding.start, f"tokens {start} to {end} do not meet those from {onboarding.start} on"
        onboarding.start = start
        self._join_loaded(sequence)
        self.publish_computed(sequence)
        return True

    def end_onboarding(self, sequence: Sequence) -> None:
        """Nothing more will be loaded: compute up to what is in place."""
        onboarding = sequence.onboarding
        if onboarding is not None and onboarding.start == onboarding.end:
            sequence.onboarding = None
        elif onboarding is not None:
            onboarding.hold_at = None

    def _join_loaded(self, sequence: Sequence) -> None:
        """Count what was loaded once everything before it is computed."""
        onboarding = sequence.onboarding
        if onboarding is None or sequence.num_computed_tokens < onboarding.start:
            return
        if sequence.num_output_tokens == 0:  # else it was preempted, and its prompt is counted
            num_cached = sequence.num_cached_tokens + onboarding.end - sequence.num_computed_tokens
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens - 1)
        sequence.num_computed_tokens = onboarding.end
        sequence.onboarding = None

    def publish_computed(self, sequence: Sequence) -> None:
        """Publish full computed blocks that were not published yet."""
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full > sequence.num_published_blocks:
            extend_digests(sequence.digests, sequence.root, sequence.token_ids, self.block_size)
            first, sequence.num_published_blocks = sequence.num_published_blocks, num_full
            self.pool.publish_chain(sequence.blocks[first:num_full], sequence.digests, first)
            for listener in self._listeners:
                listener.published(sequence, first, num_full)

    def match_prefix(self, digests: list[bytes], num_tokens: int) -> list[int]:
        """Take references on the longest usable cached prefix of a prompt of `num_tokens` tokens."""
        return self.pool.acquire_cached(self._usable_digests(digests, num_tokens))

    def _usable_digests(self, digests: list[bytes], num_tokens: int) -> list[bytes]:
        """Without the block of the last token, which is never taken from the cache: its logits are needed."""
        return digests[: (num_tokens - 1) // self.block_size]

    def _turns(self) -> list[tuple[Sequence, PrefillPriority]]:
        """The running prompts in the order in which they are computed, each with its turn.

        One that computes what a waiting one needs has that one's turn, if it is earlier: else those that come between
        the two would overtake both, and short steps would hold up the one they are meant to let through.
        """
        turns = {sequence: _turn(sequence) for sequence in self.running if not sequence.is_decoding}
        last = max((priority.order for priority in turns.values()), default=-math.inf)
        for sequence in islice(self.waiting, _MAX_PASSED):
            if sequence.order >= last:
                break
            awaited = self._awaited(sequence)
            if awaited in turns and sequence.order < turns[awaited].order:
                turns[awaited] = _turn(sequence)
        return sorted(turns.items(), key=lambda item: item[1].order)

    def _admit_received(self, step: _Step) -> None:
        """Take in those that have their blocks. While others run a seat is kept for each that was preempted."""
        received = [sequence for sequence in self._begun() if sequence.blocks]
        num_kept = sum(1 for _ in self._preempted())
        for sequence in received:
            if step.budget <= 0 or (self.running and len(self.running) + num_kept >= self.max_num_seqs):
                break
            fresh = self.pool.try_allocate(self._num_blocks(sequence) - len(sequence.blocks))
            if fresh is not None:
                sequence.blocks += fresh
                self._run(step, sequence)
        if not self.running and received and (len(received) > 1 or self._is_hopeless(received[-1])):
            # All of them lack a block, and nothing runs that would give one back.
            self._take_blocks_back(received[-1])
            self._admit_received(step)

    def _admit(self, step: _Step, *, before: float) -> None:
        """Take in those waiting that go before a running prompt of this order, while there is room.

        Whoever waits for a prefix is passed, and so is whoever lacks room unless it was preempted.
        """
        while (
            step.budget > 0
            and step.num_passed < len(self.waiting)
            and (sequence := self.waiting[step.num_passed]).order < before
            and len(self.running) + step.num_passed + self._num_promised_seats(sequence) < self.max_num_seqs
        ):
            if not sequence.blocks:
                if step.num_refused == _MAX_PASSED:
                    break
                if self._try_admit(step, sequence):
                    continue
                step.num_refused += not self._is_hopeless(sequence)
            step.num_passed += 1

    def _num_promised_seats(self, sequence: Sequence) -> int:
        """Seats kept for those that are being received, from one that has no first token yet."""
        return 0 if _is_begun(sequence) else len(self.receiving)

    def _try_admit(self, step: _Step, sequence: Sequence) -> bool:
        """Give a waiting sequence its prefix and room for all its tokens so far, or change nothing."""
        room = step.room = step.room or self._open_room()
        if not _is_begun(sequence) and not step.has_counted_asking:
            step.has_counted_asking = True
            for asking in islice(self.asking, _MAX_PASSED):
                self._find_room(room, asking)
        if (awaited := self._awaited(sequence)) is not None:
            # It would be let in once the prefix is there: the blocks that it will lack then are kept for it.
            self._find_room(room, sequence, _num_shared(sequence.digests, awaited.digests))
            return False
        if not self._find_room(room, sequence):
            return False
        fresh = self._take_blocks(room, sequence)
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
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self._add_prefill(step, sequence, _turn(sequence))

    def _open_room(self) -> PoolForecast:
        """The pool now, with what all that hold blocks are still promised."""
        holding = [*self.running, *(sequence for sequence in self._begun() if sequence.blocks)]
        holders = [
            BlockDemand(self._num_steps(sequence), self.pool.count_own(sequence.blocks))
            for sequence in holding
            if _grows(sequence)
        ]
        holders += [BlockDemand(self._num_steps(one), promise.num_blocks) for one, promise in self.receiving.items()]
        return PoolForecast(self.pool.num_blocks, self.pool.num_used, holders, block_size=self.block_size)

    def _claim(self, sequence: Sequence, num_shared: int = 0) -> BlockDemand:
        """What a sequence without blocks needs, at least `num_shared` of whose blocks others will hold."""
        num_used = self.pool.count_used(self._usable_digests(sequence.digests, len(sequence.token_ids)))
        return BlockDemand(self._num_steps(sequence), self._num_blocks(sequence) - max(num_used, num_shared))

    def _num_steps(self, sequence: Sequence) -> int:
        """Steps in which the sequence is expected to need room for one more token each."""
        num_output_tokens = sequence.num_output_tokens
        num_rest = self.lengths.expected_rest(num_output_tokens, sequence.sampling.max_tokens)
        return num_rest if num_output_tokens else num_rest - 1  # the KV of the last token is never computed

    def _find_room(self, room: PoolForecast, sequence: Sequence, num_shared: int = 0) -> bool:
        """Whether there is room for a sequence, behind those in line before it."""
        if self._is_hopeless(sequence):
            return False
        claim, had_head = self._claim(sequence, num_shared), room.has_head
        may_pass = True
        if had_head and self._head is not None:
            # The stream of one that was preempted stands still. Any other is passed by a pool's worth of blocks.
            num_passed = self._head.num_passed_blocks + claim.num_blocks
            may_pass = not _is_begun(self._head) and num_passed <= self.pool.num_blocks
        num_sure_steps = _SURE_STEPS if _is_begun(sequence) else None
        is_found = room.try_take(claim, grows=_grows(sequence), may_pass=may_pass, num_sure_steps=num_sure_steps)
        if room.has_head and not had_head:
            self._head = sequence
        return is_found

    def _is_hopeless(self, sequence: Sequence) -> bool:
        """Whether it would not fit if all others had ended. Nobody waits for it meanwhile."""
        return self._num_blocks(sequence) > self.pool.num_blocks - self.num_lost_blocks

    def _take_blocks(self, room: PoolForecast, sequence: Sequence) -> list[int]:
        """Give a sequence that there is room for its cached prefix; fresh blocks for all its other tokens so far."""
        num_available = self.pool.num_available
        sequence.blocks = self.match_prefix(sequence.digests, len(sequence.token_ids))
        fresh = self.pool.try_allocate(self._num_blocks(sequence) - len(sequence.blocks))
        assert fresh is not None, f"there is no room for {sequence.request_id}, but it was counted"
        if room.has_head and self._head is not None:
            self._head.num_passed_blocks += num_available - self.pool.num_available
        return fresh

    def _begun(self) -> Iterator[Sequence]:
        """Those waiting that have their first token: received or preempted."""
        return takewhile(_is_begun, self.waiting)

    def _preempted(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._begun() if not sequence.blocks)

    def _add_prefill(self, step: _Step, sequence: Sequence, priority: PrefillPriority) -> None:
        num_tokens = min(step.budget, sequence.num_uncomputed_tokens)
        if priority.max_step_tokens:
            num_tokens = min(num_tokens, priority.max_step_tokens - step.num_prompt_tokens)
        onboarding = sequence.onboarding
        if onboarding is not None:
            limit = onboarding.start if onboarding.hold_at is None else min(onboarding.hold_at, onboarding.start)
            num_tokens = min(num_tokens, limit - sequence.num_computed_tokens)
        if num_tokens <= 0:
            return
        samples = num_tokens == sequence.num_uncomputed_tokens
        step.chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens, samples))
        step.budget -= num_tokens
        step.num_prompt_tokens += num_tokens

    def _note_arrival(self, sequence: Sequence) -> None:
        if not sequence.arrival:
            self._num_arrived += 1
            sequence.arrival = self._num_arrived

    def _num_blocks(self, sequence: Sequence) -> int:
        """Blocks that all its tokens so far take."""
        return -(-len(sequence.token_ids) // self.block_size)

    def _awaited(self, sequence: Sequence) -> Sequence | None:
        """The running prompt that computes the next block this one needs: waiting saves computing it twice."""
        usable = self._usable_digests(sequence.digests, len(sequence.token_ids))
        num_cached = self.pool.count_cached(usable)
        if sequence.blocks or num_cached == len(usable):
            return None
        needed = usable[num_cached]
        awaited = (
            other
            for other in self.running
            if len(other.digests) > num_cached
            and other.digests[num_cached] == needed
            and other.num_computed_tokens < (num_cached + 1) * self.block_size
        )
        return next(awaited, None)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make sure there is a slot for each of `num_tokens`; False if the sequence itself had to be preempted."""
        while len(sequence.blocks) * self.block_size < num_tokens:
            fresh = self.pool.try_allocate(1)
            if fresh is not None:
                sequence.blocks += fresh
                continue
            # A prompt that is being handed over is never a victim: its blocks may be read by a transfer right now.
            victims = (
                other for other in (*self.running, *self._begun()) if other.phase is Phase.WHOLE and other.blocks
            )
            victim = max(victims, key=_place)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._take_blocks_back(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            sequence.status = SequenceStatus.WAITING
            insort(self.waiting, sequence, key=_place)

    def _take_blocks_back(self, sequence: Sequence) -> None:
        """What was computed or received stays findable until it is evicted; the rest is computed again."""
        sequence.onboarding = None
        self.publish_computed(sequence)
        self.release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        self.num_preemptions += 1


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.order, sequence.arrival


def _is_begun(sequence: Sequence) -> bool:
    return sequence.num_output_tokens > 0


def _grows(sequence: Sequence) -> bool:
    """Whether it decodes here. What a prompt that is handed over holds, it holds until that is done."""
    return sequence.phase is Phase.WHOLE


def _turn(sequence: Sequence) -> PrefillPriority:
    """Its turn; whoever has its first token is computed at once, in steps of any length."""
    return sequence.priority if sequence.num_output_tokens == 0 else _AT_ONCE


def _num_shared(digests: list[bytes], others: list[bytes]) -> int:
    """Leading blocks that two chains share: where digests are equal, all before them are."""
    return bisect_left(range(min(len(digests), len(others))), True, key=lambda idx: digests[idx] != others[idx])
