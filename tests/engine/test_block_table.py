from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.block_table import BlockTable

pieces = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=9)
bounds = st.none() | st.integers(-20, 20)


@given(pieces, bounds, bounds, st.integers(-25, 25), st.integers(0, 30))
def test_a_table_is_a_list(pieces: list[list[int]], start: int | None, end: int | None, place: int, size: int) -> None:
    table, blocks = BlockTable(pieces[0] if pieces else []), list(pieces[0] if pieces else [])
    former = table
    for number, piece in enumerate(pieces[1:]):
        table += np.array(piece, dtype=np.int32) if number % 2 else piece
        blocks += piece
    assert table is former, "steps that are launched know a sequence's blocks by their table"
    assert table == blocks
    assert list(table.ids) == list(np.asarray(table)) == blocks
    assert (len(table), bool(table), table[start:end]) == (len(blocks), bool(blocks), blocks[start:end])
    if -len(blocks) <= place < len(blocks):
        assert table[place] == blocks[place]
        assert type(table[place]) is int
        table[place] = blocks[place] = 7
    else:
        with pytest.raises(IndexError, match="of a table"):
            table[place]
    table.truncate(size)
    assert table == blocks[:size]
    table += [1]
    assert table == [*blocks[:size], 1]


def test_a_slice_is_replaced_by_as_many_blocks() -> None:
    table = BlockTable([1, 2, 3, 4])
    table[1:3] = [8, 9]
    assert table == [1, 8, 9, 4]
    with pytest.raises(AssertionError, match="1 blocks for 2"):
        table[1:3] = [8]


def test_a_copy_does_not_change_with_its_source() -> None:
    table = BlockTable([1, 2])
    copy = BlockTable(table.ids)
    table[0] = 5
    copy += [3]
    assert (table, copy) == ([5, 2], [1, 2, 3])
