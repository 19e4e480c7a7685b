"""How many workers of which role a cluster has, and which cores, GPUs and settings each gets."""

from __future__ import annotations

import os
from dataclasses import replace

import ray

from tandem.protocol.config import ClusterConfig, WorkerConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role

__all__ = ["resolve", "worker_configs"]

# Tokens of a step by (has a GPU, colocated). A chunk of a prompt delays the sequences that decode beside it by its
# whole duration, so a worker that always does both takes smaller ones.
_STEP_TOKENS = {(False, False): 512, (False, True): 256, (True, False): 8192, (True, True): 2048}


def resolve(config: ClusterConfig) -> ClusterConfig:
    """Fill in settings that follow from the machine or the Ray cluster: cores and GPUs per worker, threads per step."""
    num_workers = 1 if config.colocated else config.num_prefill + config.num_decode
    resources = ray.cluster_resources()
    num_cpus = config.num_cpus_per_worker or max(resources.get("CPU", 1.0) / num_workers, 0.01)
    if num_cpus >= 1 and not config.num_cpus_per_worker:
        num_cpus = float(int(num_cpus))
    num_gpus = config.num_gpus_per_worker
    if not num_gpus and config.engine.device != "cpu" and resources.get("GPU", 0) >= num_workers:
        num_gpus = 1.0
    if num_gpus * num_workers > resources.get("GPU", 0):
        raise ConfigError(
            f"num_gpus_per_worker={num_gpus} for {num_workers} workers needs {num_gpus * num_workers} GPUs; "
            f"Ray has {resources.get('GPU', 0)}"
        )
    # A cluster that was joined may grow until it has the cores; a private Ray would wait for them for ever.
    if not config.ray_address and config.num_cpus_per_worker * num_workers > resources.get("CPU", 0):
        raise ConfigError(
            f"num_cpus_per_worker={num_cpus:g} for {num_workers} worker(s) needs {num_cpus * num_workers:g} cores; "
            f"this machine has {resources.get('CPU', 0):g}"
        )
    engine = config.engine
    tokens = _STEP_TOKENS[num_gpus > 0, config.colocated]
    return replace(
        config,
        engine=replace(
            engine,
            num_threads=engine.num_threads or max(1, int(num_cpus)),
            max_num_batched_tokens=engine.max_num_batched_tokens or max(tokens, engine.max_num_seqs),
        ),
        num_cpus_per_worker=num_cpus,
        num_gpus_per_worker=num_gpus,
    )


def worker_configs(
    config: ClusterConfig, *, model: str = "", router_key: str = "", socket_folder: str = ""
) -> list[WorkerConfig]:
    """One config per worker. On a private Ray each gets cores of its own if there are enough.

    `model` is the name that workers of a joined cluster resolve on their nodes; empty = the folder of this machine.
    `router_key` is the public key of the router that the workers obey. Their sockets are files in `socket_folder`
    unless they run on several machines.
    """
    roles = [Role.COLOCATED] if config.colocated else []
    roles = roles or [Role.PREFILL] * config.num_prefill + [Role.DECODE] * config.num_decode
    counts: dict[Role, int] = {}
    engine = replace(config.engine, model=model) if config.ray_address and model else config.engine
    configs = []
    for idx, role in enumerate(roles):
        number = counts[role] = counts.get(role, -1) + 1
        configs.append(
            WorkerConfig(
                worker_id=f"{role}-{number}",
                role=role,
                engine=engine,
                transfer=config.transfer,
                tiers=config.tiers,
                host="" if config.ray_address else "127.0.0.1",
                socket_folder="" if config.ray_address else socket_folder,
                router_key=router_key,
                cpu_cores=() if config.ray_address else _cores(idx, len(roles), config.engine.num_threads),
            )
        )
    return configs


def _cores(idx: int, num_workers: int, num_threads: int) -> tuple[int, ...]:
    cores = sorted(os.sched_getaffinity(0))
    if num_workers == 1 or num_workers * num_threads > len(cores):
        return ()
    return tuple(cores[idx * num_threads : (idx + 1) * num_threads])
