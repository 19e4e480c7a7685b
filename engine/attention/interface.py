"""Plugs paged attention into unmodified transformers models.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention_forward` in every layer. The step's
metadata is in a context variable meanwhile, because some models do not hand keyword arguments on to their layers.
Without it the function raises: attending without block tables would silently compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from tandem.engine.attention.context import StepContext

ATTENTION_NAME = "tandem_paged"


class LayerAttention(NamedTuple):
    """What a layer of a model needs from its backend; see `AttentionBackend` for the terms."""

    num_heads: int
    scale: float
    window: int
    softcap: float
    has_sinks: bool

    @classmethod
    def of(
        cls,
        query: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> LayerAttention:
        """Made from what a layer passes to its attention function, read as `paged_attention_forward` reads it."""
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return cls(query.shape[1], scale, sliding_window or 0, softcap or 0.0, s_aux is not None)


class AttentionBackend(Protocol):
    """Writes one layer's new KV into the pool and attends through block tables.

    A context of `long_context` tokens is long enough to take every path of the backend: the check at start uses it.
    """

    name: str
    long_context: int

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
        """Write this layer's new KV into its slots, then attend into `out`.

        query:      [T, H, D]; key, value: [T, KVH, D]; any strides
        out:        [T, H, D], contiguous, with any content
        window:     a token sees itself and the window - 1 tokens before it; 0 = all before it
        softcap:    scores become softcap * tanh(score / softcap); 0 = they stay
        sinks:      [H]; for each head one more score that every token sees, of a value of zeros

        Raises NotImplementedError for what this backend cannot compute.
        """
        ...


class PagedStep:
    """Backend and context of the forward inside `with`, for its attention layers.

    `between_layers` is called in each of them: work of other parts that must not wait for the end of a long step.
    """

    __slots__ = ("backend", "between_layers", "context")

    def __init__(self, backend: AttentionBackend, context: StepContext, between_layers: Callable[[], None]) -> None:
        self.backend = backend
        self.context = context
        self.between_layers = between_layers

    def __enter__(self) -> None:
        _current.set(self)

    def __exit__(self, *_: object) -> None:
        _current.set(None)


_current: ContextVar[PagedStep | None] = ContextVar("paged_step", default=None)


def current_step() -> PagedStep | None:
    """The step whose forward this is, if it is one."""
    return _current.get()


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, KVH, T, D] (after rope) -> [1, T, H, D]."""
    paged_step = _current.get()
    if paged_step is None:
        raise RuntimeError(
            f"{type(module).__name__} was called outside an engine step: its attention has no block tables, "
            "so its result would be wrong"
        )
    layer_idx: int = module.layer_idx  # type: ignore[assignment]  # every decoder attention of transformers has it
    pool = paged_step.context.pool
    _check_geometry(type(module).__name__, layer_idx, query, key, value, pool)
    paged_step.between_layers()
    num_heads, num_tokens, key_dim = query.shape[1:]
    value_dim, head_dim = value.shape[3], pool.shape[5]
    if not key_dim == value_dim == head_dim:  # appended zeros change no score, and no value that is kept
        query, key, value = (pad(heads, (0, head_dim - heads.shape[3])) for heads in (query, key, value))
    out = query.new_empty(num_tokens, num_heads, head_dim)
    paged_step.backend(
        layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        out,
        paged_step.context,
        scale=key_dim**-0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return (out if value_dim == head_dim else out[..., :value_dim]).unsqueeze(0), None


def _check_geometry(name: str, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, pool: Tensor) -> None:
    """Raise NotImplementedError unless this layer's KV fits a slot of the pool; backends do not check that."""
    _, num_layers, _, _, num_kv_heads, head_dim = pool.shape
    num_seqs, num_heads, num_tokens, key_dim = query.shape
    value_dim = value.shape[3]
    if (
        num_seqs != 1
        or key.shape != (1, num_kv_heads, num_tokens, key_dim)
        or value.shape != (1, num_kv_heads, num_tokens, value_dim)
        or key_dim > head_dim
        or value_dim > head_dim
        or num_heads % num_kv_heads
        or not 0 <= layer_idx < num_layers
    ):
        raise NotImplementedError(
            f"{name} of layer {layer_idx} attends with query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)}, but the KV pool has {num_layers} layers of {num_kv_heads} heads of {head_dim}"
        )


def register() -> None:
    """Make ATTENTION_NAME known to transformers; calling it again changes nothing.

    NOTE: it has no mask function, so transformers makes no mask. Positions and block tables define causality. With one,
    transformers would look for several sequences among the positions, and each forward would wait for the GPU.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
