"""Random-weight models of real architectures, small enough to load in a tenth of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCAB = 200
EOS = 2
WINDOW = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # large enough for attention to decide the tokens
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
_LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_BART = {
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
}

# name -> (transformers config class, settings over _BASE, or alone where the class has other names)
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _BASE),
    "qwen2": ("Qwen2Config", _BASE),  # biases on q, k, v
    "qwen3": ("Qwen3Config", {**_BASE, "head_dim": 32}),  # norms on q and k; heads wider than hidden / num_heads
    "mistral": ("MistralConfig", {**_BASE, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**_BASE, **_GEMMA}),  # soft caps, (1 + weight) norms, GELU gates, every other sliding
    "gemma3": ("Gemma3TextConfig", {**_BASE, **_GEMMA}),  # two rotary tables
    "phi3": ("Phi3Config", _BASE),  # fused qkv and gate_up
    "phi": ("PhiConfig", _BASE),  # partial rotary, LayerNorm
    "olmo2": ("Olmo2Config", _BASE),  # norms after the blocks
    "cohere": ("CohereConfig", _BASE),  # interleaved rotary
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "mixtral": ("MixtralConfig", {**_BASE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_BASE, **_MOE, "head_dim": 16}),
    "olmoe": ("OlmoeConfig", {**_BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {**_BASE, "num_local_experts": 4}),  # a router that is a linear layer of its own kind
    "glm4_moe": (  # a router in float32, a shared expert
        "Glm4MoeConfig",
        {
            **_BASE,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention sinks": ("GptOssConfig", {**_BASE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "the KV pool has": ("DeepseekV3Config", {**_BASE, **_MLA, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}),
    "layers this engine cannot serve: linear_attention": (
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "layers this engine cannot serve: conv": (
        "Lfm2Config",
        {**_BASE, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "layers this engine cannot serve: chunked_attention": (
        "Llama4TextConfig",
        {**_BASE, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 32},
    ),
    "paged logits differ": (
        "BartConfig",
        {"vocab_size": VOCAB, **_BART, "max_position_embeddings": 512},
    ),  # counts itself
    "paged_step is missing": ("StableLmConfig", _BASE),  # does not pass keyword arguments on
    "no max_position_embeddings": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "knows only attention of its own": (
        "FalconConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gptj. cannot be paged": (
        "GPTJConfig",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    ),
    "encoder-decoder": ("T5Config", {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}),
}
LONGROPE = ("Phi3Config", {**_BASE, "rope_parameters": _LONG, "original_max_position_embeddings": 64})


def save_model(folder: Path, recipe: tuple[str, dict[str, Any]], seed: int = 0) -> Path:
    """Write a model with weights drawn from `seed` into `folder`, norms and biases perturbed too."""
    torch.manual_seed(seed)
    config = getattr(transformers, recipe[0])(**recipe[1])
    auto = AutoModelForSeq2SeqLM if recipe[0] == "T5Config" else AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return folder
