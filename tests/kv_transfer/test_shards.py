from __future__ import annotations

import pytest
import torch

from tandem.kv_transfer.transport.base import PoolShape
from tandem.kv_transfer.transport.shards import byte_pieces, num_pieces, piece_ids
from tandem.protocol.errors import IncompatiblePeer


@pytest.mark.parametrize(("num_shards", "pieces"), [(1, 1), (1, 2), (2, 2), (1, 6), (2, 6), (3, 6), (6, 6)])
def test_pieces_of_a_block_are_its_bytes_in_order(num_shards: int, pieces: int) -> None:
    pool = torch.randint(256, (5, 6, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shards = [part.contiguous() for part in pool.chunk(num_shards, dim=1)]
    rows = torch.cat(byte_pieces(shards, pieces))
    numbers = piece_ids([3, 0, 4], PoolShape(5, 24, num_shards), pieces)
    content = rows[torch.tensor(numbers)].view(pieces, 3, -1)  # the first piece of each block, then the second, ...
    assert torch.equal(content.transpose(0, 1).reshape(3, 24), pool[[3, 0, 4]].flatten(1))


def test_a_gap_keeps_pieces_of_two_shards_apart() -> None:
    assert piece_ids([0, 1], PoolShape(2, 24, 2), 2, gap=1) == [0, 1, 3, 4]


def test_blocks_that_cannot_be_exchanged_are_refused() -> None:
    with pytest.raises(IncompatiblePeer, match="block_bytes: 24 here, 48 at d"):
        num_pieces(PoolShape(5, 24), PoolShape(5, 48), "d")
    for num_shards in (0, 5):
        with pytest.raises(IncompatiblePeer, match=f"d cannot have {num_shards} shards of 24 bytes"):
            num_pieces(PoolShape(5, 24, 2), PoolShape(5, 24, num_shards), "d")
    with pytest.raises(IncompatiblePeer, match="d cannot have 1048576 shards"):
        num_pieces(PoolShape(5, 1 << 20), PoolShape(5, 1 << 20, 1 << 20), "d")
    assert num_pieces(PoolShape(5, 24, 2), PoolShape(7, 24, 3), "d") == 6
