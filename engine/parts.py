"""What parts of a model are replaced with, over the products and kernels of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_STANDARD_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class Product(Protocol):
    """Linear layers over one input."""

    out_features: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        ...


class SharedProduct:
    """One product for several linear layers: the first one called computes it, the others take their part."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}  # those that were not taken yet

    def part(self, x: Tensor, idx: int) -> Tensor:
        """The output of one of the layers. A layer that is called again is computed again: `x` may have changed."""
        if self._input is not x or idx not in self._parts:
            self._input = x
            self._parts = dict(enumerate(torch.split(self.product(x), self.product.out_features, dim=-1)))
        out = self._parts.pop(idx)
        if not self._parts:  # do not keep activations alive
            self._input = None
        return out


class MergedLinear(nn.Module):
    """Replaces one of the linear layers that share a product."""

    def __init__(self, product: SharedProduct, idx: int) -> None:
        super().__init__()
        self.product = product
        self._idx = idx

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.product.part(x, self._idx)


class RmsNorm:
    """Forward of a norm with a weight."""

    def __init__(
        self,
        weight: Tensor,
        epsilon: float,
        original: Callable[[Tensor], Tensor],
        kernel: Callable[[Tensor, Tensor, float], Tensor],
    ) -> None:
        """`original` serves inputs of another type: some models keep their norms in float32."""
        self.weight = weight
        self.epsilon = epsilon
        self._original = original
        self._kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        if x.dtype != self.weight.dtype:
            return self._original(x)
        return self._kernel(x, self.weight, self.epsilon)


class GatedMlp:
    """Forward of down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Product, down: Product, silu_multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.gate_up = gate_up
        self.down = down
        self._silu_multiply = silu_multiply

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        both = self.gate_up(x)
        width = both.shape[-1] // 2
        return self.down(self._silu_multiply(both[..., :width], both[..., width:]))


class LayerStack(nn.Module):
    """Stands for all layers of a model, so that they are one call."""

    def __init__(self, layers: nn.ModuleList, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = layers
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        """What a model reads of its first layer, such as the kind of its attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layers[0], name)


def has_standard_parts(layer: nn.Module) -> bool:
    """Whether a decoder layer has the parts of the standard form (see `native_layers.py`), and no others."""
    children = {name for name, _ in layer.named_children()}
    return children == _STANDARD_PARTS and next(layer.parameters(recurse=False), None) is None


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute this meanwhile."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def forward_of(part: Any, kind: type[Any]) -> Any:
    """What a module's forward was replaced with, if it is of this kind."""
    forward = vars(part).get("forward") if isinstance(part, nn.Module) else None
    return forward if isinstance(forward, kind) else None
