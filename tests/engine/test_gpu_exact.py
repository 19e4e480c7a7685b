"""Products on a GPU whose rows do not depend on each other, under Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from tandem.engine import loader, model_check
from tandem.engine.engine import Engine
from tandem.engine.gpu import ops
from tandem.engine.gpu.optimize import ExactLinear, optimize, quantize_products
from tandem.engine.model_check import has_independent_rows
from tandem.engine.products import inexact_parts
from tandem.engine.quantization import QUANTIZED_DTYPES
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import generate, make_prompt
from tests.engine.test_optimize import make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 100), (64, 32), (200, 130)])
def test_a_row_of_a_product_is_the_same_among_any_others(
    num_in: int, num_out: int, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = noise(150, num_in, dtype=dtype), noise(num_out, num_in, dtype=dtype, seed=1)
    bias = noise(num_out, dtype=dtype)
    whole = ops.multiply(x[None], weight, bias)
    expected = nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(whole[0].float(), expected, atol=tolerance * num_in**0.5, rtol=tolerance)
    for first, end in ((0, 1), (149, 150), (37, 38), (3, 64), (10, 75), (0, 128)):
        assert torch.equal(ops.multiply(x[None, first:end], weight, bias), whole[:, first:end]), (first, end)


def test_a_product_takes_rows_that_are_strided_and_none() -> None:
    both, weight = noise(1, 5, 96, dtype=torch.float32), noise(7, 48, dtype=torch.float32, seed=1)
    part = both[..., 48:]
    assert torch.equal(ops.multiply(part, weight, None), ops.multiply(part.contiguous(), weight, None))
    turned = both.transpose(1, 2)[:, :, :3].contiguous().transpose(1, 2)[..., :48]
    assert torch.equal(ops.multiply(turned, weight, None), ops.multiply(turned.contiguous(), weight, None))
    assert ops.multiply(both[:, :0, :48], weight, None).shape == (1, 0, 7)


@pytest.mark.parametrize("agrees", [True, False])
def test_wide_tiles_are_used_only_where_they_give_the_same_bits(agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = ops._multiply
    monkeypatch.setattr(ops, "_multiply", lambda *arguments: used.append(arguments[-1]) or original(*arguments))
    monkeypatch.setattr(ops, "wide_tile_agrees", lambda *_: agrees)
    x, weight = noise(65, 16, dtype=torch.bfloat16), noise(8, 16, dtype=torch.bfloat16, seed=1)
    ops.multiply(x, weight, None)
    ops.multiply(x[:64], weight, None)
    narrow = ops.narrow_tile(8, torch.bfloat16)
    assert used == [ops.WIDE_TILE if agrees else narrow, narrow]


@pytest.mark.parametrize("num_out", [300, 8192, 8193, 100_000])
def test_wide_tiles_are_compared_with_those_that_a_product_of_this_width_uses(
    num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(ops, "_multiply", lambda rows, *rest: used.append(rest[-1]) or rows)
    assert ops.wide_tile_agrees.__wrapped__(num_out, 16, torch.bfloat16, torch.bfloat16, torch.device(DEVICE))
    assert set(used) == {ops.narrow_tile(num_out, torch.bfloat16), ops.WIDE_TILE}


@pytest.mark.cluster
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe", "gpt2"])
def test_logits_of_a_model_do_not_depend_on_other_rows(family: str) -> None:
    plain, model = (
        make_model(family, torch.float32).to(DEVICE),
        optimize(make_model(family, torch.float32).to(DEVICE), is_exact=True),
    )
    assert inexact_parts(model) == []
    ids = torch.arange(3, 20, device=DEVICE)
    hidden = lambda module, tokens: module(input_ids=tokens[:, None], use_cache=False).logits[:, 0]  # noqa: E731
    with torch.inference_mode():
        together, expected = hidden(model, ids), hidden(plain, ids)
        torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
        for row in (0, 8, 16):
            assert torch.equal(hidden(model, ids[row : row + 1])[0], together[row])


def test_rows_that_depend_on_each_other_are_seen(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(EngineConfig(model=str(model_folder("llama")), device="cpu", pool_bytes=1 << 20))
    model, backend = engine.model, engine.runner.backend
    assert has_independent_rows(model, backend, 16)
    original = model.module.lm_head.forward
    noisy = lambda x: original(x) * (1 + 1e-6 * x.shape[-2])  # noqa: E731
    monkeypatch.setattr(model.module.lm_head, "forward", noisy)
    assert not has_independent_rows(model, backend, 16)


@pytest.mark.parametrize("differs", [lambda num_rows: num_rows == 1, lambda num_rows: num_rows > 64])
def test_steps_of_one_row_and_of_wide_tiles_are_checked_on_any_device(
    differs: Callable[[int], bool],
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = nn.functional.embedding
    monkeypatch.setattr(
        nn.functional, "embedding", lambda ids, *rest: original(ids, *rest) + 1e-4 * differs(ids.shape[-1])
    )
    config: Any = {"model": str(model_folder("llama")), "device": "cpu", "pool_bytes": 1 << 20}
    assert Engine(EngineConfig(**config)).speculator is None
    assert "logits of LlamaForCausalLM in torch.float32 depend on the other rows of a step, so last bits" in caplog.text
    with pytest.raises(ConfigError, match=r"exact=on cannot be kept: logits of LlamaForCausalLM in torch\.float32"):
        Engine(EngineConfig(**config, exact="on"))


def test_what_cannot_be_exact_is_refused_by_name(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"exact='on' cannot be kept by attention_backend='fa3'"):
        EngineConfig(model="m", exact="on", attention_backend="fa3")
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module, **_: None)  # nothing is replaced
    config: Any = {"model": str(model_folder("llama")), "device": "cpu", "pool_bytes": 1 << 20}
    Engine(EngineConfig(**config))
    with pytest.raises(ConfigError, match=r"exact=on cannot be kept: products of .*Linear.* are not known here"):
        Engine(EngineConfig(**config, exact="on"))


@pytest.mark.cluster  # much to interpret
@pytest.mark.timeout(400)
@pytest.mark.skipif(DEVICE != "cpu", reason="`make gpu-check` has it")
@pytest.mark.parametrize(
    "weights", ["as-loaded", *(pytest.param(kind, marks=pytest.mark.slow) for kind in QUANTIZED_DTYPES)]
)
def test_tokens_of_an_engine_depend_on_nothing_beside_them(
    weights: str, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use_kernels(module: nn.Module, *_: Any) -> str:
        if weights == "as-loaded":
            optimize(module, is_exact=True)
        else:
            quantize_products(module, QUANTIZED_DTYPES[weights], torch.device("cpu"), is_exact=True)
        return "exact"

    monkeypatch.setattr(loader, "_use_kernels", use_kernels)
    prompts = [[5, 6, 7] * 4, *(make_prompt(length) for length in (1, 20))]
    monkeypatch.setattr(model_check, "has_independent_rows", lambda *_: True)  # it takes long to interpret
    options: dict[str, Any] = {"dtype": "bfloat16"}
    engine = build_engine(**options, speculate="auto")
    assert engine.model.is_exact
    assert engine.speculator is not None
    together = generate(engine, prompts, max_tokens=6)
    cut = build_engine(**options, max_num_batched_tokens=8, max_num_seqs=2, speculate="off")
    assert [generate(cut, [prompt], max_tokens=6)[0] for prompt in prompts] == together


def test_an_exact_layer_says_so() -> None:
    linear = nn.Linear(8, 4)
    assert inexact_parts(nn.Sequential(linear)) == ["Linear"]
    assert inexact_parts(nn.Sequential(ExactLinear([linear]))) == []
