"""`tandem serve` with servers of another engine, as the tests of vLLM's and SGLang's see it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.cluster.engines.server import EngineServer, Parallelism
from tests.support.server import HTTP, Server, started

BODY: dict[str, Any] = {"model": "toy", "prompt": "a b c " * 40, "max_tokens": 3, "stream": False}


def engine_python(folder: Path, fake: str) -> Path:
    """A program that runs the module `fake` of `tests/support`, whatever module it is told to run."""
    program = folder / f"python-of-{fake}"
    script = Path(__file__).with_name(fake)
    has_every_module = '[ "$1" = -c ] && exit 0'
    program.write_text(f'#!/bin/sh\n{has_every_module}\nexec {sys.executable} {script}.py "$@"\n')
    program.chmod(0o755)
    return program


def engine_server(**fields: Any) -> EngineServer:
    """What a node is told about another engine's server; `fields` override these."""
    values: dict[str, Any] = {
        "worker_id": "prefill-0",
        "kind": "vllm",
        "python": "/venv/bin/python",
        "model": "/models/m",
        "served_model_name": "toy",
        "arguments": (),
        "parallelism": Parallelism(),
        "is_disaggregated": True,
        "num_gpus": 0.0,
        "host": "127.0.0.1",
        "is_local": True,
        "start_timeout_s": 60.0,
        "api_key": "secret",
    }
    return EngineServer(**(values | fields))


@contextmanager
def managed(model: Path, folder: Path, engine: str, *flags: str) -> Iterator[Server]:
    """One prefill and two decode servers, ready."""
    flags += (f"--engine={engine}", f"--engine-python={engine_python(folder, f'fake_{engine}')}")
    flags += ("--served-model-name=toy", "--no-autoscale", "--prefill=1", "--decode=2", "--cpus-per-worker=0.1")
    with started(model, folder, *flags) as running:
        yield running.wait_ready()


def engines(server: Server) -> dict[str, dict[str, Any]]:
    """The router's engines by name."""
    pools = HTTP.get(f"{server.url}/v1/pools").json()
    return {engine["name"]: engine for engine in pools["engines"]}


def roles(server: Server) -> dict[str, str]:
    """Of the engines that are ready."""
    return {name: engine["role"] for name, engine in engines(server).items() if engine["state"] == "ready"}


def ask(server: Server, **fields: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/completions", json=BODY | fields)


def flip(server: Server, worker: str, role: str) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/pools/roles", json={"worker": worker, "role": role})


def process_of(server: Server, engine: str) -> psutil.Process:
    """The server process behind an engine's URL."""
    port = engines(server)[engine]["url"].rpartition(":")[2]
    return next(one for one in server.children() if one.is_running() and port in one.cmdline())
