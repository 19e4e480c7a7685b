"""The check at start of a model's paged logits: deep models round, wrong ones differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.loader import LoadedModel, load_model
from tandem.engine.model_check import check_model
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model so deep that roundings in bfloat16 change its logits by more than 0.1."""
    folder = tmp_path_factory.mktemp("deep")
    config = LlamaConfig(num_hidden_layers=64, vocab_size=500, initializer_range=0.2, dtype="bfloat16", **SIZES)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return load_model(EngineConfig(model=str(folder)))


class Wrong:
    """Attention with an error in one of its options."""

    name = "wrong"

    def __init__(self, **options: Any) -> None:
        self._right = CpuAttention(1)
        self._options = options
        self.long_context = self._right.long_context

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._right(*arguments, **(options | self._options))


def test_a_deep_model_may_round_more(deep: LoadedModel) -> None:
    check_model(deep, CpuAttention(1), 16)


@pytest.mark.parametrize("error", [{"scale": 0.3}, {"window": 4}, {"sinks": torch.zeros(4)}], ids=str)
def test_a_deep_model_that_attends_otherwise_is_refused(error: dict[str, Any], deep: LoadedModel) -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM cannot be served: its paged logits differ from its own by"
    ):
        check_model(deep, Wrong(**error), 16)
