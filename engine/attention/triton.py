"""Paged attention by Triton kernels of our own: ragged mixed batches, any block size, windows, soft caps, sinks.

A row's result does not depend on batch and chunks, bit for bit (see the head of `triton_kernels.py`). Nothing here
waits for the device, and a launch depends on the host's figures alone, so steps can be captured in CUDA graphs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext

MAX_HEAD_DIM = 256
_SMALLEST_SPLIT, _MOST_SPLITS = 512, 64
_MAX_DECODING = 512  # sequences whose splits one program counts
_PROGRAMS_PER_PROCESSOR = 4
_WRITE_ELEMENTS = 2048  # elements of keys, and of values, that one program writes into the pool


class Tile(NamedTuple):
    """Shape of the work of one program: query rows, keys of one step, warps, and steps loaded ahead."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_of(head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for this head dimension and type: the same on all GPUs, and small enough for 99 KB of shared memory.

    With two stages the next keys load while these are multiplied. A third one loads the block table a step ahead too.
    On an H100 it is slower for heads of 128 (a prompt of 4,096: 677 against 565 us); not measured for larger ones.
    """
    if dtype is torch.float32:  # without tensor cores, which would round to tf32
        return Tile(32, 32, 4, 2) if head_dim <= 64 else Tile(16, 32, 4, 1)
    return Tile(64, 64, 4, 2) if head_dim <= 128 else Tile(64, 32, 8, 3)


def split_tokens(max_model_len: int) -> int:
    """Keys of one split for models of this context length: a power of two that cuts it into at most 64 splits.

    It must not depend on the batch, and be the same on workers that hand KV to each other.
    """
    return max(_SMALLEST_SPLIT, power_of_two(-(-max_model_len // _MOST_SPLITS)))


class _Options(NamedTuple):
    """The kernels' compile-time options for one layer."""

    rows: int  # of one program's tile
    decoding: dict[str, Any]
    chunks: dict[str, Any]
    merge: dict[str, Any]


