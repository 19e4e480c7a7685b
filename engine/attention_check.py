"""Checks at start that an attention backend computes what plain attention does.

GPU libraries have returned wrong rows without an error: for block sizes they do not page, for contexts they split. A
backend with such a fault must be refused here, before its answers are wrong.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend, LayerAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.kv_geometry import FORWARD_ERRORS
from tandem.engine.kv_pool import paged_view
from tandem.engine.loader import LoadedModel
from tandem.engine.quantization import as_kv
from tandem.protocol.errors import ConfigError

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # relative, for each row
LAYER_IDX, _NUM_LAYERS = 1, 2  # a pool of two layers, so that views of one have gaps
_MAX_WINDOW = 100  # longer ones would need longer contexts to matter
_SCORES = 2.0  # standard deviation of the scores: some keys matter much more than others


class Pages(NamedTuple):
    """The shape of one layer's KV in a pool, and where it is."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries, keys and values
    kv_dtype: torch.dtype  # of the pool
    device: torch.device


class AttentionCall(NamedTuple):
    """Inputs of one call: query [T, H, D], key and value [T, KVH, D], and the context with its pool."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: StepContext


def check_attention(model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
    """Raise ConfigError if the backend differs from plain attention for any layer of the model."""
    pages = Pages(model.num_kv_heads, model.head_dim, block_size, model.dtype, model.kv_dtype, model.device)
    for layer in model.attentions:
        try:
            error = largest_error(backend, pages, layer)
        except FORWARD_ERRORS as exc:
            raise ConfigError(
                f"{type(model.module).__name__} cannot be served with attention_backend={backend.name}: {exc}"
            ) from exc
        if not error < _TOLERANCE[model.dtype]:
            raise ConfigError(
                f"attention_backend={backend.name} differs from plain attention by {error:.2g} (relative) for {layer} "
                f"with {pages}; choose another attention_backend"
            )


def largest_error(backend: AttentionBackend, pages: Pages, layer: LayerAttention) -> float:
    """Largest relative error of a row, NaN if one was not written or KV is not where it belongs.

    Outputs and the pool's free slots hold NaN before. The layer attends in a mixed step, which has chunks of prompts
    beside decoding, and in one that only decodes; both have a context that the backend splits. The latter is repeated
    with a bound for longer contexts, as in a graph.
    """
    long = backend.long_context
    mixed = [(0, 100), (17, 18), (long - 30, long), (0, 1), (69, 70)]
    decoding = [(16, 17), (long - 1, long), (69, 70)]
    errors = [_step_error(backend, pages, layer, *step) for step in ((mixed, 0), (decoding, 0), (decoding, 8 * long))]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


@torch.inference_mode()
def _step_error(
    backend: AttentionBackend, pages: Pages, layer: LayerAttention, spans: list[tuple[int, int]], max_kv_len: int
) -> float:
    generator = torch.Generator().manual_seed(0)
    step = make_step(pages, layer, spans, generator)
    context = replace(step.context, max_kv_len=max(step.context.max_kv_len, max_kv_len))
    pool = step.context.pool.clone()
    sinks = torch.randn(layer.num_heads, generator=generator).to(pages.device) if layer.has_sinks else None
    out, expected = torch.full_like(step.query, float("nan")), torch.empty_like(step.query)
    options: dict[str, Any] = {
        "scale": layer.scale,
        "window": min(layer.window, _MAX_WINDOW),
        "softcap": layer.softcap,
        "sinks": sinks,
    }
    backend(LAYER_IDX, step.query, step.key, step.value, out, context, **options)
    written = step.context.pool.clone()
    step.context.pool.copy_(pool)
    ReferenceAttention()(LAYER_IDX, step.query, step.key, step.value, expected, step.context, **options)
    if not torch.equal(written.view(torch.uint8), step.context.pool.view(torch.uint8)):  # NaN equals NaN
        return math.nan
    out, expected = out.float(), expected.float()
    return float(((out - expected).norm(dim=2) / expected.norm(dim=2).clamp_min(1e-20)).max())


def make_step(
    pages: Pages, layer: LayerAttention, spans: list[tuple[int, int]], generator: torch.Generator
) -> AttentionCall:
    """A step over `spans`: for each sequence the positions it computes, behind KV that the pool has already."""
    block_size, kv_shape = pages.block_size, (pages.num_kv_heads, pages.head_dim)
    num_blocks = [-(-end // block_size) for _, end in spans]
    free = torch.randperm(sum(num_blocks), generator=generator).tolist()
    shard = (len(free), pages.num_kv_heads, _NUM_LAYERS, 2, block_size, pages.head_dim)
    pool = paged_view(torch.full(shard, float("nan"), dtype=pages.kv_dtype))
    tables = torch.zeros(len(spans), max(num_blocks), dtype=torch.int32)
    slots = []
    for row, ((start, end), count) in enumerate(zip(spans, num_blocks, strict=True)):
        blocks, free = torch.tensor(free[:count]), free[count:]
        tables[row, :count] = blocks
        positions = torch.arange(end)
        block, offset = blocks[positions // block_size], positions % block_size
        for side in (0, 1):
            content = torch.randn(start, *kv_shape, generator=generator)
            pool[block[:start], LAYER_IDX, side, offset[:start]] = as_kv(content, pages.kv_dtype)
        slots.append((block * block_size + offset)[start:])
    counts = [end - start for start, end in spans]

    def draw(num_heads: int, deviation: float) -> Tensor:
        tensor = torch.randn(sum(counts), num_heads, pages.head_dim, generator=generator) * deviation
        return tensor.to(pages.device, pages.dtype)

    wide = max(_SCORES, layer.softcap / 2)  # so that a soft cap bends the scores
    context = StepContext(
        pool=pool.to(pages.device),
        block_tables=tables.to(pages.device),
        query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=pages.device),
        kv_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=pages.device),
        slot_mapping=torch.cat(slots).to(pages.device),
        max_query_len=max(counts),
        max_kv_len=max(end for _, end in spans),
    )
    query = draw(layer.num_heads, wide / (layer.scale * pages.head_dim**0.5))
    return AttentionCall(query, draw(pages.num_kv_heads, 1.0), draw(pages.num_kv_heads, 1.0), context)
