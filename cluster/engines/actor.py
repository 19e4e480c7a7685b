"""The Ray actor around one engine server: starts it, watches it, and ends its whole process tree.

However the actor ends, nothing of the server remains: its processes carry a mark, and a guard process that outlives the
actor ends all that have it (`runtime/cleanup.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

from tandem.cluster.engines.dialect import dialect_of
from tandem.cluster.engines.process import ServerProcess, pin
from tandem.cluster.engines.server import EngineServer, Sockets
from tandem.cluster.engines.stall import ServerStallWatch
from tandem.cluster.node_config import model_on_node
from tandem.cluster.owned_actor import WATCH_S, OwnedActor, WatchNews
from tandem.cluster.ownership import LeaseTerms
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import Role
from tandem.runtime.cleanup import private_run
from tandem.runtime.log_format import show_warnings
from tandem.runtime.ports import bracketed, free_ports

logger = logging.getLogger(__name__)

_WATCH_S = 2.0  # between two looks at the server's progress
_STOP_TIMEOUT_S = 14.0
# Variables of this process that the server does not inherit: its Python may be another one.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """A server that serves, and how it is reached."""

    pid: int
    url: str
    events: str
    replay: str
    side_channel_port: int = 0


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """Why a server did not start, or how it ended."""

    reason: str
    tail: list[str] = field(default_factory=list)  # the last lines that it wrote


class EngineActor(OwnedActor):
    """Owns one server. Its methods run on Ray's threads; one more thread starts and watches the server."""

    def __init__(self, server: EngineServer, terms: LeaseTerms | None = None) -> None:
        show_warnings()
        super().__init__(terms)
        self._server = server
        self._started: EngineStarted | EngineEnd | None = None
        self._end = EngineEnd("it was not started")
        self._is_stopping = threading.Event()
        self._has_ended, self._is_gone = threading.Event(), threading.Event()  # nothing of the server is left

    def start(self) -> EngineStarted | EngineEnd:
        """Start the server and have it generate a token."""
        server = self._server
        if server.cpu_cores:
            os.sched_setaffinity(0, server.cpu_cores)  # the server inherits it
        if not server.host:
            host = ray.util.get_node_ip_address()
            server = replace(server, host=host, model=model_on_node(server.model, host))
        outcome: Future[EngineStarted | EngineEnd] = Future()
        threading.Thread(target=self._run, args=(server, outcome), name="engine", daemon=True).start()
        self._started = outcome.result()
        return self._started

    def watch(self, owner: str = "") -> EngineEnd | WatchNews:
        """Block until the server has ended, or there is news; returns which. If this process dies, the call raises."""
        while not self._has_ended.wait(WATCH_S):
            if (news := self._news(owner)) is not None:
                return news
        return self._end

    def stop(self) -> None:
        """End the server and wait for it. Raises `WorkerError` if it does not end."""
        self._is_stopping.set()
        if not self._is_gone.wait(_STOP_TIMEOUT_S):
            raise WorkerError(f"the server did not end within {_STOP_TIMEOUT_S:g} s")

    def _obey(self, router_key: str) -> tuple[EngineServer, EngineStarted | None, Role]:
        """As `OwnedActor._obey`. The server answers every router that has its key; the config has it."""
        started = self._started if isinstance(self._started, EngineStarted) else None
        return self._server, started, self._server.role

    def _run(self, server: EngineServer, outcome: Future[EngineStarted | EngineEnd]) -> None:
        try:
            with private_run(grace_s=0.0) as folder:  # the server's own time to end is over by then
                self._end = self._serve(server, folder, outcome)
        except WorkerError as exc:
            self._end = EngineEnd(exc.message)
        except BaseException as exc:  # `start` or `watch` reports it, in the thread that waits for it
            logger.exception("the server of %s is given up", server.worker_id)
            self._end = EngineEnd(f"{type(exc).__name__}: {exc}")
        if not outcome.done():
            outcome.set_result(self._end)
        self._has_ended.set()
        self._is_gone.set()

    def _serve(self, server: EngineServer, folder: Path, outcome: Future[EngineStarted | EngineEnd]) -> EngineEnd:
        """Start the server, and watch it until it ends or is to be stopped."""
        sockets = _sockets(server, folder)
        url = f"http://{bracketed(server.host)}:{sockets.http_port}"
        dialect = dialect_of(server.kind)
        command = dialect.command(server, sockets) + _config_flag(dialect.config(server), folder)
        with contextlib.ExitStack() as stack:
            stack.callback(dialect.release, sockets)
            environment = _environment(server, sockets)
            process = stack.enter_context(ServerProcess(server.kind, command, environment, _log_file(server)))
            try:
                self._wait_until_it_generates(server, process, url)
                dialect.release(sockets)
                events, replay = (
                    sockets.reached_at(endpoint, server.host) for endpoint in (sockets.events, sockets.replay)
                )
                outcome.set_result(EngineStarted(process.pid, url, events, replay, sockets.side_channel_port))
                reason = self._watch(server, process, f"{url}/metrics")
                self._end = EngineEnd(reason, process.tail)
                self._has_ended.set()  # before its other processes have ended: others take over now
            except WorkerError as exc:
                reason = exc.message + dialect.remedy(exc.message)
            return EngineEnd(reason, process.tail)

    def _wait_until_it_generates(self, server: EngineServer, process: ServerProcess, url: str) -> None:
        """Return when it has generated a token. Raises `WorkerError`."""
        deadline_s = time.monotonic() + server.start_timeout_s
        process.wait_until_healthy(f"{url}/health", deadline_s, self._is_stopping)
        if server.cpu_cores:
            pin(process.pid, server.cpu_cores)
        fields = {"model": server.served_model_name} | dialect_of(server.kind).first_request(server)
        process.generate(url, fields, server.api_key, deadline_s)
        if not server.num_gpus:
            process.lower_spinning_threads()

    def _watch(self, server: EngineServer, process: ServerProcess, metrics_url: str) -> str:
        """Watch the server until it ends, hangs or is to be stopped; returns the reason."""
        watch = ServerStallWatch(server.stall_timeout_s)
        while not self._is_stopping.is_set():
            if (ended := process.ended(timeout_s=_WATCH_S)) is not None:
                return ended
            if stalled := watch.look(process.report(metrics_url), time.monotonic()):
                return f"{server.kind} {stalled}"
        return "stopped"


