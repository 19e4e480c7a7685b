"""Paged attention in plain torch: what other backends are compared with, at start and in tests.

Mathematically exact and slow. The bits of its result depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.quantization import as_kv


class ReferenceAttention:
    """Gathers each sequence's KV and attends in float32, one sequence at a time."""

    name = "reference"
    long_context = 1

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
        """Write this layer's KV and attend into `out`; see `AttentionBackend`. lse: [T, H], float32."""
        block_size = context.pool.shape[3]
        blocks, offsets = context.slot_mapping // block_size, context.slot_mapping % block_size
        context.pool[blocks, layer_idx, 0, offsets] = as_kv(key, context.pool.dtype)
        context.pool[blocks, layer_idx, 1, offsets] = as_kv(value, context.pool.dtype)
        group = query.shape[1] // key.shape[1]
        starts, kv_lens = context.query_starts.tolist(), context.kv_lens.tolist()
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
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                column = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
                scores = torch.cat([scores, column], dim=-1)
            rows = slice(starts[i], starts[i + 1])
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :kv_len], values).to(out.dtype)
            if lse is not None:
                lse[rows] = scores.logsumexp(dim=-1).T
