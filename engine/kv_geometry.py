"""The shape of a model's KV cache, measured by one forward.

Configs name head widths in many ways, and some name another width than their attention uses (multi-head latent
attention: keys wider than values). What a layer hands to its attention function is certain.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.engine.attention.interface import ATTENTION_NAME, LayerAttention
from tandem.protocol.errors import ConfigError

# What a model that does not fit raises in the middle of its forward.
FORWARD_ERRORS = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)

_PROBE_NAME = "tandem_probe"


class KvGeometry(NamedTuple):
    """One slot of the pool: [num_layers, 2, num_kv_heads, head_dim] of `dtype`, and the kinds of attention over it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # in which the model computes it
    attentions: frozenset[LayerAttention]


class _Layer(NamedTuple):
    idx: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    attention: LayerAttention


_layers: ContextVar[list[_Layer]] = ContextVar("layers")


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function that notes what it is given and returns zeros."""
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} attends to later tokens too, as an encoder does")
    width = max(key.shape[3], value.shape[3])
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    _layers.get().append(_Layer(layer_idx, key.shape[1], width, key.dtype, LayerAttention.of(query, **options)))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@torch.inference_mode()
def measure_kv(module: nn.Module) -> KvGeometry:
    """The geometry that fits all layers of the model, whose attention is paged before and after.

    Raises ConfigError if layers differ in their KV heads, share an index, or are not numbered from 0.
    """
    AttentionInterface.register(_PROBE_NAME, _record)
    model: Any = module
    name = type(module).__name__
    layers: list[_Layer] = []
    _layers.set(layers)
    model.set_attn_implementation(_PROBE_NAME)
    try:
        ids = torch.arange(2, device=model.device).unsqueeze(0)
        model(input_ids=ids, position_ids=ids, use_cache=False)
    except FORWARD_ERRORS as exc:
        raise ConfigError(f"{name} cannot be served: {exc}") from exc
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return _common(name, layers)


def _common(name: str, layers: list[_Layer]) -> KvGeometry:
    indices = [layer.idx for layer in layers]
    if not layers:
        raise ConfigError(f"{name} cannot be served: none of its layers attends through the KV pool")
    if sorted(indices) != list(range(len(layers))):
        raise ConfigError(
            f"{name} cannot be served: a forward attends in layers {indices}; each of 0 to n must attend once"
        )
    if len(kinds := {(layer.num_kv_heads, layer.dtype) for layer in layers}) > 1:
        raise ConfigError(
            f"{name} cannot be served: its layers differ in their KV (heads, dtype: "
            f"{', '.join(f'{heads} {dtype}' for heads, dtype in sorted(kinds, key=str))}), and a block holds one kind"
        )
    ((num_kv_heads, dtype),) = kinds
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"{name} cannot be served: its KV is {dtype}, and a block holds float32 or bfloat16")
    attentions = frozenset(layer.attention for layer in layers)
    return KvGeometry(len(layers), num_kv_heads, max(layer.head_dim for layer in layers), dtype, attentions)
