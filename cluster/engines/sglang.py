"""How an SGLang server is started as a worker: its command, its environment, and the flags that users may not give.

A server with a role serves only in that one: it is started in SGLang's prefill or decode mode. Statements about SGLang
are based on the source of 0.5.23.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
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
from tandem.protocol.config import TierConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role

_MODE = "it follows from the roles of tandem serve: leave it out"
OUR_FLAGS = {
    "--host": ADDRESS_IS_OURS,
    "--port": ADDRESS_IS_OURS,
    "--fastapi-root-path": ADDRESS_IS_OURS,
    "--model-path": MODEL_IS_OURS,
    "--model": MODEL_IS_OURS,
    "--served-model-name": NAME_IS_OURS,
    "--disaggregation-mode": _MODE,
    "--disaggregation-bootstrap-port": ADDRESS_IS_OURS,
    "--kv-events-config": "every server publishes KV events to the router: leave it out",
    "--device": "it follows from --gpus-per-worker: leave it out",
    "--api-key": KEY_IS_OURS,
    "--admin-api-key": KEY_IS_OURS,
    "--ssl-keyfile": KEY_IS_OURS,
    "--ssl-certfile": KEY_IS_OURS,
    "--ssl-ca-certs": KEY_IS_OURS,
    "--config": CONFIG_IS_OURS,
    "--nnodes": MACHINES_ARE_YOURS,
    "--node-rank": MACHINES_ARE_YOURS,
    "--dist-init-addr": MACHINES_ARE_YOURS,
    "--nccl-init-addr": MACHINES_ARE_YOURS,
    "--use-ray": "Ray starts the whole server as one worker: leave it out",
    "--smg-grpc-mode": OTHER_SERVER,
    "--grpc-mode": OTHER_SERVER,
    "--encoder-only": "servers of encoders alone are not started by Tandem: leave it out",
}
_BACKEND, _SWITCH = "--disaggregation-transfer-backend", "--enable-pd-role-switch"
_QUIET = "--uvicorn-access-log-exclude-prefixes"
_SWITCHING_BACKENDS = ("mooncake", "mooncake_tcp", "mori")  # whose connections can be torn down and rebuilt
_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
_PAGE_SIZE = "16"  # SGLang's own default, 1, would be one block per token
_CPU_KV_TOKENS = "32768"  # for each server on a CPU; by itself SGLang would take most of the machine's memory
_FAKE_HOST = "2.2.2.2"  # SGLang's own sign for "no KV is handed over", which its first request in such a mode has


def check(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for flags that Tandem sets itself, and for a role switch that the server would refuse."""
    check_arguments("SGLang", arguments, OUR_FLAGS)
    given = dict(flags_of(arguments))
    backend = given.get(_BACKEND) or "nixl"
    if _SWITCH in given and backend not in _SWITCHING_BACKENDS:
        raise ConfigError(
            f"engine_args: {_SWITCH} does not work with the transfer backend {backend}; add {_BACKEND} mooncake, or "
            f"leave {_SWITCH} out"
        )


def check_tiers(tiers: TierConfig, *, has_gpus: bool) -> None:
    """Raise `ConfigError` for tiers that SGLang 0.5.23 does not have."""
    check_host_and_disk("an SGLang", tiers)
    if tiers.host_cache_gb and not has_gpus:
        raise ConfigError(
            f"host_cache_gb={tiers.host_cache_gb:g}: SGLang's HiCache keeps KV of GPUs only, and its servers get none "
            "here; leave it out, and give the tokens that each server's cache may hold as --max-total-tokens in "
            "engine_args"
        )


def parallelism(arguments: Sequence[str]) -> Parallelism:
    """The ranks that these flags ask for. Raises `ConfigError`."""
    data = number_of(arguments, "--data-parallel-size", "--dp-size", "--dp")
    attention = number_of(arguments, "--attention-data-parallel-size", "--attn-dp-size")
    if "--enable-dp-attention" in dict(flags_of(arguments)):  # older spelling: the ranks are those of attention
        data, attention = 1, data
    return Parallelism(
        tensor=number_of(arguments, "--tensor-parallel-size", "--tp-size", "--tp"),
        pipeline=number_of(arguments, "--pipeline-parallel-size", "--pp-size", "--pp"),
        data=data,
        attention=attention,
    )


