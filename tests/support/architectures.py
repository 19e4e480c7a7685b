"""Random-weight models of real architectures, small enough to load in a tenth of a second, each with its verdict.

`scripts/generate.py` writes them into docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

VOCAB = 200
EOS = 2
WINDOW = 24


class Family(NamedTuple):
    """How to make a model of this family, and what a reader of docs/models.md should know about it."""

    config: str  # transformers' config class
    settings: dict[str, Any]
    note: str = ""

    @property
    def model_type(self) -> str:
        """The name that the family has in config.json."""
        name: str = getattr(transformers, self.config).model_type
        return name


class Refusal(NamedTuple):
    """A family that is refused, and the words of the error that say why."""

    family: Family
    error: str


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
_WIDE = {**_BASE, "head_dim": 16}
_SLIDING = {**_BASE, "sliding_window": WINDOW}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED_MOE |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
_GEMMA4 = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_MLA |= {"num_key_value_heads": 4}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
_LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_GLM_ROPE = {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_MULTIPLIERS = {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}
_MULTIPLIERS |= {"logits_scaling": 2.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_FALCON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_OPT = {**_FALCON, "ffn_dim": 96, "max_position_embeddings": 512, "word_embed_proj_dim": 64}
_BERT = {**_FALCON, "intermediate_size": 96}
_BART = {"vocab_size": VOCAB, "d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 96}
_BART |= {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "max_position_embeddings": 512}

SERVED: dict[str, Family] = {
    "llama": Family("LlamaConfig", _BASE),
    "llama, llama3 rope": Family("LlamaConfig", {**_BASE, "rope_parameters": _LLAMA3}, "its rope scaling"),
    "llama, tied embeddings and biases": Family(
        "LlamaConfig",
        {**_BASE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "tied embeddings, biases",
    ),
    "llama, dynamic rope": Family(
        "LlamaConfig",
        {**_BASE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "up to `max_position_embeddings`, where its frequencies are fixed",
    ),
    "qwen2": Family("Qwen2Config", _BASE, "biases on q, k, v"),
    "qwen2, yarn": Family("Qwen2Config", {**_BASE, "rope_parameters": _YARN}),
    "qwen2, sliding": Family(
        "Qwen2Config", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}, "windows in some layers"
    ),
    "qwen3": Family("Qwen3Config", {**_BASE, "head_dim": 32}, "norms on q and k; heads wider than hidden / heads"),
    "qwen2_moe": Family("Qwen2MoeConfig", {**_BASE, **_MOE, "shared_expert_intermediate_size": 32}, "a shared expert"),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_WIDE, **_MOE}),
    "mistral": Family("MistralConfig", _SLIDING, "windows in all layers"),
    "mistral, no window": Family("MistralConfig", {**_BASE, "sliding_window": None}),
    "ministral": Family("MinistralConfig", {**_SLIDING, "head_dim": 16}),
    "mixtral": Family("MixtralConfig", {**_BASE, **_LOCAL_MOE}),
    "mixtral, sliding": Family("MixtralConfig", {**_SLIDING, **_LOCAL_MOE}),
    "gemma": Family("GemmaConfig", _WIDE),
    "gemma2": Family("Gemma2Config", {**_BASE, **_GEMMA}, "soft caps, (1 + weight) norms, GELU, every other sliding"),
    "gemma3": Family("Gemma3TextConfig", {**_BASE, **_GEMMA}, "two rotary tables"),
    "gemma4": Family(
        "Gemma4TextConfig",
        {**_SLIDING, **_GEMMA4, "head_dim": 256},
        "wider heads in some layers; on CPUs, because GPU kernels hold 256 elements of a head, and it has 512",
    ),
    "phi": Family("PhiConfig", _BASE, "partial rotary, LayerNorm"),
    "phi3": Family("Phi3Config", _BASE, "fused qkv and gate_up"),
    "phi3, sliding": Family("Phi3Config", _SLIDING),
    "phi3, partial rotary": Family("Phi3Config", {**_BASE, "partial_rotary_factor": 0.5}, "partial rotary"),
    "phimoe": Family("PhimoeConfig", {**_BASE, **_LOCAL_MOE}, "if its window is not shorter than its context"),
    "olmo": Family("OlmoConfig", _BASE),
    "olmo2": Family("Olmo2Config", _BASE, "norms after the blocks"),
    "olmo3": Family("Olmo3Config", _SLIDING),
    "olmoe": Family("OlmoeConfig", {**_BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": Family("DeepseekV2Config", {**_BASE, **_MLA, **_GROUPED_MOE}, "latent attention"),
    "deepseek_v3": Family("DeepseekV3Config", {**_BASE, **_MLA, **_GROUPED_MOE}, "latent attention"),
    "deepseek_v3, values as wide as keys": Family(
        "DeepseekV3Config",
        {**_BASE, **_MLA, **_GROUPED_MOE, "qk_nope_head_dim": 8, "v_head_dim": 16},
        "values as wide as keys",
    ),
    "minicpm3": Family("MiniCPM3Config", {**_BASE, **_MLA}, "latent attention"),
    "youtu": Family("YoutuConfig", {**_BASE, **_MLA}, "latent attention"),
    "granite": Family("GraniteConfig", {**_BASE, **_MULTIPLIERS}, "multipliers"),
    "granitemoe": Family("GraniteMoeConfig", {**_BASE, **_LOCAL_MOE}),
    "glm4": Family("Glm4Config", _WIDE),
    "glm4_moe": Family("Glm4MoeConfig", {**_WIDE, **_GROUPED_MOE}, "a router in float32, a shared expert"),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", {**_BASE, **_MLA, **_GROUPED_MOE}, "latent attention"),
    "gpt_oss": Family(
        "GptOssConfig", {**_WIDE, **_LOCAL_MOE, "sliding_window": WINDOW}, "attention sinks, every other layer sliding"
    ),
    "nemotron": Family("NemotronConfig", _BASE, "squared ReLU, LayerNorm with (1 + weight)"),
    "stablelm": Family("StableLmConfig", _BASE, "partial rotary, LayerNorm"),
    "cohere": Family("CohereConfig", _BASE, "interleaved rotary"),
    "cohere2": Family("Cohere2Config", _SLIDING, "layers without positions"),
    "smollm3": Family("SmolLM3Config", {**_BASE, "no_rope_layers": [1, 0, 1]}, "layers without positions"),
    "exaone4": Family("Exaone4Config", {**_SLIDING, "sliding_window_pattern": 2}),
    "starcoder2": Family("Starcoder2Config", _SLIDING),
    "gpt2": Family("GPT2Config", _GPT2, "learned positions, Conv1D"),
    "gpt_bigcode": Family("GPTBigCodeConfig", _GPT2, "one KV head for all query heads"),
    "gpt_neox": Family("GPTNeoXConfig", {**_BASE, "num_key_value_heads": None}),
    "opt": Family("OPTConfig", _OPT),
    "ernie4_5": Family("Ernie4_5Config", _WIDE),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Config", _WIDE),
    "hunyuan_v1_moe": Family("HunYuanMoEV1Config", {**_WIDE, "num_experts": 4, "moe_topk": 2}),
    "seed_oss": Family("SeedOssConfig", _WIDE),
    "helium": Family("HeliumConfig", _WIDE),
    "arcee": Family("ArceeConfig", _WIDE),
    "apertus": Family("ApertusConfig", _BASE),
    "bitnet": Family("BitNetConfig", _BASE),
    "dots1": Family("Dots1Config", {**_WIDE, **_GROUPED_MOE}),
    "minimax_m2": Family("MiniMaxM2Config", {**_WIDE, **_LOCAL_MOE}),
    "jetmoe": Family("JetMoeConfig", {**_BASE, **_LOCAL_MOE, "kv_channels": 16}, "experts in the attention too"),
    "nanochat": Family("NanoChatConfig", _BASE),
    "modernbert_decoder": Family("ModernBertDecoderConfig", {**_BASE, "local_attention": WINDOW}),
}

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_QWEN_VISION |= {"patch_size": 14}
_QWEN3_VISION = {**_QWEN_VISION, "deepstack_visual_indexes": []}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
_AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16}


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_WIDE, **changes}


def _two_part(config: str, text: dict[str, Any], vision: dict[str, Any], note: str = "", **ids: int) -> Family:
    """A model of a text part and one that reads images. `ids`: special tokens."""
    return Family(config, {"text_config": text, "vision_config": vision, **ids}, note)


_IMAGE: dict[str, Any] = {"image_token_index": 190}
_CLIP, _SIGLIP, _PIXTRAL = (
    {"model_type": kind, **_VISION} for kind in ("clip_vision_model", "siglip_vision_model", "pixtral")
)
_MROPE_TEXT, _GLM_TEXT = {**_BASE, "rope_parameters": _MROPE}, {**_BASE, "rope_parameters": _GLM_ROPE}
_QWEN2_VISION = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 14}
_GLM_VISION = {**_QWEN_VISION, "image_size": 28}
_ENCODER = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_PLAIN_MISTRAL = _text("mistral", sliding_window=None)
_POSITIONS = "three positions for each token, equal in text"

# Models that read images or sound too: their text part is served.
WRAPPERS: dict[str, Family] = {
    "gemma3, multimodal": _two_part(
        "Gemma3Config",
        {**_BASE, **_GEMMA},
        _VISION,
        mm_tokens_per_image=4,
        boi_token_index=191,
        eoi_token_index=192,
        **_IMAGE,
    ),
    "mistral3": _two_part("Mistral3Config", _PLAIN_MISTRAL, _PIXTRAL, **_IMAGE),
    "llava": _two_part("LlavaConfig", _text("llama"), _CLIP, **_IMAGE),
    "llava_next": _two_part("LlavaNextConfig", _PLAIN_MISTRAL, _CLIP, **_IMAGE),
    "llava_onevision": _two_part("LlavaOnevisionConfig", _text("qwen2"), _SIGLIP, **_IMAGE),
    "qwen2_vl": _two_part("Qwen2VLConfig", _MROPE_TEXT, _QWEN2_VISION, _POSITIONS, **_QWEN_IDS),
    "qwen2_5_vl": _two_part("Qwen2_5_VLConfig", _MROPE_TEXT, _QWEN_VISION, _POSITIONS, **_QWEN_IDS),
    "qwen3_vl": _two_part("Qwen3VLConfig", {**_WIDE, **_MROPE_TEXT}, _QWEN3_VISION, _POSITIONS, **_QWEN_IDS),
    "qwen3_vl_moe": _two_part(
        "Qwen3VLMoeConfig", {**_WIDE, **_MOE, **_MROPE_TEXT}, _QWEN3_VISION, _POSITIONS, **_QWEN_IDS
    ),
    "glm4v": _two_part("Glm4vConfig", _GLM_TEXT, _GLM_VISION, _POSITIONS),
    "glm4v_moe": _two_part("Glm4vMoeConfig", {**_WIDE, **_GROUPED_MOE, **_GLM_TEXT}, _GLM_VISION, _POSITIONS),
    "kimi_k25": _two_part(
        "Kimi_K25Config",
        {"model_type": "deepseek_v3", **_BASE, **_MLA, **_GROUPED_MOE},
        {name: _VISION[name] for name in _VISION if name != "image_size"},
        "latent attention",
    ),
    "internvl": _two_part(
        "InternVLConfig",
        _text("qwen2"),
        {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=190,
    ),
    "idefics3": _two_part("Idefics3Config", _text("llama"), _VISION, image_token_id=190),
    "voxtral": Family(
        "VoxtralConfig", {"text_config": _text("llama"), "audio_config": _AUDIO | _ENCODER, "audio_token_id": 190}
    ),
    "qwen2_audio": Family(
        "Qwen2AudioConfig", {"text_config": _text("qwen2"), "audio_config": _AUDIO, "audio_token_index": 190}
    ),
}

_TINY = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}
_LAYERS = "layers this engine cannot serve: "


def _refused(config: str, settings: dict[str, Any], because: str, error: str) -> Refusal:
    return Refusal(Family(config, settings, because), error)


def _own_attention(config: str, settings: dict[str, Any], *, is_alibi: bool = False) -> Refusal:
    family = Family(config, settings, "its code calls its own attention" + ", with ALiBi" * is_alibi)
    return Refusal(family, rf"{family.model_type}. .*has only its own attention")


REFUSED: dict[str, Refusal] = {
    "phimoe, sliding": _refused(
        "PhimoeConfig",
        {**_SLIDING, **_LOCAL_MOE},
        "transformers hands its window to no attention function",
        "paged logits differ",
    ),
    "falcon": _own_attention("FalconConfig", _FALCON),
    "falcon, alibi": _own_attention("FalconConfig", {**_FALCON, "alibi": True}, is_alibi=True),
    "bloom": _own_attention("BloomConfig", {**_GPT2, "hidden_size": 64}, is_alibi=True),
    "mpt": _own_attention(
        "MptConfig", {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4}, is_alibi=True
    ),
    "gptj": _own_attention("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "codegen": _own_attention("CodeGenConfig", {**_GPT2, "rotary_dim": 8}),
    "diffllama": _refused("DiffLlamaConfig", _BASE, "attends twice in a layer", "each of 0 to n must attend once"),
    "doge": _refused("DogeConfig", _BASE, "masks of its own", "paged logits differ"),
    "gemma4, other KV heads in some layers": _refused(
        "Gemma4TextConfig",
        {**_SLIDING, **_GEMMA4, "head_dim": 16, "per_layer_config": {"2": {"num_key_value_heads": 1}}},
        "a block holds one number of KV heads",
        "its layers differ in their KV",
    ),
    "mimo_v2_flash": _refused(
        "MiMoV2FlashConfig",
        {**_SLIDING, **_GROUPED_MOE, "head_dim": 16},
        "a block holds one number of KV heads",
        "its layers differ in their KV",
    ),
    "llama4": _refused(
        "Llama4TextConfig",
        {**_WIDE, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 32},
        "chunked attention",
        _LAYERS + "chunked_attention",
    ),
    "deepseek_v32": _refused(
        "DeepseekV32Config",
        {**_BASE, **_MLA, **_GROUPED_MOE},
        "an index of its own over keys",
        _LAYERS + "indexed_attention",
    ),
    "qwen3_next": _refused(
        "Qwen3NextConfig", {**_WIDE, **_MOE}, "linear attention: state beside the KV", _LAYERS + "linear_attention"
    ),
    "minimax": _refused("MiniMaxConfig", {**_BASE, **_LOCAL_MOE}, "linear attention", _LAYERS + "linear_attention"),
    "mamba": _refused("MambaConfig", {**_TINY, "state_size": 8}, "state instead of KV", _LAYERS + "linear_attention"),
    "rwkv": _refused("RwkvConfig", _TINY, "state instead of KV", "keeps state outside its KV cache"),
    "lfm2": _refused(
        "Lfm2Config", {**_BASE, "layer_types": ["conv", "full_attention", "conv"]}, "convolutions", _LAYERS + "conv"
    ),
    "bart": _refused("BartConfig", _BART, "counts positions itself", "paged logits differ"),
    "bert": _refused("BertConfig", _BERT, "an encoder", "attends to later tokens"),
    "t5": _refused(
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2},
        "an encoder-decoder",
        "is an encoder-decoder",
    ),
}
LONGROPE = Family("Phi3Config", {**_BASE, "rope_parameters": _LONG, "original_max_position_embeddings": 64})


def save_model(folder: Path, family: Family, seed: int = 0) -> Path:
    """Write a model with weights drawn from `seed` into `folder`."""
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**family.settings)
    perturb(auto_class(config).from_config(config)).save_pretrained(folder)
    return folder


def perturb(model: Any) -> Any:
    """Move norms and biases away from ones and zeros, where some mistakes do not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.2
    return model


