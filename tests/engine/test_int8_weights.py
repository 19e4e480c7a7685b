"""A model whose linear layers keep int8 weights: exact against itself, close to the loaded one, not mixed with it."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.cpu.packed_linear import PackedLinear
from tests.engine.conftest import BuildEngine
from tests.engine.test_tensor_parallel import two_ranks

pytestmark = pytest.mark.cpu_engine("its packed weights are looked at")


def test_all_but_the_logits_are_rounded_and_blocks_are_never_shared(build_engine: BuildEngine) -> None:
    rounded, exact = build_engine(weights="int8"), build_engine()
    assert rounded.namespace != exact.namespace
    assert rounded.model.kernels == f"{exact.model.kernels} int8"
    head = rounded.model.module.lm_head
    assert isinstance(head, PackedLinear)
    assert head.packed.scales is None
    layers = rounded.model.module.model.layers[0].layers  # all are one call
    assert {layer.self_attn.o_proj.packed.packed.dtype for layer in layers} == {torch.int8}


@pytest.mark.cluster
def test_the_logits_of_two_ranks_are_not_rounded_either(build_engine: BuildEngine) -> None:
    with two_ranks(build_engine, weights="int8") as engine:
        assert engine.model.module.lm_head.linear.packed.scales is None
