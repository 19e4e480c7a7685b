"""Paged attention on NVIDIA GPUs: torch's own variable-length flash attention over block tables."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tandem.engine.attention.context import StepContext

__all__ = ["CudaAttention"]


class CudaAttention:
    """Scatters new KV into the pool, then attends over strided per-layer views of it."""

    name = "cuda_varlen"

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: StepContext,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Write this layer's KV, attend. query [T, H, D], key and value [T, KVH, D] -> [T, H, D]."""
        if softcap:
            raise NotImplementedError("torch's varlen_attn has no logit soft cap; this model needs another backend")
        keys, values = context.pool[:, layer_idx, 0], context.pool[:, layer_idx, 1]
        block_size = keys.shape[1]
        blocks, offsets = context.slot_mapping // block_size, context.slot_mapping % block_size
        keys.index_put_((blocks, offsets), key)
        values.index_put_((blocks, offsets), value)
        out = varlen_attn(
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
        assert isinstance(out, Tensor)
        return out
