from __future__ import annotations

from typing import Any

import pytest

from tandem.cluster.engines.layout import engine_servers
from tandem.protocol.config import ClusterConfig, EngineConfig, TierConfig
from tandem.protocol.config.managed import ManagedEngineConfig
from tandem.protocol.errors import ConfigError


def config_of(engine_args: str = "", *, num_gpus: float = 8.0, **tiers: Any) -> ClusterConfig:
    return ClusterConfig(
        engine=EngineConfig(model="m"),
        managed=ManagedEngineConfig(engine_kind="vllm", engine_args=engine_args),
        num_gpus_per_worker=num_gpus,
        tiers=TierConfig(**tiers),
    )


@pytest.mark.parametrize(("engine_args", "num_bytes"), [("", 64 * 10**9), ("-tp 2 --data-parallel-size 4", 16 * 10**9)])
def test_the_ranks_of_a_worker_share_its_host_memory(engine_args: str, num_bytes: int) -> None:
    """vLLM takes the given size for each data-parallel rank."""
    servers = engine_servers(config_of(engine_args, host_cache_gb=64.0, disk_cache_path="/ssd"), "m")
    assert {(server.host_cache_bytes, server.disk_cache_path) for server, _ in servers} == {(num_bytes, "/ssd")}
    assert {server.host_cache_bytes for server, _ in engine_servers(config_of(engine_args), "m")} == {0}


def test_servers_that_got_no_gpu_are_refused_host_memory() -> None:
    with pytest.raises(ConfigError, match="vLLM offloads KV of GPUs only"):
        engine_servers(config_of(num_gpus=0.0, host_cache_gb=64.0), "m")
