"""Decides which tokens of which sequences the next step computes. Plain values; no tensors, no clock.

Mixed steps: every running sequence that decodes gets its one token first, then prompts get chunks of what is left of
the token budget, in the order of their turns: one that comes later may overtake one that is half computed, whose KV so
far stays. A prompt that another one waits for, to share its prefix, is computed at that one's turn if it is earlier.
When a decoding sequence finds no block, the prompt whose turn comes last is preempted, or where all decode the sequence
admitted last: its blocks go back and it is computed again later (mostly from the cache).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort_left, insort_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from engine.block_pool import BlockPool
from engine.sequence import Phase, Sequence, SequenceStatus
from protocol.digest import extend_digests
from protocol.messages import Turn

__all__ = ["ScheduledChunk", "Scheduler"]

_MAX_PASSED = 8  # sequences waiting for a prefix that others are admitted past: each is looked at in every step
_AT_ONCE = Turn(order=-math.inf)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens [start, start + num_tokens) of a sequence; `samples` if that reaches its end.

    NOTE: `samples` is stored, because the sequence's end moves as soon as the sampled token is appended.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class _Step:
    """A step that is being put together."""

    chunks: list[ScheduledChunk]
    budget: int  # tokens it has room for
    num_prompt_tokens: int = 0
    # So many at the head of the queue were passed, as they wait for a prefix, which they cannot get within the step.
    # A seat each and the blocks they will lack are kept for them.
    num_passed: int = 0
    num_kept_blocks: int = 0


class Scheduler:
    """Queues, admission and block tables. The one place that gives blocks to sequences and takes them back."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()  # by order, then by arrival
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        # Whoever keeps KV beyond the pool. `on_admitted`: the sequence has just got its blocks and computes nothing
        # before the call returns; it may be given an onboarding. `on_published`: its blocks [first, end) hold their
        # final KV.
        self.on_admitted: Callable[[Sequence], None] = _nothing
        self.on_published: Callable[[Sequence, int, int], None] = _nothing

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It may already own blocks whose KV was received (`num_computed_tokens` > 0)."""
        extend_digests(sequence.digests, sequence.root, sequence.token_ids, self.block_size)
        insort_right(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Take a sequence out for good; without `keep_blocks` its references are dropped now."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
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
        budget = self.max_num_batched_tokens
        for sequence in [s for s in self.running if s.is_decoding]:
            # One that was admitted earlier may have preempted it by now.
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence, len(sequence.token_ids)):
                chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, 1, samples=True))
                budget -= 1
        step = _Step(chunks, budget)
        for sequence, turn in self._turns():
            self._admit(step, before=turn.order)
            self._add_prefill(step, sequence, turn)
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
            self.on_published(sequence, first, num_full)

    def match_prefix(self, digests: list[bytes], num_tokens: int) -> list[int]:
        """Take references on the longest usable cached prefix of a prompt of `num_tokens` tokens."""
        return self.pool.acquire_cached(self._usable_digests(digests, num_tokens))

    def _usable_digests(self, digests: list[bytes], num_tokens: int) -> list[bytes]:
        """Without the block of the last token, which is never taken from the cache: its logits are needed."""
        return digests[: (num_tokens - 1) // self.block_size]

    def _turns(self) -> list[tuple[Sequence, Turn]]:
        """The running prompts in the order in which they are computed, each with its turn.

        One that computes what a waiting one needs has that one's turn, if it is earlier: else those that come between
        the two would overtake both, and short steps would hold up the one they are meant to let through.
        """
        turns = {sequence: _turn(sequence) for sequence in self.running if not sequence.is_decoding}
        last = max((turn.order for turn in turns.values()), default=-math.inf)
        for sequence in islice(self.waiting, _MAX_PASSED):
            if sequence.order >= last:
                break
            awaited = self._awaited(sequence)
            if awaited in turns and sequence.order < turns[awaited].order:
                turns[awaited] = _turn(sequence)
        return sorted(turns.items(), key=lambda item: item[1].order)

    def _admit(self, step: _Step, *, before: float) -> None:
        """Take in those waiting that go before a running prompt of this order, while there is room.

        Whoever lacks room stops those behind; whoever waits for a prefix does not.
        """
        while (
            step.budget > 0
            and step.num_passed < len(self.waiting)
            and (sequence := self.waiting[step.num_passed]).order < before
            and len(self.running) + step.num_passed < self.max_num_seqs
        ):
            if (awaited := self._awaited(sequence)) is not None:
                if step.num_passed == _MAX_PASSED:
                    break
                step.num_passed += 1
                step.num_kept_blocks += self._num_blocks(sequence) - _num_shared(sequence.digests, awaited.digests)
                continue
            if not self._try_admit(sequence, step.num_kept_blocks):
                if self.running or not self._reclaim_from_waiting():
                    break
                continue
            del self.waiting[step.num_passed]
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            self._add_prefill(step, sequence, _turn(sequence))

    def _add_prefill(self, step: _Step, sequence: Sequence, turn: Turn) -> None:
        num_tokens = min(step.budget, sequence.num_uncomputed_tokens)
        if turn.max_step_tokens:
            num_tokens = min(num_tokens, turn.max_step_tokens - step.num_prompt_tokens)
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

    def _try_admit(self, sequence: Sequence, num_kept_blocks: int) -> bool:
        """Give a waiting sequence its prefix and room for all its tokens so far, or change nothing.

        `num_kept_blocks` are left for those before it.
        """
        received = bool(sequence.blocks)
        if not received:
            sequence.blocks = self.match_prefix(sequence.digests, len(sequence.token_ids))
        num_missing = self._num_blocks(sequence) - len(sequence.blocks)
        # Room for one more block per running sequence, so that a new prompt does not make old ones stumble at once.
        reserve = len(self.running) + num_kept_blocks if num_missing > 0 else 0
        fresh = self.pool.try_allocate(num_missing) if num_missing + reserve <= self.pool.num_available else None
        if fresh is None and not self.running:
            fresh = self.pool.try_allocate(num_missing)
        if fresh is None:
            if not received:
                self.release_blocks(sequence)
            return False
        if not received:
            sequence.num_computed_tokens = len(sequence.blocks) * self.block_size
            sequence.num_published_blocks = len(sequence.blocks)
            if not sequence.is_admitted_before:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.is_admitted_before = True
        sequence.blocks += fresh
        if not received:
            self.on_admitted(sequence)
        return True

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
            victims = (other for other in reversed(self.running) if other.phase is Phase.WHOLE)
            victim = max(victims, key=_order)  # among equals the one admitted last
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._take_blocks_back(sequence)
        sequence.status = SequenceStatus.WAITING
        insort_left(self.waiting, sequence, key=_order)

    def _reclaim_from_waiting(self) -> bool:
        """Take back the blocks of the last waiting sequence that holds any, but never the head's; False if none does.

        NOTE: with nothing running, received blocks of sequences behind the head could block it for ever.
        """
        victim = next((other for other in reversed(self.waiting) if other.blocks), None)
        if victim is None or victim is self.waiting[0]:
            return False
        self._take_blocks_back(victim)
        return True

    def _take_blocks_back(self, sequence: Sequence) -> None:
        """What was computed or received stays findable until it is evicted; the rest is computed again."""
        sequence.onboarding = None
        self.publish_computed(sequence)
        self.release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        self.num_preemptions += 1


def _order(sequence: Sequence) -> float:
    return sequence.order


def _turn(sequence: Sequence) -> Turn:
    """Its turn; whoever has its first token is computed at once, in steps of any length."""
    return sequence.turn if sequence.num_output_tokens == 0 else _AT_ONCE


def _num_shared(digests: list[bytes], others: list[bytes]) -> int:
    """Leading blocks that two chains share: where digests are equal, all before them are."""
    return bisect_left(range(min(len(digests), len(others))), True, key=lambda idx: digests[idx] != others[idx])


def _nothing(*_: object) -> None:
    """Nobody has registered."""