def load_plain(folder: Path) -> Any:
    """The model as transformers alone runs it, in float32."""
    auto = auto_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def auto_class(config: Any) -> Any:
    """The class of transformers that makes models of this config."""
    autos = (AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
    return next(auto for auto in autos if type(config) in auto._model_mapping)


def families_tables() -> str:
    """Every family and its verdict, as the tables of docs/models.md."""
    refused = {name: refusal.family for name, refusal in REFUSED.items()}
    sections = (("Served", "notes", SERVED), ("Text part served", "notes", WRAPPERS), ("Refused", "because", refused))
    return "\n\n".join(
        "\n".join([f"## {title}\n", f"| `model_type` | {about} |", "|---|---|", *_rows(table)])
        for title, about, table in sections
    )


def _rows(table: dict[str, Family]) -> Iterator[str]:
    """A row for each note, with all model types that it is for; a note names the variants of a type."""
    notes: dict[str, list[str]] = {}
    for name, family in table.items():
        variant = name.partition(", ")[2]
        notes.setdefault(family.model_type, []).append(": ".join(dict.fromkeys(filter(None, (variant, family.note)))))
    model_types: dict[str, list[str]] = {}
    for model_type, variants in notes.items():
        model_types.setdefault("; ".join(filter(None, variants)), []).append(f"`{model_type}`")
    yield from (f"| {', '.join(names)} | {note} |" for note, names in model_types.items())
