from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tandem.protocol.config import ClusterConfig, EngineConfig, RouterConfig, TierConfig, TransferConfig
from tandem.protocol.errors import ConfigError

WRONG_HOSTS = ("", "http://a", "a/b", "*.a", "a,b", "a b", "[::1", "a@b")
WRONG_ORIGINS = ("", "localhost:3000", "http://a/", "http://a/b", "http://[", "http://*.a", "http://a,http://b")


def make_engine_config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="m", **changes)


def make_cluster_config(**changes: Any) -> ClusterConfig:
    return ClusterConfig(engine=make_engine_config(), **changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_engine_config, {"block_size": 24}),
        (make_engine_config, {"max_num_batched_tokens": 127}),
        *((RouterConfig, {"allowed_hosts": (value,)}) for value in WRONG_HOSTS),
        *((RouterConfig, {"cors_allow_origins": (value,)}) for value in WRONG_ORIGINS),
        *((make_cluster_config, {"ray_address": value}) for value in ("head", "local", "http://a", "a b:1", "/a")),
        (make_cluster_config, {"num_prefill": 0}),
        (make_cluster_config, {"num_decode": 0}),
        (make_cluster_config, {"num_cpus_per_worker": 1.5}),
        (make_cluster_config, {"num_gpus_per_worker": 2.5}),
        (make_cluster_config, {"min_workers": 1}),
        (make_cluster_config, {"min_workers": 3}),  # two are started
        (make_cluster_config, {"max_workers": 1}),
    ],
)
def test_a_bad_value_is_named_with_the_field(make: Callable[..., object], changes: dict[str, Any]) -> None:
    """Values within the bounds of their setting, which test_settings.py has."""
    with pytest.raises(ConfigError) as raised:
        make(**changes)
    [(name, value)] = changes.items()
    shown = {"ray_address": f"ray_address={value!r}"}
    if isinstance(value, tuple):
        shown[name] = f"{name}: {value[0]!r}"
    assert shown.get(name, f"{name}={value}") in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_decode": 4, "max_workers": 4}, "max_workers=4 must not be below num_prefill=1 + num_decode=4, which"),
        ({"num_decode": 9, "min_workers": 5, "max_workers": 4}, "min_workers=5 must not be above max_workers=4"),
        ({"num_decode": 3, "min_workers": 5}, "min_workers=5 must not be above num_prefill=1 + num_decode=3, which"),
        ({"max_workers": 4, "autoscale": False}, "min_workers=0 and max_workers=4 are the autoscaler's, which is off"),
        ({"max_workers": 4, "colocated": True}, "are for prefill and decode workers; leave them out with colocated"),
    ],
)
def test_bounds_of_the_autoscaler_agree_with_what_is_started(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_cluster_config(**changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_engine_config, {"max_num_seqs": 512, "max_num_batched_tokens": 512}),
        (make_cluster_config, {"num_prefill": 0, "num_decode": 0, "colocated": True}),
        (make_cluster_config, {"num_cpus_per_worker": 0.5, "num_gpus_per_worker": 0.25, "max_restarts": 0}),
        (make_cluster_config, {"num_cpus_per_worker": 64.0, "num_gpus_per_worker": 8}),
        (make_cluster_config, {"min_workers": 2, "max_workers": 2}),
        (make_cluster_config, {"num_decode": 3, "min_workers": 2}),
        *((make_cluster_config, {"ray_address": value}) for value in ("auto", "head:6379", "ray://[::1]:10001")),
        (RouterConfig, {"allowed_hosts": ("a.example", "Box:80", "10.0.0.7:8000", "[fd00::1]:80", "fd00::1", "*")}),
        (RouterConfig, {"cors_allow_origins": ("http://a", "https://a.b:3000", "http://[::1]:3000", "null", "*")}),
    ],
)
def test_values_at_the_edge_are_accepted(make: Callable[..., object], changes: dict[str, Any]) -> None:
    config = make(**changes)
    assert {name: getattr(config, name) for name in changes} == changes


@pytest.mark.parametrize(("lease_ttl_s", "interval_s"), [(0.5, 0.05), (5.0, 0.5), (10.0, 1.0), (600.0, 1.0)])
def test_a_lease_outlives_nine_lost_heartbeats(lease_ttl_s: float, interval_s: float) -> None:
    assert TransferConfig(lease_ttl_s=lease_ttl_s).heartbeat_interval_s == interval_s


@pytest.mark.parametrize(
    ("size", "place", "where"),
    [("disk_cache_gb", "disk_cache_path", "/kv"), ("object_cache_gb", "object_cache_url", "s3://bucket/kv")],
)
def test_a_store_that_may_hold_nothing_is_refused(size: str, place: str, where: str) -> None:
    with pytest.raises(ConfigError, match=f"{size}=0 would keep nothing in {place}='{where}'; raise it, or leave"):
        TierConfig(**{size: 0.0, place: where})
    TierConfig(**{size: 0.0})
    TierConfig(**{place: where})


@pytest.mark.parametrize("tiers", [{"disk_cache_path": "/kv"}, {"object_cache_url": "s3://bucket/kv"}])
def test_encryption_of_kv_that_nothing_stores_is_refused(tiers: dict[str, str]) -> None:
    assert TierConfig(kv_encryption="on", **tiers).kv_encryption == "on"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_encryption='on' would encrypt nothing.*give disk_cache_path"):
        TierConfig(kv_encryption="on", host_cache_gb=1.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"transfer": TransferConfig(wire_codec="exact")},
            "wire_codec: codec 'exact' does not pack KV of kv_cache_dtype",
        ),
        (
            {"tiers": TierConfig(host_cache_gb=1.0, host_cache_codec="int8")},
            "host_cache_gb=1: codec 'int8' does not pack",
        ),
        (
            {"tiers": TierConfig(tier=("host:1GB?codec=int4",))},
            "codec 'int4' does not pack KV of kv_cache_dtype='fp8'; use raw",
        ),
    ],
)
def test_codecs_that_do_not_pack_kv_in_8_bits_are_refused(parts: dict[str, Any], message: str) -> None:
    ClusterConfig(engine=EngineConfig(model="m"), **parts)
    ClusterConfig(engine=EngineConfig(model="m", kv_cache_dtype="fp8"), tiers=TierConfig(host_cache_gb=1.0))
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(engine=EngineConfig(model="m", kv_cache_dtype="fp8"), **parts)
