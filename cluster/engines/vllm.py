"""How a vLLM server is started as a worker: its command, its environment, and the flags that users may not give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tandem.cluster.engines.server import EngineServer, Parallelism, Sockets, check_arguments, flags_of, number_of
from tandem.cluster.openmp import preload_of

__all__ = [
    "OUR_FLAGS",
    "check",
    "command",
    "config",
    "defaults",
    "environment",
    "first_request",
    "fixed_role",
    "parallelism",
    "remedy",
]

_ADDRESS = "its address is chosen on its machine: leave it out"
_KV = "every server hands KV over with NixlConnector and publishes KV events: leave it out"
_RANKS = "servers that span machines are not started by Tandem: start them yourself, and use tandem route"
_TLS = "the router reaches its servers over plain HTTP, with a key that is made at each start: leave it out"
OUR_FLAGS = {
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--uds": _ADDRESS,
    "--root-path": _ADDRESS,
    "--model": "give tandem serve --model instead",
    "--model-tag": "give tandem serve --model instead",
    "--served-model-name": "give tandem serve --served-model-name instead",
    "--kv-transfer-config": _KV,
    "--kv-events-config": _KV,
    "--api-key": _TLS,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--config": "a file could set any of the flags that Tandem sets: give its flags in engine_args",
    "--headless": _RANKS,
    "--nnodes": _RANKS,
    "--node-rank": _RANKS,
    "--data-parallel-rank": _RANKS,
    "-dpr": _RANKS,
    "--data-parallel-size-local": _RANKS,
    "-dpl": _RANKS,
    "--data-parallel-address": _RANKS,
    "-dpa": _RANKS,
    "--data-parallel-external-lb": _RANKS,
    "-dpe": _RANKS,
    "--data-parallel-hybrid-lb": _RANKS,
    "-dph": _RANKS,
}
_DATA_PARALLEL = ("--data-parallel-size", "-dp")
_MEMORY, _MEMORY_SHARE = "--gpu-memory-utilization", 0.9
_KV_CACHE_GB = "2"  # of a server on a CPU; vLLM would take half of the machine's memory for each


def check(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for flags that Tandem sets itself."""
    check_arguments("vLLM", arguments, OUR_FLAGS, known=_DATA_PARALLEL)


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
        words += [_MEMORY, f"{_MEMORY_SHARE * server.num_gpus:.3f}"]  # servers that share a GPU share its memory
    if server.is_disaggregated:
        words += ["--kv-transfer-config", json.dumps(_connector(server))]
    return [*words, *server.arguments]


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
    connector: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    return connector if server.num_gpus else connector | {"kv_buffer_device": "cpu"}
