"""`tandem serve` from a config to a clean exit: Ray, workers, router, in one process plus one per worker."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import ray
import uvloop
from ray._private import ray_constants
from ray.exceptions import AuthenticationError
from rich.console import Console

from tandem.cluster.cleanup import RAY_FOLDER, private_run
from tandem.cluster.supervisor import Supervisor
from tandem.protocol.config import ClusterConfig, WorkerConfig
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import Role
from tandem.router.http.listening import listening
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.signals import defer_keyboard_interrupt, stop_events, wait_for_any
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placer import Placer
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.tenants import Tenants

if TYPE_CHECKING:
    from tandem.cluster.http_front import HttpFrontend
    from tandem.router.openai.readiness import Ready
    from tandem.router.text.tokenizer import Tokenizer

__all__ = ["resolve", "serve", "worker_configs"]

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # Ray's smallest sensible: nothing of ours goes through it
_READY_TIMEOUT_S = 120.0
_RAY_AUTH_MODE = "RAY_AUTH_MODE"
_RAY_LOGS = {"logging_level": logging.ERROR, "log_to_driver": True, "configure_logging": True}
# The daemons of a private Ray. It is of no use without one of them, and does not start them again.
_RAY_DAEMONS = {"gcs_server": "which knows all workers", "raylet": "which starts the workers"}
_PROBE_TIMEOUT_S = 2.0  # of a Ray address; Ray itself would try for a minute
# Tokens of a step by (has a GPU, colocated). A chunk of a prompt delays the sequences that decode beside it by its
# whole duration, so a worker that always does both takes smaller ones.
_STEP_TOKENS = {(False, False): 512, (False, True): 256, (True, False): 8192, (True, True): 2048}


class _Daemon(NamedTuple):
    """One process that a private Ray consists of."""

    name: str
    process: psutil.Process

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        try:
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def serve(config: ClusterConfig, tenants: Tenants, api_keys: dict[bytes, str]) -> int:
    """Start everything, serve until SIGINT or SIGTERM, stop everything that was started; the exit code.

    `api_keys` are as `load_api_keys` gives them.
    Raises ConfigError for what the user can mend.
    """
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()

    def progress(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/]  {line}")

    # The port is ours from here on: nobody takes it while the model loads, and port 0 becomes a number.
    try:
        with (
            listening(config.router.host, config.router.port) as listener,
            private_run() as folder,
            _ray(config, folder, progress) as daemons,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            config = resolve(config)
            return runner.run(_serve(config, tenants, api_keys, listener, str(folder), daemons, progress, console))
    except (KeyboardInterrupt, SystemExit):  # before our handlers were in place; Ray's make SIGTERM the latter
        progress("stopped")
        return 0


def resolve(config: ClusterConfig) -> ClusterConfig:
    """Fill in what is derived from the machine or the Ray cluster: cores and GPUs per worker, threads per step."""
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
    # A cluster that was joined may grow to what is asked for; a private Ray would wait for cores for ever.
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


def worker_configs(config: ClusterConfig, *, router_key: str = "", socket_folder: str = "") -> list[WorkerConfig]:
    """One config per worker. On a private Ray each gets cores of its own, as far as there are enough.

    `router_key` is the public key of the router they obey. Their sockets are files in `socket_folder` unless they run
    on several machines.
    """
    roles = [Role.COLOCATED] if config.colocated else []
    roles = roles or [Role.PREFILL] * config.num_prefill + [Role.DECODE] * config.num_decode
    counts: dict[Role, int] = {}
    configs = []
    for idx, role in enumerate(roles):
        number = counts[role] = counts.get(role, -1) + 1
        configs.append(
            WorkerConfig(
                worker_id=f"{role}-{number}",
                role=role,
                engine=config.engine,
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


def _ray(
    config: ClusterConfig, folder: Path, progress: Callable[[str], None]
) -> contextlib.AbstractContextManager[list[_Daemon]]:
    """Ray for as long as the block runs: a private one with its files in `folder`, or a connection to a cluster.

    The processes without which a private one is of no use.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let everything else on the machine go first
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES as it is on CPU actors
    if config.ray_address:
        return _joined_ray(config.ray_address, progress)
    return _private_ray(folder, progress)


