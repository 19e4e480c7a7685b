"""Every text generator that transformers has is served right or refused with a ConfigError.

Models are made small by rule, from the fields of their default config. A type is refused if it is with all variants of
the rules, and skipped if none makes a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tandem.engine.engine import Engine
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.test_engine import generate, make_prompt
from tests.support.architectures import VOCAB, WINDOW, auto_class, load_plain, perturb

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MAX_PARAMETERS = 30_000_000
MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})

# Values by name of a field, for all configs that have it.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "hidden_dim", "embed_dim", "emb_dim")
_INNER = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_TEXT = {
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_LAYERS, 3),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "sliding_window_pattern"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "global_head_dim"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "state_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"), 1),
    "vocab_size": VOCAB,
    "sliding_window": WINDOW,
    "initializer_range": 0.15,
    "query_pre_attn_scalar": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
}
_TOWER = {
    **dict.fromkeys((*_HIDDEN, *_INNER), 32),
    **dict.fromkeys((*_LAYERS, "depth"), 1),
    **dict.fromkeys((*_HEADS, "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "output_hidden_size", "vision_output_dim"), 64),
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
    "num_mel_bins": 16,
    "deepstack_visual_indexes": [],
}
_WRAPPER = {"hidden_size": 64, "vocab_size": VOCAB, "mm_tokens_per_image": 4, "image_seq_length": 4}
_WRAPPER |= dict.fromkeys(("image_token_index", "image_token_id", "audio_token_index", "audio_token_id"), 190)
_WRAPPER |= dict.fromkeys(("video_token_index", "video_token_id"), 191)
_TEXT_PARTS = ("text_config", "language_config", "decoder", "llm_config")
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
# Other values for fields that some families compute or constrain; None leaves the default.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window_pattern": None},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": None, "head_dim": None, "sliding_window": None},
    {"q_lora_rank": None},
    {"rope_parameters": _MROPE},
)


def small_settings(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of fields that this config has, under the names that it has for them."""
    fields, aliases = config.to_dict(), type(config).attribute_map
    values = {name: value for name, value in values.items() if value is not None}
    found = {name: value for name, value in values.items() if name in fields}
    return found | {
        aliases[name]: value for name, value in values.items() if aliases.get(name) in fields.keys() - found
    }


def small_config(model_type: str, variant: dict[str, Any]) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    parts = {name: part for name in config_class.sub_configs if (part := getattr(default, name, None)) is not None}
    if not parts:
        return config_class(**small_settings(default, _TEXT | variant))
    settings = small_settings(default, _WRAPPER)
    for name, part in parts.items():
        values = _TEXT | variant if name in _TEXT_PARTS else _TOWER
        settings[name] = {**small_settings(part, values), "model_type": part.model_type}
    return config_class(**settings)


def make_small(model_type: str, variant: dict[str, Any]) -> PreTrainedModel | None:
    """A model of this type with random weights, or None if its classes do not take these settings."""
    torch.manual_seed(0)
    try:
        config = small_config(model_type, variant)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())
        return perturb(auto_class(config).from_config(config)) if size < MAX_PARAMETERS else None  # type: ignore[no-any-return]
    except Exception as exc:  # whatever a family makes of settings that do not suit it
        print(f"no model: {exc}")
        return None


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_text_generator_is_served_right_or_refused(model_type: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "pool_bytes": 64 << 20}
    refusals = []
    for idx, variant in enumerate(_VARIANTS):
        if (model := make_small(model_type, variant)) is None:
            continue
        model.save_pretrained(folder := tmp_path / str(idx))
        try:
            engine = Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", **options))
        except ConfigError as exc:
            refusals.append(exc)
            continue
        prompts = [make_prompt(length) for length in (70, 33, 12, 97)]
        outputs = generate(engine, prompts)
        plain = load_plain(folder)
        for prompt, tokens in zip(prompts, outputs, strict=True):
            with torch.inference_mode():
                logits = plain(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
        return
    if not refusals:
        pytest.skip("no rule makes it small")
    print(f"refused: {refusals[0]}")
