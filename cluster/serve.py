"""`tandem serve` from a config to a clean exit: Ray, workers, router, in one process plus one per worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.cluster.engines.layout import parallelism_of
from tandem.cluster.engines.service import EngineService
from tandem.cluster.frontend import HttpFrontend, stop_serving
from tandem.cluster.ray_runtime import RayDaemon, daemons_watched, ray_running
from tandem.cluster.service import Service
from tandem.cluster.tandem_service import TandemService
from tandem.cluster.worker_layout import resolve
from tandem.frontend.http.listening import listening
from tandem.frontend.http.tls import scheme_of
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.config import ClusterConfig
from tandem.protocol.errors import WorkerError
from tandem.runtime.cleanup import private_run
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.log_format import show_warnings
from tandem.runtime.ports import bracketed
from tandem.runtime.signals import exit_on_sigterm, stop_signals, unless, wait_for_any
from tandem.runtime.status_console import StatusConsole
from tandem.scheduling.admission.tenants import Tenants

_READY_TIMEOUT_S = 120.0


def serve(config: ClusterConfig, tenants: Tenants, key_file: KeyFile, model: str, settings: Mapping[str, str]) -> int:
    """Start everything, serve until SIGINT or SIGTERM, and stop everything. Returns the exit code.

    `config` has the model's folder on this machine; `model` is the name under which the nodes of a cluster look for it.
    `settings` are the flags that operators are shown.
    Raises ConfigError for what the user can mend.
    """
    exit_on_sigterm()
    show_warnings()
    console = StatusConsole()
    started = time.monotonic()

    def progress(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/]  {escape(line)}", soft_wrap=True)

    # The port is reserved here: nobody else takes it while the model loads, and port 0 becomes a number.
    try:
        with (
            listening(config.router.host, config.router.port) as listener,
            private_run() as folder,
            ray_running(config.ray_address, folder, progress) as daemons,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            config = resolve(config, parallelism_of(config).num_gpus if config.managed.is_managed else 1)
            if 0 < config.num_gpus_per_worker < 1:
                progress(f"each worker gets {config.num_gpus_per_worker:g} of a GPU and of its memory")
            return runner.run(
                _serve(config, tenants, key_file, model, settings, listener, str(folder), daemons, progress, console)
            )
    except (KeyboardInterrupt, SystemExit):  # before our handlers were in place
        progress("stopped")
        return 0


async def _serve(
    config: ClusterConfig,
    tenants: Tenants,
    key_file: KeyFile,
    model: str,
    settings: Mapping[str, str],
    listener: socket.socket,
    socket_folder: str,
    ray_daemons: list[RayDaemon],
    progress: Callable[[str], None],
    console: StatusConsole,
) -> int:
    signals = stop_signals(signal.SIGINT, signal.SIGTERM)
    stop = signals.stop
    say_stopping = partial(progress, "stopping: what loads now may take some seconds to end")
    make = EngineService if config.managed.is_managed else TandemService
    service: Service = make(config, tenants, model, settings, socket_folder, progress)
    supervisor = service.supervisor
    async with _closing(service, ray_daemons):
        await service.start()
        progress(f"loading {config.engine.served_model_name} into {len(supervisor.members)} worker(s)")
        # Our HTTP side takes seconds to import; it loads while the workers load.
        starting = asyncio.gather(supervisor.start(service.mean_output_tokens), asyncio.to_thread(service.load))
        if not await unless(stop, starting, say_stopping):
            return 0
        async with (
            key_file.followed() as api_keys,
            service.serve_http(listener, api_keys) as (frontend, unready),
        ):
            ends = (frontend.serving, supervisor.failure)
            if await unless(stop, _first_generation(frontend, unready, ends), say_stopping):
                freeze_startup_heap()
                progress("the first generation succeeded")
                print_welcome(config, listener.getsockname()[1], console, needs_key=api_keys.is_required)
            await wait_for_any(*ends, stop)
            if not stop.is_set():  # SIGTERM may have reached all our processes
                _raise_failures(ends)
            await stop_serving(frontend, signals, service.shut_down, config.router, progress)
    return 0


def _raise_failures(ends: Iterable[asyncio.Future[Any]]) -> None:
    """Raise the error that ended one of these, if there is one."""
    for end in ends:
        if end.done():
            end.result()


async def _first_generation(
    frontend: HttpFrontend, unready: Callable[[], str | None], ends: Iterable[asyncio.Future[Any]]
) -> None:
    """Wait until the readiness probe has generated a token and HTTP is served."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while unready() is not None or not frontend.is_serving:
        _raise_failures(ends)
        if time.monotonic() > deadline:
            raise WorkerError(f"no token was generated in {_READY_TIMEOUT_S:.0f} s: {unready()}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _closing(service: Service, ray_daemons: list[RayDaemon]) -> AsyncIterator[None]:
    with daemons_watched(ray_daemons, service.supervisor.let_go):
        try:
            yield
        finally:
            await service.supervisor.close()
            await service.close()


def print_welcome(config: ClusterConfig, port: int, console: Console, *, needs_key: bool) -> None:
    """Tell the user where it serves, and two commands to try, which can be pasted unchanged."""
    host = "127.0.0.1" if config.router.host in ("0.0.0.0", "::") else config.router.host
    base = f"{scheme_of(config.router)}://{bracketed(host)}:{port}"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": config.engine.served_model_name, "temperature": 0, "messages": [question]}
    name = escape(config.engine.served_model_name)
    console.print(f"\n[bold]Serving {name} on {base}[/]  (Ctrl-C stops it)\n\nTry:\n", soft_wrap=True)
    key_header, key_flag = (" -H 'Authorization: Bearer KEY'", " --api-key KEY") if needs_key else ("", "")
    header = f"-H 'Content-Type: application/json'{key_header}"
    # Not wrapped: these lines are to be copied whole.
    curl = f"  curl {base}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n"
    console.out(curl, highlight=False)
    console.out(f"  {_command()} chat --url {base}{key_flag}\n", highlight=False)


def _command() -> str:
    """How this user can run `tandem`: by its path if no shell would find it, as under `make serve`."""
    path = sys.argv[0]
    return shlex.quote(path) if shutil.which("tandem") is None and Path(path).name == "tandem" else "tandem"