@contextlib.contextmanager
def _joined_ray(address: str, progress: Callable[[str], None]) -> Iterator[list[_Daemon]]:
    progress(f"joining Ray at {address}")
    _probe(address)
    with contextlib.ExitStack() as stack:
        stack.callback(_leave_ray, [])
        try:
            ray.init(address=address, **_RAY_LOGS)
        except (ConnectionError, AuthenticationError) as exc:  # Ray reports a wrong token as the former
            reason = str(exc).partition(". ")[0]
            raise ConfigError(
                f"ray_address={address!r} cannot be joined: {reason}. If that Ray demands a token, set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that holds it"
            ) from exc
        yield []


@contextlib.contextmanager
def _private_ray(folder: Path, progress: Callable[[str], None]) -> Iterator[list[_Daemon]]:
    """A Ray of our own: on loopback only, with a token of this run, and with files that only this user can reach."""
    progress("starting Ray")
    with contextlib.ExitStack() as stack:
        _require_loopback_and_token()
        daemons: list[_Daemon] = []
        stack.callback(_leave_ray, daemons)  # what of it does not end, ends with the folder
        with defer_keyboard_interrupt():  # it forks
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                # Ray opens it to all users, but it is in a folder that is ours alone.
                _temp_dir=str(folder / RAY_FOLDER),
                **_RAY_LOGS,
            )
        _check_loopback_and_token()
        children = [_Daemon(child.name(), child) for child in psutil.Process().children()]
        daemons += [child for child in children if child.name in _RAY_DAEMONS]
        yield daemons


def _require_loopback_and_token() -> None:
    """Let a Ray that starts next listen on loopback alone, and demand a token that only its own processes have.

    On Linux Ray has no option for the first: it replaces a given 127.0.0.1 by an outer address. But it keeps to
    loopback, as it does on other systems, once it is told to have no other nodes. This process has read that already,
    when it imported Ray. The token reaches Ray's processes in their environment, which other users cannot read.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop(_RAY_AUTH_MODE, None)  # NOTE: Ray demands tokens by default; set, it would be read too late


def _check_loopback_and_token() -> None:
    """Raise WorkerError unless the Ray that runs does as it was told: how to tell it is nothing that Ray promises."""
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise WorkerError(f"Ray {ray.__version__} listens on {address} instead of loopback; install the pinned version")
    if os.environ.get(_RAY_AUTH_MODE) != "token":
        raise WorkerError(f"Ray {ray.__version__} demands no token; install the pinned version")


def _probe(ray_address: str) -> None:
    """Raise ConfigError where nothing listens at `ray_address`; one without a port, such as auto, is left to Ray."""
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"ray_address={ray_address!r} cannot be reached: {exc}") from exc


def _leave_ray(daemons: list[_Daemon]) -> None:
    """Leave Ray, which ends a private one. One with a dead daemon is only left alone: Ray waits for it for a minute."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient Ctrl-C here would leave it running
    try:
        if all(daemon.is_alive for daemon in daemons):
            ray.shutdown()
        else:
            atexit.register(_exit_without_ray)  # called first: the last one registered is
    finally:
        signal.signal(signal.SIGINT, handler)


def _exit_without_ray() -> None:
    """Ray's threads would end this process in their own way: by SIGSEGV, or with a report of what they miss."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def _watched(daemons: list[_Daemon], on_death: Callable[[WorkerError], None]) -> Iterator[None]:
    """Tell of the death of one of Ray's daemons at once. Ray itself would take a minute, and then end us."""
    loop = asyncio.get_running_loop()

    def died(daemon: _Daemon, descriptor: int) -> None:
        loop.remove_reader(descriptor)
        name, pid = daemon.name, daemon.process.pid
        on_death(
            WorkerError(
                f"Ray's {name} (pid {pid}), {_RAY_DAEMONS[name]}, has died, so no worker can be started or replaced. "
                "Look for the reason in the kernel's log (out of memory?), then start the server again"
            )
        )

    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            descriptor = os.pidfd_open(daemon.process.pid)  # our own child: it is there until its end was told to us
            stack.callback(os.close, descriptor)
            loop.add_reader(descriptor, died, daemon, descriptor)
            stack.callback(loop.remove_reader, descriptor)
        yield


