"""Runs decoder layers of the standard form in one native call each, by `cpu/decoder_layer.cpp`.

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
from tandem.engine.cpu.parts import GatedMlp, MergedLinear, PackedLinear, RmsNorm
from tandem.engine.kv_geometry import FORWARD_ERRORS

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION_PARTS = {*_PROJECTIONS, "o_proj"}
_PROBE_TOKENS, _PROBE_BLOCK = 5, 16


class _Weight(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    )

    @classmethod
    def of(cls, linear: PackedLinear) -> _Weight:
        bias = linear.bias
        weight = linear.packed
        return cls(weight.packed.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)


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
        ("width", ctypes.c_int64),
        ("kind", ctypes.c_int),
        ("is_bfloat16", ctypes.c_int),
    )


class _Call(ctypes.Structure):
    """Mirror of `struct Call` there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        ("attention", ctypes.POINTER(AttentionArguments)),
        ("num_threads", ctypes.c_int),
    )


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


class NativeLayer:
    """The forward of one decoder layer."""

    def __init__(self, layer: nn.Module, parts: _Parts, settings: _Settings, window: Callable[[], int]) -> None:
        """`window` is asked in each call: the check at start shortens windows for a while."""
        self._original = layer.forward
        self._attention: Any = layer.self_attn
        self._parts = parts  # owns the memory to which `_layer` points
        self._settings = settings
        self._window = window
        self._dtype = parts.dtype
        self._layer = parts.describe()
        self._function = load_kernels().tandem_decoder_layer
        self._function.argtypes = (ctypes.POINTER(_Layer), ctypes.POINTER(_Call))
        self._function.restype = ctypes.c_int

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Arguments and result of the layer: hidden states [1, T, width], and tables of cosines and sines by name."""
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
            return self._original(*arguments, **options)
        step.between_layers()
        return self.compute(arguments[0], *tables, step.backend, step.context)

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor, backend: CpuAttention, context: StepContext) -> Tensor:
        """x [1, T, width], cos and sin [1, T, head_dim] -> [1, T, width]. Raises MemoryError."""
        settings, x = self._settings, x.contiguous()
        attention = step_arguments(context, self._attention.layer_idx)
        attention.num_heads = settings.num_heads
        attention.scale, attention.softcap = settings.scale, settings.softcap
        attention.window = self._window()
        attention.sinks = None if settings.sinks is None else settings.sinks.data_ptr()
        out = torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, cos, sin, out))
        call = _Call(*pointers, ctypes.pointer(attention), backend.num_threads)
        check(self._function(ctypes.byref(self._layer), ctypes.byref(call)), "a decoder layer")
        return out

    def _fits(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor) -> bool:
        table = (1, x.shape[1], self._settings.head_dim)
        return (
            x.dim() == 3
            and x.shape[0] == 1
            and x.dtype is cos.dtype is sin.dtype is pool.dtype is self._dtype
            and cos.shape == table
            and sin.shape == table
            and cos.is_contiguous()
            and sin.is_contiguous()
            and pool.shape[4:] == (self._settings.num_kv_heads, self._settings.head_dim)
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a layer of the standard form."""

    query_key_value: PackedLinear
    output: PackedLinear
    mlp: GatedMlp
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
        return self.query_key_value, self.output, self.mlp.gate_up, self.mlp.down

    def describe(self) -> _Layer:
        return _Layer(
            *(_Weight.of(part) for part in self._linears),
            *(_Norm.of(norm) for norm in (self.norms[0], *self.head_norms, self.norms[1])),
            self.norms[0].weight.numel(),
            self.query_key_value.packed.kind,
            int(self.dtype is torch.bfloat16),
        )


def use_native_layers(model: nn.Module) -> int:
    """Let layers of the standard form run natively; `optimize` has replaced their parts. Returns how many do."""
    count = 0
    for layer in list(model.modules()):
        parts = _parts_of(layer)
        if parts is not None and (native := _proven(layer, parts)) is not None:
            layer.forward = native
            count += 1
    return count


def _parts_of(layer: nn.Module) -> _Parts | None:
    """The parts, if the layer has those of the standard form and no others."""
    if set(dict(layer.named_children())) != _PARTS or next(layer.parameters(recurse=False), None) is not None:
        return None
    attention: Any = layer.self_attn
    mlp = _forward_of(layer.mlp, GatedMlp)
    norms = [_forward_of(part, RmsNorm) for part in (layer.input_layernorm, layer.post_attention_layernorm)]
    head_norms = [_forward_of(getattr(attention, name, None), RmsNorm) for name in ("q_norm", "k_norm")]
    names = _ATTENTION_PARTS | ({"q_norm", "k_norm"} if None not in head_norms else set())
    projections = [getattr(attention, name, None) for name in _PROJECTIONS]
    output = getattr(attention, "o_proj", None)
    if (
        mlp is None
        or None in norms
        or set(dict(attention.named_children())) != names
        or not all(isinstance(part, MergedLinear) for part in projections)
        or not isinstance(output, PackedLinear)
    ):
        return None
    return _Parts(projections[0].product.packed, output, mlp, tuple(norms), tuple(head_norms))  # type: ignore[union-attr]


def _forward_of(part: Any, kind: type[Any]) -> Any:
    forward = vars(part).get("forward") if isinstance(part, nn.Module) else None
    return forward if isinstance(forward, kind) else None


def _proven(layer: nn.Module, parts: _Parts) -> NativeLayer | None:
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
    contexts = [_probe_context(num_kv_heads, head_dim, parts.dtype) for _ in range(2)]
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
    native = NativeLayer(layer, parts, settings, window)
    actual = native.compute(x, cos, sin, backend, contexts[1])
    is_same = torch.equal(actual, expected) and torch.equal(contexts[0].pool[:, 0], contexts[1].pool[:, 0])
    return native if is_same else None


def _window_of(attention: Any, window: int) -> Callable[[], int] | None:
    """Reads the window from where the layer has it, if that is known."""
    for holder in (attention, attention.config):
        if hasattr(holder, "sliding_window") and (holder.sliding_window or 0) == window:
            return lambda: holder.sliding_window or 0
    return None if window else lambda: 0


def _probe_context(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> StepContext:
    """One sequence, in a pool of one block whose layers are all the same memory."""
    pool = torch.zeros(1, 1, 2, _PROBE_BLOCK, num_kv_heads, head_dim, dtype=dtype)
    return StepContext(
        pool=pool.expand(-1, 1 << 20, -1, -1, -1, -1),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32),
        kv_lens=torch.tensor([_PROBE_TOKENS], dtype=torch.int32),
        slot_mapping=torch.arange(_PROBE_TOKENS),
        max_query_len=_PROBE_TOKENS,
        max_kv_len=_PROBE_TOKENS,
    )
