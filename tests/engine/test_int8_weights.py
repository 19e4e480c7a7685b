"""A model whose linear layers keep int8 weights: exact against itself, close to the loaded one, not mixed with it."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.loader import load_model
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.conftest import BuildEngine


def test_all_but_the_logits_are_rounded_and_blocks_are_never_shared(build_engine: BuildEngine) -> None:
    rounded, exact = build_engine(weights="int8"), build_engine()
    assert rounded.namespace != exact.namespace
    assert rounded.model.kernels == f"{exact.model.kernels} int8"
    head = rounded.model.module.lm_head
    assert isinstance(head, PackedLinear)
    assert head.packed.scales is None
    layers = rounded.model.module.model.layers[0].layers  # all are one call
    assert {layer.self_attn.o_proj.packed.packed.dtype for layer in layers} == {torch.int8}


def test_int8_weights_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.loader.resolve_device", lambda *_: torch.device("cuda"))
    with pytest.raises(ConfigError, match="weights=int8 has kernels for CPUs only"):
        load_model(EngineConfig(model="/somewhere", device="cuda", weights="int8"))
