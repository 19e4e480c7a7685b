"""Paged attention in plain torch: the oracle of the attention tests.

Mathematically exact, but the bits of its result depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext

__all__ = ["ReferenceAttention"]


class ReferenceAttention:
    """Gathers each sequence's KV and attends in float32, one sequence at a time."""

    name = "reference"

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
        block_size = context.pool.shape[3]
        blocks, offsets = context.slot_mapping // block_size, context.slot_mapping % block_size
        context.pool[blocks, layer_idx, 0, offsets] = key
        context.pool[blocks, layer_idx, 1, offsets] = value
        group = query.shape[1] // key.shape[1]
        starts, kv_lens = context.query_starts.tolist(), context.kv_lens.tolist()
        outputs = []
        for i, kv_len in enumerate(kv_lens):
            table = context.block_tables[i, : -(-kv_len // block_size)].long()
            keys, values = (
                context.pool[table, layer_idx, side].flatten(0, 1)[:kv_len].float().repeat_interleave(group, dim=1)
                for side in (0, 1)
            )
            q = query[starts[i] : starts[i + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            positions = torch.arange(kv_len - q.shape[0], kv_len, device=q.device)[:, None]
            key_positions = torch.arange(kv_len, device=q.device)[None, :]
            hidden = key_positions > positions
            if window:
                hidden |= key_positions <= positions - window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs).to(query.dtype)
