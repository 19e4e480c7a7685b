"""Paged attention by Triton kernels of our own: ragged mixed batches, any block size, windows, soft caps, sinks.

A row's result does not depend on batch and chunks, bit for bit (see the head of `triton_kernels.py`). Nothing here
waits for the device, and a launch depends on the host's figures alone, so steps can be captured in CUDA graphs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext

__all__ = ["MAX_HEAD_DIM", "Tile", "TritonAttention", "split_tokens", "tile_of"]

MAX_HEAD_DIM = 256
_SMALLEST_SPLIT, _MOST_SPLITS = 512, 64
_MAX_DECODING = 512  # sequences whose splits one program counts
_PROGRAMS_PER_PROCESSOR = 4
_WRITE_ELEMENTS = 2048  # of the keys, and of the values, that one program writes into the pool


class Tile(NamedTuple):
    """Shape of the work of one program: query rows, keys of one step, warps, and steps loaded ahead."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_of(head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for this head dimension and type: the same on all GPUs, and small enough for 99 KB of shared memory.

    The third stage loads the block table a step ahead of the keys.
    """
    if dtype is torch.float32:  # without tensor cores, which would round to tf32
        return Tile(32, 32, 4, 2) if head_dim <= 64 else Tile(16, 32, 4, 1)
    return Tile(64, 64, 4, 3) if head_dim <= 128 else Tile(64, 32, 8, 3)


def split_tokens(max_model_len: int) -> int:
    """Keys of one split for models of this context length: a power of two that cuts it into at most 64 splits.

    It must not depend on the batch, and be the same on workers that hand KV to each other.
    """
    return max(_SMALLEST_SPLIT, _power_of_two(-(-max_model_len // _MOST_SPLITS)))


class TritonAttention:
    """The kernels as an attention backend, on NVIDIA GPUs or under Triton's interpreter."""

    name = "triton"

    def __init__(self, split: int) -> None:
        """`split` is the number of keys of one split (`split_tokens`). Raises ImportError without Triton."""
        from triton.knobs import runtime

        from tandem.engine.attention import triton_kernels

        self._kernels = triton_kernels
        self._split = split
        self.long_context = 2 * split + 77  # three splits
        self._is_interpreted = bool(runtime.interpret)

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        context: StepContext,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        lse: Tensor | None = None,
    ) -> None:
        """Write this layer's KV and attend into `out`; see `AttentionBackend`.

        lse: [T, H], float32; receives the logarithm of each row's sum of exponentials, its sink's included
        """
        head_dim = query.shape[2]
        if head_dim > MAX_HEAD_DIM:
            raise NotImplementedError(f"head_dim={head_dim} is over {MAX_HEAD_DIM}, the most the Triton kernel holds")
        assert query.dtype == context.pool.dtype, f"query is {query.dtype}, the pool {context.pool.dtype}"
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        keys, values = context.pool[:, layer_idx, 0], context.pool[:, layer_idx, 1]
        self._write(keys, values, key, value, context.slot_mapping)
        self._attend(query, keys, values, out, context, scale, window, softcap, sinks, lse)

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        dim = _power_of_two(head_dim)
        heads = min(_power_of_two(num_kv_heads), max(_WRITE_ELEMENTS // dim, 1))
        self._kernels.write_kv[(num_tokens, -(-num_kv_heads // heads))](
            keys,
            values,
            *keys.stride()[:3],
            key,
            value,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            slot_mapping,
            num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=keys.shape[1],
            HEADS=heads,
            DIM=dim,
        )

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        context: StepContext,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, num_seqs = keys.shape[2], context.kv_lens.shape[0]
        tile, group = tile_of(head_dim, query.dtype), num_heads // num_kv_heads
        num_splits = -(-context.max_kv_len // self._split)
        is_decoding = context.max_query_len == 1 and num_splits > 1 and num_seqs <= _MAX_DECODING
        # With several splits, sequences of few tokens are computed by a program for each split, those of one token
        # beside longer chunks too. Steps that only decode have a kernel of their own.
        parallel_tokens = 0
        if num_splits > 1:
            parallel_tokens = context.max_query_len if context.max_query_len * group <= tile.rows else 1
        part_rows = (num_seqs * parallel_tokens, num_heads, num_splits)
        part_acc = out.new_empty((*part_rows, head_dim), dtype=torch.float32)
        part_stats = out.new_empty((*part_rows, 2), dtype=torch.float32)
        tables = (context.block_tables, context.block_tables.stride(0))
        inputs = (query, query.stride(0), query.stride(1), keys, values, *keys.stride()[:3])
        shape = {"HEAD_DIM": head_dim, "WINDOW": window, "SPLIT": self._split}
        flags = {"HAS_SINKS": sinks is not None, "HAS_LSE": lse is not None}
        tiles = {
            "GROUP": group,
            "BLOCK_SIZE": keys.shape[1],
            "SOFTCAP": softcap,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "DIM": max(16, _power_of_two(head_dim)),  # 16 is the least that tensor cores multiply
            "CAST": self._is_interpreted and query.dtype is torch.bfloat16,  # its products of bfloat16 are wrong
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        if is_decoding:
            num_programs = min(-(-_num_programs(query.device) // num_kv_heads), num_seqs * num_splits)
            self._kernels.attend_decoding[(num_programs, num_kv_heads, -(-group // tile.rows))](
                part_acc,
                part_stats,
                *inputs,
                *tables,
                context.kv_lens,
                num_seqs,
                num_splits,
                scale,
                num_kv_heads,
                SEQS=_MAX_DECODING,
                **tiles,
                **shape,
            )
        else:
            num_tiles = num_tokens * group // tile.rows + num_seqs
            self._kernels.attend[(num_tiles, num_kv_heads, max(num_splits if parallel_tokens else 1, 1))](
                out,
                lse,
                part_acc,
                part_stats,
                *inputs,
                sinks,
                *tables,
                context.query_starts,
                context.kv_lens,
                num_seqs,
                parallel_tokens,
                scale,
                num_kv_heads,
                **tiles,
                **shape,
                **flags,
            )
        if parallel_tokens:
            self._kernels.merge_splits[(num_seqs * parallel_tokens, num_heads)](
                out,
                lse,
                part_acc,
                part_stats,
                sinks,
                context.query_starts,
                context.kv_lens,
                parallel_tokens,
                num_splits,
                DIM=_power_of_two(head_dim),
                num_warps=1,
                **shape,
                **flags,
            )


@lru_cache(maxsize=16)
def _num_programs(device: torch.device) -> int:
    """Programs that share the splits of a decoding step: a few for each multiprocessor, so that none is idle."""
    if device.type != "cuda":
        return 6
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
