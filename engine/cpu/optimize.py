"""Makes a transformers model fast on a CPU without knowing which model it is.

Parts are recognised by structure (a linear layer; linear layers that read the same input; a norm with a weight and an
epsilon; a gated MLP; a mixture of experts). What does more than multiply is replaced only if the replacement agrees
with the original on a random probe.

Without this a decode step of a small model mostly launches tiny operations, and a token's last bits would depend on its
batch: oneDNN sums in another order for other numbers of rows, at bounds that differ from CPU to CPU.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tandem.engine.cpu.ops import make_rotate
from tandem.engine.cpu.parts import GatedMlp, MergedLinear, PackedLinear, RmsNorm, SharedProduct

logger = logging.getLogger(__name__)

# Linear layers that transformers' attention blocks apply to the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"),)
_PROBE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_PROBE_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class _WeightOfProduct:
    """Replaces a weight that a module itself passes to `F.linear`, so that the product is a packed one.

    `F.linear` calls `__torch_function__` of any argument that has it, tensor or not.
    """

    def __init__(self, *weights: Tensor) -> None:
        """The same weight in each dtype that inputs may have."""
        self._products = {weight.dtype: PackedLinear([_as_linear(weight)]) for weight in weights}

    def type(self, _: torch.dtype) -> _WeightOfProduct:
        """Returns itself, because a product uses the dtype of its input."""
        return self

    @classmethod
    def __torch_function__(cls, function: object, _: object, arguments: tuple[Any, ...], options: object = None) -> Any:
        x, weight, bias = (*arguments, None)[:3]
        if function is not nn.functional.linear or options or bias is not None or not isinstance(weight, cls):
            return NotImplemented
        return weight._products[x.dtype](x)


def optimize(model: nn.Module, *, is_int8: bool = False) -> nn.Module:
    """Replace known parts in place and return the model. Needs float32 or bfloat16 weights on a CPU.

    With `is_int8` linear layers keep their weights as int8, except the one that gives logits; nor do routers of
    experts, which choose by small differences.
    """
    pack = partial(PackedLinear, is_int8=is_int8)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    with torch.inference_mode():
        for module in list(model.modules()):
            _replace_gated_mlp(module, pack)
            _merge_siblings(module, pack)
            _replace_norm(module)
            _replace_rotary(module)
            _replace_experts(module, pack)
            _replace_router(module)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if _is_plain(child):
                    setattr(module, name, PackedLinear([child]) if child is head else pack([child]))
                elif type(child) is Conv1D:
                    weight, bias = cast(Tensor, child.weight), cast(Tensor, child.bias)
                    setattr(module, name, pack([_as_linear(weight.t(), bias)]))
    if parts := inexact_parts(model):
        logger.warning(
            "%s: products of %s are not known here: the last bits of a token may depend on its batch and on how its "
            "prompt was cut",
            type(model).__name__,
            ", ".join(parts),
        )
    return model


def inexact_parts(model: nn.Module) -> list[str]:
    """The parts of an optimized model whose kernel, and so whose bits, may depend on the number of rows in a batch."""
    decoder = getattr(model, "get_decoder", lambda: model)()
    parts = {
        type(module).__name__
        for module in decoder.modules()
        if not isinstance(module, nn.Embedding) and any(map(_is_weight, _tensors(module)))
    }
    return sorted(parts)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_weight(tensor: Tensor) -> bool:
    """Whether this is what a product multiplies with. Some quantizers keep their packed weights as buffers."""
    return tensor.dim() > 1 and (isinstance(tensor, nn.Parameter) or tensor.element_size() == 1)


def _as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _agrees(original: Callable[[Tensor], Any], candidate: Callable[[Tensor], Any], probe: Tensor) -> bool:
    """Whether both give the same output up to rounding (relative to the output's magnitude)."""
    try:
        expected, actual = original(probe).float(), candidate(probe).float()
    except _PROBE_ERRORS:
        return False
    if expected.shape != actual.shape:
        return False
    error = (expected - actual).abs().max() / expected.abs().max().clamp_min(1e-20)
    return bool(error < _PROBE_TOLERANCE[probe.dtype])


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer and nothing more: quantizers put tensors, forwards and hooks of their own in."""
    return (
        type(module) is nn.Linear
        and _is_plain_weight(module.weight)
        and module.weight.dim() == 2  # `text_part` empties what is not used
        and not vars(module).get("forward")
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _is_plain_weight(weight: Any) -> TypeGuard[nn.Parameter]:
    return type(weight) is nn.Parameter and weight.dtype in _PROBE_TOLERANCE


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """The named children if all are plain linear layers of one input width, and all or none have biases."""
    children = [getattr(module, name, None) for name in names]
    if not all(_is_plain(child) for child in children):
        return None
    linears = cast(list[nn.Linear], children)
    alike = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
    return linears if len(alike) == 1 else None


def _probe(linear: nn.Linear) -> Tensor:
    return _random(linear.in_features, linear.weight.dtype)


def _merge_siblings(module: nn.Module, pack: Callable[[list[nn.Linear]], PackedLinear]) -> None:
    for names in _SIBLINGS:
        linears = _linears(module, names)
        if linears is not None:
            product = SharedProduct(pack(linears))
            for idx, name in enumerate(names):
                setattr(module, name, MergedLinear(product, idx))


def _replace_gated_mlp(module: nn.Module, pack: Callable[[list[nn.Linear]], PackedLinear]) -> None:
    pair = _linears(module, ("gate_proj", "up_proj"))
    down = getattr(module, "down_proj", None)
    if pair is None or not _is_plain(down):
        return
    forward = GatedMlp(PackedLinear(pair), PackedLinear([down]))
    probe = _probe(pair[0])
    if _agrees(module, forward, probe) and _agrees(module, forward, probe * 100):  # some clamp what is large
        module.forward = GatedMlp(pack(pair), pack([down]))
        for name in ("gate_proj", "up_proj", "down_proj"):
            delattr(module, name)


def _replace_experts(module: nn.Module, pack: Callable[[list[nn.Linear]], PackedLinear]) -> None:
    """Multiply expert by expert with packed weights: a row of a grouped product depends on the number of rows."""
    gate_up, down = _weights_of_experts(module, "gate_up_proj"), _weights_of_experts(module, "down_proj")
    apply_gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
    if gate_up is None or down is None or apply_gate is None:
        return
    linears = [(_as_linear(up), _as_linear(low)) for up, low in zip(gate_up, down, strict=True)]
    experts = [(PackedLinear([up]), PackedLinear([low])) for up, low in linears]

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
    probe = _random(gate_up.shape[-1], gate_up.dtype)
    original = module.forward
    if _agrees(lambda x: original(x[0], chosen, shares), lambda x: forward(x[0], chosen, shares), probe):
        experts[:] = [(pack([up]), pack([low])) for up, low in linears]
        module.forward = forward
        del module.gate_up_proj, module.down_proj


def _weights_of_experts(module: nn.Module, name: str) -> Tensor | None:
    """A parameter [num_experts, out, in], if the module has one of that name."""
    weight = getattr(module, name, None)
    return weight if _is_plain_weight(weight) and weight.dim() == 3 else None


def _replace_router(module: nn.Module) -> None:
    """Pack a weight that the module itself passes to `F.linear`, as routers of experts do."""
    weight = getattr(module, "weight", None)
    is_known = type(module) in (nn.Linear, Conv1D) or isinstance(module, nn.Embedding)
    if is_known or not _is_plain_weight(weight) or weight.dim() != 2:
        return
    probe = _random(weight.shape[1], weight.dtype)
    try:
        expected = _first(module(probe[0]))
    except _PROBE_ERRORS:
        return
    del module.weight
    vars(module)["weight"] = _WeightOfProduct(weight, weight.float())
    if not _agrees(lambda _: expected, lambda x: _first(module(x[0])), probe):
        del vars(module)["weight"]
        module.weight = weight


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _random(width: int, dtype: torch.dtype) -> Tensor:
    """[1, 5, width]"""
    return torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def _replace_norm(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or epsilon is None:
        return
    if weight.numel() == 0:  # emptied by `text_part`
        return
    forward = RmsNorm(weight.detach().clone(), float(epsilon), module.forward)
    if _agrees(module, forward, _random(weight.shape[0], weight.dtype)):
        module.forward = forward


def _replace_rotary(module: nn.Module) -> None:
    """Give this attention block its own copy of forward in which `apply_rotary_pos_emb` is our kernel."""
    forward = getattr(type(module), "forward", None)
    original = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
    if original is None or "apply_rotary_pos_emb" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return
    rotate = make_rotate()

    def apply_rotary(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # The kernel assumes this; anything else takes the model's own path.
        table = (1, q.shape[2], q.shape[3])
        fits = (
            not (rest or kwargs)
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
        return rotate(q, cos, sin), rotate(k, cos, sin)

    if _rotary_agrees(original, apply_rotary):
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


def _rotary_agrees(original: Callable[..., Any], candidate: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 8, generator=generator).repeat(1, 1, 2) for _ in range(2))
    try:
        pairs = zip(original(q, k, cos, sin), candidate(q, k, cos, sin), strict=True)
        return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    except _PROBE_ERRORS:
        return False
