"""Makes a transformers model fast on a GPU without knowing which model it is: see `replacement.py`.

Of a Llama's decode step this leaves a third of the kernels: one product instead of three before attention, one instead
of two in the MLP, and one kernel for each norm, for the rotary embedding and for the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tandem.engine.gpu.ops import KERNELS
from tandem.engine.parts import Product
from tandem.engine.replacement import merge_siblings, replace_gated_mlp, replace_norm, replace_rotary


class JoinedLinear(nn.Module):
    """Linear layers over one input as a single product."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.out_features = [linear.out_features for linear in linears]
        self.weight = _joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _joined(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        return nn.functional.linear(x, self.weight, self.bias)


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    if len(parameters) == 1:
        return cast(nn.Parameter, parameters[0])
    return nn.Parameter(torch.cat([one.detach() for one in parameters]), requires_grad=False)


def optimize(model: nn.Module) -> nn.Module:
    """Replace known parts in place and return the model."""
    make: type[Product] = JoinedLinear
    with torch.inference_mode():
        for module in list(model.modules()):
            replace_gated_mlp(module, KERNELS, make)
            merge_siblings(module, make)
            replace_norm(module, KERNELS)
            replace_rotary(module, KERNELS)
    return model
