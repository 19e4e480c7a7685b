"""Ray for one `tandem serve`: a private one on loopback, or a connection to a cluster that runs already."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._raylet import persist_port  # type: ignore[attr-defined]  # compiled
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.fault_boundary import error_of
from tandem.protocol.process import ProcessId, has_ended, process_of
from tandem.runtime.cleanup import RAY_FOLDER
from tandem.runtime.daemon_threads import in_daemon_thread
from tandem.runtime.signals import defer_stop, ignore_keyboard_interrupt

_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # about the least that Ray accepts: we send nothing through it
_RAY_AUTH_MODE = "RAY_AUTH_MODE"
_RAY_LOGS = {"logging_level": logging.ERROR, "log_to_driver": True, "configure_logging": True}
# The daemons of a private Ray. Without any one of them it is useless, and it does not restart them.
_DAEMONS = {"gcs_server": "which knows all workers", "raylet": "which starts the workers"}
# Services of Ray's dashboard agent, which nobody asks here. (The other agent makes the workers' environments.)
_UNUSED_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
# What Ray prints about each actor that died, with a paragraph of guesses. The supervisor reports it in one line.
DEATH_NOTICE = "A worker died or was killed"
_PROBE_TIMEOUT_S = 2.0  # Ray itself would try an address for a minute
_START_TIMEOUT_S = 180  # for each step of the start of a private Ray; Ray would give it 15 to 60 s
_LEAVE_TIMEOUT_S = 15.0  # of a Ray that is alive, but answers no more; Ray would end this process after a minute


class RayDaemon(NamedTuple):
    """One process of a private Ray."""

    name: str
    process: ProcessId

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        descriptor = self.process.open()
        if descriptor is None:
            return False
        try:
            return not has_ended(descriptor)
        finally:
            os.close(descriptor)


def ray_running(
    address: str, folder: Path, progress: Callable[[str], None]
) -> contextlib.AbstractContextManager[list[RayDaemon]]:
    """Ray for as long as the block runs: the cluster at `address`, or without one a private Ray with files in `folder`.

    Yields the processes that a private Ray cannot do without.
    """
    _print_no_deaths()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let everything else on the machine go first
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES as it is on CPU actors
    # Ray would start a process for every core in advance. None of them has the variables that our workers need.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if address:
        return _joined_ray(address, progress)
    return _private_ray(folder, progress)


def _print_no_deaths() -> None:
    """Keep Ray's notices of dead actors from the terminal. Other lines of Ray and of our workers are printed."""
    shown = ray_worker.print_to_stdstream

    def show(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet" or not all(DEATH_NOTICE in line for line in data["lines"]):
            shown(data, ignore_prefix)

    if shown.__module__ == ray_worker.__name__:  # once a process
        ray_worker.print_to_stdstream = show


@contextlib.contextmanager
def _joined_ray(address: str, progress: Callable[[str], None]) -> Iterator[list[RayDaemon]]:
    progress(f"joining Ray at {address}")
    probe_address(address)
    with contextlib.ExitStack() as stack:
        stack.push(_leaving([]))
        try:
            ray.init(address=address, job_config=_job_config(), **_RAY_LOGS)
        except (ConnectionError, AuthenticationError) as exc:  # Ray reports a wrong token as the former
            reason = str(exc).partition(". ")[0]
            raise ConfigError(
                f"ray_address={address!r} cannot be joined: {reason}. If that Ray demands a token, set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that holds it"
            ) from exc
        yield []


@contextlib.contextmanager
def _private_ray(folder: Path, progress: Callable[[str], None]) -> Iterator[list[RayDaemon]]:
    """A Ray of our own: on loopback only, with a token of this run, and with files that only this user can reach."""
    progress("starting Ray")
    with contextlib.ExitStack() as stack:
        _require_loopback_and_token()
        daemons: list[RayDaemon] = []
        stack.push(_leaving(daemons))  # processes that do not end by this end with the folder
        init = partial(
            ray.init,
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            job_config=_job_config(),
            object_store_memory=_OBJECT_STORE_BYTES,
            # Ray opens it to all users, but it is in a folder that only we can enter.
            _temp_dir=str(folder / RAY_FOLDER),
            **_RAY_LOGS,
        )
        tell = partial(progress, "stopping: Ray, which starts now, may take some seconds")
        with _own_sigterm_handler(), _patient_start(), defer_stop(tell):
            error = error_of(init)  # it forks
        if error is not None:  # mostly a bare Exception: its processes were not there in time
            raise WorkerError(
                f"Ray did not start: {str(error).partition('. ')[0].rstrip('.') or type(error).__name__}. If this "
                "machine is busy with other work, wait until that is done, then start the server again"
            ) from error
        _check_loopback_and_token()
        for child in psutil.Process().children():
            if child.name() in _DAEMONS and (process := process_of(child.pid)) is not None:
                daemons.append(RayDaemon(child.name(), process))
        yield daemons


@contextlib.contextmanager
def _patient_start() -> Iterator[None]:
    """Within the block, a Ray that starts on a busy machine comes late instead of not at all.

    The raylet waits 15 s, which no option changes, until its agents have loaded their modules and written down their
    ports; then it aborts.
    """
    for name in ("raylet_start_wait_time_s", "gcs_server_port_wait_time_s"):
        os.environ.setdefault(f"RAY_{name}", str(_START_TIMEOUT_S))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * _START_TIMEOUT_S))
    start_raylet, timeout_s = services.start_raylet, ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    services.start_raylet = partial(_start_raylet_at_once, start_raylet)
    ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = _START_TIMEOUT_S
    try:
        yield
    finally:
        services.start_raylet, ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = start_raylet, timeout_s


