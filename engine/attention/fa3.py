"""Paged attention on Hopper GPUs by FlashAttention 3, through torch's variable-length attention.

torch's built-in FlashAttention 2 is never used: it pages in multiples of 256 tokens only.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn_out

from tandem.engine.attention.context import StepContext


class Fa3Attention:
    """Writes new KV by indexing, then attends over strided per-layer views of the pool."""

    name = "fa3"
    long_context = 4096  # its own heuristics split the keys of lone queries well before

    def __init__(self) -> None:
        activate_flash_attention_impl("FA3")

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
        if softcap or sinks is not None:
            raise NotImplementedError("FlashAttention 3 through torch has no logit soft cap and no attention sinks")
        keys, values = context.pool[:, layer_idx, 0], context.pool[:, layer_idx, 1]
        block_size = keys.shape[1]
        blocks, offsets = context.slot_mapping // block_size, context.slot_mapping % block_size
        keys.index_put_((blocks, offsets), key)
        values.index_put_((blocks, offsets), value)
        varlen_attn_out(
            out,
            query.contiguous(),
            keys,
            values,
            context.query_starts,
            None,
            context.max_query_len,
            context.max_kv_len,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=context.kv_lens,
            block_table=context.block_tables,
        )
