"""Makes a transformers model fast on a GPU without knowing which model it is: see `replacement.py`.

Of a Llama's decode step this leaves a third of the kernels: one product instead of three before attention, one instead
of two in the MLP, and one kernel for each norm with the sum before it, for the rotary embedding and for the gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tandem.engine.gpu.ops import KERNELS, WIDE_TILE, multiply
from tandem.engine.gpu.residual import fuse_residuals
from tandem.engine.products import replace_products
from tandem.engine.quantization import quantize
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


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of the outermost lists, which are a model's layers."""
    for child in module.children():
        yield from child.children() if isinstance(child, nn.ModuleList) else _layers(child)


def _compile(linear: ExactLinear | QuantizedLinear, weight: Tensor) -> None:
    """Compile the kernels on a GPU now, not while requests wait."""
    if weight.is_cuda:
        for num_rows in (1, WIDE_TILE.rows):
            linear(torch.zeros(num_rows, weight.shape[1], dtype=linear.weight.dtype, device=weight.device))


def optimize(model: nn.Module, *, is_exact: bool = False) -> nn.Module:
    """Replace known parts in place and return the model. With `is_exact` these are all products: see `products.py`."""
    with torch.inference_mode():
        if is_exact:
            replace_products(model, KERNELS, ExactLinear, ExactLinear)
        else:
            for module in model.modules():  # not a list, which would keep the replaced ones in memory
                replace_parts(module, KERNELS, JoinedLinear)
        fuse_residuals(model)
    return model


def quantize_products(model: nn.Module, dtype: torch.dtype, device: torch.device, *, is_exact: bool) -> nn.Module:
    """As `optimize`, and all linear layers keep their weights in 8 bits, of this `dtype` of `quantize`.

    Not the one that gives logits, and no routers of experts, which choose by small differences. The model goes to the
    device layer by layer, so that the weights of one layer at most are there as they were loaded.
    """
    plain = ExactLinear if is_exact else JoinedLinear
    for part in (*_layers(model), model):
        if not hasattr(model, "hf_quantizer"):  # its model is there already, and may refuse to move
            part.to(device)
        with torch.inference_mode():
            replace_products(part, KERNELS, partial(QuantizedLinear, dtype=dtype), plain)
    with torch.inference_mode():
        fuse_residuals(model)
    return model
