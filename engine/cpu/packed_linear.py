"""Linear layers over the products of this package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.engine.cpu.matmul import PackedWeight


class PackedLinear(nn.Module):
    """Linear layers over one input as a single product with a packed weight."""

    def __init__(self, linears: list[nn.Linear], *, is_int8: bool = False) -> None:
        super().__init__()
        self.out_features = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.weight = torch.empty_like(weight, device="meta")  # some models look at its dtype or shape
        self.packed = PackedWeight(weight, is_int8=is_int8)
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out]."""
        return self.packed.multiply(x, self.bias)
