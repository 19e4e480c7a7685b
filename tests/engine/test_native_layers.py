"""Layers of the standard form run in one native call each, and give the bits of their own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.interface import ATTENTION_NAME, PagedStep, register
from tandem.engine.cpu.optimize import optimize
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.native_layers import NativeLayers, use_native_layers
from tandem.engine.parts import MergedLinear, SharedProduct
from tests.support.architectures import SERVED
from tests.support.attention_case import Case

STANDARD = ("llama", "llama, tied embeddings and biases", "qwen2", "qwen2, sliding", "qwen3", "mistral", "ministral")
OTHERS = ("gemma2", "gemma3", "phi", "cohere", "mixtral", "olmo2", "gpt2", "granite")


def make_layers(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """The optimized layers of a model, whose attention is ours."""
    torch.manual_seed(0)
    register()
    recipe = SERVED[name]
    config = getattr(transformers, recipe[0])(**(recipe[1] | changes))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05)
    return optimize(model.to(dtype).eval())


def num_native(model: Any) -> int:
    with torch.inference_mode():
        return use_native_layers(model)


@pytest.mark.parametrize("name", STANDARD)
def test_layers_of_the_standard_form_are_recognised(name: str, cpu_dtype: torch.dtype) -> None:
    model = make_layers(name, cpu_dtype)
    assert num_native(model) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", [name for name in OTHERS if name in SERVED])
def test_other_layers_keep_their_own_code(name: str) -> None:
    assert num_native(make_layers(name, torch.float32)) == 0


class Steps:
    """Forwards of one layer over chunks of sequences, each set of chunks over a pool of its own."""

    def __init__(self, layer: Any, dtype: torch.dtype, lengths: list[int]) -> None:
        attention, config = layer.self_attn, layer.self_attn.config
        self.layer = layer
        self.case = Case(
            lengths,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            dtype=dtype,
        )
        generator = torch.Generator().manual_seed(1)
        self.x = [torch.randn(length, config.hidden_size, generator=generator).to(dtype) for length in lengths]
        angles = torch.rand(max(lengths), attention.head_dim // 2, generator=generator).repeat(1, 2)
        self.tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(self, forward: Any, pool: Tensor, chunks: list[tuple[int, int, int]], num_threads: int = 1) -> list[Tensor]:
        """One step over `chunks` of (sequence, start, end)."""
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        cos, sin = (table[positions].unsqueeze(0) for table in self.tables)
        x = torch.cat([self.x[i][start:end] for i, start, end in chunks]).unsqueeze(0)
        with (
            torch.inference_mode(),
            PagedStep(CpuAttention(num_threads), self.case.context(pool, chunks), lambda: None),
        ):
            out: Tensor = forward(x, position_embeddings=(cos, sin))
        return list(out[0].split([end - start for _, start, end in chunks]))


def test_outside_an_engine_step_layers_run_their_own_code() -> None:
    model = make_layers("llama", torch.float32)
    ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation(ATTENTION_NAME)
        assert num_native(model) == model.config.num_hidden_layers
        model.set_attn_implementation("eager")
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_a_layer_that_gives_something_else_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_layers("llama", torch.float32)
    compute = NativeLayers.compute
    monkeypatch.setattr(NativeLayers, "compute", lambda *arguments: compute(*arguments) * 1.0001)
    assert num_native(model) == 0


def test_a_window_may_change_after_the_start(cpu_dtype: torch.dtype) -> None:
    layer = make_layers("mistral", cpu_dtype).model.layers[0]
    own = layer.forward
    assert num_native(layer) == 1
    layer.self_attn.sliding_window = 5
    steps = Steps(layer, cpu_dtype, [60])
    expected = steps.run(own, steps.case.new_pool(0.0), steps.case.whole())
    assert torch.equal(steps.run(layer.forward, steps.case.new_pool(0.0), steps.case.whole())[0], expected[0])


@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_width_than_keys_keep_the_layers_own_code(value_dim: int) -> None:
    """The native call reads memory by the shapes of the standard form, so none of another shape may reach it."""
    layer = make_layers("llama", torch.float32, num_key_value_heads=4).model.layers[0]
    attention, hidden = layer.self_attn, layer.input_layernorm.weight.numel()
    heads = attention.config.num_attention_heads
    sizes = [heads * attention.head_dim] * 2 + [heads * value_dim]
    product = SharedProduct(PackedLinear([nn.Linear(hidden, size, bias=False) for size in sizes]))
    for idx, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(attention, name, MergedLinear(product, idx))
    attention.o_proj = PackedLinear([nn.Linear(heads * value_dim, hidden, bias=False)])
    assert num_native(layer) == 0


def test_a_call_by_position_takes_the_layers_own_code() -> None:
    layer = make_layers("llama", torch.float32).model.layers[0]
    own = layer.forward
    assert num_native(layer) == 1
    steps = Steps(layer, torch.float32, [9])

    def by_position(x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Any:
        return layer.forward(x, None, None, None, False, position_embeddings)

    expected = steps.run(own, steps.case.new_pool(0.0), steps.case.whole())
    assert torch.equal(steps.run(by_position, steps.case.new_pool(0.0), steps.case.whole())[0], expected[0])


class _Between(nn.Module):
    """A model that may do something of its own between its layers."""

    def __init__(self, model: Any, factor: float) -> None:
        super().__init__()
        self.layers = model.layers
        self._embed, self._rotary, self._factor = model.embed_tokens, model.rotary_emb, factor

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        x = self._embed(input_ids)
        tables = self._rotary(x, position_ids)
        for layer in self.layers:
            x = layer(x, position_embeddings=tables) * self._factor
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=x)


@pytest.mark.parametrize(("factor", "num_calls"), [(1.0, 1), (0.5, 3)])
def test_only_layers_with_nothing_between_them_become_one_call(factor: float, num_calls: int) -> None:
    model = _Between(make_layers("llama", torch.float32).model, factor)
    assert num_native(model) == 3
    assert len(model.layers) == num_calls


def test_layers_of_several_kinds_of_attention_are_calls_of_their_own() -> None:
    model = make_layers("qwen2, sliding", torch.float32).model
    assert num_native(model) == len(model.layers) == 3


@pytest.mark.parametrize("name", ["llama", "llama, tied embeddings and biases", "mistral", "qwen3"])
def test_all_layers_in_one_call_give_the_bits_of_the_models_own_code(name: str, cpu_dtype: torch.dtype) -> None:
    model = make_layers(name, cpu_dtype).model
    steps = Steps(model.layers[0], cpu_dtype, lengths := [1, 17, 70, 200])
    num_layers = len(model.layers)
    ids = [torch.arange(length) % 190 for length in lengths]

    def run(chunks: list[tuple[int, int, int]], pool: Tensor, num_threads: int) -> list[Tensor]:
        tokens = torch.cat([ids[i][start:end] for i, start, end in chunks])
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        context = steps.case.context(pool, chunks)
        with torch.inference_mode(), PagedStep(CpuAttention(num_threads), context, lambda: None):
            output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return list(output.last_hidden_state[0].split([end - start for _, start, end in chunks]))

    def new_pool() -> Tensor:
        return steps.case.new_pool(0.0).repeat(1, num_layers, 1, 1, 1, 1)

    pools = new_pool(), new_pool()
    expected = run(steps.case.whole(), pools[0], 1)
    assert num_native(model) == num_layers
    assert len(model.layers) == 1
    actual = run(steps.case.whole(), pools[1], 2)
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(*pools)
    for size in (1, 7, 33, 64):
        pool = new_pool()
        pieces = [run([(2, start, min(start + size, 70))], pool, 2)[0] for start in range(0, 70, size)]
        assert torch.equal(torch.cat(pieces), expected[2]), f"chunks of {size}"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_other_parts_work_between_layers_and_their_errors_are_told(num_threads: int) -> None:
    model = make_layers("llama", torch.float32).model
    steps = Steps(model.layers[0], torch.float32, [40])
    assert num_native(model) == 3
    pool = steps.case.new_pool(0.0).repeat(1, 3, 1, 1, 1, 1)
    ids = torch.arange(40)[None]
    calls: list[int] = []

    def run(between_layers: Callable[[], None]) -> None:
        context = steps.case.context(pool, steps.case.whole())
        with torch.inference_mode(), PagedStep(CpuAttention(num_threads), context, between_layers):
            model(input_ids=ids, position_ids=ids, use_cache=False)

    def fail() -> None:
        raise ConnectionError("a peer has gone")

    run(lambda: calls.append(1))
    assert 1 <= len(calls) <= 3
    with pytest.raises(ConnectionError, match="a peer has gone"):
        run(fail)
