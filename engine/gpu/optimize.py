"""Makes a transformers model fast on a GPU without knowing which model it is: see `replacement.py`.

Of a Llama's decode step this leaves a third of the kernels: one product instead of three before attention, one instead
of two in the MLP, and one kernel for each norm with the sum before it, for the rotary embedding and for the gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.engine.gpu.ops import KERNELS, WIDE_TILE, multiply
from tandem.engine.gpu.residual import fuse_residuals
from tandem.engine.products import replace_products
from tandem.engine.replacement import replace_parts


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


class ExactLinear(JoinedLinear):
    """The same, with no row of the result depending on how many rows there are."""

    is_exact = True

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__(linears)
        if self.weight.is_cuda:  # compile now, not while requests wait
            for num_rows in (1, WIDE_TILE.rows):
                multiply(self.weight.new_zeros(num_rows, self.weight.shape[1]), self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        return multiply(x, self.weight, self.bias)


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    whole = parameters[0].detach() if len(parameters) == 1 else torch.cat([one.detach() for one in parameters])
    return nn.Parameter(whole.contiguous(), requires_grad=False)


def optimize(model: nn.Module, *, is_exact: bool = False) -> nn.Module:
    """Replace known parts in place and return the model. With `is_exact` these are all products: see `products.py`."""
    with torch.inference_mode():
        if is_exact:
            replace_products(model, KERNELS, ExactLinear, ExactLinear)
        else:
            for module in list(model.modules()):
                replace_parts(module, KERNELS, JoinedLinear)
        fuse_residuals(model)
    return model
