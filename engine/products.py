"""Replaces every product of a model's weights, where no row may depend on how many rows there are.

Libraries sum in another order for other numbers of rows, so a token's last bits would depend on its batch, on how its
prompt was cut and on which worker computes it. Beside the parts of `replacement.py` these are all linear layers and
mixtures of experts. What does more than multiply is replaced only if the replacement agrees with the original on a
random probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tandem.engine.replacement import (
    PROBE_ERRORS,
    Kernels,
    MakeProduct,
    agrees,
    is_plain,
    is_plain_weight,
    random_like,
    replace_parts,
)

_Apply: TypeAlias = Callable[[Tensor], Tensor]


def replace_products(model: nn.Module, kernels: Kernels, make: MakeProduct, make_small: MakeProduct) -> None:
    """Replace known parts in place; inference mode.

    `make_small` makes those products where a small difference changes a choice: the one that gives logits, and routers
    of experts.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():  # not a list, which would keep the replaced ones in memory
        replace_parts(module, kernels, make)
        _replace_experts(module, make)
        _replace_router(module, make_small)
    for module in model.modules():
        for name, child in list(module.named_children()):
            if is_plain(child):
                setattr(module, name, make_small([child]) if head in (child, module) else make([child]))
            elif type(child) is Conv1D:
                weight, bias = cast(Tensor, child.weight), cast(Tensor, child.bias)
                setattr(module, name, make([_as_linear(weight.t(), bias)]))


def inexact_parts(model: nn.Module) -> list[str]:
    """The parts of an optimized model whose kernel, and so whose bits, may depend on the number of rows in a batch."""
    decoder = getattr(model, "get_decoder", lambda: model)()
    parts = {
        type(module).__name__
        for module in decoder.modules()
        if not (isinstance(module, nn.Embedding) or getattr(module, "is_exact", False))
        and any(map(_is_weight, _tensors(module)))
    }
    return sorted(parts)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_weight(tensor: Tensor) -> bool:
    """Whether this is what a product multiplies with. Some quantizers keep their packed weights as buffers."""
    is_packed = tensor.element_size() == 1 and tensor.dtype is not torch.bool  # a mask
    return tensor.dim() > 1 and (isinstance(tensor, nn.Parameter) or is_packed)


def _as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _replace_experts(module: nn.Module, make: MakeProduct) -> None:
    """Multiply expert by expert: a row of a grouped product depends on the number of rows."""
    gate_up, down = _weights_of_experts(module, "gate_up_proj"), _weights_of_experts(module, "down_proj")
    apply_gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
    if gate_up is None or down is None or apply_gate is None:
        return
    linears = [(_as_linear(up), _as_linear(low)) for up, low in zip(gate_up, down, strict=True)]
    experts: list[tuple[_Apply, _Apply]] = [*linears]  # ours once they are known to fit

    def forward(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [T, D], chosen [T, k] of the experts, shares [T, k] -> [T, D]"""
        num_chosen = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
        parts = zip(experts, torch.split(x[order // num_chosen], counts), strict=True)
        computed = torch.cat([low(apply_gate(up(part))) for (up, low), part in parts if len(part)])
        outputs = torch.empty_like(computed).index_copy_(0, order, computed).view(*chosen.shape, -1)
        weighted = (outputs * shares.unsqueeze(-1)).unbind(1)
        return sum(weighted[1:], weighted[0]).to(x.dtype)  # one by one, so always in the same order

    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(len(gate_up), generator=generator)[:2] for _ in range(5)])
    shares = torch.rand(chosen.shape, generator=generator).to(gate_up.dtype)
    probe = random_like(gate_up)
    original = module.forward
    if agrees(lambda x: original(x[0], chosen, shares), lambda x: forward(x[0], chosen, shares), probe):
        experts[:] = [(make([up]), make([low])) for up, low in linears]
        module.forward = forward
        del module.gate_up_proj, module.down_proj


def _weights_of_experts(module: nn.Module, name: str) -> Tensor | None:
    """A parameter [num_experts, out, in], if the module has one of that name."""
    weight = getattr(module, name, None)
    return weight if is_plain_weight(weight) and weight.dim() == 3 else None


def _replace_router(module: nn.Module, make: MakeProduct) -> None:
    """Take over a weight that the module itself passes to `F.linear`, as routers of experts do."""
    weight = getattr(module, "weight", None)
    is_known = type(module) in (nn.Linear, Conv1D) or isinstance(module, nn.Embedding)
    if is_known or not is_plain_weight(weight) or weight.dim() != 2:
        return
    probe = random_like(weight)
    try:
        expected = _first(module(probe[0]))
    except PROBE_ERRORS:
        return
    del module.weight
    vars(module)["weight"] = _WeightOfProduct(make, weight, weight.float())
    if not agrees(lambda _: expected, lambda x: _first(module(x[0])), probe):
        del vars(module)["weight"]
        module.weight = weight


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


class _WeightOfProduct:
    """Replaces a weight that a module itself passes to `F.linear`, so that the product is one of ours.

    `F.linear` calls `__torch_function__` of any argument that has it, tensor or not.
    """

    def __init__(self, make: MakeProduct, *weights: Tensor) -> None:
        """The same weight in each dtype that inputs may have."""
        by_dtype = {weight.dtype: weight for weight in weights}
        self._products = {dtype: make([_as_linear(weight)]) for dtype, weight in by_dtype.items()}

    def type(self, _: torch.dtype) -> _WeightOfProduct:
        """Returns itself, because a product uses the dtype of its input."""
        return self

    @classmethod
    def __torch_function__(cls, function: object, _: object, arguments: tuple[Any, ...], options: object = None) -> Any:
        x, weight, bias = (*arguments, None)[:3]
        if function is not nn.functional.linear or options or bias is not None or not isinstance(weight, cls):
            return NotImplemented
        return weight._products[x.dtype](x)
