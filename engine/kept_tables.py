"""Block tables of a batch, kept from step to step: of most sequences they have not changed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tandem.engine.sequence import Sequence

Array = np.ndarray[Any, Any]


class KeptTables:
    """A row for each sequence of the latest batch, in its order. What is in a row is known by its table's stamp."""

    def __init__(self) -> None:
        self._rows = np.zeros((1, 1), dtype=np.int32)  # 0 behind a row's blocks
        self._num_blocks = np.zeros(1, dtype=np.int64)  # of each row
        self._stamps: list[object] = [None]  # see `BlockTable`

    def pack(self, sequences: Seq[Sequence], num_needed: Array) -> Array:
        """The blocks of these sequences, `num_needed` [n] or more of each: int32 [n, max(num_needed)], a copy."""
        num_rows, stamps = len(sequences), [sequence.blocks.stamp for sequence in sequences]
        if num_rows > len(self._stamps):
            self._grow(num_rows, self._rows.shape[1])
        for row, (stamp, kept) in enumerate(zip(stamps, self._stamps, strict=False)):
            if stamp is not kept:
                self._write(row, sequences[row].blocks.ids)
        self._stamps[:num_rows] = stamps
        assert (num_needed <= self._num_blocks[:num_rows]).all(), "a chunk has no slot for one of its tokens"
        return self._rows[:num_rows, : num_needed.max()].copy()

    def _write(self, row: int, ids: Array) -> None:
        num_blocks = len(ids)
        if num_blocks > self._rows.shape[1]:
            self._grow(len(self._rows), 2 * num_blocks)
        self._rows[row, :num_blocks] = ids
        self._rows[row, num_blocks : self._num_blocks[row]] = 0
        self._num_blocks[row] = num_blocks

    def _grow(self, num_rows: int, num_blocks: int) -> None:
        rows, counts = np.zeros((num_rows, num_blocks), dtype=np.int32), np.zeros(num_rows, dtype=np.int64)
        old_rows, old_blocks = self._rows.shape
        rows[:old_rows, :old_blocks], counts[:old_rows] = self._rows, self._num_blocks
        self._rows, self._num_blocks = rows, counts
        self._stamps += [None] * (num_rows - old_rows)
