"""How a vLLM server is started as a worker: its command, its environment, and the flags that users may not give."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cluster.engines.server import (
    ADDRESS_IS_OURS,
    CONFIG_IS_OURS,
    KEY_IS_OURS,
    MACHINES_ARE_YOURS,
    MODEL_IS_OURS,
    NAME_IS_OURS,
    OTHER_SERVER,
    EngineServer,
    Parallelism,
    Sockets,
    check_arguments,
    check_host_and_disk,
    flags_of,
    number_of,
)
from tandem.cluster.worker_layout import preload_of
from tandem.protocol.config import GPU_MEMORY_SHARE, TierConfig
from tandem.protocol.errors import ConfigError

_KV = "every server hands KV over with NixlConnector and publishes KV events: leave it out"
_TIERS = "give tandem serve --host-cache-gb and --disk-cache-path instead"
OUR_FLAGS = {
    "--host": ADDRESS_IS_OURS,
    "--port": ADDRESS_IS_OURS,
    "--uds": ADDRESS_IS_OURS,
    "--root-path": ADDRESS_IS_OURS,
    "--model": MODEL_IS_OURS,
    "--model-tag": MODEL_IS_OURS,
    "--served-model-name": NAME_IS_OURS,
    "--kv-transfer-config": _KV,
    "--kv-events-config": _KV,
    "--kv-offloading-size": _TIERS,  # replaces our connector by one of its own
    "--kv-offloading-backend": _TIERS,
    "--api-key": KEY_IS_OURS,
    "--ssl-keyfile": KEY_IS_OURS,
    "--ssl-certfile": KEY_IS_OURS,
    "--ssl-ca-certs": KEY_IS_OURS,
    "--config": CONFIG_IS_OURS,
    "--grpc": OTHER_SERVER,
    "--grpc-port": OTHER_SERVER,
    "--headless": MACHINES_ARE_YOURS,
    "--nnodes": MACHINES_ARE_YOURS,
    "-n": MACHINES_ARE_YOURS,
    "--node-rank": MACHINES_ARE_YOURS,
    "-r": MACHINES_ARE_YOURS,
    "--data-parallel-rank": MACHINES_ARE_YOURS,
    "-dpn": MACHINES_ARE_YOURS,
    "--data-parallel-start-rank": MACHINES_ARE_YOURS,
    "-dpr": MACHINES_ARE_YOURS,
    "--data-parallel-size-local": MACHINES_ARE_YOURS,
    "-dpl": MACHINES_ARE_YOURS,
    "--data-parallel-address": MACHINES_ARE_YOURS,
    "-dpa": MACHINES_ARE_YOURS,
    "--data-parallel-external-lb": MACHINES_ARE_YOURS,
    "-dpe": MACHINES_ARE_YOURS,
    "--data-parallel-hybrid-lb": MACHINES_ARE_YOURS,
    "-dph": MACHINES_ARE_YOURS,
    "--data-parallel-multi-port-external-lb": MACHINES_ARE_YOURS,
    "-dpm": MACHINES_ARE_YOURS,
    "--data-parallel-rpc-port": ADDRESS_IS_OURS,
    "-dpp": ADDRESS_IS_OURS,
}
_DATA_PARALLEL = ("--data-parallel-size", "-dp")
_MEMORY = "--gpu-memory-utilization"
SHARED_MEMORY = Path("/dev/shm")
_KV_CACHE_GB = "2"  # for each server on a CPU; by itself vLLM would take half of the machine's memory


def check(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for flags that Tandem sets itself."""
    check_arguments("vLLM", arguments, OUR_FLAGS, known=_DATA_PARALLEL)


def check_tiers(tiers: TierConfig, *, has_gpus: bool) -> None:
    """Raise `ConfigError` for tiers that vLLM 0.32 does not have."""
    check_host_and_disk("a vLLM", tiers)
    if tiers.host_cache_gb and not has_gpus:
        raise ConfigError(
            f"host_cache_gb={tiers.host_cache_gb:g}: vLLM offloads KV of GPUs only, and its servers get none here; "
            "leave it out, and set VLLM_CPU_KVCACHE_SPACE to the GB that the cache of each server may take"
        )


