"""The batch of one engine step, as the attention function needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The packed batch of one step: S sequences, T tokens, sequence i owning tokens [starts[i], starts[i + 1]).

    pool:          [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], in any order except head_dim
    block_tables:  [S, max_blocks], int32; row i names the blocks of sequence i, in order
    query_starts:  [S + 1], int32
    kv_lens:       [S], int32; tokens of sequence i in the cache once this step has written its new ones
    slot_mapping:  [T], int64; block_id * block_size + offset where each token's KV goes
    max_query_len, max_kv_len: the largest entries on the host, or bounds above them, for kernels' launches
    """

    pool: Tensor
    block_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_kv_len: int

    @classmethod
    def of_one_sequence(
        cls, num_tokens: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> StepContext:
        """A whole prompt in one step on a CPU, over a pool of its own of one block."""
        return cls(
            pool=torch.zeros(1, num_layers, 2, num_tokens, num_kv_heads, head_dim, dtype=dtype),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
            kv_lens=torch.tensor([num_tokens], dtype=torch.int32),
            slot_mapping=torch.arange(num_tokens),
            max_query_len=num_tokens,
            max_kv_len=num_tokens,
        )
