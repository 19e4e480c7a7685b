"""What parts of a model are replaced with: modules and forwards over the kernels of this package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tandem.engine.cpu.matmul import PackedWeight
from tandem.engine.cpu.ops import make_rms_norm, make_silu_multiply


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


class SharedProduct:
    """One packed product for several linear layers: the first one called computes it, the others take their part."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._num_left = 0

    def part(self, x: Tensor, idx: int) -> Tensor:
        """The output of one of the layers."""
        if self._input is not x or self._num_left == 0:
            self._input = x
            self._parts = self.packed(x).split(self.packed.out_features, dim=-1)
            self._num_left = len(self._parts)
        self._num_left -= 1
        out = self._parts[idx]
        if self._num_left == 0:  # do not keep activations alive
            self._input, self._parts = None, ()
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

    def __init__(self, weight: Tensor, epsilon: float, original: Callable[[Tensor], Tensor]) -> None:
        """`original` serves inputs of another type: some models keep their norms in float32."""
        self.weight = weight
        self.epsilon = epsilon
        self._original = original
        self._kernel = make_rms_norm()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        if x.dtype != self.weight.dtype:
            return self._original(x)
        return self._kernel(x, self.weight, self.epsilon)


class GatedMlp:
    """Forward of down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self.gate_up = gate_up
        self.down = down
        self._silu_multiply = make_silu_multiply()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        both = self.gate_up(x)
        width = both.shape[-1] // 2
        return self.down(self._silu_multiply(both[..., :width], both[..., width:]))  # type: ignore[no-any-return]
