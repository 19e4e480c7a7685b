"""The shards of a KV pool that rank 0 owns and the other ranks map.

Rank 0's process allocates all of them, because only the process that allocated memory can register it for RDMA. On a
CPU they are one anonymous file in memory, which has no name and ends with the last process that maps it. On GPUs each
is on its rank's device, and CUDA hands it to the other process.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.kv_pool import KvPool


class ShardHandle(NamedTuple):
    """What another rank needs to map its shard. It travels between processes that trust each other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0  # in the file
    rebuild: Callable[..., Tensor] | None = None  # CUDA's; None on a CPU
    arguments: tuple[Any, ...] = ()


def allocate_shared(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, size: int, *, takes_memory: bool
) -> tuple[KvPool, list[ShardHandle], int | None]:
    """A zeroed pool of `size` shards of this shape, a handle of each, and the file that holds them on a CPU.

    `takes_memory`: take the memory now and not when blocks are first used. Raises OSError if there is too little.
    """
    if device.type == "cuda":
        shards = [torch.zeros(shape, dtype=dtype, device=torch.device("cuda", rank)) for rank in range(size)]
        return KvPool(shards), [_cuda_handle(shard) for shard in shards], None
    num_bytes = _shard_bytes(shape, dtype)
    file = os.memfd_create("tandem-kv")
    os.ftruncate(file, size * num_bytes)
    if takes_memory:
        os.posix_fallocate(file, 0, size * num_bytes)
    handles = [ShardHandle(shape, dtype, rank * num_bytes) for rank in range(size)]
    return KvPool([_map_file(file, handle) for handle in handles]), handles, file


def map_shard(handle: ShardHandle, file: int | None) -> Tensor:
    """The shard, in this process."""
    if handle.rebuild is not None:
        return handle.rebuild(*handle.arguments)
    assert file is not None, "a shard on a CPU is in a file"
    return _map_file(file, handle)


def _map_file(file: int, handle: ShardHandle) -> Tensor:
    pages = mmap.mmap(file, _shard_bytes(handle.shape, handle.dtype), flags=mmap.MAP_SHARED, offset=handle.offset)
    flat = torch.frombuffer(pages, dtype=handle.dtype, count=math.prod(handle.shape))
    return flat.view(handle.shape)


def _shard_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a shard in the file: whole pages."""
    return -(-math.prod(shape) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _cuda_handle(shard: Tensor) -> ShardHandle:
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(shard)  # type: ignore[no-untyped-call]
    return ShardHandle(tuple(shard.shape), shard.dtype, rebuild=rebuild, arguments=arguments)
