"""Adds residuals in the kernel of the norm behind them, in decoder layers of the standard form.

The standard form is x = x + attention(norm(x)), x = x + mlp(norm(x)). A layer is recognised by its parts, as `optimize`
has replaced them, and trusted once the fused code has given what its own code gives, with a function that is quickly
computed in the place of its attention. Layers that follow each other without anything between them are one call, so
that the sum behind an MLP is in the next layer's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.engine.gpu.ops import add_rms_norm
from tandem.engine.parts import LayerStack, RmsNorm, forward_of, has_standard_parts, with_forward
from tandem.engine.replacement import PROBE_ERRORS, agrees, random_like

_PROBE_TOKENS = 3


class _FusedLayer(NamedTuple):
    """A layer that was proven to have the standard form."""

    forward: Callable[..., Any]  # its own code
    attention: Callable[..., Any]
    mlp: Callable[[Tensor], Tensor]
    norms: tuple[RmsNorm, RmsNorm]  # before attention, before the MLP
    options: frozenset[str]  # those that it passes on to its attention


class FusedLayers:
    """The forward of one decoder layer, or of some that follow each other."""

    def __init__(self, layers: list[_FusedLayer]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        """Arguments and result of a layer: hidden states [..., width], and what its attention takes by name."""
        if rest or x.dtype is not self.layers[0].norms[0].weight.dtype:
            return self._compute_by_own_code(x, *rest, **options)
        norms = [norm for layer in self.layers for norm in layer.norms]
        normed = norms[0](x)
        for layer, (before_mlp, following) in zip(self.layers, _pairs(norms), strict=True):
            passed = {name: value for name, value in options.items() if name in layer.options}
            attended, _ = layer.attention(hidden_states=normed, **passed)
            x, normed = add_rms_norm(x, attended, before_mlp.weight, before_mlp.epsilon)
            out = layer.mlp(normed)
            if following is None:
                return x + out
            x, normed = add_rms_norm(x, out, following.weight, following.epsilon)
        raise AssertionError("the last layer has none that follows")

    def _compute_by_own_code(self, x: Any, *rest: Any, **options: Any) -> Any:
        for layer in self.layers:
            x = layer.forward(x, *rest, **options)
        return x


def _pairs(norms: list[RmsNorm]) -> Iterator[tuple[RmsNorm, RmsNorm | None]]:
    """Of each layer the norm before its MLP, and the one behind it."""
    return zip(norms[1::2], [*norms[2::2], None], strict=True)


def fuse_residuals(model: nn.Module) -> None:
    """Replace the forward of what has the standard form, in place."""
    for layer in list(model.modules()):
        if (fused := _proven(layer)) is not None:
            layer.forward = FusedLayers([fused])
    for module in list(model.modules()):
        _stack_layers(module)


def _proven(layer: Any) -> _FusedLayer | None:
    """The layer, if its own code gives what the fused code gives."""
    if not has_standard_parts(layer):
        return None
    first, second = (forward_of(norm, RmsNorm) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    if first is None or second is None or first.weight.dtype is not second.weight.dtype:
        return None
    options: dict[str, Any] = {"position_embeddings": object(), "attention_mask": object(), "position_ids": object()}
    options |= {"past_key_values": None, "use_cache": False}
    with _without_attention(layer) as calls:
        try:
            layer(random_like(first.weight), **options)
        except PROBE_ERRORS:
            return None
        passed = calls[0] if len(calls) == 1 else {}
        if not passed or any(value is not options.get(name) for name, value in passed.items()):
            return None
        proven = _FusedLayer(layer.forward, layer.self_attn, layer.mlp, (first, second), frozenset(passed))
        fused = FusedLayers([proven])
        is_right = agrees(lambda x: layer(x, **options), lambda x: fused(x, **options), random_like(first.weight))
    return proven if is_right else None


@contextmanager
def _without_attention(layer: Any) -> Iterator[list[dict[str, Any]]]:
    """Let the layer's attention be a function of its input alone. Yields what else it was given in each call."""
    calls: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        return hidden_states.roll(1, -1) * 0.5, None

    with with_forward(layer.self_attn, attend):
        yield calls


def _stack_layers(model: Any) -> None:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) < 2:
        return
    fused = [forward_of(layer, FusedLayers) for layer in layers]
    if None not in fused and len(set(map(_window_of, layers))) == 1 and _follow_each_other(model, layers):
        stack = FusedLayers([layer for one in fused for layer in one.layers])
        model.layers = nn.ModuleList([LayerStack(layers, stack)])


def _window_of(layer: Any) -> object:
    """Layers of several windows are not a stack: outside an engine step each needs its own mask."""
    return getattr(layer, "attention_type", None), getattr(layer.self_attn, "sliding_window", None)


def _follow_each_other(model: Any, layers: nn.ModuleList) -> bool:
    """Whether the model gives each layer what the one before it has returned, and else the same to all."""
    given, returned, options = list[Any](), list[Any](), list[dict[str, Any]]()

    def note(x: Tensor, **others: Any) -> Tensor:
        given.append(x)
        options.append(others)
        returned.append(x.clone())
        return returned[-1]  # type: ignore[no-any-return]

    ids = torch.arange(_PROBE_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    with ExitStack() as patches:
        for layer in layers:
            patches.enter_context(with_forward(layer, note))
        try:
            model(input_ids=ids, position_ids=ids, use_cache=False)
        except PROBE_ERRORS:
            return False
    return (
        len(given) == len(layers)
        and all(x is before for x, before in zip(given[1:], returned, strict=False))
        and all(_are_same(options[0], others) for others in options[1:])
    )


def _are_same(options: dict[str, Any], others: dict[str, Any]) -> bool:
    return options.keys() == others.keys() and all(value is others[name] for name, value in options.items())
