from __future__ import annotations

import pytest
import torch

from kv_transfer.checksum import CHECKSUM_BYTES, block_checksums, wrong_blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
def test_every_flipped_bit_of_a_block_is_caught(dtype: torch.dtype) -> None:
    pool = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    checksums = block_checksums(pool, [2, 0])
    assert {len(checksum) for checksum in checksums} == {CHECKSUM_BYTES}
    assert wrong_blocks(pool, [2, 0], checksums) == []
    block = pool[2].view(-1).view(torch.uint8)
    for position in range(len(block)):
        for bit in range(8):
            block[position] ^= 1 << bit
            assert wrong_blocks(pool, [2, 0], checksums) == [2]
            block[position] ^= 1 << bit


def test_equal_bytes_have_equal_checksums_in_any_block_of_any_pool() -> None:
    pool = torch.arange(40, dtype=torch.float32).view(4, 10)
    other = torch.zeros(6, 10)
    other[5] = pool[1]
    assert block_checksums(pool, [1]) == block_checksums(other, [5])
    assert block_checksums(pool, [0]) != block_checksums(pool, [1])


def test_a_block_without_checksum_is_not_checked() -> None:
    assert wrong_blocks(torch.zeros(2, 4), [0, 1], [b"", b"12345678"]) == [1]
