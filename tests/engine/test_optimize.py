from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_rotary

from tandem.engine.cpu import matmul
from tandem.engine.cpu.ops import make_rms_norm, make_rotate, make_silu_multiply
from tandem.engine.cpu.optimize import optimize
from tandem.engine.products import _first, inexact_parts
from tandem.engine.replacement import agrees, rotary_agrees
from tests.support.architectures import SERVED

DTYPES = [torch.float32, torch.bfloat16]


def make_model(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(0)
    recipe = SERVED[name]
    model = AutoModelForCausalLM.from_config(getattr(transformers, recipe[0])(**(recipe[1] | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.2
    return model.to(dtype).eval()


# Those whose parts differ. Of every other family tests/engine/test_engine.py compares the tokens of optimized models.
DISTINCT = ("llama", "gemma2", "phi", "cohere", "qwen2_moe", "glm4_moe")


@pytest.mark.parametrize(
    "name", [*DISTINCT, *(pytest.param(name, marks=pytest.mark.slow) for name in SERVED if name not in DISTINCT)]
)
def test_an_optimized_model_gives_the_same_logits(name: str) -> None:
    model = make_model(name, torch.float32)
    ids = torch.randint(0, 200, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        actual = optimize(model)(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def replaced(name: str, dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Whether the first layer's MLP, its input norm and its rotary embedding were replaced."""
    layer = optimize(make_model(name, dtype)).model.layers[0]
    return tuple("forward" in vars(part) for part in (layer.mlp, layer.input_layernorm, layer.self_attn))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", (True, True, True)),
        ("gemma2", (False, False, True)),  # GELU gate, (1 + weight) norm
        ("phi", (False, False, True)),  # no gate, LayerNorm; partial rotary is recognised at run time
        ("cohere", (True, False, False)),  # interleaved rotary
    ],
)
def test_only_what_agrees_is_replaced(name: str, expected: tuple[bool, bool, bool], dtype: torch.dtype) -> None:
    assert replaced(name, dtype) == expected


def test_a_probe_tells_rotary_layouts_apart() -> None:
    rotate = make_rotate()

    def candidate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    assert rotary_agrees(half_rotary, candidate)
    assert not rotary_agrees(interleaved_rotary, candidate)


def test_a_candidate_of_another_shape_or_with_an_error_does_not_agree() -> None:
    probe = torch.randn(1, 5, 8)
    assert agrees(nn.Identity(), lambda x: x, probe)
    assert not agrees(nn.Identity(), lambda x: x[..., :4], probe)
    assert not agrees(nn.Identity(), lambda x: x.missing, probe)
    assert not agrees(nn.Identity(), lambda x: x * 1.1, probe)


def test_a_norm_kept_in_float32_serves_bfloat16_inputs_its_own_way() -> None:
    norm = make_model("llama", torch.float32).model.norm
    plain = copy.deepcopy(norm)
    x = torch.randn(1, 3, 64).bfloat16()
    with torch.inference_mode():
        assert torch.equal(optimize(norm)(x), plain(x))


def test_original_weights_are_released() -> None:
    model = make_model("llama", torch.float32)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    originals = [weakref.ref(p.weight) for p in (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)]
    optimize(model)
    gc.collect()
    assert [original() for original in originals] == [None] * 4


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_nothing_is_packed_that_is_not_kept(name: str, is_int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights beside it in its slab would keep its memory."""
    taken: list[weakref.ref[Tensor]] = []
    take = matmul._memory.take

    def take_and_note(*size: Any) -> Tensor:
        memory = take(*size)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(matmul._memory, "take", take_and_note)
    model = optimize(make_model(name, torch.float32), is_int8=is_int8)
    gc.collect()
    assert len(taken) >= 4 * len(model.model.layers)
    assert sum(memory() is None for memory in taken) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 15, 16, 17, 96])
def test_kernels_agree_with_torch(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 7, dim, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(dim, generator=generator).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    torch.testing.assert_close(make_rms_norm()(x, weight, 1e-6), normed, atol=tolerance, rtol=tolerance)
    wide = torch.cat([x * 30, y], dim=-1)  # strided halves, as a merged product hands them over
    gated = nn.functional.silu(wide[..., :dim]) * wide[..., dim:]
    actual = make_silu_multiply()(wide[..., :dim], wide[..., dim:])
    torch.testing.assert_close(actual, gated, atol=tolerance, rtol=tolerance)


# Mixtures of experts.

# Wide enough for products to be blocked: the kernels of small ones have but one way.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "initializer_range": 0.08}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": WIDE,
    "qwen3_moe": {**WIDE, "num_experts": 8, "moe_intermediate_size": 128, "head_dim": 64},
    "olmoe": WIDE,
    "phimoe": WIDE,
    # Its router's sigmoid takes 32 values at a time, whatever row they are of: of fewer experts rows would differ.
    "glm4_moe": {**WIDE, "n_routed_experts": 32, "moe_intermediate_size": 128, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixtures_rows_are_independent(name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(name, dtype, **MIXTURES[name])
    x = torch.randn(1, 150, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        expected = _first(model.model.layers[0].mlp(x))
        mixture = optimize(model).model.layers[0].mlp
        whole = _first(mixture(x))
        torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)
        for size in (1, 2, 3, 16, 37, 64, 149):
            for start in (0, 150 - size):
                part = slice(start, start + size)
                assert torch.equal(_first(mixture(x[:, part])), whole[:, part]), f"rows {part}"
    assert list(mixture.experts.parameters()) == [], "packed"
    assert caplog.messages == []


class Odd(nn.Module):
    """A part of a kind of its own, with packed weights in a buffer or with a plain matrix."""

    def __init__(self, *, is_packed: bool) -> None:
        super().__init__()
        if is_packed:
            self.register_buffer("weight", torch.zeros(4, 4, dtype=torch.uint8))
        else:
            self.matrix = nn.Parameter(torch.eye(4))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_part_whose_products_are_not_known_is_named(caplog: pytest.LogCaptureFixture, is_packed: bool) -> None:
    optimize(nn.Sequential(nn.Linear(4, 4), Odd(is_packed=is_packed)))
    assert "products of Odd are not known" in caplog.text


def test_a_mask_is_no_weight() -> None:
    assert inexact_parts(optimize(make_model("gpt_bigcode", torch.float32))) == []


class Marked(nn.Parameter):
    """A weight of a kind of its own, as quantizers make them."""


def test_linear_layers_that_a_quantizer_has_changed_are_left_alone() -> None:
    hooked, patched, marked, packed = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_pre_hook(lambda *_: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    marked.weight = Marked(marked.weight.detach())
    packed.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    layers = [hooked, patched, marked, packed]
    assert [*optimize(nn.Sequential(*layers, nn.Linear(8, 8)))][:-1] == layers


def test_a_gated_mlp_that_clamps_what_is_large_is_left_alone() -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            gated = nn.functional.silu(self.gate_proj(x)).clamp(max=16.0)
            return self.down_proj(gated * self.up_proj(x).clamp(-16.0, 16.0))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    mlp, large = Clamping(), torch.randn(1, 3, 16) * 200
    with torch.inference_mode():
        expected = mlp(large)
        torch.testing.assert_close(optimize(mlp)(large), expected, rtol=1e-4, atol=1e-3)


def root_mean_square(x: Tensor, epsilon: float) -> Tensor:
    return (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


OTHER_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "epsilon outside the root": lambda x: x / (root_mean_square(x, 0.0) + 1e-6),
    "another epsilon": lambda x: x / root_mean_square(x, 1e-5),
    "centred": lambda x: (x - x.mean(-1, keepdim=True)) / root_mean_square(x - x.mean(-1, keepdim=True), 1e-6),
    "clamped": lambda x: x.clamp(-10, 10) / root_mean_square(x.clamp(-10, 10), 1e-6),
    "clamped variance": lambda x: x / root_mean_square(x, 0.0).clamp_min(0.1),
}


class OwnRMSNorm(nn.Module):
    def __init__(self, weight: Tensor, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps = 1e-6
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 2048])
def test_a_norm_of_another_formula_is_left_alone(dim: int, dtype: torch.dtype) -> None:
    weight = torch.ones(dim, dtype=dtype)
    assert "forward" in vars(optimize(OwnRMSNorm(weight, lambda x: x / root_mean_square(x, 1e-6))))
    taken = [name for name, norm in OTHER_NORMS.items() if "forward" in vars(optimize(OwnRMSNorm(weight, norm)))]
    assert taken == []


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_norm_with_one_factor_for_all_widths_is_left_alone(shape: tuple[int, ...]) -> None:
    norm = OwnRMSNorm(torch.full(shape, 1.5), lambda x: x / root_mean_square(x, 1e-6))
    x = torch.randn(1, 3, 33)
    with torch.inference_mode():
        expected = norm(x)
        assert torch.equal(optimize(norm)(x), expected)


class Gated(nn.Module):
    def __init__(self, dim: int, deviation: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(dim, dim) for _ in range(3))
        self._activation = activation
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "deviation"), [(64, 1.0), (256, 0.006), (33, 1e-4)])
def test_gates_are_told_apart_whatever_their_weights(dim: int, deviation: float, dtype: torch.dtype) -> None:
    functional = nn.functional
    others = (functional.gelu, functional.relu, functional.mish, functional.hardswish, functional.elu)
    clamped = (lambda x: functional.silu(x.clamp(max=7.0)), lambda x: functional.silu(x.clamp(max=100.0)))
    torch.manual_seed(0)
    assert "forward" in vars(optimize(Gated(dim, deviation, functional.silu).to(dtype)))
    taken = [one for one in (*others, *clamped) if "forward" in vars(optimize(Gated(dim, deviation, one).to(dtype)))]
    assert taken == []


@pytest.mark.parametrize(("batch", "dim"), [(2, 16), (1, 15)])
def test_heads_that_the_kernel_cannot_rotate_take_the_models_own_way(batch: int, dim: int) -> None:
    attention = optimize(make_model("llama", torch.float32)).model.layers[0].self_attn
    rotate = attention.forward.__func__.__globals__["apply_rotary_pos_emb"]
    q, k, cos, sin = (torch.randn(*shape, 5, dim) for shape in ((batch, 4), (batch, 2), (1,), (1,)))
    for actual, expected in zip(rotate(q, k, cos, sin), half_rotary(q, k, cos, sin), strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_attention_blocks_own_forward_is_kept() -> None:
    attention = make_model("llama", torch.float32).model.layers[0].self_attn
    attention.forward = lambda *_: "its own"
    assert optimize(attention)() == "its own"


def test_a_layer_that_is_called_again_reads_its_input_again() -> None:
    attention = make_model("llama", torch.float32).model.layers[0].self_attn
    plain, x = copy.deepcopy(attention), torch.randn(1, 3, 64)
    optimize(attention)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(attention.q_proj(x), plain.q_proj(x))
            x.mul_(2)  # as a buffer of fixed place gets its next contents
