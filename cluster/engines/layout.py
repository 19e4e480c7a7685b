"""Which engine servers a cluster has, what starts each of them, and what is reserved for it."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tandem.cluster.engines.dialect import dialect_of
from tandem.cluster.engines.member import EngineFacts
from tandem.cluster.engines.server import EngineServer, Parallelism
from tandem.cluster.roles import roles_of, worker_ids_of
from tandem.cluster.worker_layout import cores_of
from tandem.protocol.config import ClusterConfig
from tandem.protocol.config.managed import ManagedEngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role

_KEY_BYTES = 24
_IS_MISSING = 3  # exit code
# A server shows less of its progress than our workers do: one that computes a long prompt shows none.
_STALL_FACTOR = 5
_LOOK_S = 20.0
_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_engine(config: ClusterConfig) -> None:
    """Raise `ConfigError` for engine settings that cannot work, before anything is fetched or started."""
    managed = config.managed
    dialect_of(managed.engine_kind).check_tiers(config.tiers, has_gpus=True)  # it is not known yet
    if managed.engine_python and not Path(managed.engine_python).is_file():
        raise ConfigError(f"engine_python={managed.engine_python!r} is not a file; give the path of a Python")
    num_gpus = parallelism_of(config).num_gpus
    wanted = config.num_gpus_per_worker
    if wanted and wanted != num_gpus and (num_gpus > 1 or wanted > 1):
        raise ConfigError(
            f"num_gpus_per_worker={wanted:g}, but a server with these engine_args uses {num_gpus} (tensor x pipeline x "
            "data parallel); make them equal, or leave num_gpus_per_worker out"
        )
    if not config.ray_address:  # nodes have Pythons of their own
        _check_installed(managed)


def _check_installed(managed: ManagedEngineConfig) -> None:
    """Raise `ConfigError` unless the Python that is to run the engine has it. Importing it would take many seconds."""
    python, engine = managed.engine_python or sys.executable, managed.engine_kind
    look = f"import importlib.util, sys; sys.exit({_IS_MISSING} if importlib.util.find_spec({engine!r}) is None else 0)"
    try:
        looked = subprocess.run([python, "-c", look], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_S)
    except OSError as exc:
        raise ConfigError(f"engine_python={python!r} cannot be run: {exc.strerror}") from exc
    except subprocess.TimeoutExpired:
        return  # a cold disk; the server itself says what is wrong
    if looked.returncode == _IS_MISSING:
        raise ConfigError(
            f"engine_kind={engine!r}, but {python} has no module {engine}: install it there, or name the Python of an "
            "environment that has it as engine_python"
        )


def parallelism_of(config: ClusterConfig) -> Parallelism:
    """The ranks of each server. Raises `ConfigError` for flags that cannot be given."""
    dialect, arguments = dialect_of(config.managed.engine_kind), shlex.split(config.managed.engine_args)
    dialect.check(arguments)
    return dialect.parallelism(arguments)


def engine_servers(config: ClusterConfig, model: str) -> list[tuple[EngineServer, Role]]:
    """One server per worker, with its role at the start. `config` is resolved.

    Raises `ConfigError` for tiers that these servers cannot have. `model` is the name that servers of a joined cluster
    resolve on their nodes.
    """
    managed, roles, tiers = config.managed, roles_of(config), config.tiers
    dialect_of(managed.engine_kind).check_tiers(tiers, has_gpus=config.num_gpus_per_worker > 0)
    ranks = parallelism_of(config)
    names, api_key = worker_ids_of(roles), secrets.token_hex(_KEY_BYTES)
    return [
        (
            EngineServer(
                worker_id=name,
                kind=managed.engine_kind,
                python=managed.engine_python or sys.executable,
                model=model if config.ray_address else config.engine.model,
                served_model_name=config.engine.served_model_name,
                arguments=tuple(shlex.split(managed.engine_args)),
                parallelism=ranks,
                is_disaggregated=not config.colocated,
                num_gpus=config.num_gpus_per_worker,
                host="" if config.ray_address else "127.0.0.1",
                is_local=not config.ray_address,
                cpu_cores=() if config.ray_address else cores_of(idx, len(roles), config.engine.num_threads),
                log_folder=managed.engine_log_folder,
                stall_timeout_s=_STALL_FACTOR * config.router.worker_stall_timeout_s,
                host_cache_bytes=round(tiers.host_cache_gb * 1e9) // ranks.num_caches,
                disk_cache_path=tiers.disk_cache_path,
                disk_cache_bytes=round(tiers.disk_cache_gb * 1e9),
                api_key=api_key,
            ),
            role,
        )
        for idx, (name, role) in enumerate(zip(names, roles, strict=True))
    ]


def engine_facts(config: ClusterConfig) -> EngineFacts:
    """What the router is told about all servers."""
    hardware = "" if config.num_gpus_per_worker else "cpu"  # on a CPU, costs start from slower guesses
    return EngineFacts(hardware, _kv_bytes_per_token(Path(config.engine.model)))


def _kv_bytes_per_token(model: Path) -> int:
    """Size of one token's KV as a plain decoder keeps it; 0 if the model's config does not say."""
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    config = config.get("text_config") or config
    try:
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        num_bytes = _BYTES_OF[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        return int(2 * config["num_hidden_layers"] * num_kv_heads * head_dim * num_bytes)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0
