"""Runs decoder layers of the standard form in one native call, by `cpu/decoder_layer.cpp`.

The standard form: norm, one product for queries, keys and values, norms of their heads or none, rotation of whole
heads, attention, output, norm and gated MLP, with plain residuals. A layer is recognised by its parts, as `optimize`
has replaced them, and is trusted once it has reproduced the original on a probe. Outside an engine step, and for what
the call does not know, the layer's own code runs over the same weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.cpu import AttentionArguments, CpuAttention, step_arguments
from tandem.engine.attention.interface import PagedStep, current_step
from tandem.engine.cpu.library import check, load_kernels
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.kv_geometry import FORWARD_ERRORS
from tandem.engine.parts import GatedMlp, LayerStack, MergedLinear, RmsNorm, forward_of, has_standard_parts

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION_PARTS = {*_PROJECTIONS, "o_proj"}
_PROBE_TOKENS = 5


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "bias")),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    )

    @classmethod
    def of(cls, linear: PackedLinear) -> _Weight:
        weight = linear.packed
        pointers = (None if part is None else part.data_ptr() for part in (weight.packed, weight.scales, linear.bias))
        return cls(*pointers, *weight.shape)


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float))

    @classmethod
    def of(cls, norm: RmsNorm | None) -> _Norm:
        return cls() if norm is None else cls(norm.weight.data_ptr(), norm.epsilon)


class _Layer(ctypes.Structure):
    """Mirror of `struct Layer` in decoder_layer.cpp."""

    _fields_ = (
        *((name, _Weight) for name in ("query_key_value", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("input", "query", "key", "mlp")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("index", "num_heads", "window", "width")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kind", ctypes.c_int),
        ("is_bfloat16", ctypes.c_int),
    )


class _Call(ctypes.Structure):
    """Mirror of `struct Call` there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        ("attention", ctypes.POINTER(AttentionArguments)),
        ("layer_bytes", ctypes.c_int64),
        ("num_threads", ctypes.c_int),
    )


_BetweenLayers = ctypes.CFUNCTYPE(None)


