"""A model's KV and parameters, from the fields of its Hugging Face config.json. No weights are needed.

Names of fields are transformers'. What a config leaves out and transformers would fill in, the caller fills in first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.protocol.errors import ConfigError

_NO_WINDOW = 1 << 62
_MOST = 1 << 40  # of any field: products of a few stay exact
_ATTENDS = {"full_attention", "attention", "indexed_attention", "hybrid"}
_NO_MIXER = {"moe", "mlp"}  # layers of Nemotron-H
# Two matrices in an MLP instead of three.
_UNGATED = {"apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt"}
_UNGATED |= {"nanochat", "nemotron", "nemotron_h", "opt", "phi", "starcoder2"}
_UNGROUPED = {"jetmoe", "modernbert-decoder"}  # their code gives every query head keys and values of its own
_DTYPE_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


class LayerKv(NamedTuple):
    """What one layer keeps of the tokens before, and what attending to one of them takes."""

    kind: str  # full, window, latent (multi-head latent attention) or state (recurrent)
    token_elements: int  # of a token that is kept
    window: int  # tokens kept
    state_elements: int  # whatever the context is
    pair_elements: int  # multiplied for each pair of a query and a key: heads * (key width + value width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes that a plan needs."""

    layers: tuple[LayerKv, ...]
    num_params: int
    num_active_params: int  # that one token is multiplied with, embedding tables left out
    num_expert_params: int  # in routed experts
    expert_share: float  # of the routed experts that one token uses
    head_params: int  # of the matrix that makes logits
    hidden_size: int
    weight_bytes: float  # of one parameter, by the checkpoint's dtype or quantization
    kv_element_bytes: int
    pool_token_elements: int  # of one token in a pool of Tandem's own engine; 0 = it cannot serve the model

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.weight_bytes

    @property
    def pool_token_bytes(self) -> int:
        """KV bytes of a token in Tandem's own pool: every layer in full, keys and values as wide as the widest head.

        Equal to what `engine/kv_geometry.py` measures.
        """
        return self.pool_token_elements * self.kv_element_bytes

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes kept of a context, as vLLM and SGLang keep them, all layers and tensor-parallel ranks together.

        Sum over layers of 2 * KV heads * head width * min(context, window); latent attention keeps rank + rope width
        (DeepSeek-V2, arXiv 2405.04434); a recurrent layer keeps its state, in float32.
        """
        kept = sum(layer.token_elements * min(num_tokens, layer.window) for layer in self.layers)
        return kept * self.kv_element_bytes + 4 * sum(layer.state_elements for layer in self.layers)

    def of_kind(self, *kinds: str) -> list[LayerKv]:
        """The layers of these kinds."""
        return [layer for layer in self.layers if layer.kind in kinds]


def geometry_of(fields: Mapping[str, Any], name: str, *, kv_element_bytes: int = 0) -> Geometry:
    """The geometry of the text model that `fields` describe; `name` is for errors.

    KV has the dtype of the model unless `kv_element_bytes` is given. Raises `ConfigError` for fields that are missing
    or absurd.
    """
    config = _Fields(fields, name)
    if fields.get("is_encoder_decoder"):
        raise ConfigError(f"model={name!r} is an encoder-decoder; plan for a decoder model")
    layers = tuple(_layers(config))
    if not any(layer.token_elements or layer.state_elements for layer in layers):
        raise ConfigError(f"model={name!r}: no layer of its config.json keeps KV or a state; plan for a decoder model")
    vocab, hidden = config.number("vocab_size"), config.number("hidden_size")
    mixers = sum(_mixer_params(config, layer) for layer in layers)
    mlps, experts, active_experts = _mlp_params(config, len(layers))
    head = vocab * hidden
    per_layer_tables = config.number("vocab_size_per_layer_input", default=0, least=0) * len(layers)
    per_layer_tables *= config.number("hidden_size_per_layer_input", default=0, least=0)
    tables = per_layer_tables + (0 if fields.get("tie_word_embeddings") else head)
    dtype_bytes = _dtype_bytes(config)
    return Geometry(
        layers=layers,
        num_params=mixers + mlps + experts + head + tables,
        num_active_params=mixers + mlps + active_experts,
        num_expert_params=experts,
        expert_share=active_experts / experts if experts else 1.0,
        head_params=head,
        hidden_size=hidden,
        weight_bytes=_weight_bytes(config, dtype_bytes),
        kv_element_bytes=kv_element_bytes or int(dtype_bytes),
        pool_token_elements=_pool_elements(config, layers),
    )


class _Fields:
    """The fields of a config, checked where they are read."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self.fields = fields
        self.name = name

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these fields that has a value, or the default. Raises `ConfigError`."""
        for field in names:
            value = self.fields.get(field)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                raise ConfigError(
                    f"model={self.name!r}: {field}={str(value)[:40]} in its config.json must be a whole number "
                    f"from {least} to {_MOST}; repair the file"
                )
            return value
        if default is None:
            raise ConfigError(
                f"model={self.name!r}: its config.json lacks {names[0]}, and transformers does not know its "
                f"model_type={str(self.fields.get('model_type'))[:40]!r}; add the field"
            )
        return default

    def optional(self, *names: str) -> int:
        """As `number`, or 0."""
        return self.number(*names, default=0, least=0)

    def names(self, field: str) -> Sequence[str]:
        """A list of texts, or nothing."""
        value = self.fields.get(field)
        return [str(one) for one in value] if isinstance(value, list | tuple) else ()

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.number("num_attention_heads")

    def kv_heads(self, layer: Mapping[str, Any]) -> int:
        """Heads of keys and values, of this layer if it has other ones."""
        if self.fields.get("multi_query"):
            return self.number("num_key_value_heads", default=1)
        if self.fields.get("model_type") in _UNGROUPED:
            return self.heads
        return _Fields({**self.fields, **layer}, self.name).number("num_key_value_heads", default=self.heads)

    def head_width(self, layer: Mapping[str, Any]) -> int:
        """Elements of a key, of this layer if it has other ones."""
        of_layer = _Fields({**self.fields, **layer}, self.name)
        return of_layer.number("head_dim", default=max(self.number("hidden_size") // self.heads, 1))


def _layers(config: _Fields) -> Iterator[LayerKv]:
    kinds = _layer_types(config)
    own = config.fields.get("per_layer_config")  # Gemma 4: "05" = layer 5
    special = {int(idx): one for idx, one in own.items() if idx.isdecimal()} if isinstance(own, dict) else {}
    num_shared = config.optional("num_kv_shared_layers")  # the last layers use the KV of others
    for idx, kind in enumerate(kinds):
        layer = _attention(config, kind, special.get(idx, {}))
        yield layer._replace(token_elements=0) if idx >= len(kinds) - num_shared else layer


def _layer_types(config: _Fields) -> Sequence[str]:
    """What each layer does with the tokens before: transformers' names."""
    for field in ("layer_types", "layers_block_type"):
        if found := config.names(field):
            _check_count(config, field, len(found), config.number("num_hidden_layers", default=len(found)))
            return found
    num_layers = config.number("num_hidden_layers")
    if num_layers > 10_000:
        raise ConfigError(f"model={config.name!r}: num_hidden_layers={num_layers} in its config.json is absurd")
    if config.fields.get("num_attention_heads") is None:
        return ["linear_attention"] * num_layers
    if period := config.optional("attn_layer_period"):  # Jamba
        offset = config.optional("attn_layer_offset")
        return ["full_attention" if idx % period == offset else "linear_attention" for idx in range(num_layers)]
    is_windowed = config.fields.get("sliding_window") and config.fields.get("use_sliding_window", True)
    return ["sliding_attention" if is_windowed else "full_attention"] * num_layers


