from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kv_transfer.transport import checksum
from tandem.kv_transfer.transport.checksum import block_checksums, wrong_blocks


def device_checksums(pool: Tensor, block_ids: list[int]) -> list[bytes]:
    """The checksums of a pool on a GPU."""
    return [b"d" + digest for digest in checksum._device_digests([pool], block_ids)]


KINDS: dict[str, Callable[[Tensor, list[int]], list[bytes]]] = {"host": block_checksums, "device": device_checksums}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
def test_every_flipped_bit_of_a_block_is_caught(dtype: torch.dtype, kind: str) -> None:
    pool = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    checksums = KINDS[kind](pool, [2, 0])
    assert {len(checksum) for checksum in checksums} == {9}  # a letter for the kind, and 64 bits
    assert wrong_blocks(pool, [2, 0], checksums) == []
    block = pool[2].view(-1).view(torch.uint8)
    for position in range(len(block)):
        for bit in range(8):
            block[position] ^= 1 << bit
            assert wrong_blocks(pool, [2, 0], checksums) == [2]
            block[position] ^= 1 << bit


@pytest.mark.parametrize("kind", KINDS)
def test_torn_and_swapped_blocks_are_caught(kind: str) -> None:
    pool = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(0))
    sent = pool.clone()
    checksums = KINDS[kind](pool, [0, 1, 2, 3, 4, 5])
    pool[1, 2:] = sent[0, 2:]  # half old, half new
    pool[[3, 4]] = sent[[4, 3]]
    pool[5, [0, 1]] = sent[5, [1, 0]]  # swapped within a block
    assert wrong_blocks(pool, [0, 1, 2, 3, 4, 5], checksums) == [1, 3, 4, 5]


def test_many_blocks_are_summed_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    whole = device_checksums(pool, list(range(9)))
    monkeypatch.setattr(checksum, "_SLAB_BYTES", 2 * 64)
    assert device_checksums(pool, list(range(9))) == whole
    assert len(set(whole)) == 9


def test_a_block_without_checksum_is_not_checked() -> None:
    assert wrong_blocks(torch.zeros(2, 4), [0, 1], [b"", b"h12345678"]) == [1]


def test_a_checksum_of_no_known_kind_is_wrong_and_so_are_too_few() -> None:
    pool = torch.zeros(2, 4)
    assert wrong_blocks(pool, [0, 1], [b"?12345678", b"h"]) == [0, 1]
    assert wrong_blocks(pool, [0, 1], block_checksums(pool, [0])) == [0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_and_a_host_check_each_other() -> None:
    pool = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    on_gpu = pool.cuda()
    assert block_checksums(on_gpu, [4, 1]) == device_checksums(pool, [4, 1])
    assert wrong_blocks(pool, [4, 1], block_checksums(on_gpu, [4, 1])) == []
    assert wrong_blocks(on_gpu, [4, 1], block_checksums(pool, [4, 1])) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_shards", [2, 3])
def test_checksums_do_not_depend_on_how_blocks_are_sharded(kind: str, num_shards: int) -> None:
    pool = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))
    shards = [part.contiguous() for part in pool.chunk(num_shards, dim=1)]
    checksums = KINDS[kind](pool, [3, 0])
    assert wrong_blocks(shards, [3, 0], checksums) == []
    shards[-1][0, -1, -1] += 1
    assert wrong_blocks(shards, [3, 0], checksums) == [0]