def _sockets(server: EngineServer, folder: Path) -> Sockets:
    """Free ports of this node; on one machine, events go through files in a folder that only this user can enter."""
    num_ranks = server.parallelism.num_caches
    port = free_ports(server.host, 1 + 3 * num_ranks)
    side_channel, events, replay = (port + 1 + i * num_ranks for i in range(3))
    engine_id = secrets.token_hex(16)
    if server.is_local:
        # The word "inproc" is for vLLM and SGLang: they add the rank to such an endpoint, and to no other kind of file.
        return Sockets(port, side_channel, f"ipc://{folder}/inproc-events", f"ipc://{folder}/inproc-replay", engine_id)
    return Sockets(port, side_channel, f"tcp://*:{events}", f"tcp://*:{replay}", engine_id)


def _config_flag(text: str, folder: Path) -> list[str]:
    """The flag that names a file with this text, in a folder that only this user can enter; no flag without text."""
    if not text:
        return []
    file = folder / "server.yaml"
    file.write_text(text)
    return ["--config", str(file)]


def _environment(server: EngineServer, sockets: Sockets) -> dict[str, str]:
    """This process's variables with those that the server needs."""
    dialect = dialect_of(server.kind)
    inherited = {
        name: value for name, value in os.environ.items() if name not in _NOT_INHERITED and not name.startswith("RAY_")
    }
    ours = {
        "SPT_NOENV": "1",  # processes that rename themselves keep their environment, by which they are found
        "PYTHONSAFEPATH": "1",  # they must not import modules of the folder that we were started in
    }
    if server.is_local:
        ours["UCX_NET_DEVICES"] = "lo"  # otherwise UCX listens at every network interface
    return dialect.defaults(server) | inherited | ours | dialect.environment(server, sockets)


def _log_file(server: EngineServer) -> Path | None:
    """Where the server's output goes. Raises `WorkerError` if the folder cannot be made."""
    if not server.log_folder:
        return None
    file = Path(server.log_folder) / f"{server.worker_id}.log"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as exc:
        raise WorkerError(f"engine_log_folder={server.log_folder!r} cannot be written: {exc}") from exc
    return file
