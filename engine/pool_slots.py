"""What the token slots of the pool are used for."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.block_pool import BlockPool
from tandem.engine.queues import SequenceQueues
from tandem.engine.sequence import Sequence
from tandem.protocol.messages import PoolSlots


def pool_slots(pool: BlockPool, queues: SequenceQueues, block_size: int) -> PoolSlots:
    """The slots of used blocks by what they hold, each once however many sequences share it, and of cached ones.

    Blocks that only a peer uses, to read or to write, count as written.
    """
    reserved, waste = _unwritten((*queues.running, *queues.received()), block_size)
    for prompt, room in queues.receiving.items():
        num_left = room.num_blocks * block_size - len(prompt.token_ids)
        waste += num_left
        reserved += (room.num_blocks - len(prompt.blocks)) * block_size - num_left
    written = pool.num_used * block_size - reserved - waste
    return PoolSlots(written, reserved, waste, (pool.num_available - pool.num_free) * block_size)


def _unwritten(sequences: Iterable[Sequence], block_size: int) -> tuple[int, int]:
    """Slots of these sequences for tokens that are not computed yet, and slots behind all their tokens."""
    reserved = waste = 0
    last_blocks: set[int] = set()  # forks share theirs until they write to it
    for sequence in sequences:
        if not sequence.blocks or sequence.blocks[-1] in last_blocks:
            continue
        last_blocks.add(sequence.blocks[-1])
        num_slots = len(sequence.blocks) * block_size
        num_tokens = min(len(sequence.token_ids), num_slots)  # the newest may get its slot in the next step
        reserved += num_tokens - min(sequence.num_computed_tokens, num_tokens)
        waste += num_slots - num_tokens
    return reserved, waste