@dataclass(frozen=True, slots=True)
class _Settings:
    """How a layer attends, as it told its attention function."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    sinks: Tensor | None


@dataclass(slots=True)
class _Listener:
    """An attention backend that notes what a layer asks for."""

    backend: CpuAttention
    settings: _Settings | None = None
    window: int = 0
    name: str = "listener"
    long_context: int = 1

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        context: StepContext,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        self.settings = _Settings(query.shape[1], key.shape[1], query.shape[2], scale, softcap, sinks)
        self.window = window
        self.backend(
            layer_idx, query, key, value, out, context, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


class _ProvenLayer:
    """A layer that a native call may compute."""

    def __init__(self, layer: nn.Module, parts: _Parts, settings: _Settings, window: Callable[[], int]) -> None:
        """`window` is asked in each call: the check at start shortens windows for a while."""
        self.forward: Callable[..., Any] = layer.forward  # the layer's own code
        self.attention: Any = layer.self_attn
        self.settings = settings
        self.window = window
        self._parts = parts  # owns the memory to which descriptions point

    @property
    def dtype(self) -> torch.dtype:
        return self._parts.dtype

    def describe(self) -> _Layer:
        """What the native call needs to know of it. It keeps no memory alive."""
        settings = self.settings
        layer = self._parts.describe()
        layer.sinks = None if settings.sinks is None else settings.sinks.data_ptr()
        layer.index, layer.num_heads = self.attention.layer_idx, settings.num_heads
        layer.scale, layer.softcap = settings.scale, settings.softcap
        return layer


class NativeLayers:
    """The forward of one decoder layer, or of some that follow each other."""

    def __init__(self, layers: list[_ProvenLayer]) -> None:
        """They have one shape, and so one type."""
        self.layers = layers
        self._descriptions = (_Layer * len(layers))(*(layer.describe() for layer in layers))
        self._function = load_kernels().tandem_decoder_layers
        self._function.argtypes = (ctypes.POINTER(_Layer), ctypes.c_int64, ctypes.POINTER(_Call), _BetweenLayers)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Arguments and result of a layer: hidden states [1, T, width], and tables of cosines and sines by name."""
        step = current_step()
        tables: tuple[Tensor, Tensor] | None = options.get("position_embeddings")
        if (
            step is None
            or tables is None
            or len(arguments) != 1
            or options.get("past_key_values") is not None
            or not self._fits(arguments[0], *tables, step.context.pool)
            or not isinstance(step.backend, CpuAttention)
        ):
            return self._compute_by_own_code(*arguments, **options)
        return self.compute(arguments[0], *tables, step.backend, step.context, step.between_layers)

    def compute(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        backend: CpuAttention,
        context: StepContext,
        between_layers: Callable[[], None],
    ) -> Tensor:
        """x [1, T, width], cos and sin [1, T, head_dim] -> [1, T, width]. Raises MemoryError."""
        x, out = x.contiguous(), torch.empty_like(x)
        for layer, description in zip(self.layers, self._descriptions, strict=True):
            description.window = layer.window()
        attention = step_arguments(context, 0)
        layer_bytes = context.pool.stride(1) * context.pool.element_size()
        pointers = (tensor.data_ptr() for tensor in (x, cos, sin, out))
        call = _Call(*pointers, ctypes.pointer(attention), layer_bytes, backend.num_threads)
        raised: list[BaseException] = []

        def between() -> None:
            try:
                between_layers()
            except BaseException as exc:  # nothing can pass through native code: it is raised after the call
                raised.append(exc)

        status = self._function(self._descriptions, len(self.layers), ctypes.byref(call), _BetweenLayers(between))
        if raised:
            raise raised[0]
        check(status, "a decoder layer")
        return out

    def _compute_by_own_code(self, *arguments: Any, **options: Any) -> Any:
        x = self.layers[0].forward(*arguments, **options)
        for layer in self.layers[1:]:
            x = layer.forward(x, *arguments[1:], **options)
        return x

    def _fits(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor) -> bool:
        settings, dtype = self.layers[0].settings, self.layers[0].dtype
        table = (1, x.shape[1], settings.head_dim)
        return (
            x.dim() == 3
            and x.shape[0] == 1
            and x.dtype is cos.dtype is sin.dtype is pool.dtype is dtype
            and cos.shape == table
            and sin.shape == table
            and cos.is_contiguous()
            and sin.is_contiguous()
            and pool.shape[4:] == (settings.num_kv_heads, settings.head_dim)
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a layer of the standard form."""

    query_key_value: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norms: tuple[RmsNorm, RmsNorm]  # before attention, before the MLP
    head_norms: tuple[RmsNorm | None, RmsNorm | None]  # of queries and keys

    @property
    def dtype(self) -> torch.dtype:
        return self.query_key_value.packed.dtype

    def num_kv_heads(self, head_dim: int) -> int | None:
        """The number of key/value heads, if all parts have the shapes that the native call takes for granted."""
        # Of each product, what it gives and what it takes.
        (fused, to_fused), (from_output, attended), (both, to_both), (from_down, inner) = (
            part.packed.shape for part in self._linears
        )
        num_heads, num_kv_heads = attended // head_dim, (fused - attended) // (2 * head_dim)
        widths = {to_fused, from_output, to_both, from_down, *(norm.weight.numel() for norm in self.norms)}
        head_widths = {norm.weight.numel() for norm in self.head_norms if norm is not None}
        is_standard = (
            num_kv_heads > 0
            and attended == num_heads * head_dim
            and fused == (num_heads + 2 * num_kv_heads) * head_dim
            and num_heads % num_kv_heads == 0
            and both == 2 * inner
            and len(widths) == 1
            and head_widths <= {head_dim}
            and len({part.packed.dtype for part in self._linears}) == 1
        )
        return num_kv_heads if is_standard else None

    @property
    def _linears(self) -> tuple[PackedLinear, ...]:
        return self.query_key_value, self.output, self.gate_up, self.down

    def describe(self) -> _Layer:
        return _Layer(
            *(_Weight.of(part) for part in self._linears),
            *(_Norm.of(norm) for norm in (self.norms[0], *self.head_norms, self.norms[1])),
            width=self.norms[0].weight.numel(),
            kind=self.query_key_value.packed.kind,
            is_bfloat16=int(self.dtype is torch.bfloat16),
        )


def use_native_layers(model: nn.Module) -> int:
    """Let layers of the standard form run natively; `optimize` has replaced their parts. Returns how many do.

    Where they are all of a model's layers, and the model does nothing between them, all become one call.
    """
    count = 0
    for layer in list(model.modules()):
        parts = _parts_of(layer)
        if parts is not None and (native := _proven(layer, parts)) is not None:
            layer.forward = native
            count += 1
    for module in list(model.modules()):
        _stack_layers(module)
    return count


def _stack_layers(model: nn.Module) -> None:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) < 2:
        return
    natives = [forward_of(layer, NativeLayers) for layer in layers]
    if None in natives or len({_shape_of(native.layers[0]) for native in natives}) > 1:
        return
    settings, dtype = natives[0].layers[0].settings, natives[0].layers[0].dtype
    contexts = [_probe_context(settings.num_kv_heads, settings.head_dim, dtype, len(layers)) for _ in range(2)]
    expected = _hidden_states(model, contexts[0])
    stack = NativeLayers([layer for native in natives for layer in native.layers])
    model.layers = nn.ModuleList([LayerStack(layers, stack)])
    actual = _hidden_states(model, contexts[1])
    is_same = expected is not None and actual is not None and torch.equal(actual, expected)
    if not is_same or not torch.equal(contexts[0].pool, contexts[1].pool):
        model.layers = layers


def _shape_of(layer: _ProvenLayer) -> tuple[object, ...]:
    """Layers of several windows are not a stack: outside an engine step each needs its own mask."""
    return layer.settings.num_kv_heads, layer.settings.head_dim, layer.dtype, layer.window()


def _hidden_states(model: nn.Module, context: StepContext) -> Tensor | None:
    ids = torch.arange(_PROBE_TOKENS).unsqueeze(0)
    try:
        with PagedStep(CpuAttention(1), context, lambda: None):
            output = model(input_ids=ids, position_ids=ids, use_cache=False)
    except (*FORWARD_ERRORS, AssertionError, KeyError):
        return None
    return output.last_hidden_state  # type: ignore[no-any-return]


def _parts_of(layer: nn.Module) -> _Parts | None:
    """The parts, if the layer has those of the standard form and no others."""
    if not has_standard_parts(layer):
        return None
    attention: Any = layer.self_attn
    mlp = forward_of(layer.mlp, GatedMlp)
    norms = [forward_of(part, RmsNorm) for part in (layer.input_layernorm, layer.post_attention_layernorm)]
    head_norms = [forward_of(getattr(attention, name, None), RmsNorm) for name in ("q_norm", "k_norm")]
    names = _ATTENTION_PARTS | ({"q_norm", "k_norm"} if None not in head_norms else set())
    projections = [getattr(attention, name, None) for name in _PROJECTIONS]
    products = getattr(attention, "o_proj", None), getattr(mlp, "gate_up", None), getattr(mlp, "down", None)
    if (
        None in norms
        or set(dict(attention.named_children())) != names
        or not all(isinstance(part, MergedLinear) for part in projections)
        or not all(isinstance(part, PackedLinear) for part in products)
    ):
        return None
    return _Parts(projections[0].product.product, *products, tuple(norms), tuple(head_norms))  # type: ignore[union-attr,arg-type]


def _proven(layer: nn.Module, parts: _Parts) -> NativeLayers | None:
    """The native forward, if it gives what the layer gives on a probe."""
    generator = torch.Generator().manual_seed(0)
    width, backend = parts.norms[0].weight.numel(), CpuAttention(1)
    x = torch.randn(1, _PROBE_TOKENS, width, generator=generator).to(parts.dtype)
    attention: Any = layer.self_attn
    head_dim = getattr(attention, "head_dim", 0)
    if not isinstance(head_dim, int) or head_dim < 2 or (num_kv_heads := parts.num_kv_heads(head_dim)) is None:
        return None
    cos, sin = (
        torch.randn(1, _PROBE_TOKENS, head_dim // 2, generator=generator).repeat(1, 1, 2).to(parts.dtype)
        for _ in range(2)
    )
    contexts = [_probe_context(num_kv_heads, head_dim, parts.dtype, _layer_idx(attention) + 1) for _ in range(2)]
    listener = _Listener(backend)
    try:
        with PagedStep(listener, contexts[0], lambda: None):
            expected = layer(x, position_embeddings=(cos, sin))
    except (*FORWARD_ERRORS, AssertionError, KeyError):
        return None
    settings = listener.settings
    if not isinstance(expected, Tensor) or settings is None:
        return None
    if (settings.num_heads, settings.num_kv_heads, settings.head_dim) != (
        parts.output.packed.shape[1] // head_dim,
        num_kv_heads,
        head_dim,
    ):
        return None
    window = _window_of(attention, listener.window)
    if window is None:
        return None
    native = NativeLayers([_ProvenLayer(layer, parts, settings, window)])
    actual = native.compute(x, cos, sin, backend, contexts[1], lambda: None)
    is_same = torch.equal(actual, expected) and torch.equal(contexts[0].pool, contexts[1].pool)
    return native if is_same else None


def _window_of(attention: Any, window: int) -> Callable[[], int] | None:
    """Reads the window from where the layer has it, if that is known."""
    for holder in (attention, attention.config):
        if hasattr(holder, "sliding_window") and (holder.sliding_window or 0) == window:
            return lambda: holder.sliding_window or 0
    return None if window else lambda: 0


def _layer_idx(attention: Any) -> int:
    idx = getattr(attention, "layer_idx", 0)
    return idx if isinstance(idx, int) else 0


def _probe_context(num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_layers: int) -> StepContext:
    return StepContext.of_one_sequence(
        _PROBE_TOKENS, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