async def _serve(
    config: ClusterConfig,
    tenants: Tenants,
    api_keys: dict[bytes, str],
    listener: socket.socket,
    socket_folder: str,
    ray_daemons: list[_Daemon],
    progress: Callable[[str], None],
    console: Console,
) -> int:
    stop, stop_now = stop_events(signal.SIGINT, signal.SIGTERM)
    registry, index, costs = Registry(), PrefixIndex(), CostModel()
    sizing = CacheSizing(registry)
    placer = Placer(registry, index, costs, config.router)
    workers = WorkerClient(registry, index, costs, config.router)
    flow = RequestFlow(
        model=config.engine.served_model_name,
        registry=registry,
        index=index,
        costs=costs,
        placer=placer,
        sizing=sizing,
        workers=workers,
        config=config.router,
        tenants=tenants,
    )
    supervisor = Supervisor(config, registry, costs, workers, flow, on_progress=progress)
    async with _closing(workers, supervisor, ray_daemons):
        await workers.start()
        configs = worker_configs(config, router_key=workers.public_key, socket_folder=socket_folder)
        progress(f"loading {config.engine.served_model_name} into {len(configs)} worker(s)")
        starting = asyncio.gather(supervisor.start(configs), asyncio.to_thread(_load_http, config))
        if not await _unless(stop, starting, progress):
            return 0
        http, tokenizer = starting.result()[1]
        metrics = http.metrics_of(flow, registry, sizing)
        async with http.serve_http(flow, tokenizer, metrics, config, listener, api_keys, tenants) as (front, readiness):
            ends = (front.serving, supervisor.failure)
            is_ready = await _unless(stop, _first_generation(front, readiness, ends), progress)
            if is_ready:
                freeze_startup_heap()
                progress("the first generation succeeded")
                _print_welcome(config, listener.getsockname()[1], console, needs_key=bool(api_keys))
            await wait_for_any(*ends, stop)
            _raise_failures(ends)
            await http.drain(front, stop_now, flow, config.router.drain_timeout_s, progress)
    return 0


def _load_http(config: ClusterConfig) -> tuple[ModuleType, Tokenizer]:
    """Imports of the HTTP edge cost seconds (the tokenizer brings transformers); the workers load meanwhile."""
    from tandem.cluster import http_front
    from tandem.router.text.tokenizer import Tokenizer

    return http_front, Tokenizer(config.engine.model)


async def _unless(stop: asyncio.Event, work: object, progress: Callable[[str], None]) -> bool:
    """Await `work` unless `stop` comes first; whether it finished. Its exceptions are raised."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        progress("stopping: what loads now may take some seconds to end")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    task.result()
    return True


def _raise_failures(ends: Iterable[asyncio.Future[Any]]) -> None:
    """Raise what ended one of these, if it was an error."""
    for end in ends:
        if end.done():
            end.result()


async def _first_generation(front: HttpFrontend, readiness: Ready, ends: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until the readiness probe has generated a token and HTTP is served."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while readiness.reason is not None or not front.is_serving:
        _raise_failures(ends)
        if time.monotonic() > deadline:
            raise WorkerError(f"no token was generated in {_READY_TIMEOUT_S:.0f} s: {readiness.reason}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _closing(workers: WorkerClient, supervisor: Supervisor, ray_daemons: list[_Daemon]) -> AsyncIterator[None]:
    with _watched(ray_daemons, supervisor.ray_died):
        try:
            yield
        finally:
            await supervisor.close()
            await workers.close()


def _print_welcome(config: ClusterConfig, port: int, console: Console, *, needs_key: bool) -> None:
    host = "127.0.0.1" if config.router.host in ("0.0.0.0", "::") else config.router.host
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = (
        f'{{"model": "{config.engine.served_model_name}", "temperature": 0, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    console.print(f"\n[bold]Serving {config.engine.served_model_name} on {base}[/]  (Ctrl-C stops it)\n\nTry:\n")
    # Written raw: this line is to be copied whole.
    key_header, key_flag = (" -H 'Authorization: Bearer KEY'", " --api-key KEY") if needs_key else ("", "")
    header = f"-H 'Content-Type: application/json'{key_header}"
    console.file.write(f"  curl {base}/v1/chat/completions {header} -d '{body}'\n\n")
    console.file.write(f"  tandem chat --url {base}{key_flag}\n\n")
    console.file.flush()
