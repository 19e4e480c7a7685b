"""Fields of published models' config.json, as far as a plan reads them."""

from __future__ import annotations

from typing import Any


def _dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GROUPED = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
_LLAMA4 = {"intermediate_size_mlp": 16384, "num_local_experts": 128, "num_experts_per_tok": 1}
_LLAMA4 |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 8192}
_NEXT = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "mixtral-8x7b": _dense(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "qwen3-30b-a3b": _dense(
        2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "deepseek-v3": _dense(7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, **_MLA, **_GROUPED),
    "llama-4-maverick": _dense(
        5120, 8192, 48, 40, 8, 202048, head_dim=128, **_LLAMA4,
        layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 12,
    ),
    "gemma-3-27b": _dense(
        5376, 21504, 62, 32, 16, 262208, head_dim=128, tie_word_embeddings=True, sliding_window=1024,
        layer_types=["sliding_attention"] * 52 + ["full_attention"] * 10,
    ),
    "qwen3-next-80b": _dense(
        2048, 5120, 48, 16, 2, 151936, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts=512, num_experts_per_tok=10, **_NEXT,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
    ),
}  # fmt: skip