def _start_raylet_at_once(start: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Start the raylet where the ports of its agents are written down already."""
    given = inspect.signature(start).bind(*args, **options).arguments
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given["runtime_env_agent_port"] = listener.getsockname()[1]
    for name in _UNUSED_PORTS:
        persist_port(given["session_dir"], given["node_id"], name, -1)  # as an agent without this service does
    return start(**given)


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Within the block, Ray leaves the handler of SIGTERM alone."""
    set_handler = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler


def _job_config() -> JobConfig:
    """Keeps Ray from putting the folder that we were started in first in the workers' module path.

    A user's random.py there would be imported instead of the standard library's.
    """
    config = JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return config


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
    """Raise WorkerError unless Ray listens on loopback and demands a token: Ray does not promise to obey."""
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise WorkerError(f"Ray {ray.__version__} listens on {address} instead of loopback; install the pinned version")
    if os.environ.get(_RAY_AUTH_MODE) != "token":
        raise WorkerError(f"Ray {ray.__version__} demands no token; install the pinned version")


def probe_address(ray_address: str) -> None:
    """Raise ConfigError where nothing listens at `ray_address`; one without a port, such as auto, is left to Ray."""
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"ray_address={ray_address!r} cannot be reached: {exc}") from exc


def _leaving(daemons: list[RayDaemon]) -> Callable[..., None]:
    """What a context does at its end: it leaves Ray, with exit code 1 after an error if this process cannot go on."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        is_stop = kind is None or issubclass(kind, KeyboardInterrupt | SystemExit)
        _leave_ray(daemons, exit_code=0 if is_stop else 1)

    return leave


def _leave_ray(daemons: list[RayDaemon], *, exit_code: int) -> None:
    """Disconnect from Ray, which ends a private one. It is left as it is if it is dead, or dies or hangs meanwhile.

    Ray would wait a minute for it, and then abort this process. SIGTERM to all processes of a server, as systemd sends
    it, reaches Ray's daemons too.
    """
    with ignore_keyboard_interrupt():  # an impatient Ctrl-C here would leave it running
        if all(daemon.is_alive for daemon in daemons):
            leaving = in_daemon_thread(ray.shutdown)
            if wait([leaving], timeout=_LEAVE_TIMEOUT_S).done:
                leaving.result()  # raises what it raised
                return
        atexit.register(_exit_without_ray, exit_code)  # called first: the last one registered is


def _exit_without_ray(exit_code: int) -> None:
    """End at once: Ray's threads would end this process by SIGSEGV, or with a report of what they miss."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader may be gone
            stream.flush()
    os._exit(exit_code)


@contextlib.contextmanager
def daemons_watched(daemons: list[RayDaemon], on_death: Callable[[WorkerError], None]) -> Iterator[None]:
    """Call `on_death` at once when one of Ray's daemons dies. Ray would take a minute, and then end this process."""
    loop = asyncio.get_running_loop()

    def died(daemon: RayDaemon, descriptor: int) -> None:
        loop.remove_reader(descriptor)
        name, pid = daemon.name, daemon.process.pid
        on_death(
            WorkerError(
                f"Ray's {name} (pid {pid}), {_DAEMONS[name]}, has died, so no worker can be started or replaced. "
                "Look for the reason in the kernel's log (out of memory?), then start the server again"
            )
        )

    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            descriptor = os.pidfd_open(daemon.process.pid)  # our own child: its pid is ours until we collect its exit
            stack.callback(os.close, descriptor)
            loop.add_reader(descriptor, died, daemon, descriptor)
            stack.callback(loop.remove_reader, descriptor)
        yield
