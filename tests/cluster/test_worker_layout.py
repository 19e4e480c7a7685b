from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from tandem.cluster.worker_layout import resolve, worker_configs
from tandem.protocol.config import ClusterConfig, EngineConfig
from tandem.protocol.errors import ConfigError

CONFIG = ClusterConfig(engine=EngineConfig(model="m"))


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})


@pytest.mark.usefixtures("four_cores")
def test_more_cores_than_the_machine_has_are_refused() -> None:
    assert resolve(replace(CONFIG, num_cpus_per_worker=2)).num_cpus_per_worker == 2
    with pytest.raises(ConfigError, match=r"=64 for 2 worker\(s\) needs 128 cores; this machine has 4"):
        resolve(replace(CONFIG, num_cpus_per_worker=64))


@pytest.mark.usefixtures("four_cores")
def test_a_cluster_that_was_joined_may_grow() -> None:
    assert resolve(replace(CONFIG, num_cpus_per_worker=64, ray_address="auto")).num_cpus_per_worker == 64


def test_workers_of_one_machine_have_files_for_sockets_and_those_of_several_have_ports() -> None:
    resolved = replace(CONFIG, engine=replace(CONFIG.engine, num_threads=1))
    here = worker_configs(resolved, router_key="key", socket_folder="/private")
    assert {(config.socket_folder, config.host, config.router_key) for config in here} == {
        ("/private", "127.0.0.1", "key")
    }
    there = worker_configs(replace(resolved, ray_address="auto"), router_key="key", socket_folder="/private")
    assert {(config.socket_folder, config.host, config.router_key) for config in there} == {("", "", "key")}


def test_workers_of_several_machines_are_told_the_models_name_and_those_of_one_its_folder() -> None:
    resolved = replace(CONFIG, engine=replace(CONFIG.engine, model="/here/m", num_threads=1))
    here = worker_configs(resolved, model="org/m")
    there = worker_configs(replace(resolved, ray_address="auto"), model="org/m")
    assert ({config.engine.model for config in here}, {config.engine.model for config in there}) == (
        {"/here/m"},
        {"org/m"},
    )