def command(server: EngineServer, sockets: Sockets) -> list[str]:
    """The command line of the server."""
    given = dict(flags_of(server.arguments))
    words = [server.python, "-m", "sglang.launch_server"]
    words += ["--host", server.host, "--port", str(sockets.http_port)]
    words += ["--model-path", server.model, "--served-model-name", server.served_model_name]
    words += ["--enable-metrics", "--enable-cache-report", "--kv-events-config", json.dumps(_events(sockets))]
    if _QUIET not in given:  # the router asks for health and load every second
        words += [_QUIET, "/health", "/metrics"]
    if "--page-size" not in given:
        words += ["--page-size", _PAGE_SIZE]
    if not server.num_gpus:
        words += ["--device", "cpu"]
        words += [] if "--max-total-tokens" in given else ["--max-total-tokens", _CPU_KV_TOKENS]
    if server.role in _MODES:
        words += ["--disaggregation-mode", _MODES[server.role]]
        words += ["--disaggregation-bootstrap-port", str(sockets.side_channel_port)]
        words += [] if _BACKEND in given else [_BACKEND, "nixl"]
    if _has_tiers(server):
        words += ["--enable-hierarchical-cache", "--hicache-size", str(_host_gb_of_a_rank(server))]
        words += ["--hicache-storage-backend", "file"] if server.disk_cache_path else []
    return [*words, *server.arguments]


def release(sockets: Sockets) -> None:
    """As `Dialect.release`: nothing has a name."""


def config(server: EngineServer) -> str:
    """The server's `--config` file. It holds the key, which every user of the machine could read on a command line."""
    return f'api-key: "{server.api_key}"\n' if server.api_key else ""


def environment(server: EngineServer, sockets: Sockets) -> dict[str, str]:
    """Variables of the server, on top of those that it inherits."""
    # Otherwise each probe of an idle server generates a token, and is answered after a second at the earliest.
    variables = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if server.disk_cache_path and _has_tiers(server):
        num_bytes = server.disk_cache_bytes // _num_ranks(server)  # each rank evicts its own files
        variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = os.path.expanduser(server.disk_cache_path)
        variables["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] = str(num_bytes)
    return variables


def first_request(server: EngineServer) -> dict[str, Any]:
    """Fields of the request that shows that the server generates."""
    return {"bootstrap_host": _FAKE_HOST, "bootstrap_room": 0} if server.role in _MODES else {}


def fixed_role(server: EngineServer) -> str:
    """Why the server cannot change its role while it runs; "" if it can."""
    if _SWITCH in dict(flags_of(server.arguments)):
        return ""
    return (
        "an SGLang server keeps its role, except over another transfer backend than nixl: "
        f"start it with --engine-args '{_BACKEND} mooncake {_SWITCH}'"
    )


def remedy(reason: str) -> str:
    """What to do about a server that ended for this reason, as the end of a sentence; "" if that is not known."""
    if "No module named 'sglang" in reason:
        return "; install sglang in an environment of its own, and give its Python as engine_python"
    return ""


def defaults(server: EngineServer) -> dict[str, str]:
    """Variables that a user may set otherwise."""
    return {}


def _has_tiers(server: EngineServer) -> bool:
    """A decode server keeps no prefixes: its KV comes from a prefill server, which has the tiers."""
    return bool(server.host_cache_bytes) and server.role is not Role.DECODE


def _host_gb_of_a_rank(server: EngineServer) -> int:
    """Each rank has a pool of its own in host memory, whose size SGLang takes in whole GB."""
    num_bytes = server.host_cache_bytes * server.parallelism.num_caches
    return max(int(num_bytes / 1e9) // _num_ranks(server), 1)


def _num_ranks(server: EngineServer) -> int:
    return max(server.parallelism.num_gpus, 1)


def _events(sockets: Sockets) -> dict[str, object]:
    return {"publisher": "zmq", "endpoint": sockets.events, "replay_endpoint": sockets.replay}
