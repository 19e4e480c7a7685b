from __future__ import annotations

from typing import Any

import pytest

from tandem.protocol.errors import ConfigError
from tandem.scheduling.planning.geometry import geometry_of
from tests.support.published_models import PUBLISHED


@pytest.mark.parametrize(
    ("name", "params", "active", "token_bytes"),
    [  # billions as published, and KV bytes of a token at a context of 1k
        ("llama-8b", 8.03, 8.03, 131_072),
        ("llama-70b", 70.6, 70.6, 327_680),
        ("mixtral-8x7b", 46.7, 12.9, 131_072),
        ("qwen3-30b-a3b", 30.5, 3.3, 98_304),
        ("deepseek-v3", 671.0, 37.5, 70_272),  # 61 layers * (512 + 64) * 2
        ("llama-4-maverick", 400.7, 17.2, 196_608),
        ("gemma-3-27b", 27.0, 28.4, 507_904),  # here with the tied table counted twice
    ],
)
def test_published_models_have_their_published_sizes(name: str, params: float, active: float, token_bytes: int) -> None:
    geometry = geometry_of(PUBLISHED[name], name)
    assert geometry.num_params / 1e9 == pytest.approx(params, rel=0.01)
    assert (geometry.num_active_params + 2 * geometry.head_params) / 1e9 == pytest.approx(active, rel=0.02)
    assert geometry.kv_bytes(1024) == 1024 * token_bytes


@pytest.mark.parametrize("field", ["layer_types", "mlp_layer_types"])
def test_lists_of_layers_must_be_of_all_layers(field: str) -> None:
    kinds = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
    with pytest.raises(ConfigError, match=f"{field} in its config.json names 50 layers, and there are 32"):
        geometry_of(PUBLISHED["llama-8b"] | {field: [kinds[field]] * 50, "num_experts": 8}, "m")


def test_bits_that_are_no_number_are_not_counted() -> None:
    quantized = PUBLISHED["llama-8b"] | {"quantization_config": {"bits": True}}
    assert geometry_of(quantized, "m").weight_bytes == geometry_of(PUBLISHED["llama-8b"], "m").weight_bytes


def test_windows_latent_attention_and_states_keep_less() -> None:
    maverick, gemma, deepseek, qwen = (
        geometry_of(PUBLISHED[name], name)
        for name in ("llama-4-maverick", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b")
    )
    full, window = 12 * 4096, 36 * 4096 * 8192  # 2 * 8 heads * 128 * 2 bytes, in chunks of 8,192 tokens
    assert maverick.kv_bytes(1_000_000) == 1_000_000 * full + window
    assert gemma.kv_bytes(100_000) == 8192 * (10 * 100_000 + 52 * 1024)
    assert deepseek.pool_token_bytes == 61 * 2 * 128 * 192 * 2  # Tandem's own pool keeps all heads
    assert qwen.kv_bytes(0) == 36 * 32 * 128 * 128 * 4
    assert qwen.pool_token_bytes == 0, "the engine refuses it"


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "mxfp4"}, 0.5),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 1.0),
        ({"quant_method": "unheard of", "bits": "many"}, 2.0),
        ({"quant_method": None, "config_groups": 7}, 2.0),
        ("fp8", 2.0),
    ],
)
def test_quantized_weights_are_smaller(quantization: Any, expected: float) -> None:
    fields = PUBLISHED["llama-8b"] | {"quantization_config": quantization}
    assert geometry_of(fields, "m").weight_bytes == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, r"model='m': its config.json lacks num_hidden_layers.*'llama'; add the field"),
        ({"hidden_size": "large"}, "hidden_size=large in its config.json must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 in its config.json is absurd"),
        ({"num_key_value_heads": -8}, "num_key_value_heads=-8"),
        ({"vocab_size": 10**400}, "vocab_size=1000000000000000000000000000000000000000 in"),
        ({"head_dim": [128]}, r"head_dim=\[128\]"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"layer_types": ["mlp", "moe"], "num_hidden_layers": 2}, "no layer of its config.json keeps KV or a state"),
        (
            {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "sliding_window": None},
            "lacks attention_chunk_size",
        ),
        ({"kv_lora_rank": 512}, "lacks qk_rope_head_dim"),
    ],
)
def test_missing_and_absurd_fields_are_named(changes: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in (PUBLISHED["llama-8b"] | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        geometry_of(fields, "m")
