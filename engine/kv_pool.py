"""The memory of the KV pool: one shard for each rank of the engine, heads outermost within a block.

    shard of rank r   [num_blocks, num_kv_heads / R, num_layers, 2, block_size, head_dim], contiguous
    block             its parts of the shards, end to end: [num_kv_heads, num_layers, 2, block_size, head_dim]

So the bytes of a block are the same for any number of ranks R, and every rank's part of them is contiguous. Transports,
checksums, codecs and tiers rely on that: KV of a worker of two ranks is that of a worker of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvPool:
    """All KV memory of a worker. It belongs to rank 0's process, on every rank's device."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.shards = tuple(shards)
        num_blocks, num_heads, *per_head = self.shards[0].shape
        self.num_blocks = num_blocks
        self.block_shape = torch.Size((num_heads * len(self.shards), *per_head))  # of a whole block
        self.dtype = self.shards[0].dtype
        self.device = self.shards[0].device  # of rank 0
        self.block_bytes = self.block_shape.numel() * self.dtype.itemsize

    def read(self, blocks: Sequence[int] | Tensor) -> Tensor:
        """A copy of whole blocks [n, *block_shape] on rank 0's device."""
        index = torch.as_tensor(blocks)
        return torch.cat([shard[index.to(shard.device)].to(self.device) for shard in self.shards], dim=1)

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block into another one, behind the work launched so far."""
        for shard in self.shards:
            shard[target].copy_(shard[source])

    def write(self, blocks: Sequence[int] | Tensor, content: Tensor) -> None:
        """Replace whole blocks by `content` [n, *block_shape]."""
        index = torch.as_tensor(blocks)
        for shard, part in zip(self.shards, content.chunk(len(self.shards), dim=1), strict=True):
            shard[index.to(shard.device)] = part.to(shard.device)


def paged_view(shard: Tensor) -> Tensor:
    """The shard as attention sees it: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    return shard.permute(0, 2, 3, 4, 1, 5)