class _Layer(NamedTuple):
    """The attention of one layer in one step."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    context: StepContext
    inputs: tuple[Any, ...]  # the kernels' arguments from the query to the strides of the pool
    scale: float
    num_heads: int
    num_kv_heads: int
    options: _Options


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
        pool, is_fp8 = context.pool, context.pool.dtype is torch.float8_e4m3fn
        assert is_fp8 or query.dtype == pool.dtype, f"query is {query.dtype}, the pool {pool.dtype}"
        pool = pool.view(torch.int8) if is_fp8 else pool  # on Ampere Triton has no such numbers
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        keys, values = pool[:, layer_idx, 0], pool[:, layer_idx, 1]
        self._write(keys, values, key, value, context.slot_mapping)
        num_heads, num_kv_heads = query.shape[1], keys.shape[2]
        cast = self._is_interpreted and query.dtype is torch.bfloat16  # its products of bfloat16 are wrong
        flags = (cast, sinks is not None, lse is not None)
        group = num_heads // num_kv_heads
        options = _options(head_dim, query.dtype, group, keys.shape[1], self._split, window, softcap, *flags)
        inputs = (query, query.stride(0), query.stride(1), keys, values, *keys.stride()[:3])
        self._attend(_Layer(out, lse, sinks, context, inputs, scale, num_heads, num_kv_heads, options), head_dim)

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        dim = power_of_two(head_dim)
        heads = min(power_of_two(num_kv_heads), max(_WRITE_ELEMENTS // dim, 1))
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

    def _attend(self, layer: _Layer, head_dim: int) -> None:
        """Compute rows whole, or compute their splits separately and merge them."""
        context, num_seqs = layer.context, layer.context.kv_lens.shape[0]
        num_splits = -(-context.max_kv_len // self._split)
        # With several splits, sequences of few tokens are computed by a program for each split, those of one token
        # beside longer chunks too. Steps that only decode have a kernel of their own.
        parallel_tokens = 0
        if num_splits > 1:
            is_short = context.max_query_len * (layer.num_heads // layer.num_kv_heads) <= layer.options.rows
            parallel_tokens = context.max_query_len if is_short else 1
        rows = (num_seqs * parallel_tokens, layer.num_heads, num_splits)
        part_acc = layer.out.new_empty((*rows, head_dim), dtype=torch.float32)
        part_stats = layer.out.new_empty((*rows, 2), dtype=torch.float32)
        if context.max_query_len == 1 and num_splits > 1 and num_seqs <= _MAX_DECODING:
            self._launch_decoding(layer, part_acc, part_stats, num_splits)
        else:
            self._launch_chunks(layer, part_acc, part_stats, num_splits, parallel_tokens)
        if parallel_tokens:
            self._launch_merge(layer, part_acc, part_stats, parallel_tokens)

    def _launch_decoding(self, layer: _Layer, part_acc: Tensor, part_stats: Tensor, num_splits: int) -> None:
        """Compute the splits of sequences of one token each."""
        context, num_seqs = layer.context, layer.context.kv_lens.shape[0]
        num_programs = min(-(-_num_programs(layer.out.device) // layer.num_kv_heads), num_seqs * num_splits)
        num_tiles = -(-(layer.num_heads // layer.num_kv_heads) // layer.options.rows)
        self._kernels.attend_decoding[(num_programs, layer.num_kv_heads, num_tiles)](
            part_acc,
            part_stats,
            *layer.inputs,
            context.block_tables,
            context.block_tables.stride(0),
            context.kv_lens,
            num_seqs,
            num_splits,
            layer.scale,
            layer.num_kv_heads,
            **layer.options.decoding,
        )

    def _launch_chunks(
        self, layer: _Layer, part_acc: Tensor, part_stats: Tensor, num_splits: int, parallel_tokens: int
    ) -> None:
        """Compute whole rows, but the splits of sequences with at most `parallel_tokens` tokens."""
        context, num_seqs = layer.context, layer.context.kv_lens.shape[0]
        group = layer.num_heads // layer.num_kv_heads
        num_tiles = layer.out.shape[0] * group // layer.options.rows + num_seqs
        self._kernels.attend[(num_tiles, layer.num_kv_heads, num_splits if parallel_tokens else 1)](
            layer.out,
            layer.lse,
            part_acc,
            part_stats,
            *layer.inputs,
            layer.sinks,
            context.block_tables,
            context.block_tables.stride(0),
            context.query_starts,
            context.kv_lens,
            num_seqs,
            parallel_tokens,
            layer.scale,
            layer.num_kv_heads,
            **layer.options.chunks,
        )

    def _launch_merge(self, layer: _Layer, part_acc: Tensor, part_stats: Tensor, parallel_tokens: int) -> None:
        """Merge the splits that were computed apart."""
        num_rows, num_heads, num_splits, _ = part_acc.shape
        self._kernels.merge_splits[(num_rows, num_heads)](
            layer.out,
            layer.lse,
            part_acc,
            part_stats,
            layer.sinks,
            layer.context.query_starts,
            layer.context.kv_lens,
            parallel_tokens,
            num_splits,
            **layer.options.merge,
        )


@lru_cache(maxsize=64)
def _options(
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    block_size: int,
    split: int,
    window: int,
    softcap: float,
    cast: bool,
    has_sinks: bool,
    has_lse: bool,
) -> _Options:
    """The kernels' options, made once for all layers of a kind: each layer of each step would take microseconds."""
    tile = tile_of(head_dim, dtype)
    shape = {"HEAD_DIM": head_dim, "WINDOW": window, "SPLIT": split}
    flags = {"HAS_SINKS": has_sinks, "HAS_LSE": has_lse}
    tiles = {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "SOFTCAP": softcap,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DIM": max(16, power_of_two(head_dim)),  # 16 is the least that tensor cores multiply
        "CAST": cast,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return _Options(
        rows=tile.rows,
        decoding={"SEQS": _MAX_DECODING, **tiles, **shape},
        chunks={**tiles, **shape, **flags},
        merge={"DIM": power_of_two(head_dim), "num_warps": 1, **shape, **flags},
    )


@lru_cache(maxsize=16)
def _num_programs(device: torch.device) -> int:
    """Programs that share the splits of a decoding step: a few for each multiprocessor, so that none is idle."""
    if device.type != "cuda":
        return 6
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
