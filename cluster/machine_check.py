"""Whether this machine can run what a private Ray would start on it, before anything slow starts.

Only what is certain to fail is refused. On a joined cluster nodes may come, so nothing is asked of it here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from tandem.cluster.roles import ranks_of, roles_of
from tandem.protocol.config import ClusterConfig
from tandem.protocol.errors import ConfigError

# Each process takes ten seconds of a core before it serves. With more of them on a core, starting takes minutes.
_MAX_PROCESSES_PER_CORE = 10
# A worker of our engine with the smallest model takes 0.7 GB, weights and buffers included.
_PROCESS_BYTES = 300_000_000
_GPU_DEVICES = ("nvidia[0-9]*", "nvhost*", "dxg", "kfd")  # on a PC or server, a Jetson, in WSL, by AMD


def check_machine(config: ClusterConfig) -> None:
    """Raise `ConfigError` if this machine has too few cores for the workers, or no GPU where one is asked for."""
    if config.ray_address:
        return
    check_cores(config, len(os.sched_getaffinity(0)))
    if config.managed.is_managed or _has_gpu():
        return
    engine = config.engine
    if engine.device == "cuda":
        raise ConfigError("device='cuda', but this machine has no GPU that its processes can see; leave it out")
    if engine.kv_cache_dtype == "fp8" and engine.attention_backend != "triton":
        raise ConfigError("kv_cache_dtype='fp8' needs a GPU, and this machine has none; leave it out on a CPU")
    if engine.attention_backend in ("fa3", "triton") and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(
            f"attention_backend={engine.attention_backend!r} needs a GPU, and this machine has none that its processes "
            "can see; leave it out"
        )


def check_cores(config: ClusterConfig, num_cores: float) -> None:
    """Raise `ConfigError` if this machine has too few cores: a private Ray would wait for them forever.

    A cluster that was joined may grow until it has them. Who gives `num_cpus_per_worker` may make them thin.
    """
    num_workers, num_ranks = _num_processes(config)
    num_cpus = config.num_cpus_per_worker
    if num_cpus * num_workers > num_cores:
        raise ConfigError(
            f"num_cpus_per_worker={num_cpus:g} for {num_workers} worker(s) needs {num_cpus * num_workers:g} cores; "
            f"this machine has {num_cores:g}"
        )
    most, has_ranks = int(_MAX_PROCESSES_PER_CORE * num_cores), num_ranks > num_workers
    if num_ranks > most and (has_ranks or not num_cpus):
        ranks = f" of {num_ranks} processes" if has_ranks else ""
        raise ConfigError(
            f"{num_workers} worker(s){ranks} are too many for the {num_cores:g} core(s) of this machine: start at most "
            f"{most} processes{'' if has_ranks else ', or set num_cpus_per_worker to accept slower ones'}"
        )


def check_model_fits(config: ClusterConfig, folder: Path) -> None:
    """Raise `ConfigError` if the model in this folder has a shorter context, or the workers need too much memory."""
    if config.managed.is_managed:
        return
    longest, wanted = _max_model_len(folder), config.engine.max_model_len
    if longest and wanted > longest:
        raise ConfigError(f"max_model_len={wanted} is over the model's own context of {longest} tokens; lower it")
    if not config.ray_address:
        _check_memory(config, folder)


def _check_memory(config: ClusterConfig, folder: Path) -> None:
    is_on_cpu = config.engine.device == "cpu" or not _has_gpu()
    num_workers, num_ranks = _num_processes(config)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if is_on_cpu else 0
    pool = config.engine.pool_bytes if is_on_cpu else 0
    tiers = [spec for spec in config.tiers.specs if spec.scheme in ("host", "numa")]  # a device has memory of its own
    host = round(sum(spec.gb for spec in tiers) * 1e9)
    needed = num_ranks * _PROCESS_BYTES + num_workers * (weights + pool + host)
    total = psutil.virtual_memory().total
    if needed <= total:
        return
    takes = [f"{_PROCESS_BYTES / 1e9:g} for each process"]
    takes += [f"{weights / 1e9:.1f} for weights"] if weights else []
    takes += [f"pool_bytes={pool}"] if pool else []
    takes += [spec.setting for spec in tiers]
    raise ConfigError(
        f"{num_workers} worker(s) need at least {needed / 1e9:.1f} GB of memory ({', '.join(takes)}), and this machine "
        f"has {total / 1e9:.1f} GB; start fewer workers, or let each of them take less"
    )


def _num_processes(config: ClusterConfig) -> tuple[int, int]:
    """The workers that are started, and the processes that they consist of: each rank is one."""
    ranks = [ranks_of(config, role) for role in roles_of(config)]
    return len(ranks), sum(ranks)


def _max_model_len(folder: Path) -> int:
    """An upper bound of the model's context; 0 if its config does not say."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return int((config.get("text_config") or config)["max_position_embeddings"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0  # the workers say what is wrong with it


def _has_gpu() -> bool:
    """Whether a GPU may be here: what only looks like one is left to the workers."""
    return any(next(Path("/dev").glob(name), None) is not None for name in _GPU_DEVICES)