def parallelism(arguments: Sequence[str]) -> Parallelism:
    """The ranks that these flags ask for. Raises `ConfigError`."""
    return Parallelism(
        tensor=number_of(arguments, "--tensor-parallel-size", "-tp"),
        pipeline=number_of(arguments, "--pipeline-parallel-size", "-pp"),
        data=number_of(arguments, *_DATA_PARALLEL),
    )


def command(server: EngineServer, sockets: Sockets) -> list[str]:
    """The command line of the server."""
    words = [server.python, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--host", server.host, "--port", str(sockets.http_port)]
    words += ["--model", server.model, "--served-model-name", server.served_model_name]
    words += ["--disable-uvicorn-access-log"]  # the router asks for health and load every second
    words += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(_events(sockets))]
    if 0 < server.num_gpus < 1 and _MEMORY not in dict(flags_of(server.arguments)):
        words += [_MEMORY, f"{GPU_MEMORY_SHARE * server.num_gpus:.3f}"]  # servers that share a GPU share its memory
    if connector := _connector(server):
        engine_id = {"engine_id": sockets.engine_id} if sockets.engine_id else {}
        words += ["--kv-transfer-config", json.dumps(connector | engine_id)]
    return [*words, *server.arguments]


def release(sockets: Sockets) -> None:
    """As `Dialect.release`. vLLM keeps the name of its host memory until it ends in good order.

    So it does itself where it can tell that all processes have mapped it (`kv_offload/cpu/shared_offload_region.py`).
    """
    if sockets.engine_id:
        for file in SHARED_MEMORY.glob(f"vllm_offload_{sockets.engine_id}*.mmap"):
            file.unlink(missing_ok=True)


def config(server: EngineServer) -> str:
    """As `Dialect.config`: flags and environment say everything."""
    return ""


def first_request(server: EngineServer) -> dict[str, Any]:
    """As `Dialect.first_request`: any request will do."""
    return {}


def fixed_role(server: EngineServer) -> str:
    """As `Dialect.fixed_role`: every server does both, so a role is only a label."""
    return ""


def environment(server: EngineServer, sockets: Sockets) -> dict[str, str]:
    """Variables of the server, on top of those that it inherits."""
    variables = {
        "VLLM_API_KEY": server.api_key,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": server.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(sockets.side_channel_port),
    }
    if not server.num_gpus and server.cpu_cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, server.cpu_cores))
    return variables


def remedy(reason: str) -> str:
    """What to do about a server that ended for this reason, as the end of a sentence; "" if that is not known."""
    if "No module named 'vllm" in reason:
        return "; make engine-vllm makes an environment that has it: give its Python as engine_python"
    return ""


def defaults(server: EngineServer) -> dict[str, str]:
    """Variables that a user may set otherwise."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if not server.num_gpus:
        variables["VLLM_CPU_KVCACHE_SPACE"] = _KV_CACHE_GB
        variables |= preload_of(server.python)
    return variables


def _events(sockets: Sockets) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": sockets.events,
        "replay_endpoint": sockets.replay,
    }


def _connector(server: EngineServer) -> dict[str, object]:
    """What moves the server's KV; empty = nothing does.

    vLLM loads a prompt from the first connector that has any of it (`MultiConnector.get_num_new_matched_tokens`). So
    NIXL comes first: it has all of a prompt that another server computed, and nothing of any other prompt.
    """
    connectors = [_nixl(server)] if server.is_disaggregated else []
    connectors += [_offloading(server)] if server.host_cache_bytes else []
    if len(connectors) < 2:
        return connectors[0] if connectors else {}
    extra = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _nixl(server: EngineServer) -> dict[str, object]:
    connector: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    return connector if server.num_gpus else connector | {"kv_buffer_device": "cpu"}


def _offloading(server: EngineServer) -> dict[str, object]:
    folder = os.path.expanduser(server.disk_cache_path)
    disk = {"type": "fs", "root_dir": folder, "enable_kv_events": True, "locality": "LOCAL"}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": server.host_cache_bytes,
        "secondary_tiers": [disk] if folder else [],
        "blocks_per_chunk": 1,  # only whole chunks are loaded, and larger ones would be announced block by block
        "self_describing_kv_events": True,  # otherwise events of larger chunks look like those of blocks
        "offload_prompt_only": False,  # the next turn of a chat contains the answer
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
