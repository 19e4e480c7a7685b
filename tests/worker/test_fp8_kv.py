"""KV in fp8 between workers. What computes it is plain attention in the place of Triton's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tandem.protocol.config import TransferConfig, WorkerConfig
from tandem.protocol.errors import ConfigError, ServingError
from tandem.protocol.messages import Role
from tandem.worker.assembly import assemble
from tests.support.cluster_harness import Oracle, engine_config, make_prompt, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("plain_attention")]

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "triton", "speculate": "off"}


async def test_a_pair_answers_as_one_engine_does(tiny_model: Path) -> None:
    """With checksums; `wire_codec=auto` sends such KV as it is."""
    prompts = [make_prompt(length, length) for length in (40, 70, 300)]
    async with running_cluster(tiny_model, engine=FP8) as cluster:
        for name in "pd":
            parts = cluster.worker(name).parts
            assert parts.engine.kv.dtype is torch.float8_e4m3fn
            assert parts.compatibility["kv_dtype"] == "torch.float8_e4m3fn of torch.float32"
            assert parts.prefill.writes._wire is None
        oracle = Oracle(tiny_model, **FP8)
        for prompt in prompts:
            answer = await cluster.generate(prompt, max_tokens=8, ignore_eos=True)
            assert answer.token_ids == oracle.answer(prompt, max_tokens=8, ignore_eos=True)
        assert cluster.flow.num_handoffs == len(prompts)
        await cluster.becomes_idle()


async def test_it_is_not_shared_with_workers_whose_kv_is_not_rounded(tiny_model: Path) -> None:
    with pytest.raises(ServingError, match="cannot join: namespace is"):
        async with running_cluster(tiny_model, overrides={"d": FP8}) as cluster:
            await cluster.generate(make_prompt(20))


def test_it_is_never_packed_for_its_way(tiny_model: Path) -> None:
    transfer = TransferConfig(transport="in_process", wire_codec="exact")
    config = WorkerConfig(worker_id="p", role=Role.PREFILL, engine=engine_config(tiny_model, **FP8), transfer=transfer)
    with pytest.raises(ConfigError, match=r"codec 'exact' is for KV in bfloat16.* torch.float8_e4m3fn; use raw"):
        assemble(config)