def _attention(config: _Fields, kind: str, own: Mapping[str, Any]) -> LayerKv:
    if kind in _NO_MIXER:
        return LayerKv(kind, 0, 0, 0, 0)
    if "attention" not in kind or kind == "linear_attention":
        return LayerKv("state", 0, 0, _state_elements(config), 0)
    window = _NO_WINDOW if kind in _ATTENDS else config.number("attention_chunk_size", "sliding_window")
    rank = config.optional("kv_lora_rank")
    if rank:
        rope, nope, value = (config.number(f) for f in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        return LayerKv("latent", rank + rope, window, 0, config.heads * (rope + nope + value))
    kv_heads, width = config.kv_heads(own), config.head_width(own)
    value = config.number("v_head_dim", default=width)
    kept = kv_heads * (width + value)
    return LayerKv("full" if window == _NO_WINDOW else "window", kept, window, 0, config.heads * (width + value))


def _state_elements(config: _Fields) -> int:
    """Elements of a recurrent layer's state. Convolutions in front of it, a few tokens wide, are left out."""
    hidden = config.number("hidden_size")
    if heads := config.optional("linear_num_value_heads", "linear_num_heads"):  # gated delta rule
        key = config.number("linear_key_head_dim", "linear_head_dim")
        return heads * key * config.number("linear_value_head_dim", "linear_head_dim")
    if heads := config.optional("mamba_n_heads", "mamba_num_heads"):  # Mamba 2
        head = config.number("mamba_d_head", "mamba_head_dim")
        return heads * head * config.number("mamba_d_state", "ssm_state_size")
    if state := config.optional("state_size", "mamba_d_state"):  # Mamba
        return state * config.number("mamba_expand", default=2) * hidden
    if cached := config.optional("conv_L_cache"):  # LFM2
        return cached * hidden
    heads = config.number("num_attention_heads", default=1)
    return heads * config.number("head_dim", default=max(hidden // heads, 1)) ** 2  # linear attention


def _pool_elements(config: _Fields, layers: Sequence[LayerKv]) -> int:
    """Elements of one token in the pool of Tandem's engine, which keeps latent keys and values of every head."""
    if any(layer.kind == "state" or not layer.token_elements for layer in layers):
        return 0
    if layers[0].kind == "latent":
        rope, nope, value = (config.number(f) for f in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        return len(layers) * 2 * config.heads * max(rope + nope, value)
    widest = max(layer.pair_elements for layer in layers) // (2 * config.heads)
    return len(layers) * 2 * config.kv_heads({}) * widest


def _mixer_params(config: _Fields, layer: LayerKv) -> int:
    """Parameters of a layer's attention or recurrence."""
    hidden = config.number("hidden_size")
    if layer.kind in _NO_MIXER:
        return 0
    if layer.kind == "state":  # in and out, twice and once the state's width: an approximation
        return 3 * hidden * config.number("mamba_expand", default=2) * hidden
    heads = config.heads
    if layer.kind == "latent":
        rank, rope, nope, value = (
            config.number(f) for f in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        query = heads * (rope + nope)
        query_rank = config.optional("q_lora_rank")
        queries = query_rank * (hidden + query) if query_rank else hidden * query
        return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    query_and_out = hidden * layer.pair_elements
    return query_and_out + hidden * layer.token_elements


def _mlp_params(config: _Fields, num_layers: int) -> tuple[int, int, int]:
    """Parameters of dense MLPs (shared experts and routers too), of routed experts, and of those one token uses."""
    matrices = (2 if config.fields.get("model_type") in _UNGATED else 3) * config.number("hidden_size")
    hidden = config.number("hidden_size")
    inner = config.number("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    num_experts = config.optional("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if num_experts < 2:
        return num_layers * matrices * inner, 0, 0
    is_sparse = _sparse_layers(config, num_layers)
    expert = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.optional("shared_expert_intermediate_size", "shared_intermediate_size")
    shared += expert * config.optional("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if config.fields.get("intermediate_size_mlp") is not None:  # Llama 4: one shared expert
        shared += expert
    chosen = min(config.number("num_experts_per_tok", "moe_topk", "num_experts_per_token", default=1), num_experts)
    num_sparse = sum(is_sparse)
    dense = (num_layers - num_sparse) * matrices * inner
    dense += num_sparse * (matrices * shared + config.number("hidden_size") * num_experts)
    return dense, num_sparse * num_experts * matrices * expert, num_sparse * chosen * matrices * expert


def _sparse_layers(config: _Fields, num_layers: int) -> list[bool]:
    """Which layers have routed experts."""
    if kinds := config.names("mlp_layer_types"):
        _check_count(config, "mlp_layer_types", len(kinds), num_layers)
        return [kind == "sparse" for kind in kinds]
    listed = config.fields.get("moe_layers")
    dense = config.fields.get("mlp_only_layers") or ()
    first = config.optional("first_k_dense_replace", "moe_layer_start_index")
    step = config.number("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", default=1)
    offset = config.number("expert_layer_offset", default=step - 1, least=0)
    if isinstance(listed, list):
        return [idx in listed for idx in range(num_layers)]
    return [idx >= first and idx not in dense and idx % step == offset % step for idx in range(num_layers)]


def _check_count(config: _Fields, field: str, num: int, num_layers: int) -> None:
    if num != num_layers:
        raise ConfigError(
            f"model={config.name!r}: {field} in its config.json names {num} layers, and there are {num_layers}; mend it"
        )


def _dtype_bytes(config: _Fields) -> float:
    name = str(config.fields.get("dtype") or config.fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return _DTYPE_BYTES.get(name, 2.0)


def _weight_bytes(config: _Fields, dtype_bytes: float) -> float:
    """Bytes of a parameter. A quantized checkpoint names its bits, in a field or in the name of its method."""
    quantization = config.fields.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return dtype_bytes
    method = str(quantization.get("quant_algo") or quantization.get("quant_method") or "")
    named = re.search(r"(?:fp|int)(\d+)|'num_bits': (\d+)|'load_in_(\d)bit': true", f"{method} {quantization}".lower())
    bits = quantization.get("bits") or quantization.get("w_bit") or (named and int(next(filter(None, named.groups()))))
    return bits / 8 if type(bits) is int and 1 <= bits <= 32 else dtype_bytes
