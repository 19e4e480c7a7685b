"""Batches as each chunk for itself says, without anything of the step before: what `ModelRunner.pack` must give."""

from __future__ import annotations

import numpy as np

from tandem.engine.engine import Engine
from tandem.engine.model_runner import LateTokens, PackedBatch
from tandem.engine.sequence import PENDING_TOKEN, ScheduledChunk


def check_packing(engine: Engine) -> Engine:
    """Compare each batch that this engine packs from now on."""
    pack = engine.runner.pack

    def packed(chunks: list[ScheduledChunk], late_tokens: LateTokens | None = None) -> PackedBatch:
        batch = pack(chunks, late_tokens)
        check_batch(batch, chunks, late_tokens, engine.config.block_size)
        return batch

    engine.runner.pack = packed  # type: ignore[method-assign]
    return engine


def check_batch(
    batch: PackedBatch, chunks: list[ScheduledChunk], late_tokens: LateTokens | None, block_size: int
) -> None:
    """Raise AssertionError unless a batch is what its chunks say."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts, kv_lens = [0], []
    for chunk in chunks:
        known = [*chunk.sequence.token_ids[: chunk.start + chunk.num_tokens], *chunk.draft]
        token_ids += known[chunk.start :]
        for position in range(chunk.start, len(known)):
            positions.append(position)
            slots.append(chunk.sequence.blocks[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
        kv_lens.append(len(known))
        num_logits = chunk.num_scored + chunk.samples + len(chunk.draft)
        rows += range(len(token_ids) - num_logits, len(token_ids))
    pending = [place for place, token_id in enumerate(token_ids) if token_id == PENDING_TOKEN]
    _equal(batch.input_ids, [0 if place in pending else one for place, one in enumerate(token_ids)], np.int64)
    _equal(batch.positions, positions, np.int64)
    _equal(batch.slot_mapping, slots, np.int64)
    _equal(batch.logit_rows, rows, np.int64)
    _equal(batch.query_starts, starts, np.int32)
    _equal(batch.kv_lens, kv_lens, np.int32)
    _check_tables(batch, chunks, [-(-kv_len // block_size) for kv_len in kv_lens])
    if late_tokens is None or not pending:
        assert batch.late_inputs is None
        return
    assert batch.late_inputs is not None
    ends = dict(zip(np.array(starts[1:]) - 1, chunks, strict=True))
    _equal(batch.late_inputs.places, pending, np.int64)
    _equal(batch.late_inputs.rows, [late_tokens.rows[ends[place].sequence] for place in pending], np.int64)


def _check_tables(batch: PackedBatch, chunks: list[ScheduledChunk], num_blocks: list[int]) -> None:
    tables = batch.block_tables
    assert (tables.shape, tables.dtype) == ((len(chunks), max(num_blocks)), np.int32)
    assert tables.flags.owndata, "the next step must not change it"
    assert tables.flags.c_contiguous
    for table, chunk, num in zip(tables.tolist(), chunks, num_blocks, strict=True):
        blocks = list(chunk.sequence.blocks)
        assert table[:num] == blocks[:num]
        assert table[num:] == [*blocks, *[0] * len(table)][num : len(table)], "others of the sequence, or 0"


def _equal(array: np.ndarray, expected: list[int], dtype: type) -> None:  # type: ignore[type-arg]
    assert array.dtype == dtype
    assert array.flags.c_contiguous, "kernels read it as one run"
    assert array.tolist() == expected
