from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.cli.plan import read_geometry
from tandem.engine.attention.interface import ATTENTION_NAME, register
from tandem.engine.kv_geometry import measure_kv
from tandem.engine.loader import load_model
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.support.architectures import SERVED, WRAPPERS, Family, auto_class, load_plain


@pytest.fixture
def llama(model_folder: Callable[[str], Path]) -> Any:
    config = EngineConfig(model=str(model_folder("llama")), dtype="float32", device="cpu")
    return load_model(config).module


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", (3, 2, 16)),
        ("qwen3", (3, 2, 32)),
        ("deepseek_v3", (3, 4, 24)),  # keys of 24 elements, values of 16; its config's head_dim is 8
        ("gpt_bigcode", (2, 1, 16)),
        ("gemma4", (3, 2, 512)),  # the widest layer's
        ("llava", (3, 2, 16)),
    ],
)
def test_the_geometry_is_that_of_what_layers_attend_with(
    name: str, expected: tuple[int, int, int], model_folder: Callable[[str], Path]
) -> None:
    model = load_model(EngineConfig(model=str(model_folder(name)), dtype="float32", device="cpu"))
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == expected
    assert model.dtype is torch.float32


@pytest.mark.parametrize("family", [*SERVED.values(), *WRAPPERS.values()], ids=[*SERVED, *WRAPPERS])
def test_a_plan_reads_the_same_bytes_from_the_config_alone(family: Family, tmp_path: Path) -> None:
    register()
    config = getattr(transformers, family.config)(**family.settings)
    config.save_pretrained(tmp_path)
    measured = measure_kv(auto_class(config).from_config(config, dtype=torch.bfloat16).eval())
    token_bytes = measured.num_layers * 2 * measured.num_kv_heads * measured.head_dim * measured.dtype.itemsize
    geometry = read_geometry(str(tmp_path))
    kept = geometry.kv_bytes(1 << 20) / (1 << 20)
    assert geometry.pool_token_elements * measured.dtype.itemsize == token_bytes
    assert 0 < kept * 2 / geometry.kv_element_bytes <= token_bytes


def test_attention_is_paged_again_afterwards(llama: Any) -> None:
    assert measure_kv(llama).num_layers == 3
    assert llama.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(RuntimeError, match="outside an engine step"):
        llama(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.cpu_engine("its layers are one call, which is looked into")
def test_a_layer_that_attends_twice_is_refused(llama: Any) -> None:
    llama.model.layers[0].layers[1].self_attn.layer_idx = 0
    with pytest.raises(ConfigError, match=r"attends in layers \[0, 0, 2\]"):
        measure_kv(llama)


@pytest.mark.cpu_engine("its layers are one call, which is looked into")
def test_a_layer_that_sees_later_tokens_is_refused(llama: Any) -> None:
    llama.model.layers[0].layers[1].self_attn.is_causal = False
    with pytest.raises(ConfigError, match="LlamaAttention attends to later tokens"):
        measure_kv(llama)


def test_kv_in_float16_is_refused(model_folder: Callable[[str], Path]) -> None:
    register()
    with pytest.raises(ConfigError, match=r"its KV is torch\.float16"):
        measure_kv(load_plain(model_folder("llama")).half())
