"""Weights in 8 bits with a scale in float32 for each output channel, made as a model is loaded; and KV in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

QUANTIZED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by the name in `EngineConfig.weights`
_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as elements [N, K] of `dtype` and float32 scales [N]: the largest of a row becomes the type's.

    Takes memory of one float32 copy meanwhile. A row that is not finite gets a scale that is not, and so does its sum.
    """
    weight = weight.detach()
    scales = weight.abs().amax(1).float() / _LARGEST[dtype]
    steps = weight / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    return (steps if dtype.is_floating_point else steps.round_()).to(dtype), scales


def as_kv(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the type of a pool. In fp8, which has no scale, larger ones become 448; NaN stays NaN."""
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-_LARGEST[dtype], _LARGEST[dtype])  # not all versions of torch do it
    return x.to(dtype)
