from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from protocol.config import ClusterConfig, EngineConfig, RouterConfig, TransferConfig
from protocol.errors import ConfigError


def make_engine_config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="m", **changes)


def make_cluster_config(**changes: Any) -> ClusterConfig:
    return ClusterConfig(engine=make_engine_config(), **changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_engine_config, {"block_size": 0}),
        (make_engine_config, {"block_size": 24}),
        (make_engine_config, {"block_size": 512}),
        (make_engine_config, {"pool_bytes": -1}),
        (make_engine_config, {"max_model_len": -1}),
        (make_engine_config, {"num_threads": -1}),
        (make_engine_config, {"max_num_seqs": 0}),
        (make_engine_config, {"max_num_batched_tokens": 127}),
        (TransferConfig, {"lease_ttl_s": 2.9}),
        (TransferConfig, {"heartbeat_interval_s": 0.0}),
        (RouterConfig, {"port": -1}),
        (RouterConfig, {"port": 65536}),
        (RouterConfig, {"max_body_bytes": 0}),
        (make_cluster_config, {"num_prefill": 0}),
        (make_cluster_config, {"num_decode": 0}),
    ],
)
def test_a_bad_value_is_named_with_the_field(make: Callable[..., object], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        make(**changes)
    [(name, value)] = changes.items()
    assert f"{name}={value}" in str(raised.value) or (
        name == "heartbeat_interval_s" and f"({value} s" in str(raised.value)
    )


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_engine_config, {"block_size": 1}),
        (make_engine_config, {"block_size": 256}),
        (make_engine_config, {"max_num_seqs": 512, "max_num_batched_tokens": 512}),
        (TransferConfig, {"lease_ttl_s": 3.0}),
        (RouterConfig, {"port": 0}),
        (RouterConfig, {"port": 65535}),
        (make_cluster_config, {"num_prefill": 0, "num_decode": 0, "colocated": True}),
    ],
)
def test_values_at_the_edge_are_accepted(make: Callable[..., object], changes: dict[str, Any]) -> None:
    config = make(**changes)
    assert {name: getattr(config, name) for name in changes} == changes


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError):
        make_engine_config(max_num_seq=3)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_engine_config().block_size = 32  # type: ignore[misc]
