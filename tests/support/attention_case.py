"""Attention of a few sequences by any backend: random queries, keys and values, in any chunks, on any device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.kv_pool import paged_view

NUM_LAYERS = 2
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Case:
    """Queries, keys and values of two or more sequences, and the pool into which they are written.

    `kv_dtype` is the pool's type; None: `dtype`.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.block_size, self.dtype, self.device = lengths, block_size, dtype, device
        self.kv_dtype = kv_dtype or dtype

        def draw(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, head_dim, generator=generator).to(device, dtype)

        self.q = [draw(length, num_heads) for length in lengths]
        self.k = [draw(length, num_kv_heads) for length in lengths]
        self.v = [draw(length, num_kv_heads) for length in lengths]
        num_blocks = [-(-length // block_size) for length in lengths]
        ids = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
        self.blocks = [[ids.pop() for _ in range(count)] for count in num_blocks]
        self.shape = (sum(num_blocks) + 1, NUM_LAYERS, 2, block_size, num_kv_heads, head_dim)

    def new_pool(self, fill: float) -> Tensor:
        """A pool of two layers in which every element is `fill`, laid out as the engine's."""
        num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = self.shape
        shard = (num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim)
        return paged_view(torch.full(shard, fill, dtype=self.kv_dtype, device=self.device))

    def run(
        self,
        backend: AttentionBackend,
        pool: Tensor,
        chunks: list[tuple[int, int, int]],
        *,
        max_kv_len: int = 0,
        **options: Any,
    ) -> list[Tensor]:
        """One step over `chunks` of (sequence, start, end); their outputs, which were NaN before.

        `max_kv_len` is a bound above the longest context; 0 = that context.
        """
        context = self.context(pool, chunks, max_kv_len)
        counts = [end - start for _, start, end in chunks]
        query, key, value = (
            torch.cat([tensors[i][start:end] for i, start, end in chunks]) for tensors in (self.q, self.k, self.v)
        )
        settings = {"scale": 0.3, "window": 0, "softcap": 0.0, "sinks": None, **options}
        out = torch.full(query.shape, float("nan"), dtype=self.dtype, device=self.device)
        backend(1, query, key, value, out, context, **settings)
        return list(torch.split(out, counts))

    def context(self, pool: Tensor, chunks: list[tuple[int, int, int]], max_kv_len: int = 0) -> StepContext:
        """The context of a step over `chunks`."""
        tables = torch.zeros(len(chunks), max(len(self.blocks[i]) for i, _, _ in chunks), dtype=torch.int32)
        slots = []
        for row, (i, start, end) in enumerate(chunks):
            tables[row, : len(self.blocks[i])] = torch.tensor(self.blocks[i])
            slots += [
                self.blocks[i][position // self.block_size] * self.block_size + position % self.block_size
                for position in range(start, end)
            ]
        counts = [end - start for _, start, end in chunks]
        return StepContext(
            pool=pool,
            block_tables=tables.to(self.device),
            query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=self.device),
            kv_lens=torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            max_query_len=max(counts),
            max_kv_len=max_kv_len or max(end for _, _, end in chunks),
        )

    def whole(self) -> list[tuple[int, int, int]]:
        """One chunk for each sequence."""
        return [(i, 0, length) for i, length in enumerate(self.lengths)]


def assert_agrees(backend: AttentionBackend, case: Case, **options: Any) -> None:
    """Over a pool full of NaN, the backend equals the reference up to rounding and writes the same KV."""
    pools = case.new_pool(float("nan")), case.new_pool(0.0)
    actual = torch.cat(case.run(backend, pools[0], case.whole(), **options)).float()
    expected = torch.cat(case.run(ReferenceAttention(), pools[1], case.whole(), **options)).float()
    tolerance = _TOLERANCE[case.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    written = ~pools[0].isnan()
    assert int(written.sum()) == sum(case.lengths) * 2 * case.shape[4] * case.shape[5]
    assert torch.equal(pools[0].float()[written], pools[1].float()[written])
