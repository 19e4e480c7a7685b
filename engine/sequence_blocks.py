"""The KV of sequences that is in place: block tables, tokens computed or loaded so far, and published blocks.

Tokens count as computed once the work that writes their KV is launched, because later work of the stream sees it. Full
blocks are published once the device has written them, because peers and tiers see what is published.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from tandem.engine.block_index import CachedPrefix
from tandem.engine.block_pool import BlockPool
from tandem.engine.block_table import Array, BlockTable
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.protocol.digest import extend_digests


class SchedulerListener(Protocol):
    """Something that keeps KV beyond the pool. Its methods are called within a step and must not wait."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has just got its blocks. Before this returns it may be given an onboarding."""

    def published(self, sequence: Sequence, first_block: int, end_block: int) -> None:
        """Blocks [first_block, end_block) of the sequence hold their final KV."""


class ComputedBlocks(NamedTuple):
    """Full blocks of a sequence whose KV is launched: pass them to `publish` once the device has written it."""

    sequence: Sequence
    blocks: BlockTable  # NOTE: the sequence's own table; after its blocks were taken back it has another one
    num_full: int


class SequenceBlocks:
    """Counts what is in place, and publishes full blocks in the prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        listeners: Seq[SchedulerListener],
        copy_block: Callable[[int, int], None],
    ) -> None:
        """`copy_block(source, target)` copies the KV of a block, behind the work launched so far."""
        self.pool = pool
        self.block_size = block_size
        self._copy_block = copy_block
        self._listeners = listeners

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks for all its tokens so far."""
        return -(-len(sequence.token_ids) // self.block_size)

    def try_extend(self, sequence: Sequence) -> bool:
        """Give it a slot for each of its tokens. False, and nothing changes, if there is no room.

        Forks share the block to which they write next. Each of them gets a copy of it, but the last one keeps it.
        """
        size, num_blocks = self.block_size, len(sequence.blocks)
        idx = sequence.num_computed_tokens // size
        is_shared = idx < num_blocks and self.pool.is_shared(sequence.blocks[idx])
        num_missing = max(-(-len(sequence.token_ids) // size) - num_blocks, 0) + is_shared
        if not num_missing:
            return True
        fresh = self.pool.try_allocate(num_missing)
        if fresh is None:
            return False
        if is_shared:
            shared, sequence.blocks[idx] = sequence.blocks[idx], fresh.pop()
            self._copy_block(shared, sequence.blocks[idx])
            self.pool.release([shared])
        sequence.blocks += fresh
        return True

    def fork(self, sequence: Sequence, fork: Sequence) -> None:
        """Let a fork go on behind the prompt of its sequence, in the same blocks."""
        fork.digests = list(sequence.digests)
        fork.num_computed_tokens = sequence.num_computed_tokens
        fork.num_published_blocks = sequence.num_computed_tokens // self.block_size  # its sequence publishes them
        fork.is_admitted_before = True
        self.pool.share(sequence.blocks)
        fork.blocks = BlockTable(sequence.blocks.ids)

    def num_usable(self, sequence: Sequence) -> int:
        """How many blocks of a sequence may come from a cache. The last token is always computed."""
        return min(sequence.num_reusable_tokens // self.block_size, len(sequence.digests))

    def usable_digests(self, sequence: Sequence) -> list[bytes]:
        """The digests of the blocks that may come from a cache."""
        return sequence.digests[: self.num_usable(sequence)]

    def cached_blocks(self, sequence: Sequence) -> Array:
        """The longest usable cached prefix of a sequence that waits: int32 [n], valid until the next call.

        What it was is remembered, so that a step in which nothing was evicted only looks whether it has grown.
        """
        prefix = sequence.cached_prefix = sequence.cached_prefix or CachedPrefix()
        self.pool.refresh(prefix, sequence.digests, self.num_usable(sequence))
        return prefix.blocks.ids

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a sequence references on its longest usable cached prefix."""
        self.pool.acquire(self.cached_blocks(sequence))
        assert sequence.cached_prefix is not None
        sequence.blocks, sequence.cached_prefix = sequence.cached_prefix.blocks, None

    def advance(self, chunk: ScheduledChunk) -> ComputedBlocks | None:
        """Count a chunk as computed, and loaded tokens that follow it. Returns what may be published later, if any."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        if sequence.onboarding is not None:
            self._join_loaded(sequence)
        is_new = sequence.num_computed_tokens // self.block_size > sequence.num_published_blocks
        return self._computed(sequence) if is_new else None

    def onboard(self, sequence: Sequence, start: int, end: int, source: str, *, is_written: bool = True) -> bool:
        """Count tokens [start, end), whole blocks, of a running sequence as loaded from a source.

        Pieces are loaded back to front: each ends where the one before it starts. False, and nothing changes, if
        computing has already passed `start`. Unless the device has written all of the sequence's KV (`is_written`),
        the blocks are published with its next chunk.
        """
        onboarding = sequence.onboarding
        if onboarding is None or start < sequence.num_computed_tokens:
            return False
        assert end == onboarding.start, f"tokens {start} to {end} do not meet those from {onboarding.start} on"
        onboarding.start = start
        onboarding.pieces.append((start, source))
        self._join_loaded(sequence)
        if is_written:
            self.publish_computed(sequence)
        return True

    def end_onboarding(self, sequence: Sequence) -> None:
        """Load nothing more: compute up to what is in place."""
        onboarding = sequence.onboarding
        if onboarding is not None and onboarding.start == onboarding.end:
            sequence.onboarding = None
        elif onboarding is not None:
            onboarding.hold_at = None

    def publish_computed(self, sequence: Sequence) -> None:
        """Publish the full computed blocks of a sequence whose KV is in memory."""
        self.publish(self._computed(sequence))

    def publish(self, computed: ComputedBlocks) -> None:
        """Publish full blocks that were not published yet, unless they were taken from their sequence meanwhile."""
        sequence, blocks, num_full = computed
        first = sequence.num_published_blocks
        if num_full <= first or sequence.blocks is not blocks:
            return
        # Tokens behind these blocks may still be on the device.
        extend_digests(sequence.digests, sequence.root, sequence.token_ids, self.block_size, num_blocks=num_full)
        sequence.num_published_blocks = num_full
        self.pool.publish_chain(blocks.ids[first:num_full], sequence.digests, first)
        for listener in self._listeners:
            listener.published(sequence, first, num_full)

    def make_room(self, sequence: Sequence, num_drafted: int) -> int:
        """Take free blocks for a draft behind a sequence's tokens. Returns for how many drafted tokens there is room.

        `keep_needed` gives them back.
        """
        num_tokens = len(sequence.token_ids)
        num_missing = -(-(num_tokens + num_drafted) // self.block_size) - len(sequence.blocks)
        fresh = self.pool.try_allocate(min(max(num_missing, 0), self.pool.num_available))
        if fresh:
            sequence.blocks += fresh
        return min(len(sequence.blocks) * self.block_size - num_tokens, num_drafted)

    def accept(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens of a draft as computed, which the device has done, and publish full blocks."""
        sequence.num_computed_tokens += num_tokens
        self.publish_computed(sequence)

    def keep_needed(self, sequence: Sequence) -> None:
        """Give back blocks behind a sequence's last token."""
        num_needed = self.num_needed(sequence)
        if num_needed < len(sequence.blocks):
            self.pool.release(sequence.blocks[num_needed:])
            sequence.blocks.truncate(num_needed)

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence's references; cached blocks stay findable until evicted."""
        self.pool.release(sequence.blocks)
        sequence.blocks = BlockTable()

    def take_back(self, sequence: Sequence) -> None:
        """Take a sequence's blocks. Published KV stays findable until it is evicted; the rest is computed again."""
        sequence.onboarding = None
        self.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0

    def _computed(self, sequence: Sequence) -> ComputedBlocks:
        return ComputedBlocks(sequence, sequence.blocks, sequence.num_computed_tokens // self.block_size)

    def _join_loaded(self, sequence: Sequence) -> None:
        """Count loaded tokens once everything before them is computed."""
        onboarding = sequence.onboarding
        if onboarding is None or sequence.num_computed_tokens < onboarding.start:
            return
        if not sequence.has_first_token:  # otherwise it was preempted, and its prompt is counted already
            for source, num_tokens in onboarding.tokens_by_source(sequence.num_computed_tokens):
                loaded = sequence.num_loaded_tokens
                loaded[source] = loaded.get(source, 0) + num_tokens
            # Of the loaded tokens [start, end), those before `num_computed_tokens` were computed after all.
            num_cached = sequence.num_cached_tokens + onboarding.end - sequence.num_computed_tokens
            # At least the prompt's last token is computed, for its logits.
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens - 1)
        sequence.num_computed_tokens = onboarding.end
        sequence.onboarding = None
