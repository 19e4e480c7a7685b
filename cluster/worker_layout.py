"""How many workers of which role a cluster has, and which cores, GPUs and settings each gets."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray

from tandem.cluster.machine_check import check_cores
from tandem.cluster.roles import ranks_of, roles_of, worker_ids_of
from tandem.protocol.config import GPU_MEMORY_SHARE, ClusterConfig, WorkerConfig
from tandem.protocol.errors import ConfigError

# Tokens of a step by (has a GPU, colocated). A chunk of a prompt delays the sequences that decode beside it by its
# whole duration, so a worker that always does both takes smaller ones.
_STEP_TOKENS = {(False, False): 512, (False, True): 256, (True, False): 8192, (True, True): 2048}


def resolve(config: ClusterConfig, num_ranks: int = 1) -> ClusterConfig:
    """Fill in settings that depend on the machine or the Ray cluster: cores and GPUs per worker, threads per step.

    Each server of another engine has `num_ranks`. Each rank takes a GPU. Raises `ConfigError`.
    """
    ranks = [max(num_ranks, ranks_of(config, role)) for role in roles_of(config)]
    num_workers = len(ranks)
    resources = ray.cluster_resources()
    # A private Ray does not grow: the autoscaler's workers need a share too.
    num_shares = num_workers if config.ray_address else max(num_workers, config.max_workers)
    num_cpus = config.num_cpus_per_worker or _share_of_cores(num_shares)
    num_gpus = config.num_gpus_per_worker
    if not num_gpus and config.engine.device != "cpu":
        num_gpus = _share_of_gpus(int(resources.get("GPU", 0)), ranks)
    elif num_gpus and num_gpus != max(ranks) > 1:
        raise ConfigError(
            f"num_gpus_per_worker={num_gpus:g}, but a worker of {max(ranks)} ranks uses {max(ranks)}; leave it out"
        )
    needed = sum(_gpus_of(num_gpus, ranks))
    if needed > resources.get("GPU", 0):
        raise ConfigError(
            f"num_gpus_per_worker={num_gpus} for {num_workers} workers needs {needed} GPUs; "
            f"Ray has {resources.get('GPU', 0)}"
        )
    if 0 < num_gpus < 1 and num_workers > 1 and config.transfer.transport == "nccl":
        raise ConfigError(
            f"transport='nccl' cannot move KV between workers that share a GPU, and {num_workers} workers get "
            f"{num_gpus:g} of one each; use transport='nixl', or start fewer workers"
        )
    if not config.ray_address:
        check_cores(config, resources.get("CPU", 0))
    engine = config.engine
    tokens = _STEP_TOKENS[num_gpus > 0, config.colocated]
    return replace(
        config,
        engine=replace(
            engine,
            num_threads=engine.num_threads or max(1, int(num_cpus)),
            gpu_memory_share=engine.gpu_memory_share or GPU_MEMORY_SHARE * min(num_gpus, 1.0),
            max_num_batched_tokens=engine.max_num_batched_tokens or max(tokens, engine.max_num_seqs),
        ),
        num_cpus_per_worker=num_cpus,
        num_gpus_per_worker=num_gpus,
    )


def needs_of(config: ClusterConfig) -> list[tuple[float, float]]:
    """Cores and GPUs of each worker. `config` is resolved."""
    ranks = [ranks_of(config, role) for role in roles_of(config)]
    return [(config.num_cpus_per_worker, num_gpus) for num_gpus in _gpus_of(config.num_gpus_per_worker, ranks)]


def _gpus_of(num_gpus: float, ranks: Sequence[int]) -> list[float]:
    """GPUs of each worker if those with the most ranks have `num_gpus`; the others have one for each rank."""
    return [float(number) if num_gpus and number < max(ranks) else num_gpus for number in ranks]


def _share_of_gpus(num_gpus: int, ranks: Sequence[int]) -> float:
    """The most GPUs of a worker: one for each rank, 0 without GPUs.

    Workers of one rank share GPUs if there are too few. Raises ConfigError if there are too few for ranks.
    """
    if not num_gpus or num_gpus >= sum(ranks):
        return float(max(ranks)) if num_gpus else 0.0
    if max(ranks) > 1:
        sizes = " and ".join(map(str, sorted(set(ranks), reverse=True)))
        raise ConfigError(
            f"{len(ranks)} worker(s) of {sizes} ranks need {sum(ranks)} GPUs; Ray has {num_gpus}: "
            "start fewer workers, or lower the parallel sizes"
        )
    return math.floor(1e4 / math.ceil(len(ranks) / num_gpus)) / 1e4  # Ray counts to four decimals


def _share_of_cores(num_workers: int) -> float:
    """The most cores that every worker can have. The cores of one worker are on one node.

    It is a whole number or below one, where Ray counts in steps of a ten thousandth. One core if no node has any yet.
    """
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    shares = sorted({cores / number for cores in nodes if cores for number in range(1, num_workers + 1)}, reverse=True)
    fitting = (share for share in shares if sum(int(cores / share + 1e-9) for cores in nodes) >= num_workers)
    share = next(fitting, 1.0)
    return float(int(share)) if share >= 1 else max(int(share * 1e4) / 1e4, 0.01)


def worker_configs(
    config: ClusterConfig, *, model: str = "", router_key: str = "", socket_folder: str = ""
) -> list[WorkerConfig]:
    """One config per worker. On a private Ray each gets cores of its own if there are enough.

    `model` is the name that workers of a joined cluster resolve on their nodes; empty = the folder of this machine.
    `router_key` is the public key of the router that the workers obey. Their sockets are files in `socket_folder`
    unless they run on several machines.
    """
    roles = roles_of(config)
    engine = replace(config.engine, model=model) if config.ray_address and model else config.engine
    return [
        WorkerConfig(
            worker_id=name,
            role=role,
            engine=replace(engine, tensor_parallel_size=ranks_of(config, role), decode_parallel_size=0),
            transfer=config.transfer,
            tiers=config.tiers,
            host="" if config.ray_address else "127.0.0.1",
            socket_folder="" if config.ray_address else socket_folder,
            router_key=router_key,
            cpu_cores=() if config.ray_address else cores_of(idx, len(roles), config.engine.num_threads),
        )
        for idx, (name, role) in enumerate(zip(worker_ids_of(roles), roles, strict=True))
    ]


def cores_of(idx: int, num_workers: int, num_threads: int) -> tuple[int, ...]:
    """The cores of one worker of this machine; none if there are not enough for all."""
    cores = sorted(os.sched_getaffinity(0))
    if num_workers == 1 or num_workers * num_threads > len(cores):
        return ()
    return tuple(cores[idx * num_threads : (idx + 1) * num_threads])


def preload_of(python: str) -> dict[str, str]:
    """The environment variable by which processes of this Python preload Intel's OpenMP library.

    Small steps are faster with it than with the one that torch brings. It must be there before any library that uses
    OpenMP. {} if the environment of this Python lacks it (`pip install intel-openmp`, x86 only).
    """
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}
