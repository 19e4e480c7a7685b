"""Makes a transformers model fast on a GPU without knowing which model it is: see `replacement.py`.

Of a Llama's decode step this leaves a third of the kernels: one product instead of three before attention, one instead
of two in the MLP, and one kernel for each norm, for the rotary embedding and for the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tandem.engine.gpu.ops import KERNELS, WIDE_TILE, multiply
from tandem.engine.products import replace_products
from tandem.engine.quantization import QUANTIZED_DTYPES, quantize
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
        _compile(self, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        return multiply(x, self.weight, self.bias)


class QuantizedLinear(nn.Module):
    """The same product as `ExactLinear`, of a weight in 8 bits with a scale for each output."""

    is_exact = True

    def __init__(self, linears: list[nn.Linear], *, dtype: torch.dtype) -> None:
        """`dtype`: of `quantize`."""
        super().__init__()
        self.out_features = [linear.out_features for linear in linears]
        elements, scales = zip(*(quantize(linear.weight, dtype) for linear in linears), strict=True)
        self.elements, self.scales = _joined(elements), _joined(scales)
        # Some models look at its dtype or shape.
        self.weight = torch.empty_like(self.elements, dtype=linears[0].weight.dtype, device="meta")
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _joined(biases) if biases else None
        _compile(self, self.elements)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        return multiply(x, self.elements, self.bias, self.scales)


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    whole = parameters[0].detach() if len(parameters) == 1 else torch.cat([one.detach() for one in parameters])
    return nn.Parameter(whole.contiguous(), requires_grad=False)


def _compile(linear: ExactLinear | QuantizedLinear, weight: Tensor) -> None:
    """Compile the kernels on a GPU now, not while requests wait."""
    if weight.is_cuda:
        for num_rows in (1, WIDE_TILE.rows):
            linear(torch.zeros(num_rows, weight.shape[1], dtype=linear.weight.dtype, device=weight.device))


def optimize(model: nn.Module, *, is_exact: bool = False, weights: str = "as-loaded") -> nn.Module:
    """Replace known parts in place and return the model. With `is_exact` these are all products: see `products.py`.

    With `weights` int8 or fp8 all linear layers keep theirs in 8 bits, except the one that gives logits; nor do routers
    of experts, which choose by small differences.
    """
    plain = ExactLinear if is_exact else JoinedLinear
    with torch.inference_mode():
        if weights != "as-loaded":
            replace_products(model, KERNELS, partial(QuantizedLinear, dtype=QUANTIZED_DTYPES[weights]), plain)
        elif is_exact:
            replace_products(model, KERNELS, plain, plain)
        else:
            for module in model.modules():  # not a list, which would keep the replaced ones in memory
                replace_parts(module, KERNELS, plain)
    return model
