"""The parts that make a model fast on a GPU, under Triton's interpreter where there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

pytest.importorskip("triton")

from tandem.engine import loader
from tandem.engine.gpu.ops import add_rms_norm, rms_norm, rotate, silu_multiply
from tandem.engine.gpu.optimize import optimize
from tandem.engine.gpu.residual import FusedLayers
from tandem.engine.parts import forward_of
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import generate, make_prompt
from tests.engine.test_optimize import DISTINCT, make_model
from tests.support.architectures import SERVED
from tests.support.launches import launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 100, 576, 4096])
def test_a_norm_is_that_of_each_row(dim: int, dtype: torch.dtype) -> None:
    x, weight = noise(1, 7, dim, dtype=dtype), noise(dim, dtype=dtype, seed=1)
    expected = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    whole = rms_norm(x, weight, 1e-6)
    close(whole, expected)
    for row in range(7):
        assert torch.equal(rms_norm(x[:, row : row + 1], weight, 1e-6), whole[:, row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_heads_takes_them_as_they_lie_in_a_product(dtype: torch.dtype) -> None:
    product, weight = noise(1, 5, 6 * 32, dtype=dtype), noise(32, dtype=dtype, seed=1)
    heads = product[..., 32:160].view(1, 5, 4, 32)  # strided: others lie between two tokens
    actual = rms_norm(heads, weight, 1e-6)
    assert actual.shape == heads.shape
    assert torch.equal(actual, rms_norm(heads.contiguous(), weight, 1e-6))
    assert torch.equal(actual, rms_norm(heads.transpose(1, 2), weight, 1e-6).transpose(1, 2))
    assert torch.equal(actual[0, :, 0], rms_norm(heads.transpose(0, 1), weight, 1e-6)[:, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 1024, 1537])
def test_a_gate_is_silu_times_the_rest(width: int, dtype: torch.dtype) -> None:
    both = noise(1, 3, 2 * width, dtype=dtype) * 30
    gate, up = both[..., :width], both[..., width:]
    close(silu_multiply(gate, up), nn.functional.silu(gate) * up)
    extreme = torch.tensor([[[200.0, -200.0, float("inf"), 0.0]]], device=DEVICE, dtype=dtype)
    assert silu_multiply(extreme, torch.ones_like(extreme)).tolist() == [[[200.0, 0.0, float("inf"), 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(1, 1, 2), (9, 3, 64), (32, 8, 128), (3, 1, 80)])
def test_heads_are_rotated_as_torch_does(num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    product = noise(1, 5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    heads = product.view(1, 5, -1, dim).transpose(1, 2)
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    cos, sin = (noise(1, 5, dim // 2, dtype=dtype, seed=seed).repeat(1, 1, 2) for seed in (1, 2))
    for actual, expected in zip(rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(actual, expected)


@pytest.mark.cluster  # much to interpret
@pytest.mark.parametrize(
    "name", [*DISTINCT, *(pytest.param(n, marks=pytest.mark.slow) for n in SERVED if n not in DISTINCT)]
)
def test_an_optimized_model_gives_the_same_logits(name: str) -> None:
    model = make_model(name, torch.float32).to(DEVICE)
    ids = torch.randint(0, 200, (1, 30), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        actual = optimize(model)(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", (True, True, True, True)),
        ("gemma2", (False, False, True, True)),  # GELU gate, (1 + weight) norm
        ("cohere", (True, False, False, True)),  # interleaved rotary
    ],
)
def test_only_what_agrees_is_replaced(name: str, expected: tuple[bool, ...]) -> None:
    layer = optimize(make_model(name, torch.bfloat16).to(DEVICE)).model.layers[0]
    parts = (layer.mlp, layer.input_layernorm, layer.self_attn)
    is_merged = type(layer.self_attn.q_proj).__name__ == "MergedLinear"
    assert (*("forward" in vars(part) for part in parts), is_merged) == expected


@pytest.mark.parametrize(
    ("name", "num_layers", "num_fused"),
    [
        ("llama", 1, 1),  # a stack
        ("qwen2, sliding", 3, 3),  # each for itself: layers of two windows
        ("granite", 3, 0),  # residuals with a factor
        ("olmo2", 3, 0),  # norms behind attention and MLP
        ("cohere", 3, 0),  # attention and MLP of the same input
    ],
)
def test_sums_are_fused_in_layers_of_the_standard_form_alone(name: str, num_layers: int, num_fused: int) -> None:
    layers = optimize(make_model(name, torch.float32).to(DEVICE)).model.layers
    assert (len(layers), sum(forward_of(layer, FusedLayers) is not None for layer in layers)) == (num_layers, num_fused)


def test_layers_with_something_between_them_are_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", torch.float32).to(DEVICE)
    call = LlamaDecoderLayer.__call__
    monkeypatch.setattr(LlamaDecoderLayer, "__call__", lambda layer, x, **options: call(layer, x * 1.0, **options))
    assert len(optimize(model).model.layers) == 3


def test_layers_compute_by_their_own_code_what_the_kernels_do_not_know() -> None:
    stack: FusedLayers = optimize(make_model("llama", torch.bfloat16).to(DEVICE)).model.layers[0].forward
    stack.layers = [layer._replace(forward=lambda x, *_, **__: x + 1) for layer in stack.layers]
    x = noise(1, 2, 64, dtype=torch.float32)
    assert torch.equal(stack(x), x + 1 + 1 + 1)
    assert torch.equal(stack(x.bfloat16(), None), x.bfloat16() + 1 + 1 + 1)


def test_what_is_in_a_type_that_is_not_served_stays() -> None:
    model = make_model("llama", torch.float16).to(DEVICE)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    optimize(model)
    assert "forward" not in vars(norm)
    assert type(mlp.down_proj) is nn.Linear


def test_joined_products_keep_their_biases() -> None:
    model = make_model("qwen2", torch.float32).to(DEVICE)
    attention = model.model.layers[0].self_attn
    expected = [copy.deepcopy(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
    x = noise(1, 4, expected[0].in_features, dtype=torch.float32)
    optimize(model)
    for name, plain in zip(("q_proj", "k_proj", "v_proj"), expected, strict=True):
        close(getattr(attention, name)(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_are_those_of_two_kernels(dtype: torch.dtype) -> None:
    both, weight = noise(1, 14, 100, dtype=dtype), noise(100, dtype=dtype, seed=1)
    x, added = both[:, ::2], both[:, 1::2]  # strided
    total, normed = add_rms_norm(x, added, weight, 1e-6)
    close(total, x + added)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


def test_the_layers_of_a_llama_launch_a_quarter() -> None:
    models = [make_model("llama", torch.bfloat16).to(DEVICE) for _ in range(2)]
    optimize(models[1])
    assert len(models[1].model.layers) == 1  # a stack
    layers: list[Any] = models[0].model.layers
    x = noise(1, 1, layers[0].hidden_size, dtype=torch.bfloat16)
    tables = tuple(noise(1, 1, layers[0].self_attn.head_dim, dtype=torch.bfloat16) for _ in range(2))

    def run(model: Any) -> Tensor:
        out = x
        for layer in model.model.layers:
            out = layer(out, position_embeddings=tables)
        return out

    plain, fast = (launches(lambda model=model: run(model)) for model in models)
    assert len(plain) >= 34 * len(layers)
    product = "aten::linear"
    attention = [product, "rotate", "aten::scaled_dot_product_attention", product]
    layer = [*attention, "rms_norm", product, "silu_multiply", product]
    assert fast == [*(len(layers) * ["rms_norm", *layer]), "aten::add.Tensor"]


@pytest.mark.parametrize(
    ("has_triton", "exact", "expected"),
    [(True, "off", "cuda fused"), (False, "off", "cuda"), (True, "on", "cuda exact 9.0")],
)
def test_kv_of_fused_parts_is_told_apart(
    has_triton: bool, exact: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: object() if has_triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    model, config = make_model("llama", torch.float32).to(DEVICE), EngineConfig(model="m", exact=exact)
    assert loader._use_kernels(model, torch.device("cuda"), torch.float32, config) == expected
    assert ("forward" in vars(model.model.norm)) == has_triton


def test_without_triton_a_gpu_cannot_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="exact=on needs Triton's kernels on a GPU: install triton"):
        loader._use_kernels(nn.Module(), torch.device("cuda"), torch.float32, EngineConfig(model="m", exact="on"))


@pytest.mark.cluster  # much to interpret
@pytest.mark.skipif(DEVICE != "cpu", reason="an engine on a GPU has these parts anyway")
def test_an_engine_gives_the_same_tokens_with_them(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(length) for length in (1, 9, 40)]
    expected = generate(build_engine(), prompts)
    monkeypatch.setattr(loader, "_use_kernels", lambda module, *_: optimize(module) and "fused")
    assert generate(build_engine(), prompts) == expected
