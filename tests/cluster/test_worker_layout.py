from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import ray

from tandem.cluster.worker_layout import needs_of, resolve, worker_configs
from tandem.protocol.config import ClusterConfig, EngineConfig, TransferConfig
from tandem.protocol.errors import ConfigError

CONFIG = ClusterConfig(engine=EngineConfig(model="m"))


def have_nodes(monkeypatch: pytest.MonkeyPatch, *cores: float) -> None:
    """Let Ray have nodes with these numbers of cores, and one that is dead."""
    nodes = [{"Alive": True, "Resources": {"CPU": float(number)} if number else {}} for number in cores]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 1000.0}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(cores))})


def test_more_cores_than_the_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 4)
    assert resolve(replace(CONFIG, num_cpus_per_worker=2)).num_cpus_per_worker == 2
    with pytest.raises(ConfigError, match=r"=64 for 2 worker\(s\) needs 128 cores; this machine has 4"):
        resolve(replace(CONFIG, num_cpus_per_worker=64))
    joined = replace(CONFIG, num_cpus_per_worker=64, ray_address="auto")
    assert resolve(joined).num_cpus_per_worker == 64, "a cluster that was joined may grow"


@pytest.mark.parametrize(
    ("cores", "num_decode", "share"),
    [
        ((4,), 1, 2.0),
        ((2,), 2, 0.6666),  # rounded up, three of them would be more than two cores
        ((0, 4, 4, 4), 1, 4.0),  # 12 / 2 = 6 is on no node
        ((0, 4, 4), 2, 2.0),
        ((16, 2), 1, 8.0),
        ((6, 5), 2, 3.0),
        ((0,), 1, 1.0),  # the nodes of a cluster may come later
    ],
)
def test_every_workers_share_of_the_cores_is_on_one_node(
    cores: tuple[float, ...], num_decode: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_nodes(monkeypatch, *cores)
    resolved = resolve(replace(CONFIG, num_prefill=1, num_decode=num_decode, ray_address="auto"))
    assert resolved.num_cpus_per_worker == share
    assert resolved.engine.num_threads == max(1, int(share))


def test_workers_of_one_machine_share_folders_and_others_have_ports() -> None:
    engine = replace(CONFIG.engine, model="/here/m", num_threads=1)
    for address, told in (("", ("/private", "127.0.0.1", "key", "/here/m")), ("auto", ("", "", "key", "org/m"))):
        config = replace(CONFIG, engine=engine, ray_address=address)
        workers = worker_configs(config, router_key="key", socket_folder="/private", model="org/m")
        assert {(one.socket_folder, one.host, one.router_key, one.engine.model) for one in workers} == {told}


@pytest.mark.parametrize(
    ("num_gpus", "num_decode", "share", "memory_share"),
    [
        (0, 1, 0.0, 0.0),
        (1, 1, 0.5, 0.45),  # prefill and decode on the GPU of a laptop
        (1, 2, 0.3333, 0.29997),
        (2, 2, 0.5, 0.45),  # two of the three workers share one
        (2, 1, 1.0, 0.9),
        (8, 1, 1.0, 0.9),
    ],
)
def test_workers_share_gpus_where_there_are_too_few(
    num_gpus: int, num_decode: int, share: float, memory_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_nodes(monkeypatch, 8)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(num_gpus)})
    resolved = resolve(replace(CONFIG, num_decode=num_decode))
    assert resolved.num_gpus_per_worker == share
    assert resolved.engine.gpu_memory_share == pytest.approx(memory_share)
    on_cpu = resolve(replace(CONFIG, num_decode=num_decode, engine=EngineConfig(model="m", device="cpu")))
    assert on_cpu.num_gpus_per_worker == 0


def test_nccl_is_refused_between_workers_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 8)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    config = replace(CONFIG, transfer=TransferConfig(transport="nccl"))
    assert resolve(config).num_gpus_per_worker == 1
    with pytest.raises(ConfigError, match=r"transport='nccl' .* share a GPU, and 3 workers get 0\.5 of one each"):
        resolve(replace(config, num_decode=2))


def test_ranks_of_a_server_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 8)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 8.0})
    assert resolve(CONFIG, 4).num_gpus_per_worker == 4
    with pytest.raises(ConfigError, match=r"2 worker\(s\) of 8 ranks need 16 GPUs; Ray has 8"):
        resolve(CONFIG, 8)


def of_ranks(prefill: int, decode: int, **settings: Any) -> ClusterConfig:
    engine = EngineConfig(model="m", tensor_parallel_size=prefill, decode_parallel_size=decode)
    return replace(CONFIG, engine=engine, **settings)


def test_each_rank_of_a_worker_has_a_gpu_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 8)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 5.0})
    resolved = resolve(of_ranks(4, 1))
    assert needs_of(resolved) == [(4.0, 4.0), (4.0, 1.0)]
    assert [config.engine.tensor_parallel_size for config in worker_configs(resolved)] == [4, 1]
    with pytest.raises(ConfigError, match=r"2 worker\(s\) of 4 ranks need 8 GPUs; Ray has 5"):
        resolve(of_ranks(4, 0))
    with pytest.raises(ConfigError, match="num_gpus_per_worker=2, but a worker of 4 ranks uses 4"):
        resolve(of_ranks(4, 1, num_gpus_per_worker=2))


def test_ranks_on_a_cpu_share_the_cores_of_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 8)
    resolved = resolve(of_ranks(2, 0))
    assert needs_of(resolved) == [(4.0, 0.0), (4.0, 0.0)]
    assert resolved.engine.num_threads == 4


@pytest.mark.parametrize(("address", "share"), [("", 1.0), ("auto", 2.0)])
def test_those_that_may_be_added_have_a_share(address: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, 4)
    config = replace(CONFIG, max_workers=4, ray_address=address)
    assert resolve(config).num_cpus_per_worker == share
