"""Paged attention on CPUs, by the kernel in `engine/cpu/paged_attention.cpp`.

A kernel of our own reads KV in place, without a gather. Its result does not depend on batch and chunks, bit for bit,
so disaggregated and colocated output are equal (see the head of the C++ file).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.cpu.kinds import kind_for
from tandem.engine.cpu.library import check, load_kernels

MAX_HEAD_DIM = 512
SPLIT = 4096  # as in attention.h: keys that are summed apart, from position 0 on


class AttentionArguments(ctypes.Structure):
    """Mirror of `struct AttentionArguments` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "key", "value", "layer_keys", "layer_values")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "kv_lens", "slot_mapping", "sinks")),
        *(
            (f"{what}_{axis}_stride", ctypes.c_int64)
            for what in ("query", "key", "value")
            for axis in ("token", "head")
        ),
        *((f"{what}_stride", ctypes.c_int64) for what in ("block", "slot", "kv_head")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "max_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def step_arguments(context: StepContext, layer_idx: int) -> AttentionArguments:
    """What a step says about the attention of one of its layers."""
    pool = context.pool
    element = pool.element_size()
    layer_keys = pool.data_ptr() + layer_idx * pool.stride(1) * element
    return AttentionArguments(
        layer_keys=layer_keys,
        layer_values=layer_keys + pool.stride(2) * element,
        block_tables=context.block_tables.data_ptr(),
        query_starts=context.query_starts.data_ptr(),
        kv_lens=context.kv_lens.data_ptr(),
        slot_mapping=context.slot_mapping.data_ptr(),
        block_stride=pool.stride(0),
        slot_stride=pool.stride(3),
        kv_head_stride=pool.stride(4),
        num_tokens=context.slot_mapping.shape[0],
        num_seqs=context.kv_lens.shape[0],
        max_blocks=context.block_tables.shape[1],
        block_size=pool.shape[3],
        num_kv_heads=pool.shape[4],
        head_dim=pool.shape[5],
    )


class CpuAttention:
    """The compiled kernel as an attention backend."""

    name = "cpu"
    long_context = SPLIT + 64  # a split and a tile of keys

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._kinds = {dtype: kind_for(dtype) for dtype in (torch.float32, torch.bfloat16)}
        self._function = load_kernels().tandem_paged_attention
        self._function.argtypes = (ctypes.c_int, ctypes.POINTER(AttentionArguments), ctypes.c_int, ctypes.c_int)
        self._function.restype = ctypes.c_int

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
    ) -> None:
        """Write this layer's KV and attend into `out`; see `AttentionBackend`."""
        pool = context.pool
        _, num_heads, head_dim = query.shape
        if head_dim > MAX_HEAD_DIM:
            raise NotImplementedError(f"head_dim={head_dim} is over {MAX_HEAD_DIM}, the most the CPU kernel holds")
        assert query.dtype == pool.dtype, f"query is {query.dtype}, the pool {pool.dtype}"
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        arguments = step_arguments(context, layer_idx)
        arguments.out, arguments.query = out.data_ptr(), query.data_ptr()
        arguments.key, arguments.value = key.data_ptr(), value.data_ptr()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.query_token_stride, arguments.query_head_stride = query.stride(0), query.stride(1)
        arguments.key_token_stride, arguments.key_head_stride = key.stride(0), key.stride(1)
        arguments.value_token_stride, arguments.value_head_stride = value.stride(0), value.stride(1)
        arguments.num_heads, arguments.window = num_heads, window
        arguments.scale, arguments.softcap = scale, softcap
        is_bfloat16 = int(query.dtype == torch.bfloat16)
        status = self._function(self._kinds[query.dtype], ctypes.byref(arguments), is_bfloat16, self.num_threads)
        check(status, "attention")
