"""Checks at start that an attention backend computes what plain attention does.

GPU libraries have returned wrong rows without an error: for block sizes they do not page, for contexts they split. A
backend with such a fault must be refused here, before its answers are wrong.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend, LayerAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.kv_geometry import FORWARD_ERRORS
from tandem.engine.loader import LoadedModel
from tandem.protocol.errors import ConfigError

__all__ = ["check_attention"]

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # relative, for each row
_LAYER_IDX, _NUM_LAYERS = 1, 2  # a pool of two layers, so that views of one have gaps
_MAX_WINDOW = 100  # longer ones would need longer contexts to matter
_SCORES = 2.0  # standard deviation of the scores: some keys matter much more than others


class _Step(NamedTuple):
    """Inputs of one call: query [T, H, D], key and value [T, KVH, D], and the context with its pool."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: StepContext


def check_attention(model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
    """Raise ConfigError if the backend differs from plain attention for any layer of the model.

    Outputs and the pool's free slots hold NaN before. Each kind of layer attends in a mixed step, which has chunks of
    prompts beside decoding, and in one that only decodes; both have contexts that the backend splits.
    """
    long = backend.long_context
    mixed = [(0, 40), (long // 2, long // 2 + 30), (0, 1), (17, 18), (long - 1, long)]
    decoding = [(16, 17), (long - 1, long), (long // 2, long // 2 + 1)]
    for layer in model.attentions:
        for spans in (mixed, decoding):
            try:
                error = _largest_error(model, backend, layer, block_size, spans)
            except FORWARD_ERRORS as exc:
                raise ConfigError(
                    f"{type(model.module).__name__} cannot be served with attention_backend={backend.name}: {exc}"
                ) from exc
            if not error < _TOLERANCE[model.dtype]:
                raise ConfigError(
                    f"attention_backend={backend.name} differs from plain attention by {error:.2g} (relative) on "
                    f"{model.device} with {model.dtype}, head_dim={model.head_dim}, block_size={block_size} and "
                    f"{layer}; choose another attention_backend"
                )


@torch.inference_mode()
def _largest_error(
    model: LoadedModel,
    backend: AttentionBackend,
    layer: LayerAttention,
    block_size: int,
    spans: list[tuple[int, int]],
) -> float:
    """Largest relative error of a row, NaN if one was not written or KV is not where it belongs."""
    generator = torch.Generator().manual_seed(0)
    step = _make_step(model, layer, block_size, spans, generator)
    pool = step.context.pool.clone()
    sinks = torch.randn(layer.num_heads, generator=generator).to(model.device) if layer.has_sinks else None
    out, expected = torch.full_like(step.query, float("nan")), torch.empty_like(step.query)
    options: dict[str, Any] = {
        "scale": layer.scale,
        "window": min(layer.window, _MAX_WINDOW),
        "softcap": layer.softcap,
        "sinks": sinks,
    }
    backend(_LAYER_IDX, step.query, step.key, step.value, out, step.context, **options)
    written = step.context.pool.clone()
    step.context.pool.copy_(pool)
    ReferenceAttention()(_LAYER_IDX, step.query, step.key, step.value, expected, step.context, **options)
    if not torch.equal(written.nan_to_num(7.0), step.context.pool.nan_to_num(7.0)):
        return float("nan")
    out, expected = out.float(), expected.float()
    return float(((out - expected).norm(dim=2) / expected.norm(dim=2).clamp_min(1e-20)).max())


def _make_step(
    model: LoadedModel,
    layer: LayerAttention,
    block_size: int,
    spans: list[tuple[int, int]],
    generator: torch.Generator,
) -> _Step:
    """A step over `spans`: for each sequence the positions it computes, behind KV that the pool has already."""
    kv_shape = (model.num_kv_heads, model.head_dim)
    num_blocks = [-(-end // block_size) for _, end in spans]
    free = torch.randperm(sum(num_blocks), generator=generator).tolist()
    pool = torch.full((len(free), _NUM_LAYERS, 2, block_size, *kv_shape), float("nan"), dtype=model.dtype)
    tables = torch.zeros(len(spans), max(num_blocks), dtype=torch.int32)
    slots = []
    for row, ((start, end), count) in enumerate(zip(spans, num_blocks, strict=True)):
        blocks, free = torch.tensor(free[:count]), free[count:]
        tables[row, :count] = blocks
        positions = torch.arange(end)
        block, offset = blocks[positions // block_size], positions % block_size
        for side in (0, 1):
            content = torch.randn(start, *kv_shape, generator=generator)
            pool[block[:start], _LAYER_IDX, side, offset[:start]] = content.to(model.dtype)
        slots.append((block * block_size + offset)[start:])
    counts = [end - start for start, end in spans]

    def draw(num_heads: int, deviation: float) -> Tensor:
        tensor = torch.randn(sum(counts), num_heads, model.head_dim, generator=generator) * deviation
        return tensor.to(model.device, model.dtype)

    wide = max(_SCORES, layer.softcap / 2)  # so that a soft cap bends the scores
    context = StepContext(
        pool=pool.to(model.device),
        block_tables=tables.to(model.device),
        query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=model.device),
        kv_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=model.device),
        slot_mapping=torch.cat(slots).to(model.device),
        max_query_len=max(counts),
        max_kv_len=max(end for _, end in spans),
    )
    query = draw(layer.num_heads, wide / (layer.scale * model.head_dim**0.5))
    return _Step(query, draw(model.num_kv_heads, 1.0), draw(model.num_kv_heads, 1.0), context)
