"""Weights in 8 bits on a GPU, under Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton")

from tandem.engine import loader
from tandem.engine.gpu import ops
from tandem.engine.gpu.optimize import QuantizedLinear, quantize_products
from tandem.engine.products import inexact_parts
from tandem.engine.quantization import QUANTIZED_DTYPES, quantize
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.test_gpu_exact import DEVICE, noise
from tests.engine.test_optimize import make_model

LARGEST = {"int8": 127, "fp8": 448}
every_kind = pytest.mark.parametrize("kind", QUANTIZED_DTYPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def dequantized(weight: Tensor, kind: str) -> Tensor:
    elements, scales = quantize(weight, QUANTIZED_DTYPES[kind])
    return elements.float() * scales.unsqueeze(-1)


@every_kind
@every_dtype
def test_a_weight_is_off_by_half_a_step_of_its_row(kind: str, dtype: torch.dtype) -> None:
    weight = noise(6, 500, dtype=dtype) * torch.logspace(-30, 30, 6, device=DEVICE).to(dtype).unsqueeze(1)
    weight[2] = 0
    weight[3, 1:] = 0
    elements, scales = quantize(weight, QUANTIZED_DTYPES[kind])
    assert elements.dtype is QUANTIZED_DTYPES[kind]
    largest = torch.full((6,), float(LARGEST[kind]), device=DEVICE)
    largest[2] = 0
    assert torch.equal(elements.float().abs().amax(1), largest)
    steps = (weight.float() / scales.clamp_min(1e-37).unsqueeze(1)).abs()
    half = torch.full_like(steps, 0.5) if kind == "int8" else (steps / 16).clamp_min(2.0**-10)  # of 3 bits of fraction
    wrong = (dequantized(weight, kind) - weight.float()).abs()
    assert bool((wrong <= half * 1.0001 * scales.unsqueeze(1)).all())


@every_dtype
def test_all_values_of_fp8_are_widened_exactly(dtype: torch.dtype) -> None:
    weight = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).unsqueeze(1)
    is_number = ~weight.float().isnan()[:, 0]
    assert is_number.sum() == 254
    product = ops.multiply(torch.ones(1, 1, dtype=dtype, device=DEVICE), weight, None, torch.ones(256, device=DEVICE))
    assert torch.equal(product[0, is_number].float(), weight.float()[is_number, 0])


@every_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 3), (64, 32), (200, 130)])
def test_a_row_is_that_of_the_dequantized_weight_among_any_others(
    num_in: int, num_out: int, dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    x, weight = noise(150, num_in, dtype=dtype), noise(num_out, num_in, dtype=dtype, seed=1)
    elements, scales = quantize(weight, QUANTIZED_DTYPES[kind])
    bias = noise(num_out, dtype=dtype)
    whole = ops.multiply(x[None], elements, bias, scales)
    expected = nn.functional.linear(x.double(), dequantized(weight, kind).double(), bias.double()).float()
    torch.testing.assert_close(whole[0].float(), expected, atol=tolerance * num_in**0.5, rtol=tolerance)
    for first, end in ((0, 1), (149, 150), (37, 38), (3, 64), (10, 75), (0, 128)):
        assert torch.equal(ops.multiply(x[None, first:end], elements, bias, scales), whole[:, first:end]), (first, end)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy computes what is interpreted
@every_kind
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_an_output_that_is_not_finite_stays_so_and_leaves_the_others(wrong: float, kind: str) -> None:
    x, weight = noise(4, 40, dtype=torch.float32), noise(5, 40, dtype=torch.float32, seed=1)
    expected = ops.multiply(x, *_parts(weight, kind))
    weight[2, 7] = wrong
    weight[4] = 0
    product = ops.multiply(x, *_parts(weight, kind))
    assert not product[:, 2].isfinite().any()
    assert torch.equal(product[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    assert not product[:, 4].any()


def _parts(weight: Tensor, kind: str) -> tuple[Tensor, None, Tensor]:
    elements, scales = quantize(weight, QUANTIZED_DTYPES[kind])
    return elements, None, scales


def round_weights(model: Any, kind: str) -> None:
    """Give each product of the plain model the weight that it has in 8 bits."""
    for module in model.model.modules():  # without the head
        if isinstance(module, nn.Linear):
            module.weight.copy_(dequantized(module.weight, kind))
        for name in ("gate_up_proj", "down_proj"):
            experts = getattr(module, name, None)
            if isinstance(experts, nn.Parameter):
                experts.copy_(torch.stack([dequantized(expert, kind) for expert in experts]))


@pytest.mark.cluster
@every_kind
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", ""])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_a_model_computes_with_rounded_weights_and_its_own_head_and_routers(
    family: str, is_exact: bool, kind: str
) -> None:
    plain, model = (make_model(family, torch.float32).to(DEVICE) for _ in "12")
    quantize_products(model, QUANTIZED_DTYPES[kind], torch.device(DEVICE), is_exact=is_exact)
    assert inexact_parts(model) == [] or not is_exact
    ids = torch.arange(3, 20, device=DEVICE)
    hidden = lambda module, tokens: module(input_ids=tokens[:, None], use_cache=False).logits[:, 0]  # noqa: E731
    with torch.inference_mode():
        round_weights(plain, kind)
        together = hidden(model, ids)
        torch.testing.assert_close(together, hidden(plain, ids), atol=1e-4, rtol=1e-4)
        for row in (0, 16) if is_exact else ():
            assert torch.equal(hidden(model, ids[row : row + 1])[0], together[row])


@every_kind
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", ""])
def test_a_tied_head_shares_the_memory_of_the_embeddings(is_exact: bool, kind: str) -> None:
    model = make_model("llama", torch.bfloat16, tie_word_embeddings=True).to(DEVICE)
    quantize_products(model, QUANTIZED_DTYPES[kind], torch.device(DEVICE), is_exact=is_exact)
    assert not isinstance(model.lm_head, QuantizedLinear)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@every_kind
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_only_one_layer_at_a_time_has_its_original_weights_on_the_device(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family, torch.bfloat16, num_hidden_layers=4).to(DEVICE)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 4)
    originals = {layer: [storage_of(weight) for weight in weights_of(layer)] for layer in layers}
    del layers
    placed: list[StorageWeakRef] = []
    most = 0
    place = nn.Module.to

    def place_and_note(module: nn.Module, device: torch.device) -> nn.Module:
        assert all(original.expired() for original in placed)
        placed.extend(originals.pop(module, []))
        return place(module, device)

    def quantize_and_count(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        nonlocal most
        most = max(most, sum(not original.expired() for original in placed))
        return quantize(weight, dtype)

    monkeypatch.setattr(nn.Module, "to", place_and_note)
    monkeypatch.setattr("tandem.engine.gpu.optimize.quantize", quantize_and_count)
    quantize_products(model, QUANTIZED_DTYPES[kind], torch.device(DEVICE), is_exact=False)
    assert originals == {}
    assert all(original.expired() for original in placed)
    assert most == len(placed) // 4


def test_what_a_quantizer_has_placed_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("`.to` is not supported for this model")

    model = make_model("llama", torch.float32).to(DEVICE)
    model.hf_quantizer = object()
    monkeypatch.setattr(nn.Module, "to", refuse)
    quantize_products(model, torch.int8, torch.device(DEVICE), is_exact=False)
    assert isinstance(model.model.layers[0].self_attn.o_proj, QuantizedLinear)


def weights_of(layer: nn.Module) -> list[Tensor]:
    return [weight for weight in layer.parameters() if weight.dim() > 1 and min(weight.shape[-2:]) > 8]  # no routers


def storage_of(weight: Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())


@every_kind
def test_parts_of_a_type_that_is_not_served_stay(kind: str) -> None:
    model = make_model("llama", torch.float16).to(DEVICE)
    quantize_products(model, QUANTIZED_DTYPES[kind], torch.device(DEVICE), is_exact=False)
    assert {type(module) for module in model.modules() if "Linear" in type(module).__name__} == {nn.Linear}


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests' device be a GPU of Hopper's kind for what is loaded."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    place = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda module, device: place(module, DEVICE))


@every_kind
@pytest.mark.parametrize(("exact", "expected"), [("off", "cuda fused"), ("on", "cuda exact 9.0")])
def test_kv_of_weights_in_8_bits_is_told_apart(
    kind: Any, exact: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    model = make_model("llama", torch.float32).to(DEVICE)
    config = EngineConfig(model="m", exact=exact, weights=kind)
    assert loader._use_kernels(model, torch.device("cuda"), torch.float32, config) == f"{expected} {kind}"
    assert isinstance(model.model.layers[0].self_attn.o_proj, QuantizedLinear)


@pytest.mark.parametrize("exact", ["off", "on"])
def test_only_a_model_that_was_asked_to_be_exact_may_draft(
    exact: Any, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products of its layers are exact kernels either way; its head is not."""
    monkeypatch.setattr(loader, "resolve_device", lambda *_: torch.device("cuda"))
    stand_in(monkeypatch)
    config = EngineConfig(model=str(model_folder("llama")), dtype="float32", exact=exact, weights="int8")
    assert loader.load_model(config).is_exact == (exact == "on")


@every_kind
def test_without_triton_weights_in_8_bits_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"weights={kind} needs Triton's kernels on a GPU: install triton"):
        loader._use_kernels(nn.Module(), torch.device("cuda"), torch.float32, EngineConfig(model="m", weights=kind))


def test_fp8_weights_on_a_cpu_are_refused_by_name(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="weights=fp8 has kernels for GPUs only; use weights=int8 on a CPU"):
        loader.load_model(EngineConfig(model=str(model_folder("llama")), device="cpu", weights="fp8"))
