"""Weights that are missing, left over, misshapen, damaged or quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.architecture import load_config, model_class
from tandem.engine.engine import Engine
from tandem.engine.weights import load_weights
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.sampling import SamplingParams
from tests.support.architectures import SERVED, Family, load_plain, save_model

TINY = {"num_hidden_layers": 1, "vocab_size": 64}


def save_tiny(folder: Path, name: str = "llama", **changes: Any) -> Path:
    family = SERVED[name]
    return save_model(folder, Family(family.config, family.settings | TINY | changes))


def load(folder: Path, device: str = "cpu") -> Any:
    config = load_config(folder)
    return load_weights(folder, model_class(str(folder), config), config, torch.float32, torch.device(device))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite the tensors of a checkpoint of one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "weight", "needed"),
    [
        ("llama", "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("llama", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_a_missing_weight_is_never_drawn_at_random(name: str, weight: str, needed: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", name)
    edit(folder, lambda tensors: tensors.pop(weight))
    with pytest.raises(ConfigError, match=f"model=.* {needed}"):
        load(folder)


def test_scales_of_a_quantized_kv_cache_are_not_weights(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}))
    assert load(folder)


def test_tied_embeddings_need_no_second_weight(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    module = load(folder)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lacks weights that LlamaForCausalLM needs: lm_head\.weight"):
        load(folder)


def test_a_head_in_a_checkpoint_that_calls_itself_tied_is_used(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    edit_config(folder, tie_word_embeddings=True)
    assert torch.equal(load(folder).lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def add_a_weight(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.weight": torch.zeros(64, 64)}))


def cut_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[:3]}
    save_file(first, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    index = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def pickle_them(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (add_a_weight, r"no use for: model\.layers\.1\.self_attn\.q_proj\.weight"),
        (
            lambda folder: edit_config(folder, intermediate_size=128),
            r"another shape .*mlp.down_proj.weight \[64, 96\] instead of \[64, 128\]",
        ),
        (cut_the_file, "cannot be loaded here"),
        (lose_a_shard, r"model-00002-of-00002\.safetensors"),
        (pickle_them, "convert its weights to safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    damage(folder := save_tiny(tmp_path / "model"))
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_weights_go_straight_to_the_device(tmp_path: Path) -> None:
    """The meta device stands for a GPU: no weight is in host memory afterwards."""
    module = load(save_tiny(tmp_path / "model"), "meta")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


def save_quantized(
    folder: Path,
    settings: dict[str, Any] | None,
    quantize: Callable[[Tensor], dict[str, Tensor]],
    name: str = "llama",
    ending: str = "_proj.weight",
) -> Path:
    """A model whose weights of this ending are stored as `quantize` makes them: {suffix of the name: tensor}."""
    save_tiny(folder, name, num_hidden_layers=2)
    edit_config(folder, quantization_config=settings)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            stem = name.removesuffix("weight")
            tensors.update({stem + suffix: tensor for suffix, tensor in quantize(tensors.pop(name)).items()})

    edit(folder, change)
    return folder


def as_fp8_blocks(weight: Tensor) -> dict[str, Tensor]:
    """float8 with a scale for each block of 32 x 32, as DeepSeek V3 and Qwen 3 are published."""
    rows, columns = weight.shape
    blocks = weight.view(rows // 32, 32, columns // 32, 32)
    scales = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}


def as_ternary(weight: Tensor) -> dict[str, Tensor]:
    """Weights of -1, 0 and 1, four in a byte, as BitNet is published."""
    from transformers.integrations.bitnet import pack_weights  # compiles a function: seconds

    scale = 1 / weight.abs().mean()
    return {"weight": pack_weights((weight * scale).round().clamp(-1, 1)).contiguous(), "weight_scale": scale.view(1)}


def as_int8_rows(weight: Tensor) -> dict[str, Tensor]:
    """int8 with a scale for each row, as compressed-tensors stores W8A8."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def as_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Random 4-bit floats, two in a byte, with an exponent for each 32, as GPT-OSS stores its experts [E, in, out]."""
    num_experts, width, num_rows = weight.shape
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (num_experts, num_rows, width // 32, 16), generator=generator, dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": torch.full(blocks.shape[:-1], 124, dtype=torch.uint8)}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
BITNET = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
_INT8_ROWS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8_GROUP = {
    "targets": ["Linear"],
    "weights": _INT8_ROWS | {"strategy": "channel"},
    "input_activations": _INT8_ROWS | {"strategy": "token", "dynamic": True},
}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
INT8 |= {"ignore": ["lm_head"], "config_groups": {"group_0": _INT8_GROUP}}


def greedy(folder: Path, dtype: str = "float32") -> tuple[Engine, list[list[int]]]:
    engine = Engine(EngineConfig(model=str(folder), dtype=dtype, device="cpu", pool_bytes=8 << 20, max_num_seqs=4,
                                 max_num_batched_tokens=17))  # fmt: skip
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    sequences = [engine.factory.make_sequence(str(n), list(range(3, 3 + n)), sampling) for n in (5, 20, 40)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return engine, [sequence.token_ids.tolist() for sequence in sequences]


def assert_generates(folder: Path, plain: Any) -> Engine:
    engine, answers = greedy(folder)
    for tokens in answers:
        expected = plain.generate(torch.tensor([tokens[:-8]]), max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert tokens == expected[0].tolist()
    return engine


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile, which BitNet uses
@pytest.mark.parametrize(
    ("settings", "quantize", "kinds"),
    [
        pytest.param(FP8, as_fp8_blocks, {"PackedLinear", "MergedLinear"}, id="fp8"),
        pytest.param(BITNET, as_ternary, {"PackedLinear", "BitLinear"}, id="bitnet"),  # the former is the head's
    ],
)
def test_a_quantized_model_generates_what_transformers_does(
    settings: dict[str, Any], quantize: Callable[[Tensor], dict[str, Tensor]], kinds: set[str], tmp_path: Path
) -> None:
    """Dequantized weights are packed, and a quantizer's own layers are left alone."""
    folder = save_quantized(tmp_path / "model", settings, quantize)
    # BitNet compiles its layers, once for each shape: minutes of a C++ compiler, and the same numbers.
    with torch.compiler.set_stance("force_eager"):
        engine = assert_generates(folder, load_plain(folder))
    names = {type(module).__name__ for module in engine.model.module.modules()}
    assert {name for name in names if "Linear" in name} == kinds


def test_experts_in_4_bits_are_served_as_plain_weights(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path / "model", {"quant_method": "mxfp4"}, as_mxfp4, "gpt_oss", "_proj")
    assert_generates(folder, load_plain(folder))


@pytest.mark.skipif(not find_spec("compressed_tensors"), reason="needs compressed-tensors")
def test_compressed_tensors_are_served_as_plain_weights(tmp_path: Path) -> None:
    def dequantized(weight: Tensor) -> dict[str, Tensor]:
        stored = as_int8_rows(weight)
        return {"weight": stored["weight"] * stored["weight_scale"]}

    plain = save_quantized(tmp_path / "plain", None, dequantized)
    assert_generates(save_quantized(tmp_path / "int8", INT8, as_int8_rows), load_plain(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_beside_dequantized_ones_get_their_dtype(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    folder = save_quantized(tmp_path / "model", FP8, as_fp8_blocks)

    def store(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items() if "_proj" not in name})

    edit(folder, store)
    engine, _ = greedy(folder, dtype)
    assert {parameter.dtype for parameter in engine.model.module.parameters()} == {engine.kv.dtype}
    assert str(engine.kv.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("method", "settings", "package", "remedy"),
    [
        ("gptq", {"bits": 4}, "optimum", "pip install optimum"),
        ("awq", {"bits": 4}, "gptqmodel", "pip install gptqmodel"),
        ("compressed-tensors", {"config_groups": {}}, "compressed_tensors", "pip install compressed-tensors"),
        ("bitsandbytes", {"load_in_4bit": True}, "bitsandbytes", "pip install -U bitsandbytes"),
        ("quanto", {"weights": "int8"}, "optimum", "pip install optimum-quanto"),
        ("torchao", {"quant_type": "int8wo"}, "torchao", "pip install torchao"),
        ("auto-round", {"bits": 4}, "auto_round", "pip install 'auto-round"),
        ("fbgemm_fp8", {}, "", "requires a GPU"),
        ("spqr", {}, "", "GPU is required"),
        ("nvfp4", {}, "", "not supported yet"),
        ("modelopt", {"quant_algo": "FP8"}, "", "choose another checkpoint"),
    ],
)
def test_a_quantization_that_cannot_run_is_refused_before_weights_are_read(
    method: str, settings: dict[str, Any], package: str, remedy: str, tmp_path: Path
) -> None:
    if (package and find_spec(package)) or torch.cuda.is_available():
        pytest.skip(f"{package or 'a GPU'} is here")
    folder = save_tiny(tmp_path / "model")
    edit_config(folder, quantization_config={"quant_method": method, **settings})
    (folder / "model.safetensors").write_bytes(b"unreadable")
    with pytest.raises(ConfigError, match=f"quantized.*{method}.*{remedy}"):
        load(folder)


def test_a_quantization_without_a_name_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    edit_config(folder, quantization_config={"bits": 4})
    with pytest.raises(ConfigError, match="has no quant_method"):
        load(folder)
