"""Weights in 8 bits with a scale in float32 for each output channel, made as a model is loaded."""

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
