from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster import machine_check
from tandem.cluster.machine_check import check_machine, check_model_fits
from tandem.protocol.config import ClusterConfig, EngineConfig, ManagedEngineConfig, TierConfig
from tandem.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two cores, 16 GB, no GPU."""
    here = SimpleNamespace(num_cores=2, gb=16, has_gpu=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(here.num_cores)))
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=here.gb * 10**9))
    monkeypatch.setattr(machine_check, "psutil", memory)
    monkeypatch.setattr(machine_check, "_has_gpu", lambda: here.has_gpu)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return here


def config_of(**fields: Any) -> ClusterConfig:
    engine = {name: fields.pop(name) for name in list(fields) if name in EngineConfig.__dataclass_fields__}
    tiers = {name: fields.pop(name) for name in list(fields) if name in TierConfig.__dataclass_fields__}
    return ClusterConfig(engine=EngineConfig(**({"model": "m"} | engine)), tiers=TierConfig(**tiers), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prefill": 40}, r"41 worker\(s\) are too many for the 2 core\(s\).*: start at most 20 processes"),
        ({"num_decode": 1024}, r"1025 worker\(s\) are too many"),
        ({"num_cpus_per_worker": 4.0}, r"num_cpus_per_worker=4 for 2 worker\(s\) needs 8 cores; this machine has 2"),
        ({"tensor_parallel_size": 64}, r"2 worker\(s\) of 128 processes are too many for the 2 core\(s\)"),
        ({"decode_parallel_size": 64, "num_cpus_per_worker": 1.0}, r"2 worker\(s\) of 65 processes are too many"),
        ({"device": "cuda"}, r"device='cuda', but this machine has no GPU"),
        ({"attention_backend": "fa3"}, r"attention_backend='fa3' needs a GPU"),
        ({"attention_backend": "triton"}, r"attention_backend='triton' needs a GPU"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype='fp8' needs a GPU, and this machine has none; leave it out"),
    ],
)
def test_what_exceeds_the_machine_is_refused(fields: dict[str, Any], message: str, machine: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(config_of(**fields))
    check_machine(config_of(**fields, ray_address="head:6379"))  # its nodes decide, and more of them may come
    machine.num_cores, machine.has_gpu = 1024, True
    check_machine(config_of(**fields))


@pytest.mark.parametrize(
    ("fields", "one_more"),
    [
        ({"num_prefill": 10, "num_decode": 10}, {"num_decode": 11}),
        ({"num_prefill": 39, "num_cpus_per_worker": 0.05}, {"num_prefill": 40}),
        ({"tensor_parallel_size": 10}, {"tensor_parallel_size": 11}),
        ({"colocated": True, "tensor_parallel_size": 20}, {"tensor_parallel_size": 21}),
        ({"device": "cpu"}, {"device": "cuda"}),
    ],
)
def test_what_is_only_slow_is_started(fields: dict[str, Any], one_more: dict[str, Any]) -> None:
    check_machine(config_of(**fields))
    with pytest.raises(ConfigError):
        check_machine(config_of(**fields | one_more))


def test_servers_of_other_engines_find_their_own_gpus() -> None:
    managed = ManagedEngineConfig(engine_kind="vllm")
    check_machine(config_of(managed=managed))
    with pytest.raises(ConfigError, match="too many for the 2 core"):
        check_machine(config_of(managed=managed, num_prefill=40))


def make_model(folder: Path, num_bytes: int = 10**9, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192} | config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # takes no disk
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_prefill": 12},
            r"13 worker\(s\) need at least 16.9 GB of memory \(0.3 for each process, 1.0 for weights",
        ),
        ({"pool_bytes": 10**10}, r"need at least 22.6 GB of memory .*pool_bytes=10000000000\), and this machine has"),
        ({"host_cache_gb": 7.0}, r"need at least 16.6 GB of memory .*host_cache_gb=7\)"),
        ({"max_model_len": 8193}, r"max_model_len=8193 is over the model's own context of 8192 tokens"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_fits(config_of(**fields), make_model(tmp_path))


def test_what_fits_is_started(tmp_path: Path, machine: SimpleNamespace) -> None:
    model = make_model(tmp_path)
    check_model_fits(config_of(num_prefill=11, max_model_len=8192), model)
    check_model_fits(config_of(num_prefill=999, ray_address="auto"), model)
    managed = ManagedEngineConfig(engine_kind="vllm")
    check_model_fits(replace(config_of(num_prefill=12), managed=managed), model)
    machine.has_gpu = True
    check_model_fits(config_of(num_prefill=12, pool_bytes=10**11), model)  # the GPU has a memory of its own
    with pytest.raises(ConfigError, match="host_cache_gb=100"):
        check_model_fits(config_of(host_cache_gb=100.0), model)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"text_config": 1}', '{"max_position_embeddings": null}', "\x00"])
def test_a_config_that_says_nothing_of_the_context_is_left_to_the_workers(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    check_model_fits(config_of(max_model_len=10**6), tmp_path)
    with pytest.raises(ConfigError, match="own context of 8192"):
        check_model_fits(config_of(max_model_len=10**6), make_model(tmp_path))


def test_the_context_of_a_model_of_text_and_images_is_that_of_its_text(tmp_path: Path) -> None:
    model = make_model(tmp_path, max_position_embeddings=None, text_config={"max_position_embeddings": 64})
    with pytest.raises(ConfigError, match="own context of 64 tokens"):
        check_model_fits(config_of(max_model_len=65), model)
