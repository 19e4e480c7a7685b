"""Replaces parts of a transformers model with faster ones, without knowing which model it is.

Parts are recognised by structure (linear layers that read the same input; a norm with a weight and an epsilon; a gated
MLP; rotary embedding). What does more than multiply is replaced only if the replacement agrees with the original on a
random probe.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn

from tandem.engine.parts import GatedMlp, MergedLinear, Product, RmsNorm, SharedProduct

# Linear layers that transformers' attention blocks apply to the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"),)
PROBE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_PROBE_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

MakeProduct: TypeAlias = Callable[[list[nn.Linear]], Product]  # linear layers over one input as a single product


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What one kind of device computes small operations with."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # (x [..., D], weight [D], epsilon) -> [..., D]
    silu_multiply: Callable[[Tensor, Tensor], Tensor]  # (gate, up), both [..., T, D] -> silu(gate) * up
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q [1, H, T, D], k [1, KVH, T, D], both with unit stride in D, cos [1, T, D], sin) -> q and k, rotated."""


class _Separate:
    """Linear layers as they are: what is compared with the original takes no memory for weights."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.out_features = [linear.out_features for linear in linears]
        self._linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._linears], dim=-1)


def replace_parts(module: nn.Module, kernels: Kernels, make: MakeProduct) -> None:
    """Replace what is known of one module, in place."""
    replace_gated_mlp(module, kernels, make)
    merge_siblings(module, make)
    replace_norm(module, kernels)
    replace_rotary(module, kernels)


def merge_siblings(module: nn.Module, make: MakeProduct) -> None:
    """Let linear layers over one input be one product."""
    for names in _SIBLINGS:
        linears = linears_of(module, names)
        if linears is not None:
            product = SharedProduct(make(linears))
            for idx, name in enumerate(names):
                setattr(module, name, MergedLinear(product, idx))


def replace_gated_mlp(module: nn.Module, kernels: Kernels, make: MakeProduct) -> None:
    """Let a gated MLP be two products and a kernel."""
    pair = linears_of(module, ("gate_proj", "up_proj"))
    down = getattr(module, "down_proj", None)
    if pair is None or not is_plain(down):
        return
    candidate = GatedMlp(_Separate(pair), _Separate([down]), kernels.silu_multiply)
    # Activations differ most where the gate is neither small nor large. Some modules clamp what is large.
    probe = random_like(pair[0].weight)
    probe = probe * (2 / nn.functional.linear(probe, pair[0].weight).std().clamp_min(1e-6))
    if all(agrees(module, candidate, probe * scale) for scale in (0.01, 1.0, 1000.0)):
        module.forward = GatedMlp(make(pair), make([down]), kernels.silu_multiply)
        for name in ("gate_proj", "up_proj", "down_proj"):
            delattr(module, name)


def replace_norm(module: nn.Module, kernels: Kernels) -> None:
    """Let a norm with a weight be a kernel."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or epsilon is None:
        return
    if "forward" in vars(module):  # ours already
        return
    if weight.dim() != 1 or weight.numel() < 2:  # emptied by `text_part`, or one factor for rows of any width
        return
    forward = RmsNorm(weight.detach().clone(), float(epsilon), module.forward, kernels.rms_norm)
    probe = random_like(weight)
    for row, scale in enumerate((1e-4, 0.01, 100.0, 1e4)):  # rows that show where epsilon is, and what is clamped
        probe[:, row] *= scale
    probe[:, 4] += 3  # and whether the mean is subtracted
    if agrees(module, forward, probe):
        module.forward = forward


def replace_rotary(module: nn.Module, kernels: Kernels) -> None:
    """Give this attention block its own copy of forward in which `apply_rotary_pos_emb` is our kernel."""
    forward = getattr(type(module), "forward", None)
    original = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
    if "forward" in vars(module):  # somebody else's, which does more
        return
    if original is None or "apply_rotary_pos_emb" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return

    def apply_rotary(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # The kernel assumes this; anything else takes the model's own path.
        table = (1, q.shape[2], q.shape[3])
        fits = (
            not (rest or kwargs)
            and q.shape[0] == k.shape[0] == 1
            and q.shape[3] % 2 == 0
            and cos.shape == table
            and sin.shape == table
            and k.shape[2:] == q.shape[2:]
            and q.dtype == k.dtype == cos.dtype == sin.dtype
            and q.stride(3) == k.stride(3) == 1
            and cos.is_contiguous()
            and sin.is_contiguous()
        )
        if not fits:
            return original(q, k, cos, sin, *rest, **kwargs)  # type: ignore[no-any-return]
        return kernels.rotate(q, k, cos, sin)

    if rotary_agrees(original, apply_rotary, _device_of(module)):
        function = cast(types.FunctionType, forward)
        copy = types.FunctionType(
            function.__code__,
            {**function.__globals__, "apply_rotary_pos_emb": apply_rotary},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        module.forward = types.MethodType(copy, module)


def rotary_agrees(
    original: Callable[..., Any], candidate: Callable[..., Any], device: torch.device = torch.device("cpu")
) -> bool:
    """Whether both rotate queries and keys alike."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator).to(device) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 16, generator=generator).to(device) for _ in range(2))
    try:
        pairs = zip(original(q, k, cos, sin), candidate(q, k, cos, sin), strict=True)
        return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    except PROBE_ERRORS:
        return False


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def agrees(original: Callable[[Tensor], Any], candidate: Callable[[Tensor], Any], probe: Tensor) -> bool:
    """Whether both give the same output up to rounding (relative to the magnitude of each row)."""
    try:
        expected, actual = original(probe).float(), candidate(probe).float()
    except PROBE_ERRORS:
        return False
    if expected.shape != actual.shape or probe.dtype not in _PROBE_TOLERANCE:
        return False
    error = (expected - actual).abs().amax(-1) / expected.abs().amax(-1).clamp_min(1e-20)
    return bool(error.max() < _PROBE_TOLERANCE[probe.dtype])


def is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer and nothing more: quantizers put tensors, forwards and hooks of their own in."""
    return (
        type(module) is nn.Linear
        and is_plain_weight(module.weight)
        and module.weight.dim() == 2  # `text_part` empties what is not used
        and not vars(module).get("forward")
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def is_plain_weight(weight: Any) -> TypeGuard[nn.Parameter]:
    """Whether this is a parameter of a type that models are served in, and of no kind of its own."""
    return type(weight) is nn.Parameter and weight.dtype in _PROBE_TOLERANCE


def linears_of(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """The named children if all are plain linear layers of one input width, and all or none have biases."""
    children = [getattr(module, name, None) for name in names]
    if not all(is_plain(child) for child in children):
        return None
    linears = cast(list[nn.Linear], children)
    alike = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
    return linears if len(alike) == 1 else None


def random_like(weight: Tensor) -> Tensor:
    """[1, 5, width] of the type and on the device of a weight [..., width]."""
    noise = torch.randn(1, 5, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, weight.dtype)
