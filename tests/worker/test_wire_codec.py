"""Packed KV between real workers: answers are those of one engine, and what cannot be packed goes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.config import EngineConfig, TransferConfig, WorkerConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tandem.worker.assembly import assemble
from tandem.worker.loop import Worker
from tests.support.cluster_harness import BLOCK_SIZE, ROUTER_KEYS, Cluster, Oracle, make_prompt, running_cluster
from tests.support.tiny_llama import save_tiny_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 256}
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate((40, 16 * BLOCK_SIZE, 200, 333, 450))]


def saved_share(cluster: Cluster) -> float:
    """Of the bytes that "p" sent to "d"."""
    [load] = cluster.worker("p").parts.prefill.writes.loads
    return load.num_saved_bytes / load.num_bytes


async def check_answers(cluster: Cluster, model: Path) -> None:
    oracle = Oracle(model, dtype="bfloat16")
    for prompt in PROMPTS:
        for sampling in ({}, {"temperature": 0.9, "seed": 11}):
            answer = await cluster.generate(prompt, max_tokens=12, ignore_eos=True, **sampling)
            assert answer.token_ids == oracle.answer(prompt, max_tokens=12, ignore_eos=True, **sampling)
    assert cluster.flow.num_handoffs == 2 * len(PROMPTS)
    await cluster.becomes_idle()


@pytest.mark.parametrize("checksums", ["off", "all"])
async def test_packed_pairs_answer_as_one_engine_does(tiny_model: Path, checksums: str) -> None:
    transfer = {"wire_codec": "exact", "checksums": checksums}
    async with running_cluster(tiny_model, engine=BFLOAT16, transfer=transfer) as cluster:
        await check_answers(cluster, tiny_model)
        assert 0.05 < saved_share(cluster) < 0.23
        # The router knows it from the next heartbeat.
        await eventually(lambda: cluster.sample("tandem_link_saved_bytes_total", worker="p", peer="d") > 0)


async def test_a_fast_link_is_left_alone(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, engine=BFLOAT16) as cluster:  # memory to memory
        for name in "pd":
            wire = cluster.worker(name).parts.prefill.writes._wire
            assert wire is not None, "auto is the default"
            wire.pack_block_s = wire.unpack_block_s = 1.0
        await check_answers(cluster, tiny_model)
        assert saved_share(cluster) == 0


async def test_a_slow_link_is_packed_once_its_speed_is_known(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, engine=BFLOAT16) as cluster:
        wire = cluster.worker("p").parts.prefill.writes._wire
        assert wire is not None
        wire.pays = lambda n, link_block_s, unpack_block_s: (  # type: ignore[method-assign]
            0 < link_block_s < 1 and 0 < unpack_block_s < 1 and wire.num_packed(n) < n
        )
        await check_answers(cluster, tiny_model)
        assert 0 < saved_share(cluster) < 0.2


async def test_a_peer_that_takes_no_packed_blocks_gets_none(tiny_model: Path) -> None:
    async with running_cluster(
        tiny_model, {"p": Role.PREFILL}, engine=BFLOAT16, transfer={"wire_codec": "exact"}
    ) as cluster:
        raw = WorkerConfig(
            worker_id="d",
            role=Role.DECODE,
            engine=cluster.worker("p").config.engine,
            transfer=TransferConfig(transport="in_process", wire_codec="raw"),
            router_key=cluster.worker("p").config.router_key,
        )
        await cluster.add(raw)
        await check_answers(cluster, tiny_model)
        assert saved_share(cluster) == 0


async def test_without_spare_blocks_nothing_is_packed_and_nothing_waits(tiny_model: Path) -> None:
    # Prompts of 29 blocks in a pool of 32: there is no room for packed ones beside them.
    small = {"p": {"num_blocks": 16}}  # of float32: twice as many of bfloat16
    transfer = {"wire_codec": "exact"}
    async with running_cluster(tiny_model, engine=BFLOAT16, transfer=transfer, overrides=small) as cluster:
        oracle = Oracle(tiny_model, dtype="bfloat16")
        for seed in range(3):
            prompt = make_prompt(455, seed)
            answer = await cluster.generate(prompt, max_tokens=5, ignore_eos=True)
            assert answer.token_ids == oracle.answer(prompt, max_tokens=5, ignore_eos=True)
        await cluster.becomes_idle()


def test_blocks_that_are_larger_when_packed_are_not(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "narrow", hidden_size=32)  # heads of 8
    engine = EngineConfig(model=str(model), dtype="bfloat16", device="cpu", pool_bytes=1 << 20, block_size=1)
    auto, exact = (
        WorkerConfig(
            worker_id="w",
            role=Role.PREFILL,
            engine=engine,
            transfer=TransferConfig(transport="in_process", wire_codec=codec),
            router_key=ROUTER_KEYS.public,
        )
        for codec in ("auto", "exact")
    )
    worker = Worker(auto, hub=InProcessHub())
    assert worker.parts.prefill.writes._wire is None
    worker.close()
    with pytest.raises(ConfigError, match=r"saves nothing: a block of .* bytes has .* packed; use auto"):
        assemble(exact, hub=InProcessHub())


def test_exact_is_refused_for_float32(tiny_model: Path) -> None:
    config = WorkerConfig(
        worker_id="w",
        role=Role.PREFILL,
        engine=EngineConfig(model=str(tiny_model), dtype="float32", device="cpu", pool_bytes=1 << 20),
        transfer=TransferConfig(transport="in_process", wire_codec="exact"),
    )
    with pytest.raises(ConfigError, match="'exact' is for KV in bfloat16"):
        assemble(config)
