"""Engines whose pool holds KV in fp8, by Triton's kernels: interpreted where there is no GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tandem.engine import model_check
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.engine import Engine
from tandem.engine.loader import load_model
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.engine.conftest import BuildEngine
from tests.engine.speculation import test_exactness
from tests.engine.test_engine import generate, make_prompt
from tests.engine.test_forced_runs import answers
from tests.engine.test_structured_output import make_engine
from tests.engine.test_tensor_parallel import two_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]  # much to interpret

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "triton"}
PROMPTS = [make_prompt(length) for length in (3, 30)]


@pytest.fixture
def build(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> BuildEngine:
    """Makes engines with KV in fp8, without the checks at start, which take minutes to interpret."""
    for check in ("check_attention", "check_model"):
        monkeypatch.setattr(model_check, check, lambda *_: None)
    monkeypatch.setattr(model_check, "has_independent_rows", lambda *_: True)
    return partial(build_engine, num_blocks=None, speculate="off", **FP8)


def test_tokens_are_those_of_plain_attention_over_rounded_kv(
    build: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one step, in chunks, and found in the cache."""
    engine = build()
    assert engine.kv.dtype is torch.float8_e4m3fn
    answers = generate(engine, PROMPTS, max_tokens=4)
    assert generate(engine, PROMPTS, max_tokens=4) == answers
    assert generate(build(max_num_batched_tokens=16), PROMPTS, max_tokens=4) == answers
    monkeypatch.setattr(model_check, "make_backend", lambda *_: ReferenceAttention())
    assert generate(build(), PROMPTS, max_tokens=4) == answers


@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 4), ("bfloat16", 2)])
def test_a_pool_of_one_size_holds_more_blocks(
    dtype: str, ratio: int, build: BuildEngine, build_engine: BuildEngine
) -> None:
    wide, narrow = build_engine(num_blocks=None, dtype=dtype), build(dtype=dtype)
    assert narrow.namespace != wide.namespace
    assert narrow.model.dtype is wide.model.dtype
    assert narrow.block_bytes * ratio == wide.block_bytes
    assert narrow.kv.num_blocks // ratio == wide.kv.num_blocks
    assert narrow.kv.shards[0].nbytes == narrow.kv.num_blocks * narrow.block_bytes


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))])
def test_neither_drafts_nor_preemptions_show(
    build: BuildEngine, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain attention: Triton's interpreter would take minutes for so many steps."""
    monkeypatch.setattr(ReferenceAttention, "long_context", 128)  # enough for the check at start
    monkeypatch.setattr(model_check, "make_backend", lambda *_: ReferenceAttention())
    monkeypatch.setattr(test_exactness, "make_engine", partial(make_engine, **FP8))
    test_exactness.predicted_requests_and_answers.cache_clear()  # those of other tests are in another type
    requests, expected = test_exactness.predicted_requests_and_answers(folder, seed)
    test_exactness.predicted_requests_and_answers.cache_clear()
    engine = make_engine(folder, **FP8, num_blocks=60, speculate="8")
    assert engine.kv.dtype is torch.float8_e4m3fn
    told = answers(engine, requests, random.Random(seed), 0.05)
    tokens, expected_tokens = ([[fact[0] for fact in facts] for facts in found] for found in (told, expected))
    assert tokens == expected_tokens  # plain attention rounds as its rows are cut, so log probabilities differ
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 10
    engine.close()


def test_kv_is_named_by_its_type_and_the_one_it_was_computed_in(model_folder: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(model_folder("llama")), device="cpu")
    kinds = [{"dtype": dtype, **more} for more in ({}, FP8) for dtype in ("float32", "bfloat16")]
    models = [load_model(replace(config, **kind)) for kind in kinds]
    fp8 = "torch.float8_e4m3fn of"
    expected = ["torch.float32", "torch.bfloat16", f"{fp8} torch.float32", f"{fp8} torch.bfloat16"]
    assert [model.kv_type for model in models] == expected


def test_a_block_is_copied_byte_for_byte(build: BuildEngine) -> None:
    """As for a fork that goes on writing."""
    kv = build().kv
    kv.shards[0].view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    before = kv.read([5]).view(torch.uint8).clone()
    kv.copy(5, 7)
    assert torch.equal(kv.read([7, 5]).view(torch.uint8), before.expand(2, *before.shape[1:]))


def test_two_ranks_answer_as_one(build: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plain attention: the ranks are threads, and Triton's interpreter is for one."""
    monkeypatch.setattr(model_check, "make_backend", lambda *_: ReferenceAttention())
    expected = generate(build(), PROMPTS, max_tokens=3)
    with two_ranks(build) as engine:
        assert [shard.dtype for shard in engine.kv.shards] == 2 * [torch.float8_e4m3fn]
        assert generate(engine, PROMPTS, max_tokens=3) == expected


@pytest.mark.slow  # minutes
def test_an_engine_starts_with_all_its_checks(build_engine: BuildEngine) -> None:
    engine = build_engine(num_blocks=None, **FP8)
    assert len(generate(engine, PROMPTS[:1], max_tokens=2)[0]) == 2


def test_the_check_at_start_sees_kv_that_is_rounded_otherwise(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.attention.reference.as_kv", lambda x, dtype: (x * 1.07).to(dtype))
    with pytest.raises(ConfigError, match="attention_backend=triton differs from plain attention by nan"):
        build_engine(num_blocks=None, **FP8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "kv_cache_dtype='fp8' has kernels for GPUs only; leave it out on a CPU"),
        ({"attention_backend": "fa3"}, "kv_cache_dtype='fp8' is not read by attention_backend='fa3'"),
        ({"attention_backend": "cpu"}, "kv_cache_dtype='fp8' is not read by attention_backend='cpu'"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", kv_cache_dtype="fp8", **settings)


def test_a_worker_without_a_gpu_refuses_it(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8 has kernels for GPUs only; leave it out on a CPU"):
        Engine(EngineConfig(model=str(model_folder("llama")), kv_cache_dtype="fp8"))
