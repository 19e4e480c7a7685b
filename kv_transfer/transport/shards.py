"""The shards of a block pool: one tensor, or one for each rank of a worker that computes on several.

A block is its parts of all shards, end to end. Workers with different numbers of shards hold the same bytes, cut in
other places. So two of them exchange pieces: as many to a block as it takes to cut it wherever one of them does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.kv_transfer.transport.base import PoolShape
from tandem.protocol.errors import IncompatiblePeer

_MAX_SHARDS = 256  # each block becomes as many descriptors: a peer must not make that any number


def shards_of(pool: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """The shards of a pool, which is one tensor if it has one shard."""
    return (pool,) if isinstance(pool, Tensor) else pool


def num_pieces(local: PoolShape, remote: PoolShape, worker_id: str) -> int:
    """Pieces of a block between two pools. Raises `IncompatiblePeer` if their blocks cannot be exchanged."""
    if local.block_bytes != remote.block_bytes:
        raise IncompatiblePeer(f"block_bytes: {local.block_bytes} here, {remote.block_bytes} at {worker_id}")
    if not 1 <= remote.num_shards <= _MAX_SHARDS or remote.block_bytes % remote.num_shards:
        raise IncompatiblePeer(f"{worker_id} cannot have {remote.num_shards} shards of {remote.block_bytes} bytes")
    return math.lcm(local.num_shards, remote.num_shards)


def byte_pieces(shards: Sequence[Tensor], pieces: int) -> list[Tensor]:
    """The shards as pieces `[num_blocks * pieces / num_shards, piece bytes]`, uint8, without a copy."""
    num_rows = shards[0].shape[0] * pieces // len(shards)
    return [shard.view(-1).view(torch.uint8).view(num_rows, -1) for shard in shards]


def piece_ids(block_ids: Sequence[int], shape: PoolShape, pieces: int, gap: int = 0) -> Sequence[int]:
    """Numbers of the blocks' pieces, counted through all shards: the first piece of each block, then the second, ...

    So the pieces of neighbouring blocks are neighbours where a shard has one piece of each block. `gap` numbers are
    left out between two shards.
    """
    if pieces == 1:
        return block_ids
    # Two shards, blocks A, B, C in four pieces each: numbers of the pieces, without a gap
    #   shard 0   A0 A1 B0 B1 C0 C1    0 ..  5
    #   shard 1   A2 A3 B2 B3 C2 C3    6 .. 11
    per_shard = pieces // shape.num_shards
    idx = np.arange(pieces)
    offsets = idx // per_shard * (shape.num_blocks * per_shard + gap) + idx % per_shard
    ids: list[int] = (offsets[:, None] + np.asarray(block_ids, dtype=np.int64)[None, :] * per_shard).ravel().tolist()
    return ids
